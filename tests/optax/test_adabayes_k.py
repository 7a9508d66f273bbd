"""AdaBayes-K for JAX: torch's numbers, what a refresh costs, Flax, and where arrays are split over devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from numpy.typing import NDArray

import adabayes.optax as ours
from adabayes import AdaBayesK, diagnostics, filtering
from adabayes._blocks.schedule import spread
from adabayes.optim._matrix.layout import layouts_of
from tests.support.precision import enable_x64

Array = NDArray[Any]
MAX_SIZE = 8
# In torch's order of axes. The first gradient of each has full rank on every side that is rotated, so that the first
# basis is known but for signs. A side of 12 or 16 is not rotated.
SHAPES: list[tuple[int, ...]] = [(6, 6), (4,), (12, 4), (4, 1, 2, 2), (4, 4, 2, 2), (), (1, 12), (0, 3)]


def to_jax(x: Any) -> Array:
    """Put an array into JAX's order of axes, outputs last."""
    array: Array = np.asarray(x)
    return array.T if array.ndim < 3 else array.transpose(2, 3, 1, 0)


def numbers(
    shapes: list[tuple[int, ...]], steps: int, dtype: Any = np.float64
) -> tuple[list[Array], list[list[Array]]]:
    random = np.random.default_rng(0)
    start = [np.asarray(random.standard_normal(shape)) for shape in shapes]
    sizes = [10 ** np.asarray(random.uniform(-2, 1, shape)) for shape in shapes]
    grads = [[np.asarray(size * (0.3 + random.standard_normal(size.shape))) for size in sizes] for _ in range(steps)]
    if dtype == np.complex128:
        pairs = zip(grads, grads[::-1])
        return [np.asarray(p * (1 + 2j)) for p in start], [[np.asarray(g + 1j * h) for g, h in zip(*p)] for p in pairs]
    return start, grads


def by_torch(start: list[Array], grads: list[list[Array]], rates: Array, **options: Any) -> list[Array]:
    weights = [torch.from_numpy(p.copy()) for p in start]
    optimizer = AdaBayesK(weights, lr=float(rates[0]), max_size=MAX_SIZE, **options)
    for rate, row in zip(rates, grads):
        optimizer.param_groups[0]["lr"] = float(rate)
        for w, g in zip(weights, row):
            w.grad = torch.from_numpy(g)
        optimizer.step()
    return [w.numpy() for w in weights]


def by_optax(start: list[Array], grads: list[list[Array]], rates: Array, **options: Any) -> list[Array]:
    schedule = jnp.asarray(rates)
    optimizer = ours.adabayes_k(lambda count: schedule[count], base_lr=float(rates[0]), max_size=MAX_SIZE, **options)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = [jnp.asarray(p) for p in start]
    stacked = [jnp.stack([jnp.asarray(g) for g in column]) for column in zip(*grads)]
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), stacked)
    return [np.asarray(p) for p in params]


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.05},
        {"lr_sgd": 1.0, "cautious": False, "learn_every": 3, "refresh": 3},
        pytest.param({"centred": True, "refresh": 1}, marks=pytest.mark.long),
    ],
    ids=["cautious", "plain", "centred"],
)
def test_weights_are_those_of_torch(options: dict[str, Any]) -> None:
    """Over 500 steps with 50 to 500 refreshes, to 1e-9; 1e-11 was seen. Bases have signs, so weights are compared."""
    start, grads = numbers(SHAPES, 500)
    rates = 1e-2 * np.linspace(1.0, 0.1, 500)
    expected = by_torch(start, grads, rates, **options)
    with enable_x64(True):
        found = by_optax([to_jax(p) for p in start], [[to_jax(g) for g in row] for row in grads], rates, **options)
    for a, b, p in zip(found, expected, start):
        np.testing.assert_allclose(a, to_jax(b), rtol=0, atol=1e-9)
        assert not p.size or np.abs(b - p).max() > 1e-3


def test_complex_weights_are_those_of_torch() -> None:
    """Parts are further inputs of a layer; inputs come first in JAX and last in torch."""
    start, grads = numbers([(4, 2), (2,), ()], 100, np.complex128)
    rates = np.full(100, 1e-2)
    expected = by_torch(start, grads, rates)
    with enable_x64(True):
        found = by_optax([p.T for p in start], [[g.T for g in row] for row in grads], rates)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b.T, rtol=0, atol=1e-9)


def test_where_nothing_is_rotated_it_is_adabayes_fp() -> None:
    p = jnp.ones((3, 4))
    found = []
    for optimizer in (ours.adabayes_k(1e-2, cautious=False, max_size=1), ours.adabayes_fp(1e-2, b2=0.99)):
        state, update = optimizer.init(p), jax.jit(optimizer.update)
        for t in range(3):
            updates, state = update(jax.random.normal(jax.random.key(t), (3, 4)), state, p)
        found.append(updates)
    np.testing.assert_array_equal(*found)


