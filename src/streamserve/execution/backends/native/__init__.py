"""CPU kernels: C++ in cpp/, compiled in a wheel or on first use for this processor, loaded with ctypes.

cpp/common.h            number types, paths, layout of activations
cpp/processor.h         the processor's instructions
cpp/vec.h               common interface to AVX-512, AVX2 and plain C++ vectors
cpp/pool.*              the thread pool
cpp/gemm*               matrix multiplication: one file a path
cpp/attention*          paged attention
cpp/elementwise.*       norms, rotary embedding, SwiGLU
cpp/layers.*            decoder layers as one call
cpp/sampling.*          from logits to tokens
cpp/draft_selection.cpp from a draft model's logits to draft tokens
cpp/abi.*               structures and enums described for Python
levels.py, packaged.py  the libraries of a wheel
structures.py, abi.py   the structures as Python makes them, and the check that a library has the same
build.py → library.py → linear.py, attention.py, sampling.py → model.py
"""
