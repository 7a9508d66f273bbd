"""AdaBayes-K: the filter for weight matrices, in the eigenbasis of their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adabayes._blocks.schedule import interval, learns
from adabayes.eigenbasis import eigenvectors, factor, least_ratio, reorder, rotate
from adabayes.eigenbasis import refresh as refresh_basis
from adabayes.optax._adabayes_fp import FixedPointRule
from adabayes.optax._chain import chain
from adabayes.optax._conditional import apply_if
from adabayes.optax._leaves import map_weights
from adabayes.optax._matrices import (
    Pair,
    Squares,
    create_identities,
    create_zeros,
    from_pair,
    map_sides,
    matrix_shape,
    refresh_offsets,
    rotated_sides,
    to_pair,
)
from adabayes.optax._rates import Rates, RateSettings
from adabayes.optax._settings import Scalar, ScalarOrSchedule, cast_to, check_integer, check_range, to_python
from adabayes.optax._shardings import shard_like, unshard
from adabayes.optax._storage import Storage
from adabayes.rates import FIXED_POINT_RATIO

LEARN_EVERY, REFRESH, MAX_SIZE = 2, 10, 2048


class MatrixState(NamedTuple):
    """State of one matrix of weights, inputs x outputs."""

    M: jax.Array  # averaged gradient, in the eigenbasis
    V: jax.Array  # averaged square of the gradient, in the eigenbasis
    factors: Pair  # A and C, averaged covariances of the gradient
    bases: Pair  # Q_A and Q_C, their eigenvectors as columns


class Coefficients(NamedTuple):
    """Scalars of one step, which all matrices share."""

    t: jax.Array  # steps so far, including this one
    learn_every: jax.Array  # steps between two gradients that a factor learns from, at present
    refresh_every: jax.Array  # steps between two refreshes of a basis, at present
    factor_decay: jax.Array  # decay of factors, beta_2 ** learn_every
    least_ratio: jax.Array  # lower bound on V / M²


def adabayes_k_rule(
    G: jax.Array, state: MatrixState, fixed_point: FixedPointRule, coefficients: Coefficients, offset: int
) -> tuple[jax.Array, MatrixState]:
    r"""Return the direction :math:`U` of a matrix, in units of the learning rate, and its new state.

    .. math::
        \begin{aligned}
        G' &= Q_A^T G Q_C \\
        U', M, V &\leftarrow \text{AdaBayes-FP}(G', M, V) \\
        U &= Q_A U' Q_C^T \\
        A &\leftarrow \beta_2 A + (1 - \beta_2) G G^T, \qquad C \leftarrow \beta_2 C + (1 - \beta_2) G^T G \\
        Q_A &\leftarrow \text{qr}(A Q_A), \qquad Q_C \leftarrow \text{qr}(C Q_C)
        \end{aligned}

    The factors :math:`A` and :math:`C` learn every ``learn_every`` steps, alternating, with :math:`\beta_2` to that
    power. The bases :math:`Q_A` and :math:`Q_C` are the eigenvectors of the first gradient's covariances, and are
    refreshed every ``refresh_every`` steps. See :class:`adabayes.AdaBayesK`.

    Args:
        G: the gradient.
        state: the state of the matrix.
        fixed_point: the update rule of AdaBayes-FP.
        coefficients: the scalars of this step.
        offset: refresh the bases at the steps ``t`` for which ``t - offset`` is a multiple of ``refresh_every``.
    """
    M, V, factors, bases = state
    t = coefficients.t
    bases = apply_if(t == 1, initialize_bases, bases, G)
    U, M, V = fixed_point.update(rotate(G, bases), M, V)
    U = rotate(U, bases, back=True)
    factors = learn_factors(factors, G, coefficients)
    is_due = (t > 1) & ((t - offset) % coefficients.refresh_every == 0)
    return U, apply_if(is_due, refresh_bases, MatrixState(M, V, factors, bases), coefficients.least_ratio)


def initialize_bases(bases: Pair, G: jax.Array) -> Pair:
    """Return the eigenvectors of the covariances of one gradient."""
    return map_sides(lambda side, Q: eigenvectors(factor(G.astype(Q.dtype), side)), bases)


def learn_factors(factors: Pair, G: jax.Array, coefficients: Coefficients) -> Pair:
    """Average the covariances of the gradient, each at the steps at which its side learns."""

    def learn(A: jax.Array, G: jax.Array, decay: jax.Array, side: int) -> Any:
        cast = cast_to(A.dtype)
        return cast(decay) * A + cast(1 - decay) * factor(G.astype(A.dtype), side)

    def learn_if_due(side: int, A: jax.Array) -> Any:
        # torch's matrices are the transposes of JAX's, so their sides have the opposite numbers.
        is_due = learns(1 - side, coefficients.t, coefficients.learn_every)
        return apply_if(is_due, partial(learn, side=side), A, G, coefficients.factor_decay)

    return map_sides(learn_if_due, factors)


def refresh_bases(state: MatrixState, least_ratio: jax.Array) -> MatrixState:
    """Refresh the bases of a matrix. Rotate M with them, reorder V, and raise V to the least that M permits."""
    M, V, factors, bases = state
    # A factor that has overflowed starts again from zero.
    factors = jax.tree.map(lambda A: jnp.nan_to_num(A, nan=0.0, posinf=0.0, neginf=0.0), factors)
    new_bases = list(bases)
    for side, (A, Q) in enumerate(zip(factors, bases)):
        if Q is not None:
            new_bases[side], order = refresh_basis(A, Q)
            V = reorder(V, order, side)
    left, right = new_bases
    M = rotate(rotate(M, bases, back=True), (left, right))
    V = jnp.maximum(V, least_ratio.astype(V.dtype) * M * M)
    return MatrixState(M, V, factors, (left, right))


class ScaleByAdaBayesKState(NamedTuple):
    """State of :func:`scale_by_adabayes_k`.

    ``mu`` and ``nu`` are averages of the gradient and of its square, in the eigenbasis, in the shape of the parameter.
    ``factors`` and ``bases`` have a tuple for each parameter, with a square matrix for each side that is rotated.
    """

    count: jax.Array  # type: ignore[assignment]  # updates so far
    mu: optax.Updates
    nu: optax.Updates
    factors: Any
    bases: Any
    rates: Rates
    b2: jax.Array


def scale_by_adabayes_k(
    learning_rate: ScalarOrSchedule = 3e-3,
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

    Later transformations of the chain must scale by the learning rate. The arguments are those of :func:`adabayes_k`.
    """
    rates = RateSettings(learning_rate, base_lr, lr_sgd, FIXED_POINT_RATIO)
    b1, b2 = to_python(b1), to_python(b2)
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    max_learn_every = check_integer("learn_every", LEARN_EVERY if learn_every is None else learn_every)
    max_refresh_every = check_integer("refresh", REFRESH if refresh is None else refresh)
    max_side = check_integer("max_size", MAX_SIZE if max_size is None else max_size)
    storage = Storage(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesKState:
        factors = map_weights(partial(create_zeros, max_size=max_side), params)
        # A parameter without a gradient at the first step is not rotated until its first refresh.
        bases = map_weights(partial(create_identities, max_size=max_side), params)
        count, initial = jnp.zeros([], jnp.int32), Rates.from_scalars(*rates.resolve())
        return ScaleByAdaBayesKState(count, *storage.zeros(params), factors, bases, initial, jnp.asarray(b2, float))

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesKState]:
        count, base_lr = optax.safe_increment(state.count), state.rates.lr
        learn_every = interval(count, max_learn_every)
        coefficients = Coefficients(
            t=count,
            learn_every=learn_every,
            refresh_every=interval(count, max_refresh_every),
            factor_decay=jnp.asarray(b2**learn_every, float),
            least_ratio=jnp.asarray(0.0 if centred else least_ratio(b1, b2), float),
        )
        fixed_point = FixedPointRule(b1, b2, rates.ratio(base_lr), count, cautious, centred)
        update_leaf = partial(_update_leaf, fixed_point=fixed_point, coefficients=coefficients, max_size=max_side)
        trees = state.mu, state.nu, state.factors, state.bases
        offsets = refresh_offsets(updates, state.bases, max_refresh_every)
        with jax.default_matmul_precision("highest"):  # bases must stay orthonormal, also on accelerators
            directions, mu, nu, factors, bases = storage.update(update_leaf, count, updates, params, trees, (offsets,))
        new_rates = Rates.from_scalars(*rates.resolve(base_lr))
        return directions, ScaleByAdaBayesKState(count, mu, nu, factors, bases, new_rates, jnp.asarray(b2, float))

    return optax.GradientTransformation(init, update)


