"""Tool calls in a model's output: the formats of model families, and incremental parsing."""
