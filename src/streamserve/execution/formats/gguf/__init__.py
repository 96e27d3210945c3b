"""Checkpoints in GGUF files: the model's spec, its tensors under Hugging Face names, and their blocks."""
