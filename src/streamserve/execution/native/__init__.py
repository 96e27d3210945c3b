"""Kernels of our own for the CPU: C++ in cpp/, compiled for this very processor, loaded with ctypes.

cpp/common.h            number types, paths, how activations lie
cpp/vec.h               one vocabulary for AVX-512, AVX2 and plain C++ vectors
cpp/pool.*              the threads
cpp/gemm*               matrices: one file a path
cpp/attention*          paged attention
cpp/elementwise.*       norms, rotary embedding, SwiGLU
cpp/layers.*            decoder layers as one call
cpp/sampling.*          from logits to tokens
build.py → library.py → linear.py, attention.py, sampling.py → model.py
"""
