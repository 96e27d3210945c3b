"""Tensors: model specs, weight loading, attention, sampling, verification and the executor of steps."""
