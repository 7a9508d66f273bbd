"""Fused steps of AdaBayes-K: when a kernel steps the matrices of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from adabayes.eigenbasis import limit
from adabayes.kernels.coefficients import ADABAYES_FP
from adabayes.kernels.cpu.matrix import Matrix
from adabayes.kernels.matrix_plan import MatrixPlan, kernel_can_serve
from adabayes.kernels.plan import StatePlan, explain_unsupported
from adabayes.optim._engine.fused import FusedSteps
from adabayes.optim._engine.state import Group
from adabayes.optim._matrix.layout import blocks_of, check_state
from adabayes.optim._matrix.refresh import initialize_bases_
from adabayes.optim._matrix.replicated import Ranks
from adabayes.optim._matrix.stack import LocalStack, StackedState

if TYPE_CHECKING:
    from adabayes.optim._engine.step import EngineOptimizer

__all__ = ["FusedMatrixSteps"]


class FusedMatrixSteps(FusedSteps):
    """The fused steps of matrices: rotations, AdaBayes-FP in the eigenbasis, factors and refreshes, in one call."""

    def __init__(self) -> None:
        super().__init__(ADABAYES_FP)

    @_disable_dynamo
    def _new_plan(self, optimizer: EngineOptimizer, group: Group, params: list[Tensor]) -> StatePlan | None:
        if group["fused"] and (reasons := [reason for p in params if (reason := explain_unsupported(p))]):
            raise RuntimeError(f"{reasons[0]} Leave `fused` out to use foreach.")
        if len(set(map(id, params))) < len(params):  # a parameter that occurs twice takes two steps
            return None
        optimizer._init_group(group, [], [], [], *([] for _ in optimizer._entries(group, params[0])))
        check_state(optimizer.state, group)
        matrices = []
        for p, index in zip(params, optimizer.indices(params)):
            blocks, state = blocks_of(p, group), optimizer.state[p]
            assert blocks is not None
            if not kernel_can_serve(p, state, blocks):
                return None
            matrices.append(Matrix(p, blocks, group["batch_dims"], state, index))
        return MatrixPlan(matrices, _initialize_bases)


def _initialize_bases(matrix: Matrix, gradient: Tensor, beta2: float) -> None:
    """Compute the first factors and bases of a matrix from its first gradient.

    One thread computes them, as in the kernel, so that all steps are the same for every number of threads.
    """
    stack = LocalStack([matrix.blocks])
    state = StackedState({name: [x] for name, x in matrix.state.items() if x.dim()}, stack.owners(gradient.device))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        initialize_bases_(state.matrices, limit(stack.to_blocks([gradient])), beta2, Ranks())
    finally:
        torch.set_num_threads(threads)
