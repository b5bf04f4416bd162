"""Communication between ranks: groups, collectives, the protocol of a pass, its errors."""
