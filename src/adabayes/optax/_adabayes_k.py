"""AdaBayes-K: the filter for whole matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes.eigenbasis import basis_of, factor, refreshed, rotate, spread
from adabayes.optax._adabayes_fp import Settled
from adabayes.optax._chain import chain
from adabayes.optax._leaves import Leaves, real_shape
from adabayes.optax._numbers import Rate, Rates, Scalar, TwoRates, caster, check, check_whole, plain
from adabayes.rates import SETTLED_RATIO

Sides = tuple[jax.Array, ...]  # of each side that is rotated, a square matrix

REFRESH, MAX_SIZE = 10, 2048


class ScaleByAdaBayesKState(NamedTuple):
    """State of :func:`scale_by_adabayes_k`.

    ``mu`` and ``nu`` are averages of the gradient and of its square, in the eigenbasis, laid out in the shape of the
    parameter. ``factors`` and ``bases`` have a tuple for each parameter, with a matrix for each side that is rotated.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    factors: Any
    bases: Any
    rates: Rates
    b2: jax.Array


def scale_by_adabayes_k(
    learning_rate: Rate = 3e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    *,
    base_lr: Scalar | None = None,
    refresh: int | None = None,
    max_size: int | None = None,
    cautious: bool = True,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the fixed point of the gain in their eigenbasis, in units of the learning rate.

    The learning rate is to follow in the chain. Arguments are those of :func:`adabayes_k`.
    """
    rates = TwoRates(learning_rate, base_lr, lr_sgd, SETTLED_RATIO)
    b1, b2 = plain(b1), plain(b2)
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)
    period = check_whole("refresh", REFRESH if refresh is None else refresh)
    size = check_whole("max_size", MAX_SIZE if max_size is None else max_size)
    leaves = Leaves(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesKState:
        def squares(make: Callable[..., jax.Array]) -> Any:
            return leaves.of_weights(lambda p: _squares(make, p, size), params)

        count, decay = jnp.zeros([], jnp.int32), jnp.asarray(b2, float)
        # Of a parameter without a gradient at the first step, the basis is its own until the first refresh.
        matrices = squares(lambda n, dtype: jnp.zeros((n, n), dtype)), squares(jnp.eye)
        return ScaleByAdaBayesKState(count, *leaves.zeros(params), *matrices, rates.initial(), decay)

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesKState]:
        count, base_lr = optax.safe_increment(state.count), state.rates.lr
        c = Settled(b1, b2, rates.ratio(base_lr), count, cautious, centred)

        def leaf(
            g: jax.Array, mu: jax.Array, nu: jax.Array, factors: Sides, bases: Sides, slot: int
        ) -> tuple[Any, ...]:
            shape, rotated = g.shape, _rotated(g.shape, size)
            g, mu, nu = (x.reshape(_modes(shape, size)) for x in (g, mu, nu))
            factors = tuple(_followed(f, g, side, b2) for f, side in zip(factors, rotated))
            bases = _when(count == 1, _first, (factors, bases))[1]
            turn = _by_side(bases, rotated, g.ndim)
            move, mean, square = c.step(rotate(g, turn), mu, nu)
            move = rotate(move, turn, back=True)
            due = (count > 1) & (count % period == slot)
            mean, square, factors, bases = _when(due, _refresher(rotated), (mean, square, factors, bases))
            return *(x.reshape(shape) for x in (move, mean, square)), factors, bases, slot

        columns = state.mu, state.nu, state.factors, state.bases, _slots(state, updates, period)
        with jax.default_matmul_precision("highest"):  # bases are to stay orthonormal, also on accelerators
            directions, *entries, _ = leaves.update(leaf, count, updates, params, *columns)
        now = Rates.of(*rates.of(base_lr)), jnp.asarray(b2, float)
        return directions, ScaleByAdaBayesKState(count, *entries, *now)

    return optax.GradientTransformation(init, update)


def adabayes_k(
    learning_rate: Rate = 3e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    *,
    base_lr: Scalar | None = None,
    refresh: int | None = None,
    max_size: int | None = None,
    cautious: bool = True,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes-K: the paper's filter for a whole weight matrix, in the eigenbasis of its gradients.

    It gives the same numbers as :class:`adabayes.AdaBayesK`, which has more to say about the method. Use it for a whole
    model, in the place of ``optax.adamw``: vectors and numbers get AdaBayes-FP. Arguments are those of
    :func:`adabayes_fp`, and

    Args:
        learning_rate: begin with three times that of ``optax.adamw``.
        refresh: steps from one update of a basis to the next. None: 10. It decides what is compiled, as ``max_size``
            does: with ``inject_hyperparams``, leave both out or name them in ``static_args``.
        max_size: of a side that is rotated. None: 2048. A matrix takes 2 (m² + n²) numbers of state beside adamw's 2 mn.
        state_dtype: dtype of the two averages; factors and bases stay fp32, or float64 for parameters of that.

    The last axis of an array is taken as that of the outputs, as in Flax; a convolution is a matrix, (height * width *
    in) x out, as long as that has at most ``max_size`` rows, and else has three modes: (height * width) x in x out. So
    the numbers are those of torch, whose first axis is that of the outputs, for the transpose.
    """
    directions = scale_by_adabayes_k(
        learning_rate,
        lr_sgd,
        b1,
        b2,
        base_lr=base_lr,
        refresh=refresh,
        max_size=max_size,
        cautious=cautious,
        centred=centred,
        mu_dtype=mu_dtype,
        state_dtype=state_dtype,
        seed=seed,
    )
    return chain(directions, learning_rate, base_lr, weight_decay, mask)


def _modes(shape: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Return the shape in which a parameter is rotated, as :func:`adabayes.eigenbasis.modes` does for the transpose."""
    if len(shape) <= 2:
        return shape
    rest = math.prod(shape[:-1])
    return (rest, shape[-1]) if rest <= max_size else (math.prod(shape[:-2]), *shape[-2:])


def _rotated(shape: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Return which modes are rotated."""
    if len(shape) < 2 or 0 in shape:
        return ()
    return tuple(side for side, size in enumerate(_modes(shape, max_size)) if 1 < size <= max_size)


def _squares(make: Callable[..., jax.Array], p: Any, size: int) -> Sides:
    """Return a square matrix for each side of a parameter that is rotated."""
    shape = real_shape(p)
    dtype = jnp.finfo(jnp.promote_types(jnp.result_type(p), jnp.float32)).dtype
    return tuple(make(_modes(shape, size)[side], dtype=dtype) for side in _rotated(shape, size))


def _slots(state: ScaleByAdaBayesKState, updates: optax.Updates, refresh: int) -> Any:
    """Return at which step, modulo ``refresh``, the bases of each leaf are refreshed."""
    tree: Any = jax.tree.structure(updates, is_leaf=lambda x: x is None)
    costs = [sum(len(basis) ** 3 for basis in jax.tree.leaves(one)) for one in tree.flatten_up_to(state.bases)]
    return tree.unflatten(spread(costs, refresh))


def _by_side(squares: Sides, rotated: tuple[int, ...], rank: int) -> list[jax.Array | None]:
    found = dict(zip(rotated, squares))
    return [found.get(side) for side in range(rank)]


def _followed(covariance: jax.Array, g: jax.Array, side: int, b2: Scalar) -> jax.Array:
    """Return a factor after a gradient: A = b2 A + (1 - b2) G G^T."""
    number = caster(covariance.dtype)
    return number(b2) * covariance + number(1 - b2) * factor(g.astype(covariance.dtype), side, g.ndim)


def _first(factors: Sides, bases: Sides) -> tuple[Sides, Sides]:
    """Make the first bases, of the first gradient."""
    return factors, tuple(map(basis_of, factors))


def _refresher(rotated: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that refreshes the bases of one matrix; the averages go with them."""

    def refresh(mean: jax.Array, square: jax.Array, factors: Sides, bases: Sides) -> Any:
        factors = tuple(jnp.nan_to_num(f, nan=0.0, posinf=0.0, neginf=0.0) for f in factors)  # begins again
        new = []
        for side, covariance, basis in zip(rotated, factors, bases):
            now, order = refreshed(covariance, basis)
            square = jnp.take(square, order, axis=side)
            new.append(now)
        old, turned = (_by_side(tuple(q), rotated, mean.ndim) for q in (bases, new))
        return rotate(rotate(mean, old, back=True), turned), square, factors, tuple(new)

    return refresh


def _when(condition: jax.Array, change: Callable[..., Any], operands: Any) -> Any:
    """Return ``change(*operands)`` if the condition holds, and else the operands; what is not needed costs nothing.

    ``vmap`` turns a ``cond`` with many conditions into a choice between both results. Here it stays a ``cond``, on
    whether any of them holds: as a rule, all models of a ``vmap`` are at the same step.
    """
    if not jax.tree.leaves(operands):
        return operands

    @jax.custom_batching.custom_vmap
    def chosen(condition: jax.Array, operands: Any) -> Any:
        return jax.lax.cond(condition, lambda x: change(*x), lambda x: x, operands)

    @chosen.def_vmap
    def of_many(count: int, batched: Any, condition: jax.Array, operands: Any) -> Any:
        spread_out = jax.tree.map(
            lambda x, has: x if has else jnp.broadcast_to(x, (count, *jnp.shape(x))), operands, batched[1]
        )

        def all_changed(*before: Any) -> Any:
            after = jax.vmap(change)(*before)
            if not batched[0]:
                return after
            return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b), after, before)

        found = _when(condition.any(), all_changed, spread_out)
        return found, jax.tree.map(lambda _: True, found)

    return chosen(condition, operands)