def test_the_first_step_is_the_polar_factor_of_the_gradient() -> None:
    """G (G^T G)^(-1/2): every direction gets the same length, up to lr / lr_sgd, which is 1e-5."""
    g = np.random.default_rng(0).standard_normal((5, 3))
    left, _, right = np.linalg.svd(g, full_matrices=False)
    with enable_x64(True):
        optimizer = ours.adabayes_k(1e-2, cautious=False)
        updates, _ = jax.jit(optimizer.update)(jnp.asarray(g), optimizer.init(jnp.asarray(g)))
    np.testing.assert_allclose(updates, -1e-2 * left @ right, atol=1e-6)


def loops_of(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the names of all operations of every step: those outside of the branches of a condition."""
    found: list[str] = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            found.append(equation.primitive.name)
            if equation.primitive.name != "cond":
                for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def test_bases_are_found_and_refreshed_within_conditions_also_under_vmap() -> None:
    optimizer = ours.adabayes_k(1e-2)
    p = jnp.ones((4, 4))
    many = jnp.stack([p] * 3)
    states = jax.vmap(optimizer.init)(many)
    for found in (
        loops_of(optimizer.update, p, optimizer.init(p), p),
        loops_of(jax.vmap(optimizer.update), many, states, many),
        loops_of(jax.vmap(jax.vmap(optimizer.update)), *jax.tree.map(lambda x: x[None], (many, states, many))),
    ):
        assert found.count("cond") == 4  # two factors, the first bases, a refresh
        assert not {"qr", "geqrf", "householder_product", "eigh", "sort"} & set(found)
        assert found.count("dot_general") == 4  # two sides there and back


def test_models_of_a_vmap_may_be_at_different_steps() -> None:
    optimizer = ours.adabayes_k(1e-2, refresh=3)
    grads = jax.random.normal(jax.random.key(0), (8, 4, 4))
    p, update = jnp.ones((4, 4)), jax.jit(optimizer.update)

    def after(steps: int) -> Any:
        state = optimizer.init(p)
        for g in grads[:steps]:
            _, state = update(g, state, p)
        return state

    behind, ahead = after(2), after(5)
    states = jax.tree.map(lambda a, b: jnp.stack([a, b]), behind, ahead)
    together = behind, ahead
    all_update = jax.jit(jax.vmap(optimizer.update, in_axes=(None, 0, None)))
    for _ in range(3):
        updates, states = all_update(grads[7], states, p)
        alone = [update(grads[7], state, p) for state in together]
        together = tuple(state for _, state in alone)
        np.testing.assert_allclose(updates, jnp.stack([u for u, _ in alone]), rtol=1e-3, atol=1e-5)


def test_a_matrix_without_a_gradient_at_first_learns_later() -> None:
    optimizer = ours.adabayes_k(1e-2, refresh=2)
    p = {"a": jnp.ones((3, 3)), "b": jnp.ones((3, 3))}
    state, update = optimizer.init(p), jax.jit(optimizer.update)
    for t in range(9):
        g = jax.random.normal(jax.random.key(t), (3, 3))
        updates, state = update({"a": g, "b": g if t > 2 else None}, state, p)
    np.testing.assert_allclose(state[0].bases["b"][0] @ state[0].bases["b"][0].T, jnp.eye(3), atol=1e-5)
    assert jnp.abs(updates["b"]).sum() > 1e-3


def test_gradients_that_overflow_are_forgotten_at_the_next_refresh() -> None:
    optimizer = ours.adabayes_k(1e-3, refresh=2)
    p = jnp.ones((3, 3))
    state, update = optimizer.init(p), jax.jit(optimizer.update)
    for t in range(6):
        g = jax.random.normal(jax.random.key(t), (3, 3)) * (1e25 if t == 2 else 1.0)
        updates, state = update(g, state, p)
        assert jnp.isfinite(updates).all()
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((state[0].factors, state[0].bases)))


def test_refreshes_are_spread_over_steps_as_in_torch() -> None:
    shapes = [(8, 8), (3, 3), (5, 5), (4, 4), (4,), (5, 5)]
    weights = [torch.zeros(shape) for shape in shapes]
    optimizer = AdaBayesK(weights, refresh=3)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    costs = [sum(n**3 for n in shape) if len(shape) == 2 else 0 for shape in shapes]
    slots = spread(costs, [1] * len(costs), 3)
    assert slots == [layouts_of(optimizer.param_groups)[w].offset for w in weights]
    changed: dict[int, set[int]] = {}
    p = [jnp.zeros(shape) for shape in shapes]
    mine = ours.adabayes_k(1e-2, refresh=3)
    state, update = mine.init(p), jax.jit(mine.update)
    for t in range(1, 39):
        before = state[0].bases
        _, state = update([jax.random.normal(jax.random.key(t), shape) for shape in shapes], state, p)
        for i, (old, new) in enumerate(zip(before, state[0].bases)):
            if t >= 32 and old and not (old[0] == new[0]).all():
                changed.setdefault(i, set()).add(t % 3)
    assert changed == {i: {slot} for i, slot in enumerate(slots) if costs[i]}


def test_regimes_are_those_of_torch() -> None:
    start, grads = numbers([(6, 6), (4,)], 20)
    weights = [torch.from_numpy(p.copy()) for p in start]
    optimizer = AdaBayesK(weights, lr=1e-2, lr_sgd=0.1)
    with enable_x64(True):
        mine = ours.adabayes_k(1e-2, lr_sgd=0.1)
        params = [jnp.asarray(p) for p in start]
        state, update = mine.init(params), jax.jit(mine.update)
        for row in grads:
            for w, g in zip(weights, row):
                w.grad = torch.from_numpy(g)
            optimizer.step()
            _, state = update([jnp.asarray(g) for g in row], state, params)
        expected, found = diagnostics.regimes(optimizer), ours.regimes(state)
    assert found.bounded
    assert 0 < found.total.sgd_like < 1
    assert found.total.sgd_like == pytest.approx(expected.total.sgd_like)
    assert found.total.weights == 40
    gains = filtering.fixed_point(np.asarray(state[0].nu[1]) / (1 - 0.99**20), 1e-2, 0.1)
    assert found.tensors[1].lr_quantiles == pytest.approx(tuple(np.quantile(gains, (0.05, 0.5, 0.95))), rel=1e-5)


def test_numbers_that_decide_what_is_compiled() -> None:
    make: Any = ours.adabayes_k
    for name in ("learn_every", "refresh", "max_size"):
        with pytest.raises(ValueError, match=rf"Invalid {name}: 2\.5\. It must be an integer, at least 1"):
            make(**{name: 2.5})
        with pytest.raises(ValueError, match=rf"Invalid {name}: 0"):
            make(**{name: 0})
        with pytest.raises(TypeError, match=rf'{name} is traced, .*static_args=\("{name}",\)'):
            optax.inject_hyperparams(make)(1e-3, **{name: 4}).init(jnp.ones((2, 2)))
        optax.inject_hyperparams(make, static_args=(name,))(1e-3, **{name: 4}).init(jnp.ones((2, 2)))


# Flax


def assert_learns(params: Any, apply: Callable[[Any, jax.Array], jax.Array]) -> None:
    """Assert that a step is compiled once, and that the loss on random images falls."""
    x = jax.random.normal(jax.random.key(1), (16, 6, 6, 2))
    y = jnp.arange(16) % 4
    optimizer = ours.adabayes_k(optax.warmup_cosine_decay_schedule(0.0, 5e-2, 5, 40), weight_decay=0.01)
    state = optimizer.init(params)

    def loss(params: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    first = loss(params)
    for _ in range(40):
        params, state = step(params, state)
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    assert loss(params) < 0.8 * first
    convolution = jax.tree.leaves(state[0].bases, is_leaf=lambda x: isinstance(x, tuple))[1]
    assert [len(basis) for basis in convolution] == [18, 8]  # 3 x 3 x 2 inputs, 8 outputs


@pytest.mark.long  # as the next one
def test_a_linen_model_trains() -> None:
    from flax import linen

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.relu(linen.Conv(8, (3, 3), name="a")(x)).mean((1, 2))
            return linen.Dense(4, name="b")(x)

    model = Network()
    assert_learns(model.init(jax.random.key(0), jnp.ones((1, 6, 6, 2))), cast(Any, model.apply))


def test_an_nnx_model_trains() -> None:
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a = nnx.Conv(2, 8, (3, 3), rngs=rngs)
            self.b = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(nnx.relu(self.a(x)).mean((1, 2)))

    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    assert_learns(params, lambda params, x: nnx.merge(graph, params)(x))


# Several devices, in a process of their own


def test_split_over_devices_the_result_is_the_same() -> None:
    """In float64, for partial sums are rounded otherwise; compiled for good after the second step."""
    script = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from adabayes.optax import adabayes_k
jax.config.update("jax_enable_x64", True)
random = np.random.default_rng(0)
specs = {"w": P("data", "model"), "v": P("data"), "c": P(None, None, None, "data")}
shapes = {"w": (8, 8), "v": (16,), "c": (2, 2, 1, 4)}
start = {k: random.standard_normal(s) for k, s in shapes.items()}
grads = [{k: random.standard_normal(s) for k, s in shapes.items()} for _ in range(25)]
assert jax.device_count() == 4
results = []
for devices in (1, 2, 4):
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-(-devices // 2), min(devices, 2)), ("data", "model"))
    put = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
    optimizer = adabayes_k(1e-2, weight_decay=0.1)
    p = put(start)
    state = optimizer.init(p)
    assert state[0].mu["w"].sharding == p["w"].sharding
    assert len(state[0].bases["w"][0].sharding.device_set) == devices
    shardings = jax.tree.map(lambda x: x.sharding if x.ndim else NamedSharding(mesh, P()), (p, state))
    p, state = jax.device_put((p, state), shardings)
    @jax.jit(out_shardings=shardings)
    def step(p, state, grads):
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state
    for g in grads:
        p, state = step(p, state, put(g))
    assert step._cache_size() == 1, step._cache_size()
    results.append(jax.tree.map(np.asarray, p))
for other in results[1:]:
    for name in shapes:
        np.testing.assert_allclose(other[name], results[0][name], rtol=0, atol=1e-9)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **flags}
    )
    assert done.returncode == 0, done.stderr
