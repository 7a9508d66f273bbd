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

__all__ = ["MatrixPlan", "kernel_can_serve"]

Initialize = Callable[[Matrix, Tensor, float], None]


class MatrixPlan(StatePlan):
    """Matrices of a parameter group, and the launches that step them.

    Args:
        matrices: the matrices, which the kernel can serve.
        initialize: computes the first factors and bases of a matrix from its first gradient and ``beta2``.
    """

    def __init__(self, matrices: Sequence[Matrix], initialize: Initialize) -> None:
        states = [matrix.state for matrix in matrices]
        super().__init__([matrix.param for matrix in matrices], states, lambda state: tuple(state.values()))
        self._matrices, self._initialize = matrices, initialize
        kinds: dict[Any, list[int]] = {}
        for i, matrix in enumerate(matrices):
            kind = matrix.param.dtype, matrix.state["exp_avg"].dtype, matrix.state["step"].dtype
            kinds.setdefault(kind, []).append(i)
        launch = BACKENDS[matrices[0].param.device.type].matrix_launch
        assert launch is not None
        self._launches = [
            (chosen, launch([matrices[i] for i in chosen]), library.StepCounter([states[i]["step"] for i in chosen]))
            for chosen in kinds.values()
        ]

    def _launch(self, grads: list[Tensor], addresses: list[int], coefficients: Any, options: StepOptions) -> None:
        if options.found_inf is not None and options.found_inf.item():
            return
        for chosen, launch, counter in self._launches:
            counts = [int(t) for t in counter.count()]
            for i, t in zip(chosen, counts):
                if t == 1:
                    self._initialize(self._matrices[i], grads[i] * as_float(options.unscale), coefficients.beta2)
            rows = {t: row for row, t in enumerate(dict.fromkeys(counts))}
            table = [_coefficients(coefficients, t, options) for t in rows]
            launch.take_step([addresses[i] for i in chosen], [rows[t] for t in counts], table, options.seed)


def _coefficients(coefficients: Any, t: int, options: StepOptions) -> list[float]:
    """Return a row of coefficients, in the order in which the kernel reads them."""
    fixed_point = ADABAYES_FP.derive(coefficients, t, StepOptions(sign=options.sign))
    chosen = zip(ADABAYES_FP.options, ADABAYES_FP.chosen_options(coefficients))
    values = {name: as_float(x) for name, x in (*zip(ADABAYES_FP.coefficients, fixed_point), *chosen)}
    ordered = library.order_coefficients(ADABAYES_FP.name, values)
    return [*map(float, derive_matrix_coefficients(coefficients, t, options)), *ordered]


def kernel_can_serve(p: Tensor, state: dict[str, Tensor], blocks: Blocks) -> bool:
    """Tell whether the kernel of AdaBayes-K can serve a matrix, whose state has the shapes that its blocks need."""
    backend = BACKENDS.get(p.device.type)
    if backend is None or backend.matrix_launch is None or max(blocks.sizes) > LARGEST_SIDE or has_gaps(p):
        return False
    if type(p) not in (Tensor, Parameter) or p.dtype not in (torch.float32, torch.float64):
        return False
    average = state["exp_avg"].dtype
    if average != p.dtype and (p.dtype, average) != (torch.float32, torch.bfloat16):
        return False
    dtypes = {"exp_avg": (average,), "exp_avg_sq": (average,), "step": (torch.float32, torch.float64)}
    return all(
        type(x) is Tensor and x.is_cpu and x.is_contiguous() and x.dtype in dtypes.get(name, (p.dtype,))
        for name, x in state.items()
    )
