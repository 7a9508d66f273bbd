"""The kernels for CPUs: plain C, called through ctypes."""
