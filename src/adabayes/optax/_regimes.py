"""Regimes: which weights move like SGD and which like Adam."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from adabayes import filtering
from adabayes._util.averages import bias_correction
from adabayes._util.regimes import GOLDEN, QUANTILES, Regime, Regimes
from adabayes.optax._adabayes import ScaleByAdaBayesState
from adabayes.optax._adabayes_fp import ScaleByAdaBayesFPState
from adabayes.optax._adabayes_k import ScaleByAdaBayesKState
from adabayes.optax._leaves import name_of, to_real

if TYPE_CHECKING:
    from numpy.typing import NDArray

State = ScaleByAdaBayesState | ScaleByAdaBayesFPState | ScaleByAdaBayesKState


def regimes(state: Any, learning_rate: float | None = None) -> Regimes:
    """Return which weights move like SGD and which like Adam.

    Args:
        state: the state of :func:`adabayes`, :func:`adabayes_fp`, :func:`adabayes_k` or a transformation that contains
            one of them. For :func:`adabayes_k`, the regimes are those of eigendirections: a block has as many of them
            as entries, including those that fill it up. Their learning rates include ``matrix_scale``.
        learning_rate: the present learning rate, for all weights. None: that of the filter, which is the base or, under
            ``dynamics="paper"``, that of the last step.

    Returns:
        The regimes of each parameter and in total, which print as a table.
    """
    rows: list[Regime] = []
    gains: list[Any] = []
    bounded = True
    for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, State)):
        if not isinstance(leaf, State):
            continue
        bounded &= isinstance(leaf, ScaleByAdaBayesKState)
        lr, lr_sgd = map(float, leaf.rates)
        lr_factor = 1.0 if learning_rate is None else learning_rate / lr
        for name, gain, scale in _iterate_gains(leaf, lr, lr_sgd):
            sgd_like, adam_like = (float(np.mean(x)) for x in (gain * GOLDEN >= lr_sgd, gain * GOLDEN < lr_sgd))
            gains.append(gain * lr_factor * scale)
            quantiles = tuple(np.quantile(gains[-1], QUANTILES).tolist())
            rows.append(Regime(name, gain.size, sgd_like, adam_like, quantiles, lr_sgd * lr_factor * scale))
    if not rows:
        raise ValueError("This is not the state of an adabayes, adabayes_fp or adabayes_k, or it contains no weights.")
    return Regimes.of(rows, tuple(np.quantile(np.concatenate(gains), QUANTILES).tolist()), bounded)


def _iterate_gains(state: State, lr: float, lr_sgd: float) -> Iterator[tuple[str, NDArray[np.float64], float]]:
    """Yield the name of each array of weights, their gains at the learning rates of the filter, and their scale."""
    second = state.gain if isinstance(state, ScaleByAdaBayesState) else state.nu
    tree: Any = jax.tree.structure(second)
    scales = [1.0] * tree.num_leaves
    if isinstance(state, ScaleByAdaBayesKState) and state.matrix_scale is not None:
        scales = [float(state.matrix_scale) if bases else 1.0 for bases in tree.flatten_up_to(state.bases)]
    for (path, leaf), mu, scale in zip(jax.tree_util.tree_leaves_with_path(second), jax.tree.leaves(state.mu), scales):
        values = _flatten(leaf)
        if isinstance(state, ScaleByAdaBayesState):
            values[filtering.is_unstarted(values, _flatten(mu))] = lr_sgd
        else:
            correction = bias_correction(float(state.b2), max(int(state.count), 1))
            values = filtering.fixed_point(values / correction, lr, lr_sgd)
        if values.size:
            yield name_of(path), values, scale


def _flatten(leaf: Any) -> NDArray[np.float64]:
    return np.array(to_real(leaf), np.float64).ravel()
