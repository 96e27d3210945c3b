"""Formats of quantized checkpoints: a module for each method, and common parts.

A `quantization_config` is read as a StoredFormat for each matrix of the layers: the tensors that represent
its weight, and how to read them. With every method the result is a QuantizedWeight.
"""
