"""Tools for running statistics."""