def adabayes_k(
    learning_rate: ScalarOrSchedule = 3e-3,
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
    """Create an AdaBayes-K optimizer: the paper's filter for weight matrices, in the eigenbasis of their gradients.

    The documentation of :class:`adabayes.AdaBayesK` explains the method. Here, matrices are not cut into blocks: the
    results are those of torch with a ``block_size`` of ``max_size``. Use it for all parameters of a model, in place of
    ``optax.adamw``: vectors and scalars get AdaBayes-FP.

    The last axis of an array is that of the outputs, as in Flax. A convolution is a matrix, (height * width * in) x
    out. torch has outputs along the first axis, so its matrices are the transposes of these.

    Args:
        learning_rate: a number, a schedule or a traced array. Begin with five times that of ``optax.adamw``.
        lr_sgd: the highest learning rate that a direction can get. It multiplies the averaged gradient. The default,
            None, is 1e5 times the base, whatever that is.
        b1: decay of the averaged gradient.
        b2: decay of its averaged square and covariances.
        weight_decay: decoupled weight decay, as in ``optax.adamw``.
        mask: weights to decay, as in ``optax.adamw``.
        base_lr: ``learning_rate`` without its schedule, as for :func:`adabayes`. It matters only with ``lr_sgd``.
        learn_every: steps between two gradients that a covariance learns from; fewer at the beginning. None: 2. The
            compiled program depends on it, and on ``refresh`` and ``max_size``: with ``inject_hyperparams``, leave them
            out or name them in ``static_args``.
        refresh: steps between two refreshes of a basis; fewer at the beginning. None: 10.
        max_size: largest side that is rotated. None: 2048. A matrix needs 2 (m² + n²) numbers of state in addition to
            the 2 mn of ``optax.adamw``.
        cautious: move only in directions whose averaged gradient has the sign of the newest gradient.
        centred: average the squares of the deviations of gradients from their average, instead of the squares of
            gradients, as in :class:`adabayes.AdaBayesK`.
        mu_dtype: dtype of the averaged gradient, real or complex. None: that of the averaged square.
        state_dtype: dtype of the two averages, as for :func:`adabayes`. Factors and bases are fp32, or float64 for
            float64 parameters.
        seed: seed of the stochastic rounding to bfloat16.

    Returns:
        The optimizer, an ``optax.GradientTransformation``.
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


def _update_leaf(
    g: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    factors: Squares,
    bases: Squares,
    offset: int,
    *,
    fixed_point: FixedPointRule,
    coefficients: Coefficients,
    max_size: int,
) -> tuple[Any, ...]:
    """Update a parameter as a matrix, or element-wise by AdaBayes-FP if neither side is rotated."""
    sides = rotated_sides(g.shape, max_size)
    if not sides:
        return *fixed_point.update(g, mu, nu), factors, bases
    G, M, V = (unshard(x).reshape(matrix_shape(x.shape)) for x in (g, mu, nu))
    state = MatrixState(M, V, to_pair(factors, sides), to_pair(bases, sides))
    U, (M, V, new_factors, new_bases) = adabayes_k_rule(G, state, fixed_point, coefficients, offset)
    arrays = (shard_like(x.reshape(like.shape), like) for x, like in zip((U, M, V), (g, mu, nu)))
    return *arrays, from_pair(new_factors), from_pair(new_bases)
