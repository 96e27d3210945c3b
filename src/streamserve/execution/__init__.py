"""Execution of steps on tensors: model specs, weight loading, attention, sampling and verification."""
