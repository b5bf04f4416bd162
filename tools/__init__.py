"""Programs of the project's own upkeep; none of them is installed."""
