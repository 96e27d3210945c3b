"""How quantized checkpoints are stored: a file for each method, and what they have in common.

A `quantization_config` becomes a StoredFormat for each matrix of the layers: the tensors that stand for its
weight, and how they are read. Whatever the method, the weight is a QuantizedWeight.
"""
