"""AdaBayes-K: the filter for whole matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes.eigenbasis import Bases, basis_of, factor, interval, learns, least_share, refreshed, rotate, spread
from adabayes.optax._adabayes_fp import Settled
from adabayes.optax._chain import chain
from adabayes.optax._leaves import Leaves, real_shape, wide_real
from adabayes.optax._numbers import Rate, Rates, Scalar, TwoRates, caster, check, check_whole, plain
from adabayes.optax._shardings import beside, split_like, whole
from adabayes.rates import SETTLED_RATIO

Sides = tuple[jax.Array, ...]  # of each side that is rotated, a square matrix

LEARN_EVERY, REFRESH, MAX_SIZE = 2, 10, 2048


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
    learn_every: int | None = None,
    refresh: int | None = None,
    max_size: int | None = None,
    cautious: bool = True,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the fixed point of the gain in their eigenbasis, in units of the learning rate.

    The chain has to scale by the learning rate afterwards. Arguments are those of :func:`adabayes_k`.
    """
    rates = TwoRates(learning_rate, base_lr, lr_sgd, SETTLED_RATIO)
    b1, b2 = plain(b1), plain(b2)
    check("b1", b1, 0, 1)
    check("b2", b2, 0, 1)
    longest = check_whole("learn_every", LEARN_EVERY if learn_every is None else learn_every)
    period = check_whole("refresh", REFRESH if refresh is None else refresh)
    size = check_whole("max_size", MAX_SIZE if max_size is None else max_size)
    leaves = Leaves(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesKState:
        def squares(make: Callable[..., jax.Array]) -> Any:
            return leaves.of_weights(lambda p: _squares(make, p, size), params)

        count, decay = jnp.zeros([], jnp.int32), jnp.asarray(b2, float)
        # A parameter without a gradient at the first step keeps its own basis until the first refresh.
        matrices = squares(lambda n, dtype: jnp.zeros((n, n), dtype)), squares(jnp.eye)
        return ScaleByAdaBayesKState(count, *leaves.zeros(params), *matrices, rates.initial(), decay)

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesKState]:
        count, base_lr = optax.safe_increment(state.count), state.rates.lr
        c = Settled(b1, b2, rates.ratio(base_lr), count, cautious, centred)
        every, pause = interval(count, longest), interval(count, period)
        decay, least = jnp.asarray(b2**every, float), jnp.asarray(0.0 if centred else least_share(b1, b2), float)

        def leaf(
            g: jax.Array, mu: jax.Array, nu: jax.Array, factors: Sides, bases: Sides, slot: int
        ) -> tuple[Any, ...]:
            given, rotated = (g, mu, nu), _rotated(g.shape, size)
            if not rotated:
                return *c.step(g, mu, nu), factors, bases, slot
            g, mu, nu = (whole(x).reshape(_matrix(x.shape)) for x in given)
            factors = tuple(  # sides are torch's the other way round
                _when(learns(1 - side, count, every), _follower(side), (f,), g, decay)[0]
                for f, side in zip(factors, rotated)
            )
            (bases,) = _when(count == 1, _first_of(rotated), (bases,), g)
            turn = _by_side(bases, rotated)
            move, mean, square = c.step(rotate(g, turn), mu, nu)
            move = rotate(move, turn, back=True)
            due = (count > 1) & ((count - slot) % pause == 0)
            mean, square, factors, bases = _when(due, _refresher(rotated), (mean, square, factors, bases), least)
            shaped = (split_like(x.reshape(like.shape), like) for x, like in zip((move, mean, square), given))
            return *shaped, factors, bases, slot

        columns = state.mu, state.nu, state.factors, state.bases, _slots(state, updates, period)
        with jax.default_matmul_precision("highest"):  # bases are to stay orthonormal, also on accelerators
            directions, mu, nu, factors, bases, _ = leaves.update(leaf, count, updates, params, *columns)
        now = Rates.of(*rates.of(base_lr)), jnp.asarray(b2, float)
        return directions, ScaleByAdaBayesKState(count, mu, nu, factors, bases, *now)

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
    learn_every: int | None = None,
    refresh: int | None = None,
    max_size: int | None = None,
    cautious: bool = True,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes-K: the paper's filter for a whole weight matrix, in the eigenbasis of its gradients.

    It gives the same numbers as :class:`adabayes.AdaBayesK`, whose documentation says more about the method. Use it for
    a whole model, in place of ``optax.adamw``: vectors and scalars get AdaBayes-FP.

    The last axis of an array is taken as that of the outputs, as in Flax; a convolution is a matrix, (height * width *
    in) x out. So the numbers are those of torch, whose first axis is that of the outputs, for the transpose. Matrices
    are not cut into blocks here: it is torch's form with a ``block_size`` of ``max_size``.

    Args:
        learning_rate: begin with five times that of ``optax.adamw``; a number, a schedule or a traced array.
        lr_sgd: the highest learning rate that a direction can get, in units of the averaged gradient. None: 1e5 times
            the base, whatever that is.
        b1: decay of the averaged gradient.
        b2: decay of its averaged square and covariances.
        weight_decay: decoupled, as in ``optax.adamw``.
        mask: weights to decay, as in ``optax.adamw``.
        base_lr: ``learning_rate`` without its schedule, as for :func:`adabayes`; it matters only where ``lr_sgd`` is
            given.
        learn_every: steps from one gradient that a covariance learns from to the next. None: 2. It decides what is
            compiled, as ``refresh`` and ``max_size`` do: with ``inject_hyperparams``, leave them out or name them in
            ``static_args``.
        refresh: steps from one update of a basis to the next; in the beginning less. None: 10.
        max_size: largest side that is rotated. None: 2048. A matrix takes 2 (m² + n²) numbers of state beside the 2 mn
            of ``optax.adamw``.
        cautious: move only in directions whose averaged gradient has the sign of the newest one.
        centred: average the squares of what the average did not predict, as in :class:`adabayes.AdaBayesK`.
        mu_dtype: dtype of the averaged gradient, real or complex. None: that of the averaged square.
        state_dtype: dtype of the two averages, as for :func:`adabayes`; factors and bases stay fp32, or float64 for
            float64 parameters.
        seed: seed of the rounding of bfloat16.
    """
    directions = scale_by_adabayes_k(
        learning_rate,
        lr_sgd,
        b1,
        b2,
        base_lr=base_lr,
        learn_every=learn_every,
        refresh=refresh,
        max_size=max_size,
        cautious=cautious,
        centred=centred,
        mu_dtype=mu_dtype,
        state_dtype=state_dtype,
        seed=seed,
    )
    return chain(directions, learning_rate, base_lr, weight_decay, mask)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix, inputs x outputs."""
    return math.prod(shape[:-1]), shape[-1]


