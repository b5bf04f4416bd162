"""Conversion of a model: its layers get a class that synchronizes, and their old one back."""
