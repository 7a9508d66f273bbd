"""AdaBayes-K for JAX computes the weights of ``adabayes.reference.adabayes_k``, in float64.

The inputs of a layer come first in JAX and last in the reference, so matrices are transposed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adabayes.optax as ours
from tests.support.block_reference import Array, Problem, Shape, draw_problem, reference_path, tolerance
from tests.support.precision import enable_x64

MAX_SIZE = 12
BLOCK_SIZE = 4
# In torch's order of axes. A side of 20 is above MAX_SIZE.
SHAPES: list[Shape] = [(4, 4), (8, 7), (4, 20), (20, 3), (4, 1, 2, 2), (3,)]
STEPS = 48  # the intervals of the schedule are 1, then 2 from step 16 on, then 4 from step 32 on


def to_jax(x: Array) -> Array:
    """Put an array into JAX's order of axes, outputs last."""
    return x.T if x.ndim < 3 else x.transpose(2, 3, 1, 0)


def train(problem: Problem, **options: Any) -> list[Any]:
    """Return the weights of each parameter, with one row per step."""
    lrs = jnp.asarray(problem.lrs)
    optimizer = ours.adabayes_k(
        lambda count: lrs[count],
        problem.lr_sgd,
        base_lr=problem.lrs[0],
        block_size=problem.block_size,
        max_size=problem.max_size,
        **options,
    )

    def step(carry: Any, gradients: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    params = [jnp.asarray(to_jax(x)) for x in problem.start]
    stacked = [jnp.stack([jnp.asarray(to_jax(g)) for g in column]) for column in zip(*problem.gradients)]
    _, path = jax.lax.scan(step, (params, optimizer.init(params)), stacked)
    return list(path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learn_every": 1, "refresh": 1, "centred": True},
        {"learn_every": 4, "refresh": 3, "cautious": False, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_weights_equal_the_reference(options: dict[str, Any]) -> None:
    """The tolerance is that of the other forms: ``tests.support.block_reference`` derives it."""
    problem = draw_problem(SHAPES, steps=STEPS, block_size=BLOCK_SIZE, max_size=MAX_SIZE)
    with enable_x64(True):
        path = train(problem, **options)
    for i, (weights, expected) in enumerate(zip(path, zip(*reference_path(problem, **options)), strict=True)):
        assert weights.dtype == np.float64
        for t, (w, e) in enumerate(zip(weights, expected, strict=True), 1):
            message = f"step {t}, parameter of shape {SHAPES[i]}"
            np.testing.assert_allclose(w, to_jax(e), rtol=0, atol=tolerance(problem), err_msg=message)
