"""A plugin for pytest: the kernel for GPUs takes every fused step that it can, under Triton's interpreter.

``TRITON_INTERPRET=1 python -m pytest -p tests.gpu.interpreter tests/test_fused.py``, in a process of its own, because
that is decided when Triton is imported. Step counts are taken on the device and on the host in turn.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from adabayes.kernels import device, library
from adabayes.optim import _fused

STEPS = {"device": 0, "host": 0, "C": 0}
TURN = itertools.count()


class InTurn(device.Launch):
    """Counts steps on the device or, every other time, as if its memory were not the host's."""

    def __init__(self, *columns: Any) -> None:
        self._turn = "device" if next(TURN) % 2 == 0 else "host"
        super().__init__(*columns)
        self.counts_on_host = self._turn == "host" and columns[3] is not None

    def run(self, *arguments: Any, **more: Any) -> None:
        STEPS[self._turn] += 1
        with np.errstate(all="ignore"):  # a GPU does not warn of infinities
            super().run(*arguments, **more)


class InC(_fused._LaunchOnCPU):
    """The CPU's kernel, for float64."""

    def run(self, *arguments: Any, **more: Any) -> None:
        STEPS["C"] += 1
        super().run(*arguments, **more)


def launch(params: Sequence[Tensor], exp_avgs: Sequence[Tensor], *columns: Any) -> Any:
    served = (params[0].dtype, exp_avgs[0].dtype) in device.PAIRS
    return (InTurn if served else InC)(params, exp_avgs, *columns)


@pytest.fixture(autouse=True)
def kernel_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _fused.BACKENDS["cpu"]._replace(launch=launch, pairs=library.PAIRS, asynchronous=True)  # type: ignore[arg-type]
    monkeypatch.setitem(_fused.BACKENDS, "cpu", backend)


def pytest_configure(config: Any) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1, and start a process for it"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"steps: {STEPS}")
