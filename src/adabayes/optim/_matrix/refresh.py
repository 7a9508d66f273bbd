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


def initialize_bases_(state: MatrixState, G: Tensor, beta2: float, ranks: Ranks) -> None:
    """Compute the first factors, and their eigenvectors, from the first gradient."""
    for side, (factor, basis) in enumerate(zip(state.factors, state.bases)):
        if factor is not None and basis is not None:
            _learn_(factor, G, side, beta2)
            basis.copy_(ranks.map(_eigenvectors, {"factor": factor}, cost=factor.shape[-1] ** 3)["basis"])


def learn_factors_(state: MatrixState, G: Tensor, coefficients: Any, t: int) -> None:
    """Average the covariances of the gradient: both sides learn every ``learn_every`` steps, alternating."""
    every = interval(t, coefficients.learn_every)
    for side, factor in enumerate(state.factors):
        if factor is not None and learns(side, t, every):
            _learn_(factor, G, side, coefficients.beta2**every)


def refresh_bases_(state: MatrixState, coefficients: Any, due: list[int], ranks: Ranks) -> None:
    """Refresh the bases of the blocks that are due, and express their averages in the new bases."""
    if not due:
        return
    (A, C), (Q_A, Q_C) = state.factors, state.bases
    names = {"M": state.M, "V": state.V, "A": A, "C": C, "Q_A": Q_A, "Q_C": Q_C}
    entries = {name: x for name, x in names.items() if x is not None}
    index = torch.tensor(due, device=state.M.device)
    chosen = {name: x[index] for name, x in entries.items()}
    for name in ("A", "C"):
        if name in chosen:
            chosen[name].nan_to_num_(0.0, 0.0, 0.0)  # entries that have overflowed start again
    ratio = 0.0 if coefficients.centred else least_ratio(coefficients.beta1, coefficients.beta2)
    cost = sum(x.shape[-1] ** 3 for name, x in chosen.items() if name in ("Q_A", "Q_C"))
    refreshed = ranks.map(lambda blocks: _refresh(blocks, ratio), chosen, cost)
    for name, x in (chosen | refreshed).items():
        entries[name][index] = x


def _refresh(entries: Entries, ratio: float) -> Entries:
    """Return the new bases, M rotated into them, and V reordered and at least ``ratio * M**2``."""
    V = entries["V"]
    old, new = (entries.get("Q_A"), entries.get("Q_C")), {}
    for side, (factor, Q) in enumerate((("A", "Q_A"), ("C", "Q_C"))):
        if Q in entries:
            new[Q], order = eigenbasis.refresh(entries[factor], entries[Q])
            V = reorder(V, order, side)
    M = rotate(rotate(entries["M"], old, back=True), (new.get("Q_A"), new.get("Q_C")))
    return {**new, "M": M, "V": torch.maximum(V, ratio * M * M) if ratio else V}


def _learn_(factor: Tensor, G: Tensor, side: int, decay: float) -> None:
    """Average a covariance: A = decay A + (1 - decay) G G^T for the left side, G^T G for the right one."""
    x = G.mT if side else G
    factor.baddbmm_(x, x.mT, beta=decay, alpha=1 - decay)


def _eigenvectors(entries: Entries) -> Entries:
    return {"basis": eigenvectors(entries["factor"])}
