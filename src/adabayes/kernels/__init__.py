"""The fused CPU kernels. Without them, because there was no C compiler, everything else works."""

from adabayes.kernels.library import LIBRARY, instruction_set, stream, thread_source, unavailable

__all__ = ["LIBRARY", "instruction_set", "stream", "thread_source", "unavailable"]
