"""Regimes: which weights move like SGD and which like Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from adabayes import filtering
from adabayes._regimes import GOLDEN, QUANTILES, Regime, Regimes
from adabayes.optax._adabayes import ScaleByAdaBayesState
from adabayes.optax._adabayes_fp import ScaleByAdaBayesFPState
from adabayes.optax._adabayes_k import ScaleByAdaBayesKState
from adabayes.optax._leaves import name_of, real_view

if TYPE_CHECKING:
    from numpy.typing import NDArray


def regimes(state: Any, learning_rate: float | None = None) -> Regimes:
    """Return which weights move like SGD and which like Adam, from the state of an optimizer or of a chain with one.

    Args:
        state: result of ``init`` or ``update``, of :func:`adabayes`, :func:`adabayes_fp`, :func:`adabayes_k` or
            anything around them. For :func:`adabayes_k`, the regimes are those of eigendirections: a matrix has as
            many of them as weights.
        learning_rate: its present value, for all weights. None: that of the filter, which is the base or, under
            ``dynamics="paper"``, that of the last step.
    """
    kinds = (ScaleByAdaBayesState, ScaleByAdaBayesFPState, ScaleByAdaBayesKState)
    rows: list[Regime] = []
    rates: list[Any] = []  # of all weights
    bounded = True
    for one in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(one, kinds):
            continue
        bounded &= isinstance(one, ScaleByAdaBayesKState)
        lr, lr_sgd = map(float, one.rates)
        schedule = 1.0 if learning_rate is None else learning_rate / lr
        for name, gain in _gains(one, lr, lr_sgd):
            sgd_like, adam_like = (float(np.mean(s)) for s in (gain * GOLDEN >= lr_sgd, gain * GOLDEN < lr_sgd))
            rates.append(gain * schedule)
            quantiles = tuple(np.quantile(rates[-1], QUANTILES).tolist())
            rows.append(Regime(name, gain.size, sgd_like, adam_like, quantiles, lr_sgd * schedule))
    if not rows:
        raise ValueError("this is not the state of an adabayes, adabayes_fp or adabayes_k, or it holds no weights")
    return Regimes.of(rows, tuple(np.quantile(np.concatenate(rates), QUANTILES).tolist()), bounded)


def _gains(
    state: ScaleByAdaBayesState | ScaleByAdaBayesFPState | ScaleByAdaBayesKState, lr: float, lr_sgd: float
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield the name of each array of weights, and their gains at the base learning rates."""
    second = state.gain if isinstance(state, ScaleByAdaBayesState) else state.nu
    for (path, leaf), mu in zip(jax.tree_util.tree_leaves_with_path(second), jax.tree.leaves(state.mu)):
        values = _flat(leaf)
        if isinstance(state, ScaleByAdaBayesState):
            values[filtering.is_unstarted(values, _flat(mu))] = lr_sgd
        else:
            correction = 1 - float(state.b2) ** max(int(state.count), 1)
            values = filtering.fixed_point(values / correction, lr, lr_sgd)
        if values.size:
            yield name_of(path), values


def _flat(leaf: Any) -> NDArray[np.float64]:
    return np.array(real_view(leaf), np.float64).ravel()
