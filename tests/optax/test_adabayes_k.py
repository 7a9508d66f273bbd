"""AdaBayes-K for JAX: torch's results, the cost of refreshes, Flax, and arrays that are sharded over devices."""

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
from tests.support.precision import enable_x64

Array = NDArray[Any]
Arrays = list[Array]
# In torch's order of axes. With blocks of at most 128, the sides of 131 and 135 are cut into two, with padding.
SHAPES: list[tuple[int, ...]] = [(6, 6), (4,), (131, 4), (4, 1, 2, 2), (3, 15, 3, 3), (), (1, 12), (0, 3)]


def to_jax(x: Any, batch_dims: int = 0) -> Array:
    """Put an array into JAX's order of axes: outputs last, and inputs before them."""
    array: Array = np.asarray(x)
    if array.ndim < batch_dims + 2:
        return array
    return np.moveaxis(array, (batch_dims, batch_dims + 1), (-1, -2))


def draw(shapes: list[tuple[int, ...]], steps: int, dtype: Any = np.float64) -> tuple[Arrays, list[Arrays]]:
    """Draw weights, and gradients of very different sizes."""
    random = np.random.default_rng(0)
    start = [np.asarray(random.standard_normal(shape)) for shape in shapes]
    sizes = [10 ** np.asarray(random.uniform(-2, 1, shape)) for shape in shapes]
    grads = [[np.asarray(size * (0.3 + random.standard_normal(size.shape))) for size in sizes] for _ in range(steps)]
    if dtype == np.complex128:
        pairs = zip(grads, grads[::-1])
        return [np.asarray(p * (1 + 2j)) for p in start], [[np.asarray(g + 1j * h) for g, h in zip(*p)] for p in pairs]
    return start, grads


def train_in_torch(start: Arrays, grads: list[Arrays], lrs: Array, **options: Any) -> Arrays:
    weights = [torch.from_numpy(p.copy()) for p in start]
    optimizer = AdaBayesK(weights, lr=float(lrs[0]), **options)
    for lr, row in zip(lrs, grads):
        optimizer.param_groups[0]["lr"] = float(lr)
        for w, g in zip(weights, row):
            w.grad = torch.from_numpy(g)
        optimizer.step()
    return [w.numpy() for w in weights]


def train_in_jax(start: Arrays, grads: list[Arrays], lrs: Array, **options: Any) -> Arrays:
    schedule = jnp.asarray(lrs)
    optimizer = ours.adabayes_k(lambda count: schedule[count], base_lr=float(lrs[0]), **options)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = [jnp.asarray(p) for p in start]
    stacked = [jnp.stack([jnp.asarray(g) for g in column]) for column in zip(*grads)]
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), stacked)
    return [np.asarray(p) for p in params]


def assert_same_as_torch(shapes: list[tuple[int, ...]], steps: int, **options: Any) -> None:
    """Assert that both train the same weights, to 1e-9. Differences of up to 5e-11 were seen.

    Bases have signs, so weights are compared.
    """
    start, grads = draw(shapes, steps)
    lrs = 3e-3 * np.linspace(1.0, 0.1, steps)
    expected = train_in_torch(start, grads, lrs, **options)
    batch_dims, block_size = options.get("batch_dims", 0), options.get("block_size", 128)
    if isinstance(block_size, tuple):
        options["block_size"] = block_size[::-1]  # inputs x outputs
    with enable_x64(True):
        in_jax = [to_jax(p, batch_dims) for p in start], [[to_jax(g, batch_dims) for g in row] for row in grads]
        weights = train_in_jax(*in_jax, lrs, **options)
    for w, e, p in zip(weights, expected, start):
        np.testing.assert_allclose(w, to_jax(e, batch_dims), rtol=0, atol=1e-9)
        assert not p.size or np.abs(e - p).max() > 1e-3


