"""The kernels for GPUs, in Triton."""
