"""AdaBayes for JAX: optax's conventions. That the numbers are right, test_parity.py shows."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import adabayes.optax as ours
from adabayes import AdaBayes, AdaBayesFP, diagnostics
from tests.support.precision import enable_x64

MAKERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "exact": ours.adabayes,
    "paper": partial(ours.adabayes, dynamics="paper"),
    "fp": ours.adabayes_fp,
    "k": ours.adabayes_k,
}


# Tests of AdaBayes-K's own are in test_adabayes_k.py. Through all of these, which compile its bases anew each time, it
# takes as long as the other three together.
@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] if name == "k" else []) for name in MAKERS])
def make(request: pytest.FixtureRequest) -> Callable[..., optax.GradientTransformation]:
    return MAKERS[request.param]


def params() -> dict[str, Any]:
    return {"layers": [jnp.ones((3, 2)), None, (jnp.zeros(4),)], "scale": jnp.float32(2.0)}


def gradients(step: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(step), 3)
    normal = jax.random.normal
    return {"layers": [normal(keys[0], (3, 2)), None, (normal(keys[1], (4,)),)], "scale": normal(keys[2])}


def trained(optimizer: optax.GradientTransformation, steps: int = 5, jit: bool = True) -> Any:
    p = params()
    state = optimizer.init(p)
    update = jax.jit(optimizer.update) if jit else optimizer.update
    for t in range(steps):
        updates, state = update(gradients(t), state, p)
        p = optax.apply_updates(p, updates)
    return p, state


def same(one: Any, other: Any) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    assert structures[0] == structures[1]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-5, atol=1e-7)


def test_any_tree_trains_and_is_compiled_once(make: Any) -> None:
    optimizer = make(1e-3, weight_decay=0.1)
    traced = 0

    @jax.jit
    def step(p: Any, state: Any, grads: Any) -> Any:
        nonlocal traced
        traced += 1
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    p = params()
    state = optimizer.init(p)
    first = jax.tree.structure(state), [leaf.dtype for leaf in jax.tree.leaves(state)]
    for t in range(4):
        p, state = step(p, state, gradients(t))
    assert traced == 1
    assert first == (jax.tree.structure(state), [leaf.dtype for leaf in jax.tree.leaves(state)])
    assert hasattr(state[0], "_fields")  # a NamedTuple
    same(p, trained(optimizer, 4, jit=False)[0])


def test_state_can_be_donated(make: Any) -> None:
    optimizer = make(1e-3)
    update = jax.jit(optimizer.update, donate_argnums=1)
    p = params()
    state = optimizer.init(p)
    for t in range(2):
        _, state = update(gradients(t), state, p)


def test_a_step_with_donated_state_needs_no_other_memory(make: Any) -> None:
    optimizer = make(1e-3, weight_decay=0.1)

    def step(p: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    p = jnp.ones((200, 200))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(p, optimizer.init(p), p).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    products = 20 if make is ours.adabayes_k else 0  # of which none is as large as the parameters of a whole network
    assert memory.temp_size_in_bytes < p.nbytes * (products + 0.01)


def test_scan_is_a_loop(make: Any) -> None:
    optimizer = make(1e-2)
    grads = [gradients(t) for t in range(5)]

    def step(carry: Any, g: Any) -> Any:
        p, state = carry
        updates, state = optimizer.update(g, state, p)
        return (optax.apply_updates(p, updates), state), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    (p, state), _ = jax.lax.scan(step, (params(), optimizer.init(params())), stacked)
    same((p, state), trained(optimizer))


def test_vmap_over_models_and_over_learning_rates(make: Any) -> None:
    def final(lr: Any) -> Any:
        return trained(make(lr), 3, jit=False)[0]

    together = jax.vmap(final)(jnp.array([1e-3, 3e-3]))
    for i, lr in enumerate((1e-3, 3e-3)):
        alone = trained(make(lr), 3)[0]
        same(jax.tree.map(lambda leaf, i=i: leaf[i], together), alone)

    models = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params())
    optimizer = make(1e-3)
    states = jax.vmap(optimizer.init)(models)
    grads = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), gradients())
    updates, _ = jax.vmap(optimizer.update)(grads, states, models)
    single, _ = optimizer.update(gradients(), optimizer.init(params()), params())
    same(jax.tree.map(lambda leaf: leaf[1], updates), single)


@pytest.mark.parametrize("state_dtype", [None, jnp.dtype("bfloat16")], ids=["fp32", "bf16"])
def test_inject_hyperparams_changes_the_learning_rate_without_compiling_again(make: Any, state_dtype: Any) -> None:
    inject = optax.inject_hyperparams(partial(make, state_dtype=state_dtype))
    optimizer = inject(learning_rate=1e-3, base_lr=1e-3, weight_decay=0.1)
    p, state = params(), optimizer.init(params())
    update: Any = jax.jit(optimizer.update)
    rate = lambda count: jnp.where(count < 2, 1e-3, 1e-4)  # noqa: E731
    scheduled = make(rate, base_lr=1e-3, weight_decay=0.1, state_dtype=state_dtype)
    for t in range(4):
        state.hyperparams["learning_rate"] = jnp.float32(1e-3 if t < 2 else 1e-4)
        updates, state = update(gradients(t), state, p)
        p = optax.apply_updates(p, updates)
    assert update._cache_size() == 1
    same(p, trained(scheduled, 4)[0])


def test_multi_steps_takes_the_mean(make: Any) -> None:
    optimizer = optax.MultiSteps(make(1e-2), every_k_schedule=2)
    p, state = params(), optimizer.init(params())
    for t in range(4):
        updates, state = jax.jit(optimizer.update)(gradients(t), state, p)
        p = optax.apply_updates(p, updates)
    plain = make(1e-2)
    q, other = params(), plain.init(params())
    for t in (0, 2):
        mean = jax.tree.map(lambda a, b: (a + b) / 2, gradients(t), gradients(t + 1))
        updates, other = plain.update(mean, other, q)
        q = optax.apply_updates(q, updates)
    same(p, q)


def test_masks_and_partitions(make: Any) -> None:
    mask = {"layers": [True, None, (False,)], "scale": False}
    only = optax.masked(make(1e-2), mask)
    updates, _ = only.update(gradients(), only.init(params()), params())
    np.testing.assert_array_equal(updates["scale"], gradients()["scale"])  # passed on as it was
    expected, _ = make(1e-2).update(gradients(), make(1e-2).init(params()), params())
    np.testing.assert_allclose(updates["layers"][0], expected["layers"][0])

    labels = {"layers": ["ours", None, ("frozen",)], "scale": "frozen"}
    parts = optax.partition({"ours": make(1e-2), "frozen": optax.set_to_zero()}, labels)
    updates, _ = parts.update(gradients(), parts.init(params()), params())
    np.testing.assert_allclose(updates["layers"][0], expected["layers"][0])
    assert not updates["scale"].any()

    decayed = make(1e-2, weight_decay=0.5, mask=mask)
    updates, _ = decayed.update(gradients(), decayed.init(params()), params())
    np.testing.assert_allclose(updates["scale"], expected["scale"])
    np.testing.assert_allclose(
        updates["layers"][0], expected["layers"][0] - 1e-2 * 0.5 * params()["layers"][0], rtol=1e-5
    )


def test_apply_if_finite_and_clipping_in_a_chain(make: Any) -> None:
    optimizer = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), make(1e-2)), 3)
    p, state = params(), optimizer.init(params())
    bad = gradients() | {"scale": jnp.float32(jnp.nan)}
    updates, state = jax.jit(optimizer.update)(bad, state, p)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    updates, state = jax.jit(optimizer.update)(gradients(), state, p)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


def test_integers_and_their_derivatives_are_left_alone(make: Any) -> None:
    optimizer = make(1e-2, weight_decay=0.5)
    big = 2**24 + 1  # which fp32 does not hold
    p: Any = {"w": jnp.ones(3), "table": jnp.array([3, big]), "flag": jnp.array(True)}

    @jax.jit
    def step(p: Any, state: Any) -> Any:
        grads = jax.grad(lambda q: (q["w"] ** 2).sum() * q["table"][0], allow_int=True)(p)
        assert grads["table"].dtype == jax.dtypes.float0
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    state = optimizer.init(p)
    for _ in range(3):
        p, state = step(p, state)
    np.testing.assert_array_equal(p["table"], [3, big])
    assert p["table"].dtype == jnp.int32
    assert p["flag"]
    assert (p["w"] < 1).all()
    grads = {"w": jnp.ones(3), "table": jnp.array([1, 1]), "flag": jnp.array(False)}
    for outer in (optimizer, optax.apply_if_finite(optimizer, 2), optax.MultiSteps(optimizer, 1)):
        updates, _ = outer.update(grads, outer.init(p), p)
        assert not updates["table"].any()
        assert jnp.issubdtype(updates["table"].dtype, jnp.integer)
    doubled = optax.tree_map_params(optimizer, lambda leaf: 2 * leaf, state)
    np.testing.assert_array_equal(doubled[0].mu["w"], 2 * state[0].mu["w"])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_gradient_that_is_none_leaves_its_weight_alone(make: Any, weight_decay: float) -> None:
    optimizer = make(1e-2, weight_decay=weight_decay)
    p, state = trained(optimizer, 2)
    grads = gradients(2)
    grads["scale"] = None
    updates, after = optimizer.update(grads, state, p)
    assert updates["scale"] is None
    for now, before in zip(after[0][-4:], state[0][-4:]):
        if isinstance(now, dict):
            np.testing.assert_array_equal(now["scale"], before["scale"])


@pytest.mark.parametrize(("wrong", "right"), [((3,), (2, 3)), ((), (3,)), ((1, 3), (2, 3)), ((2, 3), (3,)), ((1,), ())])
def test_a_gradient_that_would_be_broadcast_is_refused_by_name(make: Any, wrong: Any, right: Any) -> None:
    optimizer = make(1e-3, weight_decay=0.1)
    p: Any = {"scale": jnp.ones(3), "layers": [None, {"w": jnp.ones(right)}]}
    grads: Any = {"scale": None, "layers": [None, {"w": jnp.ones(wrong)}]}
    message = rf"The gradient of layers\.1\.w has shape {re.escape(str(wrong))}, but its"
    for update in (optimizer.update, jax.jit(optimizer.update)):
        with pytest.raises(ValueError, match=rf"{message} parameter has shape {re.escape(str(right))}\. .* jax\.grad"):
            update(grads, optimizer.init(p), p)
    state_shape = (1, *right) if make is ours.adabayes_k and len(right) == 2 else right  # that of a stack of blocks
    for params in (None, grads):
        with pytest.raises(ValueError, match=rf"{message} state has shape {re.escape(str(state_shape))}.* init\(\)"):
            optimizer.update(grads, optimizer.init(p), params)


def test_a_gradient_of_a_single_array_needs_no_name(make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"The gradient of the parameters has shape \(\), but its parameter has shape \(3,\)"
    ):
        make(1e-3).update(1.0, make(1e-3).init(jnp.ones(3)), jnp.ones(3))


def test_shapes_that_agree_are_taken_in_every_form(make: Any) -> None:
    optimizer = make(1e-3)
    expected, _ = optimizer.update(jnp.ones(()), optimizer.init(jnp.ones(())), jnp.ones(()))
    for one in (1.0, np.float32(1.0), np.ones(()), jnp.ones(())):
        for params in (None, 1.0, jnp.ones(())):
            found, _ = optimizer.update(one, optimizer.init(jnp.ones(())), params)
            assert found == expected
    state = optimizer.init({"w": jnp.ones(3)})
    _, state = optimizer.update({"w": np.ones(3)}, state, {"w": None})  # a parameter that is not at hand
    jax.eval_shape(optimizer.update, {"w": jnp.ones(3)}, state, {"w": jnp.ones(3)})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_has_fp32_state_and_the_updates_are_of_its_own(make: Any, dtype: Any) -> None:
    optimizer = make(1e-2)
    p = {"w": jnp.ones(8, dtype)}
    updates, state = optimizer.update({"w": jnp.full(8, 0.1, dtype)}, optimizer.init(p), p)
    assert updates["w"].dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype(jnp.float32)}


def test_dtypes_of_the_state() -> None:
    p = {"w": jnp.ones(8)}
    state = ours.scale_by_adabayes(mu_dtype=jnp.bfloat16).init(p)
    assert (state.mu["w"].dtype, state.gain["w"].dtype) == (jnp.bfloat16, jnp.float32)
    fp = ours.scale_by_adabayes_fp(state_dtype=jnp.bfloat16).init(p)
    assert (fp.mu["w"].dtype, fp.nu["w"].dtype) == (jnp.bfloat16, jnp.bfloat16)
    with enable_x64(True):
        mixed = {"w": jnp.ones(8), "v": jnp.ones(8, jnp.float32)}
        traced = ours.adabayes(jnp.asarray(1e-3), jnp.asarray(0.1), b1=jnp.asarray(0.9))
        state = traced.init(mixed)
        for _ in range(2):
            assert (state[0].gain["w"].dtype, state[0].gain["v"].dtype) == (jnp.float64, jnp.float32)
            _, state = traced.update(mixed, state, mixed)
        mixed = {"w": jnp.ones(8)}
        low = ours.scale_by_adabayes(mu_dtype=jnp.bfloat16)
        assert low.update(mixed, low.init(mixed))[1].mu["w"].dtype == jnp.bfloat16
    injected = optax.inject_hyperparams(ours.adabayes)(1e-3, state_dtype=jnp.bfloat16, mu_dtype=jnp.float32)
    inner = jax.jit(injected.init)(p).inner_state[0]
    assert (inner.mu["w"].dtype, inner.gain["w"].dtype) == (jnp.float32, jnp.bfloat16)
    updates, _ = ours.adabayes(1e-3).update({"w": jnp.ones(8, jnp.bfloat16)}, ours.adabayes(1e-3).init(p), p)
    assert updates["w"].dtype == jnp.float32  # as the weights
    for name, dtype in (("state_dtype", jnp.float16), ("state_dtype", "bf16"), ("mu_dtype", "int32")):
        wrong: dict[str, Any] = {name: dtype}
        with pytest.raises(ValueError, match=f"Invalid {name}"):
            ours.adabayes(**wrong)


@pytest.mark.parametrize("fp", [False, True])
def test_bf16_state_follows_the_filter_though_its_steps_are_below_half_its_precision(fp: bool) -> None:
    """Gradients fall to a tenth: rounded to the nearest, the state would stay where it is."""
    weights, steps = 4000, 3000
    make = ours.scale_by_adabayes_fp if fp else ours.scale_by_adabayes
    found = []
    for dtype in (jnp.float32, jnp.bfloat16):
        optimizer = make(1e-3, state_dtype=dtype)
        signs = jax.random.rademacher(jax.random.key(0), (steps,), jnp.float32)

        def step(state: Any, t: Any, signs: Any = signs, optimizer: Any = optimizer) -> Any:
            size = jnp.where(t < 50, 0.1, 0.01)
            return optimizer.update(jnp.full(weights, size) * signs[t], state)[1], None

        state, _ = jax.lax.scan(step, optimizer.init(jnp.zeros(weights)), jnp.arange(steps))
        found.append(float(jnp.mean((state.nu if fp else state.gain).astype(jnp.float32))))
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_a_weight_starts_at_the_fixed_point_of_its_first_gradient_and_stays_started() -> None:
    optimizer = ours.scale_by_adabayes(1e-3, 0.1, 128)
    state = optimizer.init(jnp.zeros(4))
    _, state = optimizer.update(jnp.array([0.0, 1.0, 1e30, 1e-30]), state)
    assert state.gain[0] == 0
    assert state.gain[1] == pytest.approx(1e-3, rel=0.2)
    assert state.gain[2] == 0  # 1e-62, which fp32 does not hold
    assert state.gain[3] == pytest.approx(0.1)  # though the square of its gradient underflows
    _, state = optimizer.update(jnp.array([1.0, 0.0, 0.0, 0.0]), state)
    assert state.gain[0] == pytest.approx(1e-3, rel=0.2)
    assert state.gain[2] == pytest.approx(128 * 1e-6, rel=1e-2)  # the noise of one step: it has not started anew
    assert state.gain[3] == pytest.approx(0.1)


def test_a_weight_of_the_papers_dynamics_starts_at_lr_sgd_by_the_schedule() -> None:
    optimizer = ours.scale_by_adabayes(lambda count: 5e-4, 0.1, 128, base_lr=1e-3, dynamics="paper")
    _, state = optimizer.update(jnp.array([0.0, 1e-6, 1e30]), optimizer.init(jnp.zeros(3)))
    np.testing.assert_allclose(state.gain[:2], 0.05, rtol=1e-3)  # k is 6e-4
    assert state.gain[2] == 0
    _, state = optimizer.update(jnp.zeros(3), state)
    assert state.gain[2] == pytest.approx(128 * 5e-4**2)  # the noise of one step


@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_any_size_keep_all_finite_and_other_weights_as_they_were(make: Any, state_dtype: Any) -> None:
    sizes = 10.0 ** np.arange(-30, 31)
    usual = (sizes > 1e-9) & (sizes < 1e9)
    signs = np.random.default_rng(0).choice([-1, 1], (50, len(sizes)))
    signs[10:20] = 0  # gains recover, as far as they do
    found = []
    options = {"cautious": False} if make is ours.adabayes_k else {}  # for that is a matter of all weights together
    for chosen in (sizes, np.where(usual, sizes, 0)):
        optimizer = make(1e-3, state_dtype=state_dtype, **options)
        p = jnp.ones(len(sizes))
        state, update = optimizer.init(p), jax.jit(optimizer.update)
        for g in jnp.asarray(signs * chosen, jnp.float32):
            updates, state = update(g, state, p)
            p = optax.apply_updates(p, updates)
            assert jnp.isfinite(p).all()
            for leaf in jax.tree.leaves(state):
                # The averaged square of AdaBayes-FP overflows, as Adam's does; such a weight rests from then on.
                settled = make in (ours.adabayes_fp, ours.adabayes_k)
                assert (jnp.isfinite(leaf) | (jnp.isposinf(leaf) & settled)).all()
        found.append([np.asarray(leaf, np.float32)[usual] for leaf in jax.tree.leaves((p, state)) if leaf.ndim])
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


def test_the_gain_stays_below_lr_sgd_where_decay_rounds_to_one() -> None:
    """At k = 5e-9 in fp32: 1 - e^(-2k) is lost in the decay, but not here."""
    optimizer = ours.scale_by_adabayes(1e-6, lr_sgd=0.1, batch_size=1000)
    step = jax.jit(optimizer.update)
    state = optimizer.init(jnp.zeros(1))
    _, state = step(jnp.full(1, 1e-9), state)
    for _ in range(2000):
        _, state = step(jnp.zeros(1), state)
    assert state.gain[0] <= 0.1


@pytest.mark.parametrize("fp", [False, True])
def test_regimes_are_those_of_torch(fp: bool) -> None:
    rng = np.random.default_rng(0)
    grads = {name: rng.standard_normal((20, 50)).astype(np.float32) * size for name, size in (("a", 1e-3), ("b", 0.3))}
    weights = {name: torch.zeros(50) for name in grads}
    optimizer = (AdaBayesFP if fp else AdaBayes)(list(weights.items()), lr=1e-3, lr_sgd=0.1)
    transformation = (ours.adabayes_fp if fp else ours.adabayes)(1e-3, 0.1)
    state = transformation.init({name: jnp.zeros(50) for name in grads})
    for t in range(20):
        for name, w in weights.items():
            w.grad = torch.from_numpy(grads[name][t])
        optimizer.step()
        _, state = transformation.update({name: jnp.asarray(g[t]) for name, g in grads.items()}, state, None)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    expected, found = diagnostics.regimes(optimizer), ours.regimes(state, learning_rate=1e-4)
    for a, b in zip((*expected.tensors, expected.total), (*found.tensors, found.total)):
        assert (a.name, a.weights) == (b.name, b.weights)
        assert a.sgd_like == pytest.approx(b.sgd_like, abs=0.01)
        assert a.lr_quantiles[0] == pytest.approx(b.lr_quantiles[0], rel=0.1)
        assert a.lr_quantiles[2] == pytest.approx(b.lr_quantiles[2], rel=0.1)
        assert a.lr_sgd == pytest.approx(b.lr_sgd)
    assert "Adam" in str(found)
    with pytest.raises(ValueError, match="not the state of an adabayes"):
        ours.regimes(optax.adam(1e-3).init(jnp.zeros(3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, r"Invalid learning_rate: -1.0. It must be at least 0"),
        ({"lr_sgd": 0.0}, r"Invalid lr_sgd: 0.0. It must be above 0"),
        ({"b1": 1.0}, r"Invalid b1: 1.0. It must be at least 0 and below 1"),
        ({"batch_size": 0.5}, r"Invalid batch_size: 0.5. It must be at least 1"),
        ({"weight_decay": math.nan}, r"Invalid weight_decay: nan"),
        ({"base_lr": math.inf}, r"Invalid base_lr: inf"),
        ({"dynamics": "euler"}, r"Invalid dynamics: 'euler'. It must be 'exact' or 'paper'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours.adabayes(**options)


@pytest.mark.parametrize("make", [ours.adabayes, ours.adabayes_fp])
def test_rates_that_may_have_been_swapped_and_decay_in_the_units_of_the_paper_warn(make: Any) -> None:
    with pytest.warns(UserWarning, match="swapped"):
        make(0.1, lr_sgd=1e-3)
    with pytest.warns(UserWarning, match=r"here 0\.05"):
        make(1e-3, weight_decay=5e-5)
    with pytest.warns(UserWarning, match=r"here 0\.05"):
        make(optax.constant_schedule(1e-3), base_lr=1e-3, weight_decay=5e-5)


@pytest.mark.parametrize("lr_sgd", [None, 0.5])
def test_a_rate_gives_the_same_numbers_however_it_is_given(make: Any, lr_sgd: float | None) -> None:
    """A schedule, a traced rate or a NumPy number; what the filter needs to know is its first value."""
    plain, state = trained(make(1e-2, lr_sgd=lr_sgd))
    same(trained(make(optax.constant_schedule(1e-2), lr_sgd=lr_sgd))[0], plain)
    same(trained(make(np.float32(1e-2), lr_sgd=lr_sgd and np.float64(lr_sgd)))[0], plain)
    same(trained(make(jnp.float32(1e-2), lr_sgd=lr_sgd))[0], plain)
    injected, outer = trained(optax.inject_hyperparams(make)(1e-2, lr_sgd=lr_sgd))
    same((injected, outer.inner_state), (plain, state))
    with pytest.raises(ValueError, match="Invalid learning_rate: nan"):
        make(np.float32(math.nan))


def test_a_rate_that_begins_at_zero_has_the_usual_base(make: Any) -> None:
    warm_up = lambda count: 1e-2 * jnp.minimum(count / 2, 1.0)  # noqa: E731
    found = trained(make(warm_up, lr_sgd=0.5))[0]
    same(found, trained(make(warm_up, lr_sgd=0.5, base_lr=1e-3))[0])
    same(found, trained(optax.inject_hyperparams(make)(warm_up, lr_sgd=0.5))[0])


def test_a_schedule_that_changes_is_the_same_when_injected(make: Any) -> None:
    rate = optax.cosine_decay_schedule(1e-2, 5)
    p, state = trained(make(rate, lr_sgd=0.5))
    injected, outer = trained(optax.inject_hyperparams(make)(rate, lr_sgd=0.5))
    same(injected, p)
    structures: list[Any] = [jax.tree.structure(one) for one in (outer.inner_state[0], state[0])]
    assert structures[0] == structures[1]


def test_regimes_of_a_rate_of_zero() -> None:
    optimizer = ours.adabayes(lambda count: 1e-3 * (count < 5), base_lr=1e-3, dynamics="paper")
    state = optimizer.init(jnp.zeros(2))
    for _ in range(20):
        _, state = optimizer.update(jnp.array([1e-6, 1.0]), state)
    assert ours.regimes(state).total.sgd_like == 0.5
    assert ours.regimes(state, 1e-4).total.lr_sgd == pytest.approx(0.01)


def test_regimes_tell_a_gain_that_underflowed_from_a_weight_without_gradients() -> None:
    optimizer = ours.adabayes(1e-3, 0.1)
    _, state = optimizer.update(jnp.array([0.0, 1e30]), optimizer.init(jnp.zeros(2)))
    found = ours.regimes(state)
    assert found.total.sgd_like == 0.5
    assert found.total.lr_quantiles == pytest.approx((0.005, 0.05, 0.095))  # of 0 and 0.1


def test_learning_rates_can_be_learned(make: Any) -> None:
    """Gradients flow through an update."""

    def loss(lr: Any) -> Any:
        optimizer = make(lr, base_lr=1e-3)
        p = jnp.array([[1.0, 2.0], [3.0, -1.0]])
        state = optimizer.init(p)
        for _ in range(2):
            updates, state = optimizer.update(2 * p, state, p)
            p = optax.apply_updates(p, updates)
        return (p**2).sum()

    by_differences = float((loss(1.05e-3) - loss(0.95e-3)) / 1e-4)
    assert float(jax.grad(loss)(1e-3)) == pytest.approx(by_differences, rel=0.05)


@pytest.mark.parametrize("mu_dtype", [None, "complex64", "float32", "bfloat16"])
def test_the_parts_of_complex_weights_are_weights_of_their_own(make: Any, mu_dtype: Any) -> None:
    """As in torch: so complex weights move as their parts do that are given as real ones."""
    optimizer = make(1e-2, weight_decay=0.1, mu_dtype=mu_dtype)
    whole, parts = jnp.array([1 + 2j, 3 - 1j]), jnp.array([[1.0, 3.0], [2.0, -1.0]])
    real = make(1e-2, weight_decay=0.1, mu_dtype="float32" if mu_dtype == "complex64" else mu_dtype)
    states: list[Any] = [optimizer.init(whole), real.init(parts)]
    if make is ours.adabayes_k:  # in the eigenbasis, averages do not come in pairs
        assert states[0][0].mu.dtype == ("bfloat16" if mu_dtype == "bfloat16" else "float32")
    else:
        assert states[0][0].mu.dtype == (mu_dtype or "complex64")
    for t in range(4):
        g = jax.random.normal(jax.random.key(t), (2, 2))
        updates, states[0] = optimizer.update(jax.lax.complex(g[0], g[1]), states[0], whole)
        whole = optax.apply_updates(whole, updates)
        updates, states[1] = real.update(g, states[1], parts)
        parts = optax.apply_updates(parts, updates)
        assert whole.dtype == jnp.complex64
        np.testing.assert_allclose(jnp.stack([whole.real, whole.imag]), parts, rtol=1e-6)
    assert ours.regimes(states[0]).total.weights == 4


def test_learning_rate_of_zero_moves_nothing_and_raises_nothing(make: Any) -> None:
    p, state = trained(make(lambda count: 0.0 * count), 3)
    same(p, params())
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


# Processes of their own


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_torch_is_not_imported_and_not_needed() -> None:
    done = run("import sys; sys.modules['torch'] = None; import adabayes, adabayes.optax as o; o.adabayes(1e-3)")
    assert done.returncode == 0, done.stderr
    done = run("import sys, adabayes; adabayes.optax.adabayes(1e-3); assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_without_jax_the_extra_is_named() -> None:
    for missing in ("jax", "optax"):
        for use in ("import adabayes.optax", "from adabayes.cli import main; main(['bench', '--backend', 'jax'])"):
            done = run(f"import sys; sys.modules['{missing}'] = None; import adabayes; {use}")
            assert done.stderr.strip().endswith(
                "adabayes.optax needs jax and optax: pip install '.[jax]' in the folder of AdaBayes"
            )


def test_sharded_arrays_keep_their_sharding() -> None:
    done = run(
        """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from adabayes.optax import adabayes, adabayes_fp
assert jax.device_count() == 4
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
split = NamedSharding(mesh, P("data", "model"))
values = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
for make in (adabayes, adabayes_fp):
    optimizer = make(1e-2, weight_decay=0.1)
    results = []
    for sharding in (split, jax.sharding.SingleDeviceSharding(jax.devices()[0])):
        p = jax.device_put(values, sharding)
        state = optimizer.init(p)
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(state) if leaf.ndim)
        @jax.jit
        def step(p, state):
            updates, state = optimizer.update(p, state, p)
            return optax.apply_updates(p, updates), state
        for _ in range(3):
            p, state = step(p, state)
        for leaf in (p, *jax.tree.leaves(state)):
            assert not leaf.ndim or leaf.sharding.is_equivalent_to(sharding, leaf.ndim), leaf.sharding
        results.append(np.asarray(p))
    np.testing.assert_allclose(*results, rtol=1e-6)
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert done.returncode == 0, done.stderr