def test_weights_equal_those_of_torch_at_default_settings() -> None:
    """Also over the 50 to 500 refreshes of each basis in 500 steps."""
    assert_same_as_torch(SHAPES, 500)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": (4, 5), "max_size": 25, "weight_decay": 0.05},  # the side of 30 is a vocabulary
        {"batch_dims": 1, "block_size": 4, "matrix_scale": 2.0},
        {"share_bases": True, "block_size": (5, 4)},
        {"share_bases": True, "block_size": 3, "batch_dims": 1},
        {"lr_sgd": 1.0, "cautious": False, "learn_every": 3, "refresh": 3, "block_size": 8},
        pytest.param({"centred": True, "refresh": 1, "block_size": 6}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_weights_equal_those_of_torch(options: dict[str, Any]) -> None:
    assert_same_as_torch([(10, 11), (30, 4), (3, 6, 7), (2, 4, 5, 3, 3), (6,)], 100, **options)


def test_complex_weights_equal_those_of_torch() -> None:
    """Real and imaginary parts are further inputs of a layer."""
    start, grads = draw([(4, 2), (2,), (), (3, 4, 2, 2)], 100, np.complex128)
    lrs = np.full(100, 1e-2)
    expected = train_in_torch(start, grads, lrs)
    with enable_x64(True):
        weights = train_in_jax([to_jax(p) for p in start], [[to_jax(g) for g in row] for row in grads], lrs)
    for w, e in zip(weights, expected):
        np.testing.assert_allclose(w, to_jax(e), rtol=0, atol=1e-9)


def test_each_parameter_can_have_its_own_batch_dims() -> None:
    """As a tree, as a prefix of one, or as a function: a stack of matrices then moves as separate matrices do."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"experts": {"up": jnp.ones((3, 4, 5)), "down": jnp.ones((3, 5, 4))}, "kernel": jnp.ones((2, 4, 5))}
    grads = jax.tree.map(
        lambda p, key: jax.random.normal(key, p.shape),
        params,
        jax.tree.unflatten(jax.tree.structure(params), list(keys)),
    )
    separate = jax.tree.map(lambda g: [g[i] for i in range(3)], grads["experts"])
    whole = {"separate": separate, "kernel": grads["kernel"]}
    plain = ours.adabayes_k(1e-2)
    expected, _ = jax.jit(plain.update)(whole, plain.init(whole))
    for batch_dims in (
        {"experts": 1, "kernel": 0},
        {"experts": {"up": 1, "down": 1}, "kernel": 0},
        lambda tree: {"experts": jax.tree.map(lambda x: x.ndim - 2, tree["experts"]), "kernel": 0},
    ):
        optimizer = ours.adabayes_k(1e-2, batch_dims=batch_dims)
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        for name in ("up", "down"):
            together = jnp.stack(expected["separate"][name])
            np.testing.assert_allclose(updates["experts"][name], together, atol=1e-6)
        np.testing.assert_allclose(updates["kernel"], expected["kernel"], atol=1e-6)
    state: Any = optimizer.init(params)
    mapped: Any = optax.tree_map_params(optimizer, lambda x: x, state)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (mapped, state)]
    assert structures[0] == structures[1]


def test_matrices_move_matrix_scale_times_as_far_as_vectors() -> None:
    params = {"matrix": jnp.ones((3, 3)), "vector": jnp.ones(3)}
    steps = []
    for scale in (1.0, 3.0):
        optimizer = ours.adabayes_k(1e-2, matrix_scale=scale)
        steps.append(optimizer.update(params, optimizer.init(params), params)[0])
    np.testing.assert_allclose(steps[1]["matrix"], 3 * steps[0]["matrix"], rtol=1e-6)
    np.testing.assert_array_equal(steps[1]["vector"], steps[0]["vector"])


def test_where_nothing_is_rotated_it_is_adabayes_fp() -> None:
    p = jnp.ones((3, 4))
    found = []
    for optimizer in (ours.adabayes_k(1e-2, cautious=False, max_size=1), ours.adabayes_fp(1e-2, b2=0.99)):
        state, update = optimizer.init(p), jax.jit(optimizer.update)
        for t in range(3):
            updates, state = update(jax.random.normal(jax.random.key(t), (3, 4)), state, p)
        found.append(updates)
    np.testing.assert_array_equal(*found)


def test_the_first_step_is_the_fixed_point_for_the_singular_values_of_the_gradient() -> None:
    """With G = L S R: the step is lr L S (eps/2 + sqrt(eps^2/4 + S^2))^(-1) R.

    The ramp turns the first bases a little, so G' has entries of up to 1e-3 outside of its diagonal: 1 % of eps.
    """
    left, _, right = np.linalg.svd(np.random.default_rng(0).standard_normal((5, 3)), full_matrices=False)
    singular = np.array([3.0, 2.0, 1.0])
    lr, eps = 1e-2, 0.1
    g = left * singular @ right
    with enable_x64(True):
        optimizer = ours.adabayes_k(lr, lr / eps, cautious=False, matrix_scale=1.0)
        updates, _ = jax.jit(optimizer.update)(jnp.asarray(g), optimizer.init(jnp.asarray(g)))
    gains = 1 / (eps / 2 + np.sqrt(eps**2 / 4 + singular**2))
    np.testing.assert_allclose(updates, -lr * (left * singular * gains @ right), atol=0.01 * lr)


def operations_of_every_step(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the names of all operations outside of conditions and loops."""
    names: list[str] = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            names.append(equation.primitive.name)
            if equation.primitive.name not in ("cond", "while"):
                for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return names


def test_bases_are_refreshed_only_when_due_also_under_vmap() -> None:
    optimizer = ours.adabayes_k(1e-2)
    p = jnp.ones((4, 4))
    many = jnp.stack([p] * 3)
    states = jax.vmap(optimizer.init)(many)
    for names in (
        operations_of_every_step(optimizer.update, p, optimizer.init(p), p),
        operations_of_every_step(jax.vmap(optimizer.update), many, states, many),
        operations_of_every_step(
            jax.vmap(jax.vmap(optimizer.update)), *jax.tree.map(lambda x: x[None], (many, states, many))
        ),
    ):
        assert (
            names.count("while") == 7
        )  # two factors, the first bases, and for each side its refreshes and the squares
        assert not {"qr", "geqrf", "householder_product", "eigh", "sort"} & set(names)
        assert names.count("dot_general") == 4  # two sides there and back


def test_the_compiler_leaves_decompositions_within_loops() -> None:
    """XLA moves what an iteration does not change out of the loop, and would compute it at every step."""
    optimizer = ours.adabayes_k(1e-2)
    p = jnp.ones((4, 4))
    program = jax.jit(optimizer.update).lower(p, optimizer.init(p), p).compile().as_text()
    assert program is not None
    assert program.count("lapack_") >= 4  # eigenvectors and QR of both sides
    assert "lapack_" not in program[program.index("ENTRY") :]


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
    for basis in state[0].bases["b"]:
        np.testing.assert_allclose(basis[0] @ basis[0].T, jnp.eye(3), atol=1e-5)
        assert jnp.abs(basis[0] - jnp.eye(3)).max() > 0.1
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


@pytest.mark.parametrize("share_bases", [False, True])
def test_the_bases_of_blocks_take_turns(share_bases: bool) -> None:
    """Basis i of a parameter is due when t - i is a multiple of the interval; torch counts blocks by row."""
    optimizer = ours.adabayes_k(1e-2, refresh=4, block_size=3, share_bases=share_bases)
    p = jnp.zeros((9, 6))  # 3 x 2 blocks of inputs x outputs: 2 x 3 in torch
    state, update = optimizer.init(p), jax.jit(optimizer.update)
    changes: list[set[tuple[int, int]]] = [set(), set()]
    for t in range(1, 65):
        before = state[0].bases
        _, state = update(jax.random.normal(jax.random.key(t), p.shape), state, p)
        for changed, old, new in zip(changes, before, state[0].bases):
            if t > 40:  # the interval is 4 from step 32 on
                changed |= {(i, t % 4) for i in range(len(old)) if not (old[i] == new[i]).all()}
    if share_bases:
        assert changes == [{(0, 0), (1, 1), (2, 2)}, {(0, 0), (1, 1)}]
    else:
        expected = {(2 * column + row, (3 * row + column) % 4) for column in range(3) for row in range(2)}
        assert changes == [expected, expected]


@pytest.mark.parametrize("refresh", [10**9, 10**12])
def test_bases_that_are_never_refreshed_cost_no_memory(refresh: int) -> None:
    p = jnp.ones((40, 40))
    sizes = []
    for every in (10, refresh):
        optimizer = ours.adabayes_k(1e-2, refresh=every, learn_every=every, block_size=10)
        state = optimizer.init(p)
        compiled = jax.jit(optimizer.update).lower(p, state, p).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        sizes.append(memory.temp_size_in_bytes + memory.output_size_in_bytes)
        updates, _ = compiled(p, state, p)
        assert jnp.isfinite(updates).all()
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.parametrize("make", [ours.adabayes, ours.adabayes_fp, ours.adabayes_k])
def test_weights_stay_finite_after_gradients_of_1e38(make: Any) -> None:
    params = {"matrix": jnp.ones((20, 200)), "vector": jnp.ones(3)}
    optimizer = make(1e-3)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for t in range(40):
        size = 1e38 if t in (0, 3) else 1.0
        grads = jax.tree.map(
            lambda p, size=size, t=t: size * jnp.sign(jax.random.normal(jax.random.key(t), p.shape)), params
        )
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert all(jnp.isfinite(p).all() for p in jax.tree.leaves(params)), t


def test_regimes_are_those_of_torch() -> None:
    start, grads = draw([(6, 6), (4,)], 20)
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
    for nu, regime, scale in zip(state[0].nu, found.tensors, (4, 1)):
        gains = scale * filtering.fixed_point(np.asarray(nu) / (1 - 0.99**20), 1e-2, 0.1)
        assert regime.lr_quantiles == pytest.approx(tuple(np.quantile(gains, (0.05, 0.5, 0.95))), rel=1e-5)
        assert regime.lr_sgd == pytest.approx(scale * 0.1)


def test_numbers_that_decide_what_is_compiled() -> None:
    make: Any = ours.adabayes_k
    for name in ("learn_every", "refresh", "block_size", "max_size"):
        with pytest.raises(ValueError, match=rf"Invalid {name}: 2\.5\. It must be an integer, at least 1"):
            make(**{name: 2.5})
        with pytest.raises(ValueError, match=rf"Invalid {name}: 0"):
            make(**{name: 0})
        with pytest.raises(TypeError, match=rf'{name} is traced, .*static_args=\("{name}",\)'):
            optax.inject_hyperparams(make)(1e-3, **{name: 4}).init(jnp.ones((2, 2)))
        optax.inject_hyperparams(make, static_args=(name,))(1e-3, **{name: 4}).init(jnp.ones((2, 2)))
    for wrong in (-1, {"w": 0.5}):
        with pytest.raises(ValueError, match=r"Invalid batch_dims: .*It must be an integer, at least 0"):
            make(batch_dims=wrong)
    with pytest.raises(ValueError, match=r"Invalid batch_dims: 0\.5"):
        make(batch_dims=lambda params: 0.5).init(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match=r"Invalid matrix_scale: -1"):
        make(matrix_scale=-1)


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
    assert [basis.shape[-1] for basis in convolution] == [18, 8]  # 3 x 3 x 2 inputs, 8 outputs


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


# Several devices, in a separate process


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_parameters_give_the_same_weights(axis_type: str) -> None:
    """In float64, because devices round partial sums differently. A step is compiled only once."""
    script = """
import jax, jax.numpy as jnp, numpy as np, optax, sys
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adabayes.optax import adabayes_k
jax.config.update("jax_enable_x64", True)
axis_type = getattr(AxisType, sys.argv[1])
random = np.random.default_rng(0)
specs = {"w": P("data", "model"), "v": P("data"), "c": P(None, None, None, "data"), "e": P("model", None, "data")}
shapes = {"w": (16, 8), "v": (16,), "c": (2, 2, 1, 4), "e": (8, 4, 4)}
start = {k: random.standard_normal(s) for k, s in shapes.items()}
grads = [{k: random.standard_normal(s) for k, s in shapes.items()} for _ in range(25)]
assert jax.device_count() == 4
results = []
for devices in (1, 2, 4):
    mesh = jax.make_mesh(
        (-(-devices // 2), min(devices, 2)), ("data", "model"), (axis_type,) * 2, devices=jax.devices()[:devices]
    )
    put = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree.items()}
    optimizer = adabayes_k(1e-2, weight_decay=0.1, block_size=4, batch_dims={"w": 0, "v": 0, "c": 0, "e": 1})
    p = put(start)
    state = optimizer.init(p)
    # The averages, factors and bases of 8 blocks are split over all devices; a single block is split along a side.
    for x in (state[0].mu["w"], *state[0].factors["w"], *state[0].bases["w"]):
        assert x.addressable_shards[0].data.shape == (8 // devices, 4, 4)
    assert state[0].nu["c"].addressable_shards[0].data.shape[1] == 4 // -(-devices // 2)
    shardings = jax.tree.map(lambda x: x.sharding if x.ndim else NamedSharding(mesh, P()), (p, state))
    p, state = jax.device_put((p, state), shardings)
    @jax.jit(out_shardings=shardings, donate_argnums=(0, 1))
    def step(p, state, grads):
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state
    with jax.set_mesh(mesh):
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
        [sys.executable, "-c", script, axis_type],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **flags},
    )
    assert done.returncode == 0, done.stderr