def _rotated(shape: tuple[int, ...], max_size: int) -> tuple[int, ...]:
    """Return which sides are rotated."""
    if len(shape) < 2 or 0 in shape:
        return ()
    return tuple(side for side, size in enumerate(_matrix(shape)) if 1 < size <= max_size)


def _squares(make: Callable[..., jax.Array], p: Any, size: int) -> Sides:
    """Return a square matrix for each side of a parameter that is rotated."""
    shape = real_shape(p)
    dtype = wide_real(jnp.result_type(p))
    return tuple(beside(p, make(_matrix(shape)[side], dtype=dtype)) for side in _rotated(shape, size))


def _slots(state: ScaleByAdaBayesKState, updates: optax.Updates, refresh: int) -> Any:
    """Return at which step, modulo ``refresh``, the bases of each leaf are refreshed."""
    tree: Any = jax.tree.structure(updates, is_leaf=lambda x: x is None)
    costs = [sum(len(basis) ** 3 for basis in jax.tree.leaves(one)) for one in tree.flatten_up_to(state.bases)]
    return tree.unflatten(spread(costs, [1] * len(costs), refresh))


def _by_side(squares: Sides, rotated: tuple[int, ...]) -> Bases:
    found = dict(zip(rotated, squares))
    return found.get(0), found.get(1)


