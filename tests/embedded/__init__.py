"""The embedded pair, its data and its training."""
