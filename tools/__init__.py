"""Programs for maintaining the project; none of them is installed."""
