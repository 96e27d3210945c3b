"""Backends: each computes the linear maps and attention of a model in its own way.

    reference/   plain torch, one sequence at a time: the reference for the other backends, used where
                 there are no kernels
    native/      CPU kernels in C++, compiled for the processor and loaded with ctypes
    cuda/        a GPU: its own executor with Triton kernels and captured graphs

loading/load.py chooses one for each model. A backend implements `AttentionBackend` (model/attention.py)
and, as `LinearMakers` (loading/weights.py), the maps that a Model consists of; cuda/ implements the whole
executor as well.
"""
