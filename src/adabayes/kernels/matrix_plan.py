"""Plans fused steps of AdaBayes-K: which matrices the kernel can serve, and the launches that step them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from adabayes._blocks.blocks import Blocks
from adabayes._util.tensors import as_float, has_gaps
from adabayes.kernels.backends import BACKENDS
from adabayes.kernels.coefficients import ADABAYES_FP, StepOptions, derive_matrix_coefficients
from adabayes.kernels.cpu import library
from adabayes.kernels.cpu.matrix import LARGEST_SIDE, Matrix
from adabayes.kernels.plan import StatePlan

__all__ = ["MatrixPlan", "explain_unfit_matrix"]

Initialize = Callable[[Matrix, Tensor], None]  # computes the first factors and bases from the first gradient


class MatrixPlan(StatePlan):
    """Matrices of a parameter group, and the launches that step them.

    Args:
        matrices: the matrices, which :func:`explain_unfit_matrix` has not refused.
        initialize: computes the first factors and bases of a matrix from its first gradient.
    """

    def __init__(self, matrices: Sequence[Matrix], initialize: Initialize) -> None:
        states = [matrix.state for matrix in matrices]
        super().__init__([matrix.param for matrix in matrices], states, lambda state: tuple(state.values()))
        self._matrices, self._initialize = matrices, initialize
        kinds: dict[Any, list[int]] = {}
        for i, matrix in enumerate(matrices):
            kinds.setdefault((matrix.param.dtype, matrix.state["exp_avg"].dtype), []).append(i)
        launch = BACKENDS[matrices[0].param.device.type].matrix_launch
        assert launch is not None
        self._launches = [(chosen, launch([matrices[i] for i in chosen])) for chosen in kinds.values()]
        self._counters = [library.StepCounter([state["step"]]) for state in states]

    def _launch(self, grads: list[Tensor], addresses: list[int], coefficients: Any, options: StepOptions) -> None:
        if options.found_inf is not None and options.found_inf.item():
            return
        counts = [int(counter.count()[0]) for counter in self._counters]
        for matrix, gradient, t in zip(self._matrices, grads, counts):
            if t == 1:
                self._initialize(matrix, gradient * as_float(options.unscale))
        rows = {t: row for row, t in enumerate(dict.fromkeys(counts))}
        table = [_coefficients(coefficients, t, options) for t in rows]
        for chosen, launch in self._launches:
            launch.take_step([addresses[i] for i in chosen], [rows[counts[i]] for i in chosen], table, options.seed)


def _coefficients(coefficients: Any, t: int, options: StepOptions) -> list[float]:
    """Return a row of coefficients, in the order in which the kernel reads them."""
    fixed_point = ADABAYES_FP.derive(coefficients, t, StepOptions(sign=options.sign))
    chosen = zip(ADABAYES_FP.options, ADABAYES_FP.chosen_options(coefficients))
    values = {name: as_float(x) for name, x in (*zip(ADABAYES_FP.coefficients, fixed_point), *chosen)}
    ordered = library.order_coefficients(ADABAYES_FP.name, values)
    return [*map(float, derive_matrix_coefficients(coefficients, t, options)), *ordered]


def explain_unfit_matrix(p: Tensor, state: dict[str, Tensor], blocks: Blocks) -> str | None:
    """Return why the kernel cannot serve a matrix with its state, or None if it can."""
    name = f"a parameter of shape {tuple(p.shape)}"
    average = state["exp_avg"].dtype
    if BACKENDS[p.device.type].matrix_launch is None:
        return f"AdaBayes-K has no kernel for {p.device}."
    if type(p) not in (Tensor, Parameter) or any(type(t) is not Tensor for t in state.values()):
        return f"{name} or its state is not a plain tensor."
    if (p.dtype, average) not in {
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
    }:
        return f"AdaBayes-K has no kernel for parameters of {p.dtype} with state of {average}."
    if has_gaps(p) or not all(t.is_contiguous() for t in state.values()):
        return f"{name} has gaps in memory, or its state is not contiguous."
    if max(blocks.sizes) > LARGEST_SIDE:
        return f"{name} has blocks with sides up to {max(blocks.sizes)}; the kernel rotates sides up to {LARGEST_SIDE}."
    return None
