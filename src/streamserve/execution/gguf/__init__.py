"""Checkpoints in GGUF files: the model's spec, its tensors by our names, and their blocks of integers."""
