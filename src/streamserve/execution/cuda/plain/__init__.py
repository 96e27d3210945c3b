"""The operations of a step in plain torch: what the kernels are compared with, and what CPUs compute."""