def _follower(side: int) -> Callable[..., Sides]:
    """Return a function that lets a factor follow a gradient: A = decay A + (1 - decay) G G^T."""

    def follow(covariance: jax.Array, g: jax.Array, decay: jax.Array) -> Sides:
        number = caster(covariance.dtype)
        return (number(decay) * covariance + number(1 - decay) * factor(g.astype(covariance.dtype), side),)

    return follow


def _first_of(rotated: tuple[int, ...]) -> Callable[..., tuple[Sides]]:
    """Return a function that computes the first bases from the first gradient."""
    return lambda bases, g: (tuple(basis_of(factor(g.astype(b.dtype), side)) for b, side in zip(bases, rotated)),)


def _refresher(rotated: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that refreshes the bases of one matrix; the averages go with them."""

    def refresh(mean: jax.Array, square: jax.Array, factors: Sides, bases: Sides, least: jax.Array) -> Any:
        factors = tuple(jnp.nan_to_num(f, nan=0.0, posinf=0.0, neginf=0.0) for f in factors)  # begins again
        new = []
        for side, covariance, basis in zip(rotated, factors, bases):
            now, order = refreshed(covariance, basis)
            square = jnp.take(square, order, axis=side)
            new.append(now)
        old, turned = (_by_side(tuple(q), rotated) for q in (bases, new))
        mean = rotate(rotate(mean, old, back=True), turned)
        return mean, jnp.maximum(square, least.astype(square.dtype) * mean * mean), factors, tuple(new)

    return refresh


def _when(condition: jax.Array, change: Callable[..., Any], operands: Any, *others: Any) -> Any:
    """Return ``change(*operands, *others)`` if the condition holds, and otherwise the operands.

    Arrays leave the ``cond`` flat, because LAPACK's are in columns: XLA would transpose all others at each step.

    ``vmap`` turns a ``cond`` with many conditions into a choice between both results, which costs both. Here it stays a
    ``cond``, on whether any of them holds: usually, all models of a ``vmap`` are at the same step.
    """
    many = len(operands)

    def flat(arrays: Any) -> Any:
        return jax.tree.map(jnp.ravel, tuple(arrays))

    def by_cond(condition: jax.Array, *arrays: Any) -> Any:
        return jax.lax.cond(condition, lambda *x: flat(change(*x)), lambda *x: flat(x[:many]), *arrays)

    batchable = jax.custom_batching.custom_vmap(by_cond)

    @batchable.def_vmap
    def of_many(count: int, batched: Any, condition: jax.Array, *arrays: Any) -> Any:
        every = jax.tree.map(
            lambda x, has: x if has else jnp.broadcast_to(x, (count, *x.shape)), arrays, tuple(batched[1:])
        )
        holds = jnp.broadcast_to(condition, (count,))

        def where_it_holds(*given: Any) -> Any:
            def leaf(after: jax.Array, before: jax.Array) -> jax.Array:
                return jnp.where(given[-1].reshape(-1, *[1] * (after.ndim - 1)), after, before)

            return jax.tree.map(leaf, tuple(jax.vmap(change)(*given[:-1])), tuple(given[:many]))

        found = _when(condition.any(), where_it_holds, every[:many], *every[many:], holds)
        return jax.tree.map(lambda x: x.reshape(count, -1), found), jax.tree.map(lambda _: True, found)

    differentiable = jax.custom_jvp(batchable)  # in reverse, too, which what batches by a rule of its own is not
    differentiable.defjvp(lambda primals, tangents: jax.jvp(by_cond, primals, tangents))
    found = differentiable(condition, *operands, *others)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), found, tuple(operands))
