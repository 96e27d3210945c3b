"""Speed of the kernels, of a GPU and of a mixture of experts, compared with the hardware's limits."""
