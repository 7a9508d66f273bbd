"""A plugin for pytest: the GPU kernel takes every fused step that it can, under Triton's interpreter.

Run ``TRITON_INTERPRET=1 python -m pytest -p tests.support.gpu.interpreter tests/kernels/test_fused.py`` in a separate
process, because Triton reads the variable when it is imported. Launches count their steps alternately on the device and
on the host.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest

from adabayes.kernels.backends import BACKENDS
from adabayes.kernels.coefficients import Rule
from adabayes.kernels.cpu import library
from adabayes.kernels.cpu.launch import CPULaunch
from adabayes.kernels.launch import Launch, Operands
from adabayes.kernels.triton.launch import PAIRS, TritonLaunch

LAUNCHES = {"device": 0, "host": 0, "step": 0, "C": 0}
ORDINALS = itertools.count()


class AlternatingLaunch(TritonLaunch):
    """Counts steps on the device or, in every other launch, on the host, as if the host had other memory."""

    def __init__(self, rule: Rule, operands: Operands) -> None:
        super().__init__(rule, operands)
        self.counts_on_device &= next(ORDINALS) % 2 == 0

    def take_step(self, *arguments: Any) -> None:
        LAUNCHES["device" if self.counts_on_device else "host"] += 1
        with np.errstate(all="ignore"):  # a GPU does not warn of infinities
            super().take_step(*arguments)

    def compute_step(self, *arguments: Any) -> None:
        LAUNCHES["step"] += 1
        with np.errstate(all="ignore"):
            super().compute_step(*arguments)


class RecordedCPULaunch(CPULaunch):
    """Launches the CPU kernel, for float64."""

    def take_step(self, *arguments: Any) -> None:
        LAUNCHES["C"] += 1
        super().take_step(*arguments)

    def compute_step(self, *arguments: Any) -> None:
        LAUNCHES["C"] += 1
        super().compute_step(*arguments)


def launch(rule: Rule, operands: Operands) -> Launch:
    supported = (operands.params[0].dtype, operands.exp_avgs[0].dtype) in PAIRS
    return (AlternatingLaunch if supported else RecordedCPULaunch)(rule, operands)


@pytest.fixture(autouse=True)
def gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the CPU kernel."""
    backend = BACKENDS["cpu"]._replace(launch=launch, dtype_pairs=library.PAIRS, asynchronous=True)  # type: ignore[arg-type]
    monkeypatch.setitem(BACKENDS, "cpu", backend)


def pytest_configure(config: Any) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 and start a new process"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"launches: {LAUNCHES}")
