"""Comparison with other inference engines."""
