"""Triton kernels of the operations of a step. Importing a module of this package needs Triton."""
