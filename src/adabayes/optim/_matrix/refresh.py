"""Learns the factors of blocks, and refreshes their bases."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adabayes import eigenbasis
from adabayes._blocks.schedule import interval, learns
from adabayes.eigenbasis import Sides, eigenvectors, least_ratio, reorder, rotate
from adabayes.optim._matrix.replicated import Entries, Ranks

__all__ = ["MatrixState", "initialize_bases_", "learn_factors_", "refresh_bases_"]


class MatrixState(NamedTuple):
    """The state of a stack of m x n matrices, which is updated in place."""

    M: Tensor  # the average of G'
    V: Tensor  # the average of the squares of G'
    factors: Sides  # A and C
    bases: Sides  # Q_A and Q_C
    owners: Sides = (None, None)  # for each matrix, the index of its basis; None if matrix i has basis i

    def bases_of_matrices(self) -> Sides:
        """Return the bases of each matrix."""
        left, right = (Q if i is None or Q is None else Q[i] for Q, i in zip(self.bases, self.owners))
        return left, right


def initialize_bases_(state: MatrixState, G: Tensor, beta2: float, ranks: Ranks) -> None:
    """Compute the first factors, and their eigenvectors, from the first gradient."""
    for side, (factor, basis) in enumerate(zip(state.factors, state.bases)):
        if factor is not None and basis is not None:
            _learn_(factor, G, side, beta2, state.owners[side])
            basis.copy_(ranks.map(_eigenvectors, {"factor": factor}, cost=factor.shape[-1] ** 3)["basis"])


def learn_factors_(state: MatrixState, G: Tensor, coefficients: Any, t: int) -> None:
    """Average the covariances of the gradient: both sides learn every ``learn_every`` steps, alternating."""
    every = interval(t, coefficients.learn_every)
    for side, factor in enumerate(state.factors):
        if factor is not None and learns(side, t, every):
            _learn_(factor, G, side, coefficients.beta2**every, state.owners[side])


def refresh_bases_(state: MatrixState, coefficients: Any, due: tuple[list[int], list[int]], ranks: Ranks) -> None:
    """Refresh the bases that are due: M is rotated with them, and V is reordered and raised to its lower bound.

    Args:
        state: the state, which is updated in place.
        coefficients: the coefficients of this step.
        due: the indices of the left and of the right bases that are due.
        ranks: the ranks that split the work.
    """
    touched: list[Tensor] = []
    for side, (A, Q) in enumerate(zip(state.factors, state.bases)):
        if A is None or Q is None or not due[side]:
            continue
        index = torch.tensor(due[side], device=Q.device)
        A[index] = chosen = A[index].nan_to_num(0.0, 0.0, 0.0)  # entries that have overflowed start again
        old = Q[index]
        refreshed = ranks.map(_refresh, {"factor": chosen, "basis": old}, cost=Q.shape[-1] ** 3)
        Q[index] = refreshed["basis"]
        rotations, orders = old.mT @ refreshed["basis"], refreshed["order"].long()
        if (owners := state.owners[side]) is not None:
            position = torch.full((len(Q),), -1, device=Q.device)
            position[index] = torch.arange(len(index), device=Q.device)
            which = position[owners]
            index = (which >= 0).nonzero().squeeze(1)
            rotations, orders = rotations[which[index]], orders[which[index]]
        state.M[index] = rotate(state.M[index], (None, rotations) if side else (rotations, None))
        state.V[index] = reorder(state.V[index], orders, side)
        touched.append(index)
    if coefficients.centred:
        return
    ratio = least_ratio(coefficients.beta1, coefficients.beta2)
    for index in touched:
        state.V[index] = torch.maximum(state.V[index], ratio * state.M[index] ** 2)


def _learn_(factor: Tensor, G: Tensor, side: int, decay: float, owners: Tensor | None) -> None:
    """Average a covariance: A = decay A + (1 - decay) G G^T for the left side, G^T G for the right one.

    Matrices that share a basis contribute the sum of their covariances.
    """
    x = G.mT if side else G
    if owners is None:
        factor.baddbmm_(x, x.mT, beta=decay, alpha=1 - decay)
    else:
        factor.mul_(decay).index_add_(0, owners, x @ x.mT, alpha=1 - decay)


def _refresh(entries: Entries) -> Entries:
    basis, order = eigenbasis.refresh(entries["factor"], entries["basis"])
    return {"basis": basis, "order": order.to(basis.dtype)}  # all entries that are sent have one dtype


def _eigenvectors(entries: Entries) -> Entries:
    return {"basis": eigenvectors(entries["factor"])}
