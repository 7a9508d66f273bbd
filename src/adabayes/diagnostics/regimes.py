"""Counts which weights move like SGD and which like Adam, from the state of an optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adabayes._util.regimes import GOLDEN, QUANTILES, Regime, Regimes
from adabayes._util.tensors import local
from adabayes.diagnostics._names import named_with_state
from adabayes.optim.extend import unwrap

__all__ = ["regimes"]

_SAMPLE = 100_000  # number of weights per tensor from which quantiles are computed; fractions count all weights


def regimes(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> Regimes:
    """Return the regimes of an optimizer with two learning rates that has taken a step.

    For :class:`~adabayes.AdaBayesK`, they are those of eigendirections: a matrix has as many of them as weights.

    Args:
        optimizer: parameters without state (no gradient yet) are left out.
        model: gives the parameters' names. Not needed if the optimizer was created with ``named_parameters()``.
    """
    optimizer = unwrap(optimizer)
    rows: list[Regime] = []
    samples: list[tuple[Tensor, float]] = []  # effective learning rates, and the number of weights that each represents
    for name, p, group in named_with_state(optimizer, model):
        gain = local(optimizer.relative_gain(p)).flatten()
        count = gain.numel()
        if count == 0:
            continue
        sgd_like = torch.count_nonzero(gain * GOLDEN >= 1).item() / count
        adam_like = torch.count_nonzero(gain * GOLDEN < 1).item() / count
        _, lr_sgd = optimizer.current_rates(group, p)
        sample = gain[:: -(-count // _SAMPLE)].double() * lr_sgd
        samples.append((sample, count / sample.numel()))
        rows.append(Regime(name, count, sgd_like, adam_like, _quantiles([samples[-1]]), lr_sgd))
    if not rows:
        raise RuntimeError("no parameter has state yet: take a step with gradients first")
    return Regimes.of(rows, _quantiles(samples), bounded=optimizer.ROTATES)


def _quantiles(samples: list[tuple[Tensor, float]]) -> tuple[float, ...]:
    """Return the quantiles of samples whose entries represent different numbers of weights."""
    values, order = torch.cat([sample for sample, _ in samples]).sort()
    weights = torch.cat([torch.full_like(sample, weight) for sample, weight in samples])[order].cumsum(0)
    targets = torch.tensor(QUANTILES, dtype=weights.dtype, device=weights.device) * weights[-1]
    return tuple(values[torch.searchsorted(weights, targets).clamp(max=len(values) - 1)].tolist())
