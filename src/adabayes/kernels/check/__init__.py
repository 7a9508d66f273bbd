"""Checks of the compiled kernels, without a GPU."""
