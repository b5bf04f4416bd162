"""What ranks say to each other: groups, collectives, the protocol of a pass."""
