"""Models on a GPU: packed inputs, Triton kernels, captured graphs, and sampling on the device."""
