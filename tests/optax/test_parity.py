"""The part of optax in the table of cases of tests/optim/test_parity.py, whose bounds hold here too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import adabayes.optax as ours
from adabayes import AdaBayes, AdaBayesFP
from tests.optim.test_parity import ALL_CASES, B1, B2, BATCH, WEIGHTS, Array, Case, Method, assert_agrees, in_two_groups
from tests.support.precision import enable_x64


def by_optax(case: Case) -> Array:
    with enable_x64(case.dtype == "float64"):
        dtype = jnp.dtype(case.dtype)
        rates = jnp.asarray(case.lr * case.factors)
        options: dict[str, Any] = {"lr_sgd": case.lr_sgd, "base_lr": case.lr, "weight_decay": case.weight_decay}
        if case.method == "fp":
            optimizer = ours.adabayes_fp(lambda count: rates[count], b1=B1, b2=B2, **options)
        else:
            optimizer = ours.adabayes(lambda count: rates[count], b1=B1, **case.filter, **options)

        def step(carry: Any, g: Any) -> Any:
            weights, state = carry
            updates, state = optimizer.update(g, state, weights)
            return (optax.apply_updates(weights, updates), state), None

        weights = jnp.asarray(case.start, dtype)
        carry = weights, optimizer.init(weights)
        (weights, _), _ = jax.lax.scan(step, carry, jnp.asarray(case.gradients, dtype))
        return np.asarray(weights, np.float64)


@ALL_CASES
def test_optax_agrees(case: Case) -> None:
    assert_agrees(by_optax, case)


def test_a_partition_agrees() -> None:
    """The groups of torch."""
    case = Case(weight_decay=0.05)
    half = WEIGHTS // 2
    with enable_x64(True):
        labels = {"first": "usual", "second": "slow"}
        partition = optax.partition(
            {
                "usual": ours.adabayes(1e-3, 0.1, BATCH, weight_decay=0.05),
                "slow": ours.adabayes(3e-4, batch_size=BATCH),
            },
            labels,
        )
        params = {"first": jnp.asarray(case.start[:half]), "second": jnp.asarray(case.start[half:])}
        state = partition.init(params)
        step = jax.jit(partition.update)
        for g in case.gradients:
            grads = {"first": jnp.asarray(g[:half]), "second": jnp.asarray(g[half:])}
            updates, state = step(grads, state, params)
            params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(np.concatenate(list(params.values())), in_two_groups(case), rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", ["memory", "fp"])
def test_bf16_state_is_rounded_by_the_same_bits(method: Method) -> None:
    """Nearly all of it is the same, bit for bit: a last digit of fp32 decides only now and then."""
    case = Case(method=method, dtype="float32", steps=200)
    weights = torch.from_numpy(case.start).float()
    kind, transformation = (AdaBayesFP, ours.adabayes_fp) if method == "fp" else (AdaBayes, ours.adabayes)
    optimizer = kind([weights], lr=case.lr, lr_sgd=case.lr_sgd, state_dtype=torch.bfloat16, seed=5)
    optimized = transformation(case.lr, case.lr_sgd, state_dtype=jnp.bfloat16, seed=5)
    state = optimized.init(jnp.asarray(case.start, jnp.float32))
    update = jax.jit(optimized.update)
    for g in case.gradients:
        weights.grad = torch.from_numpy(g).float()
        optimizer.step()
        _, state = update(jnp.asarray(g, jnp.float32), state)
    theirs = optimizer.state[weights]
    for name, mine in (
        ("exp_avg", state[0].mu),
        ("exp_avg_sq" if method == "fp" else "gain", state[0][3 - (method == "fp")]),
    ):
        same = np.asarray(mine, np.float32) == theirs[name].float().numpy()
        assert same.mean() > 0.95
