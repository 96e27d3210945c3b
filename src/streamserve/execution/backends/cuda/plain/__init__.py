"""The operations of a step in plain torch: the reference for the kernels' tests, and the device backend's
implementation on CPUs."""
