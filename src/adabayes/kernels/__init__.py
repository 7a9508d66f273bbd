"""Fused kernels for CPUs and GPUs. Everything works without them, but more slowly."""

from adabayes.kernels.cpu.library import LIBRARY, instruction_set, stream, thread_source, unavailable

__all__ = ["LIBRARY", "instruction_set", "stream", "thread_source", "unavailable"]
