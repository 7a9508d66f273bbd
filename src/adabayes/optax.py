"""AdaBayes for JAX, as optax transformations; torch is not needed.

>>> import jax, jax.numpy as jnp, optax
>>> from adabayes.optax import adabayes
>>> optimizer = adabayes(1e-3, lr_sgd=0.1, batch_size=128)
>>> params = {"w": jnp.ones(3)}
>>> state = optimizer.init(params)
>>> grads = jax.grad(lambda p: (p["w"] ** 2).sum())(params)
>>> updates, state = optimizer.update(grads, state, params)
>>> params = optax.apply_updates(params, updates)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from adabayes import filtering
from adabayes.random_bits import carry_of, key_of
from adabayes.rates import base_lr_of, lr_sgd_of, warn_if_papers, warn_if_swapped
from adabayes._regimes import GOLDEN, QUANTILES, Regime, Regimes

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
except ImportError as error:
    raise ImportError("adabayes.optax needs jax and optax: pip install '.[jax]' in the folder of AdaBayes") from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ScaleByAdaBayesFPState",
    "ScaleByAdaBayesState",
    "adabayes",
    "adabayes_fp",
    "regimes",
    "scale_by_adabayes",
    "scale_by_adabayes_fp",
]

Scalar = Any  # float | jax.Array
Rate = Any  # float | jax.Array | optax.Schedule
_TINY = float(np.finfo(np.float32).tiny)


class Rates(NamedTuple):
    """The two learning rates between which the gain is, as the filter has them now."""

    lr: jax.Array
    lr_sgd: jax.Array


class ScaleByAdaBayesState(NamedTuple):
    """A gain of 0 marks a weight that has had no gradient yet: its filter has not begun."""

    count: jax.Array  # type: ignore[assignment]  # of updates
    steps: jax.Array  # of those that counted: under dynamics="paper", not those at a learning rate of 0
    mu: optax.Updates
    gain: optax.Updates
    rates: Rates


class ScaleByAdaBayesFPState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates
    nu: optax.Updates
    rates: Rates
    b2: jax.Array


def adabayes(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    batch_size: Scalar = 128,
    b1: Scalar = 0.9,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    *,
    base_lr: Scalar | None = None,
    dynamics: Literal["exact", "paper"] = "exact",
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes (Aitchison, 2020), Algorithm 1: moves by itself between SGD and AdamW, weight by weight.

    The same numbers as :class:`adabayes.AdaBayes`, which has more to say about the method.

    Args:
        learning_rate: Adam's, and *the* learning rate: a number, a schedule or a traced array. What scales it scales
            ``lr_sgd`` too.
        lr_sgd: learning rate for weights with small gradients, while ``learning_rate`` is at its base, in units of the
            averaged gradient: coming from ``optax.sgd(lr, momentum)``, which sums instead, ``lr / (1 - momentum)``.
            None: 100 times the base, the paper's ratio.
        batch_size: of a whole step. It sets how fast the filter adapts, not where it settles: a rough figure will do.
        b1: decay of the averaged gradient (momentum).
        weight_decay: decoupled, as in ``optax.adamw``: each step multiplies weights by
            ``1 - learning_rate * weight_decay``.
        mask: of weight decay, as in ``optax.adamw``.
        base_lr: what ``learning_rate`` is without its schedule: its peak, as a rule. The filter runs at this rate and
            ``lr_sgd``. None: ``learning_rate`` itself where that is a number; where it is a schedule or traced (as by
            ``inject_hyperparams``), ``lr_sgd / 100``, the paper's ratio, or 1e-3. So say this where you mean another
            ratio. With the default ``lr_sgd``, it has no influence on where the gain settles.
        dynamics: ``"exact"`` or ``"paper"``, as for :class:`adabayes.AdaBayes`.
        mu_dtype: of the averaged gradient. None: that of the rest of the state.
        state_dtype: of the state. None: the parameters', and fp32 for those of less precision. bfloat16 is rounded
            stochastically, for the filter's changes are smaller than half its precision; with the same random bits as
            in torch.
        seed: of that rounding.
    """
    scaled = scale_by_adabayes(
        learning_rate,
        lr_sgd,
        batch_size,
        b1,
        base_lr=base_lr,
        dynamics=dynamics,
        mu_dtype=mu_dtype,
        state_dtype=state_dtype,
        seed=seed,
    )
    return _chain(scaled, learning_rate, base_lr, weight_decay, mask)


