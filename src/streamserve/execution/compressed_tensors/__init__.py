"""Checkpoints in the compressed-tensors format: their configuration, their tensors, and writing them."""
