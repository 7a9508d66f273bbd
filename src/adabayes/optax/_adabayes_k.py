"""AdaBayes-K: the filter for weight matrices, in the eigenbasis of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from adabayes._blocks.schedule import interval, learns
from adabayes.eigenbasis import eigenvectors, factor, least_ratio, limit, reorder, rotate
from adabayes.eigenbasis import refresh as refresh_basis
from adabayes.optax._adabayes_fp import FixedPointRule
from adabayes.optax._chain import chain
from adabayes.optax._conditional import apply_if, apply_times
from adabayes.optax._leaves import map_weights
from adabayes.optax._matrices import (
    Layout,
    LayoutSettings,
    Pair,
    Squares,
    create_averages,
    create_factors,
    create_identities,
    from_pair,
    map_sides,
    to_pair,
)
from adabayes.optax._rates import Rates, RateSettings
from adabayes.optax._settings import Scalar, ScalarOrSchedule, cast_to, check_integer, check_range, to_python
from adabayes.optax._shardings import shard_like, unshard
from adabayes.optax._storage import Storage
from adabayes.rates import FIXED_POINT_RATIO, MATRIX_SCALE

LEARN_EVERY, REFRESH, BLOCK_SIZE, MAX_SIZE = 2, 10, 128, 16384
MAX_COUNT = 2**31 - 1  # of the step count, an int32


class MatrixState(NamedTuple):
    """State of a stack of matrices of weights, inputs x outputs."""

    M: jax.Array  # averaged gradients, in the eigenbasis
    V: jax.Array  # averaged squares of the gradients, in the eigenbasis
    factors: Pair  # A and C, averaged covariances of the gradients
    bases: Pair  # Q_A and Q_C, their eigenvectors as columns


class Coefficients(NamedTuple):
    """Scalars of one step, which all matrices share."""

    t: jax.Array  # steps so far, including this one
    learn_every: jax.Array  # steps between two gradients that a factor learns from, at present
    refresh_every: jax.Array  # steps between two refreshes of a basis, at present
    factor_decay: jax.Array  # decay of factors, beta_2 ** learn_every
    least_ratio: jax.Array  # lower bound on V / M²
    max_refresh_every: int  # steps between two refreshes of a basis, after the beginning


def adabayes_k_rule(
    G: jax.Array, state: MatrixState, fixed_point: FixedPointRule, coefficients: Coefficients, layout: Layout
) -> tuple[jax.Array, MatrixState]:
    r"""Return the directions :math:`U` of a stack of matrices, in units of the learning rate, and its new state.

    .. math::
        \begin{aligned}
        A &\leftarrow \beta_2 A + (1 - \beta_2) G G^T, \qquad C \leftarrow \beta_2 C + (1 - \beta_2) G^T G \\
        G' &= Q_A^T G Q_C \\
        U', M, V &\leftarrow \text{AdaBayes-FP}(G', M, V) \\
        U &= Q_A U' Q_C^T \\
        Q_A &\leftarrow \text{qr}(A Q_A), \qquad Q_C \leftarrow \text{qr}(C Q_C)
        \end{aligned}

    The factors :math:`A` and :math:`C` learn every ``learn_every`` steps, alternating, with :math:`\beta_2` to that
    power. At the first step, the bases :math:`Q_A` and :math:`Q_C` are the eigenvectors of the factors. Later, they are
    refreshed every ``refresh_every`` steps. See :class:`adabayes.AdaBayesK`.

    Args:
        G: the gradients.
        state: the state of the stack.
        fixed_point: the update rule of AdaBayes-FP.
        coefficients: the scalars of this step.
        layout: tells which matrices share a basis, and in which order bases take turns.
    """
    M, V, factors, bases = state
    G = limit(G)
    factors = learn_factors(factors, G, coefficients, layout)
    bases = apply_if(coefficients.t == 1, initialize_bases, bases, factors)
    bases_of_blocks = map_sides(lambda side, Q: _take(Q, layout.owners(side)), bases)
    U, M, V = fixed_point.update(rotate(G, bases_of_blocks), M, V)
    U = rotate(U, bases_of_blocks, back=True)
    return U, refresh_due_bases(MatrixState(M, V, factors, bases), coefficients, layout)


def learn_factors(factors: Pair, G: jax.Array, coefficients: Coefficients, layout: Layout) -> Pair:
    """Average the covariances of the gradients, each at the steps at which its side learns.

    Matrices that share a basis contribute the sum of their covariances.
    """

    def learn(A: jax.Array, G: jax.Array, decay: jax.Array, side: int) -> Any:
        cast, owners = cast_to(A.dtype), layout.owners(side)
        covariances = factor(G.astype(A.dtype), side)
        sums = covariances if owners is None else jnp.zeros_like(A).at[owners].add(covariances)
        return cast(decay) * A + cast(1 - decay) * sums

    def learn_if_due(side: int, A: jax.Array) -> Any:
        # torch's matrices are the transposes of JAX's, so their sides have the opposite numbers.
        is_due = learns(1 - side, coefficients.t, coefficients.learn_every)
        return apply_if(is_due, partial(learn, side=side), A, G, coefficients.factor_decay)

    return map_sides(learn_if_due, factors)


def initialize_bases(bases: Pair, factors: Pair) -> Pair:
    """Return the eigenvectors of the first factors. The bases of the state are only placeholders."""
    return map_sides(lambda side, A: eigenvectors(A), factors)


def refresh_due_bases(state: MatrixState, coefficients: Coefficients, layout: Layout) -> MatrixState:
    """Refresh the bases that are due. Then raise V to the least that M permits."""
    for update in (refresh_bases, raise_squares):
        for side in layout.blocks.sides:
            state = update_due_bases(partial(update, side=side, layout=layout), state, coefficients, layout.turns(side))
    return state


def update_due_bases(
    update: Callable[..., MatrixState], state: MatrixState, coefficients: Coefficients, turns: NDArray[np.intp]
) -> MatrixState:
    """Call ``update(state, indices, coefficients)`` with chunks of the bases that are due, until all are updated.

    The basis ``turns[i]`` is due when ``t - i`` is a multiple of ``refresh_every``. A chunk has the number of bases
    that are due at each step after the beginning, when ``refresh_every`` is largest.
    """
    chunk_size = -(-len(turns) // coefficients.max_refresh_every)

    def update_chunk(state: MatrixState, i: jax.Array, num_due: jax.Array, coefficients: Coefficients) -> MatrixState:
        which = jnp.minimum(i * chunk_size + jnp.arange(chunk_size), num_due - 1)  # repeats the last one to fill up
        t, every = coefficients.t, coefficients.refresh_every
        return update(state, jnp.asarray(turns)[t % every + every * which], coefficients)

    t, every = coefficients.t, coefficients.refresh_every
    num_due = jnp.where(t > 1, (len(turns) - 1 - t % every) // every + 1, 0)
    num_chunks = (num_due + chunk_size - 1) // chunk_size
    max_chunks = -(-len(turns) // chunk_size)
    updated: MatrixState = apply_times(num_chunks, update_chunk, state, num_due, coefficients, max_times=max_chunks)
    return updated


def refresh_bases(
    state: MatrixState, indices: jax.Array, coefficients: Coefficients, side: int, layout: Layout
) -> MatrixState:
    """Refresh some bases of one side. Rotate the M of their matrices with them, and reorder V."""
    M, V, factors, bases = state
    A: Any = factors[side]
    Q: Any = bases[side]
    which = jnp.asarray(layout.blocks_of_bases(side))[indices]  # a row for each basis
    chosen = jnp.nan_to_num(A[indices], nan=0.0, posinf=0.0, neginf=0.0)  # a factor that has overflowed starts again
    old = Q[indices]
    new, order = refresh_basis(chosen, old)
    rotation = (old.mT @ new)[:, None]
    return MatrixState(
        M.at[which].set(rotate(M[which], (None, rotation) if side else (rotation, None))),
        V.at[which].set(reorder(V[which], order[:, None], side)),
        _replace(factors, side, A.at[indices].set(chosen)),
        _replace(bases, side, Q.at[indices].set(new)),
    )


def raise_squares(
    state: MatrixState, indices: jax.Array, coefficients: Coefficients, side: int, layout: Layout
) -> MatrixState:
    """Raise V to the least that M permits, in the matrices of some bases."""
    which = jnp.asarray(layout.blocks_of_bases(side))[indices]
    M, V = state.M[which], state.V[which]
    return state._replace(V=state.V.at[which].set(jnp.maximum(V, coefficients.least_ratio.astype(V.dtype) * M * M)))


class ScaleByAdaBayesKState(NamedTuple):
    """State of :func:`scale_by_adabayes_k`.

    ``mu`` and ``nu`` are averages of the gradient and of its square. Those of matrices are in the eigenbasis: stacks of
    blocks, inputs x outputs. ``factors`` and ``bases`` have a tuple for each parameter, with a stack of square matrices
    for each side that is rotated.
    """

    count: jax.Array  # type: ignore[assignment]  # updates so far
    mu: optax.Updates
    nu: optax.Updates
    factors: Any
    bases: Any
    rates: Rates  # of vectors; those of matrices are ``matrix_scale`` times as large
    b2: jax.Array
    matrix_scale: jax.Array | None = None  # None in states of version 0.2, which cannot be continued


def scale_by_adabayes_k(
    learning_rate: ScalarOrSchedule = 3e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    *,
    base_lr: Scalar | None = None,
    matrix_scale: Scalar = MATRIX_SCALE,
    learn_every: int | None = None,
    refresh: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    max_size: int | None = None,
    batch_dims: Any = None,
    share_bases: bool = False,
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
    b1, b2, matrix_scale = map(to_python, (b1, b2, matrix_scale))
    check_range("b1", b1, 0, 1)
    check_range("b2", b2, 0, 1)
    check_range("matrix_scale", matrix_scale, 0, math.inf)
    max_learn_every, max_refresh_every = (
        min(check_integer(name, default if value is None else value), MAX_COUNT)
        for name, value, default in (("learn_every", learn_every, LEARN_EVERY), ("refresh", refresh, REFRESH))
    )
    layout_settings = LayoutSettings.checked(
        BLOCK_SIZE if block_size is None else block_size,
        MAX_SIZE if max_size is None else max_size,
        share_bases,
        0 if batch_dims is None else batch_dims,
    )
    storage = Storage(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesKState:
        layouts = layout_settings.layouts(params)
        mu, nu = storage.zeros(params, layouts, create=create_averages)
        factors = map_weights(create_factors, params, layouts)
        # A parameter without a gradient at the first step is not rotated until its first refresh.
        bases = map_weights(create_identities, params, layouts)
        scalars = Rates.from_scalars(*rates.resolve()), jnp.asarray(b2, float), jnp.asarray(matrix_scale, float)
        return ScaleByAdaBayesKState(jnp.zeros([], jnp.int32), mu, nu, factors, bases, *scalars)

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesKState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesKState]:
        if state.matrix_scale is None:
            raise ValueError("This state is from version 0.2, which had no blocks. Create a new one with init().")
        count, base_lr = optax.safe_increment(state.count), state.rates.lr
        learn_every = interval(count, max_learn_every)
        coefficients = Coefficients(
            t=count,
            learn_every=learn_every,
            refresh_every=interval(count, max_refresh_every),
            factor_decay=jnp.asarray(b2**learn_every, float),
            least_ratio=jnp.asarray(0.0 if centred else least_ratio(b1, b2), float),
            max_refresh_every=max_refresh_every,
        )
        fixed_point = FixedPointRule(b1, b2, rates.ratio(base_lr), count, cautious, centred)
        rule = partial(_update_leaf, fixed_point=fixed_point, coefficients=coefficients, matrix_scale=matrix_scale)
        trees = state.mu, state.nu, state.factors, state.bases
        layouts = layout_settings.layouts(updates)
        with jax.default_matmul_precision("highest"):  # bases must stay orthonormal, also on accelerators
            directions, mu, nu, factors, bases = storage.update(
                rule, count, updates, params, trees, (layouts,), lambda layout: layout and layout.blocks.shape
            )
        scalars = Rates.from_scalars(*rates.resolve(base_lr)), jnp.asarray(b2, float), jnp.asarray(matrix_scale, float)
        return directions, ScaleByAdaBayesKState(count, mu, nu, factors, bases, *scalars)

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
    matrix_scale: Scalar = MATRIX_SCALE,
    learn_every: int | None = None,
    refresh: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    max_size: int | None = None,
    batch_dims: Any = None,
    share_bases: bool = False,
    cautious: bool = True,
    centred: bool = False,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Create an AdaBayes-K optimizer: the paper's filter for weight matrices, in the eigenbasis of their gradients.

    The optimizer computes the same numbers as :class:`adabayes.AdaBayesK`, whose documentation explains the method. Use
    it for all parameters of a model, in place of ``optax.adamw``: vectors and scalars get AdaBayes-FP.

    The last axis of an array is that of the outputs, as in Flax. A convolution is a matrix, (in * height * width) x
    out. torch has outputs along the first axis, so its matrices are the transposes of these.

    Args:
        learning_rate: that of ``optax.adamw``: a number, a schedule or a traced array.
        lr_sgd: the highest learning rate that a direction can get, before it is multiplied by ``matrix_scale``. It
            multiplies the averaged gradient. The default, None, is 1e5 times the base, whatever that is.
        b1: decay of the averaged gradient.
        b2: decay of its averaged square and covariances.
        weight_decay: decoupled weight decay, as in ``optax.adamw``.
        mask: weights to decay, as in ``optax.adamw``.
        base_lr: ``learning_rate`` without its schedule, as for :func:`adabayes`. It matters only with ``lr_sgd``.
        matrix_scale: how many times as far matrices move as vectors.
        learn_every: steps between two gradients that a covariance learns from; fewer at the beginning. None: 2. The
            compiled program depends on it, and on all settings down to ``share_bases``: with ``inject_hyperparams``,
            leave them out or name them in ``static_args``.
        refresh: steps between two refreshes of a basis; fewer at the beginning. None: 10.
        block_size: largest side of a block, or a pair: its most inputs and its most outputs. None: 128. A full block of
            n x n weights needs 4 n² numbers of state in addition to the 2 n² of ``optax.adamw``.
        max_size: largest side that is rotated. A larger one, such as a vocabulary, is neither cut nor rotated. None:
            16384.
        batch_dims: number of leading axes that count matrices, for stacks such as experts, or layers that ``scan`` has
            stacked. An integer is for all parameters. A tree of integers, or of a prefix of the parameters' tree, gives
            each parameter its own, and so does a function that returns such a tree, given the parameters or their
            gradients. None: 0.
        share_bases: whether the blocks of a matrix share bases: those in a row the basis of their inputs, and those in
            a column that of their outputs. This saves memory in matrices of many blocks.
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
        matrix_scale=matrix_scale,
        learn_every=learn_every,
        refresh=refresh,
        block_size=block_size,
        max_size=max_size,
        batch_dims=batch_dims,
        share_bases=share_bases,
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
    layout: Layout | None,
    *,
    fixed_point: FixedPointRule,
    coefficients: Coefficients,
    matrix_scale: Scalar,
) -> tuple[Any, ...]:
    """Update the blocks of a parameter, or the parameter element-wise by AdaBayes-FP if no side is rotated."""
    if layout is None:
        return *fixed_point.update(g, mu, nu), factors, bases
    G = layout.to_blocks(unshard(g))
    sides = layout.blocks.sides
    old = MatrixState(unshard(mu), unshard(nu), *(to_pair(tuple(map(unshard, x)), sides) for x in (factors, bases)))
    U, new = adabayes_k_rule(G, old, fixed_point, coefficients, layout)
    direction = shard_like(layout.from_blocks(U, g.shape) * cast_to(g.dtype)(matrix_scale), g)
    averages = shard_like(new.M, mu), shard_like(new.V, nu)
    squares = (tuple(map(shard_like, from_pair(x), y)) for x, y in ((new.factors, factors), (new.bases, bases)))
    return direction, *averages, *squares


def _take(bases: jax.Array, owners: NDArray[np.intp] | None) -> jax.Array:
    return bases if owners is None else bases[owners]


def _replace(pair: Pair, side: int, square: jax.Array) -> Pair:
    return (pair[0], square) if side else (square, pair[1])
