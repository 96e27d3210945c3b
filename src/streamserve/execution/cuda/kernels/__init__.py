"""Triton kernels of the operations of a step. Importing a module needs Triton."""
