"""Tool calls in what a model writes: how its family writes them, and reading them as they come."""