def adabayes_fp(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    *,
    base_lr: Scalar | None = None,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """AdaBayes-FP, Algorithm 2: the filter at its fixed point, AdamW whose epsilon is ``learning_rate / lr_sgd``.

    The same numbers as :class:`adabayes.AdaBayesFP`. Arguments are those of :func:`adabayes`; ``b2`` is the decay of
    the averaged square.
    """
    scaled = scale_by_adabayes_fp(
        learning_rate, lr_sgd, b1, b2, base_lr=base_lr, mu_dtype=mu_dtype, state_dtype=state_dtype, seed=seed
    )
    return _chain(scaled, learning_rate, base_lr, weight_decay, mask)


def scale_by_adabayes(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    batch_size: Scalar = 128,
    b1: Scalar = 0.9,
    *,
    base_lr: Scalar | None = None,
    dynamics: Literal["exact", "paper"] = "exact",
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the filter's gain, in units of the learning rate, which is to follow in the chain.

    Arguments are those of :func:`adabayes`.
    """
    base, most = _rates(learning_rate, base_lr, lr_sgd)
    learning_rate, batch_size, b1 = map(_number, (learning_rate, batch_size, b1))
    _check("batch_size", batch_size, 1, math.inf)
    _check("b1", b1, 0, 1)
    if dynamics not in ("exact", "paper"):
        raise ValueError(f"Invalid dynamics: {dynamics!r}. It must be 'exact' or 'paper'.")
    store = _Store(mu_dtype, state_dtype, seed)
    exact = dynamics == "exact"
    k = filtering.drift(base, most, batch_size)

    def init(params: optax.Params) -> ScaleByAdaBayesState:
        counts = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)  # two buffers, so that both can be donated
        return ScaleByAdaBayesState(*counts, *store.zeros(params), _as_arrays(base, most))

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesState]:
        schedule: Scalar = 1.0
        if not exact:
            schedule = (learning_rate(state.count) if callable(learning_rate) else learning_rate) / base
        live = schedule != 0  # where the paper divides by zero, nothing is to happen
        steps = jnp.where(live, optax.safe_increment(state.steps), state.steps)
        # In units of the learning rate, which is to follow; at a rate of 0, whatever is finite.
        scale = 1 / (_correction(b1, jnp.maximum(steps, 1)) * base * jnp.where(live, schedule, 1.0))

        def leaf(g: jax.Array, mu: jax.Array, gain: jax.Array) -> tuple[jax.Array, ...]:
            number = _caster(gain.dtype)
            mean = mu + (g - mu) * number(1 - b1)
            sleeping = gain == 0
            if exact:
                begun = jnp.where(sleeping, filtering.fixed_point(g * g, number(base), number(most)), gain)
                prior = filtering.predict(begun, filtering.ornstein_uhlenbeck(number(k), number(most)))
            else:
                flow = filtering.euler(number(k * schedule), number(most * schedule))
                prior = filtering.predict(jnp.where(sleeping, number(most * schedule), gain), flow)
            information = filtering.curvature(g, number(batch_size))
            posterior = filtering.update(prior, information)
            posterior = jnp.maximum(posterior, _TINY)  # awake, whatever the gradient
            if exact:
                posterior = jnp.where(gain + information == 0, 0, posterior)  # still no gradient
            else:
                mean, posterior = (jnp.where(live, new, old) for new, old in ((mean, mu), (posterior, gain)))
            return posterior * mean * number(scale), mean, posterior

        directions, mu, gain = store.apply(leaf, steps, updates, params, state.mu, state.gain)
        now = jax.tree.map(
            lambda new, old: jnp.where(live, new, old), _as_arrays(base * schedule, most * schedule), state.rates
        )
        return directions, ScaleByAdaBayesState(optax.safe_increment(state.count), steps, mu, gain, now)

    return optax.GradientTransformation(init, update)


def scale_by_adabayes_fp(
    learning_rate: Rate = 1e-3,
    lr_sgd: Scalar | None = None,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    *,
    base_lr: Scalar | None = None,
    mu_dtype: Any = None,
    state_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Scale gradients by the fixed point of the gain, in units of the learning rate, which is to follow in the chain.

    Arguments are those of :func:`adabayes_fp`.
    """
    base, most = _rates(learning_rate, base_lr, lr_sgd)
    b1, b2 = _number(b1), _number(b2)
    _check("b1", b1, 0, 1)
    _check("b2", b2, 0, 1)
    store = _Store(mu_dtype, state_dtype, seed)

    def init(params: optax.Params) -> ScaleByAdaBayesFPState:
        count = jnp.zeros([], jnp.int32)
        return ScaleByAdaBayesFPState(count, *store.zeros(params), _as_arrays(base, most), jnp.asarray(b2, jnp.float32))

    def update(
        updates: optax.Updates, state: ScaleByAdaBayesFPState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByAdaBayesFPState]:
        count = optax.safe_increment(state.count)
        inverse = 1 / _correction(b1, count), 1 / _correction(b2, count)

        def leaf(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
            number = _caster(nu.dtype)
            mean = mu + (g - mu) * number(1 - b1)
            mean_square = number(b2) * nu + number(1 - b2) * (g * g)
            # In units of the learning rate, at which the two rates are 1 and their ratio.
            gain = filtering.fixed_point(mean_square * number(inverse[1]), 1.0, number(most / base))
            return gain * mean * number(inverse[0]), mean, mean_square

        directions, mu, nu = store.apply(leaf, count, updates, params, state.mu, state.nu)
        return directions, ScaleByAdaBayesFPState(count, mu, nu, _as_arrays(base, most), jnp.asarray(b2, jnp.float32))

    return optax.GradientTransformation(init, update)


def regimes(state: Any, learning_rate: float | None = None) -> Regimes:
    """Tell which weights move like SGD and which like Adam, from the state of an optimizer or of a chain that has one.

    Args:
        state: what ``init`` and ``update`` return, of :func:`adabayes`, :func:`adabayes_fp` or anything around them.
        learning_rate: what it is now, everywhere. None: as the filter has it, which is the base or, under
            ``dynamics="paper"``, that of the last step.
    """
    kinds = (ScaleByAdaBayesState, ScaleByAdaBayesFPState)
    rows: list[Regime] = []
    rates: list[Any] = []  # of all weights
    for one in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(one, kinds):
            continue
        lr, lr_sgd = map(float, one.rates)
        schedule = 1.0 if learning_rate is None else learning_rate / lr
        for name, gain in _gains(one, lr, lr_sgd):
            sgd_like, adam_like = (float(np.mean(s)) for s in (gain * GOLDEN >= lr_sgd, gain * GOLDEN < lr_sgd))
            rates.append(gain * schedule)
            quantiles = tuple(np.quantile(rates[-1], QUANTILES).tolist())
            rows.append(Regime(name, gain.size, sgd_like, adam_like, quantiles, lr_sgd * schedule))
    if not rows:
        raise ValueError("this is not the state of an adabayes or adabayes_fp, or it holds no weights")
    return Regimes.of(rows, tuple(np.quantile(np.concatenate(rates), QUANTILES).tolist()))


# Pieces


def _gains(
    state: ScaleByAdaBayesState | ScaleByAdaBayesFPState, lr: float, lr_sgd: float
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """The name of each array of weights, and what these get at the base learning rates."""
    second = state.gain if isinstance(state, ScaleByAdaBayesState) else state.nu
    for path, leaf in jax.tree_util.tree_leaves_with_path(second):
        values = np.asarray(leaf, np.float64).ravel()
        if isinstance(state, ScaleByAdaBayesState):
            values[values == 0] = lr_sgd
        else:
            correction = 1 - float(state.b2) ** max(int(state.count), 1)
            values = filtering.fixed_point(values / correction, lr, lr_sgd)
        if values.size:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            yield name.removesuffix(".value"), values  # of Flax's nnx.Param


def _chain(
    scaled: optax.GradientTransformation,
    learning_rate: Rate,
    base_lr: Scalar | None,
    weight_decay: Scalar,
    mask: Any,
) -> optax.GradientTransformation:
    learning_rate, base_lr, weight_decay = map(_number, (learning_rate, base_lr, weight_decay))
    _check("weight_decay", weight_decay, 0, math.inf)
    base = learning_rate if base_lr is None else base_lr
    if isinstance(base, int | float) and isinstance(weight_decay, int | float):
        warn_if_papers(base, weight_decay)
    links = [scaled]
    if not (isinstance(weight_decay, int | float) and weight_decay == 0):
        decay = optax.stateless(lambda updates, params: _decayed(updates, params, weight_decay))
        links.append(decay if mask is None else optax.masked(decay, mask))
    return optax.chain(*links, _of_weights(optax.scale_by_learning_rate(learning_rate)))


def _of_weights(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation that leaves what is no weight as it is."""

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, Any]:
        changed, state = inner.update(updates, state, params)

        def leaf(before: Any, after: Any) -> Any:
            return after if before is None or _is_weight(before) else before

        return jax.tree.map(leaf, updates, changed, is_leaf=lambda x: x is None), state

    return optax.GradientTransformation(inner.init, update)


def _decayed(updates: optax.Updates, params: optax.Params | None, weight_decay: Scalar) -> optax.Updates:
    if params is None:
        raise ValueError("weight decay needs the parameters: update(gradients, state, params)")

    def leaf(u: Any, p: Any) -> Any:
        return u if u is None or not _is_weight(u) else u + weight_decay * p

    return jax.tree.map(leaf, updates, params, is_leaf=lambda x: x is None)


def _rates(learning_rate: Rate, base_lr: Scalar | None, lr_sgd: Scalar | None) -> tuple[Scalar, Scalar]:
    """The base of the learning rate, and ``lr_sgd``."""
    learning_rate, base_lr, lr_sgd = map(_number, (learning_rate, base_lr, lr_sgd))
    _check("learning_rate", learning_rate, 0, math.inf)
    _check("base_lr", base_lr, 0, math.inf, above=True)
    _check("lr_sgd", lr_sgd, 0, math.inf, above=True)
    if base_lr is None:
        known = isinstance(learning_rate, int | float) and learning_rate > 0
        base_lr = base_lr_of(float(learning_rate) if known else None, lr_sgd)
    if lr_sgd is None:
        lr_sgd = lr_sgd_of(base_lr)
    if isinstance(base_lr, int | float) and isinstance(lr_sgd, int | float):
        warn_if_swapped(base_lr, lr_sgd)
    return base_lr, lr_sgd


def _number(value: Any) -> Any:
    """NumPy's numbers as Python's; what is traced, and all else, as it is."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 else value


def _check(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """Of what is a number; what is traced cannot be looked at."""
    if not isinstance(value, int | float):
        return
    if not (low < value if above else low <= value) or not value < high:
        span = f"{'above' if above else 'at least'} {low:g}" + ("" if high == math.inf else f" and below {high:g}")
        raise ValueError(f"Invalid {name}: {value}. It must be {span}.")


def _is_weight(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            "parameters are complex: give their parts a learning rate each, with "
            "optax.contrib.split_real_and_imaginary(...) around the optimizer"
        )
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _correction(decay: Scalar, count: jax.Array) -> jax.Array:
    """``1 - decay**count``, without cancellation."""
    if isinstance(decay, int | float):
        logarithm: Scalar = math.log(decay) if decay else -math.inf
    else:
        logarithm = jnp.log(decay)
    return -jnp.expm1(count.astype(float) * logarithm)


def _caster(dtype: Any) -> Callable[[Scalar], Scalar]:
    """What keeps numbers from widening arrays: Python's do not, traced ones would."""
    return lambda value: value if isinstance(value, int | float) else jnp.asarray(value, dtype)


def _as_arrays(lr: Scalar, lr_sgd: Scalar) -> Rates:
    return Rates(jnp.asarray(lr, jnp.float32), jnp.asarray(lr_sgd, jnp.float32))


class _Store:
    """How state is kept: for which leaves, and in which precision."""

    def __init__(self, mu_dtype: Any, state_dtype: Any, seed: Any) -> None:
        self._dtype = _float_dtype("state_dtype", state_dtype, (jnp.bfloat16, jnp.float32, jnp.float64))
        self._mu_dtype = _float_dtype("mu_dtype", mu_dtype) or self._dtype
        self._seed = seed if isinstance(seed, int) else jnp.asarray(seed, jnp.uint32)

    def zeros(self, params: optax.Params) -> tuple[optax.Updates, optax.Updates]:
        """The two arrays of each weight's state; a masked node for what is no weight, such as integers."""

        def of(dtype: Any) -> optax.Updates:
            def leaf(p: Any) -> Any:
                if not _is_weight(p):
                    return optax.MaskedNode()
                return jnp.zeros_like(p, _wide(jnp.result_type(p)) if dtype is None else dtype)

            return jax.tree.map(leaf, params)

        return of(self._mu_dtype), of(self._dtype)

    def apply(
        self,
        leaf: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]],
        step: jax.Array,
        updates: optax.Updates,
        params: optax.Params | None,
        mu: optax.Updates,
        second: optax.Updates,
    ) -> list[optax.Updates]:
        """Directions and new state at a step, of each leaf that has a gradient."""
        tree: Any
        gradients, tree = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
        weights = gradients if params is None else tree.flatten_up_to(params)
        columns: tuple[list[Any], ...] = ([], [], [])
        rows = zip(gradients, tree.flatten_up_to(mu), tree.flatten_up_to(second), weights)
        for i, (g, m, s, p) in enumerate(rows):
            row = g, m, s
            if isinstance(m, optax.MaskedNode):
                row = _zero(g), m, s
            elif g is not None:
                wide = _wide(s.dtype)
                direction, mean, new = leaf(*(jnp.asarray(x, wide) for x in row))
                row = (
                    direction.astype(jnp.promote_types(jnp.result_type(g), jnp.result_type(p))),
                    self._rounded(mean, m.dtype, step, i, "exp_avg"),
                    self._rounded(new, s.dtype, step, i, "second"),
                )
            for column, entry in zip(columns, row):
                column.append(entry)
        return [tree.unflatten(column) for column in columns]

    def _rounded(self, values: jax.Array, dtype: Any, step: jax.Array, ordinal: int, stream: str) -> jax.Array:
        if dtype != jnp.bfloat16:
            return values.astype(dtype)
        # bfloat16 is the upper half of float32; adding random bits to the lower rounds up as often as it should.
        values = values.astype(jnp.float32)
        strides = (math.prod(values.shape[axis + 1 :]) for axis in range(values.ndim))
        places = (jax.lax.broadcasted_iota(jnp.uint32, values.shape, axis) * s for axis, s in enumerate(strides))
        carry = carry_of(sum(places, jnp.uint32(0)), key_of(self._seed, ordinal, step.astype(jnp.uint32)), stream)
        bits = (jax.lax.bitcast_convert_type(values, jnp.uint32) + carry) & jnp.uint32(0xFFFF0000)
        return jnp.where(jnp.isnan(values), values, jax.lax.bitcast_convert_type(bits, jnp.float32)).astype(dtype)


def _float_dtype(name: str, dtype: Any, permitted: tuple[Any, ...] = ()) -> Any:
    """A dtype however it is given, also as what ``inject_hyperparams`` makes of it."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(getattr(dtype, "dtype", dtype))
        if jnp.issubdtype(found, jnp.floating) and (not permitted or found in map(jnp.dtype, permitted)):
            return found
    except TypeError:
        pass
    names = ", ".join(jnp.dtype(p).name for p in permitted) or "a floating-point dtype"
    raise ValueError(f"Invalid {name}: {dtype!r}. It must be None (the parameters', fp32 at least) or {names}.")


def _wide(dtype: Any) -> Any:
    """The precision in which to calculate."""
    return jnp.promote_types(dtype, jnp.float32)


def _zero(gradient: Any) -> Any:
    """The update of what is no weight. Derivatives by integers have a type that nothing can be added to."""
    if gradient is None:
        return None
    dtype = jnp.result_type(gradient)
    return jnp.zeros(jnp.shape(gradient), jnp.int32 if dtype == jax.dtypes.float0 else dtype)
