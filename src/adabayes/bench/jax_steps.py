"""Jitted steps of optax's optimizers and of ours, to be timed. Parameters and state are donated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adabayes.optax import adabayes, adabayes_fp, adabayes_k  # isort: skip  # first, because it says what to install

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adabayes.bench.measure import Step
from adabayes.bench.workloads import Workload

__all__ = ["BASELINE", "matrix_optimizers", "optimizers", "roof", "steps"]

BASELINE = "optax.adamw"


def optimizers() -> dict[str, Callable[[], optax.GradientTransformation]]:
    """Return the optimizers by the names in the table."""
    return {
        BASELINE: lambda: optax.adamw(1e-3, weight_decay=0.01),
        "AdaBayes": lambda: adabayes(1e-3, weight_decay=0.01),
        "AdaBayes-FP": lambda: adabayes_fp(1e-3, weight_decay=0.01),
        "AdaBayes bf16": lambda: adabayes(1e-3, weight_decay=0.01, state_dtype=jnp.bfloat16),
        "optax.adam": lambda: optax.adam(1e-3),
        "optax.sgd": lambda: optax.sgd(0.1, momentum=0.9),
    }


def matrix_optimizers() -> dict[str, Callable[[], optax.GradientTransformation]]:
    """Return the optimizers that work on matrices. Of optax's own, Muon is the closest."""
    return {
        BASELINE: optimizers()[BASELINE],
        "AdaBayes-K": lambda: adabayes_k(1e-3, weight_decay=0.01),
        "AdaBayes-K, shared bases": lambda: adabayes_k(1e-3, weight_decay=0.01, share_bases=True),
        "AdaBayes-K, its element-wise part": lambda: adabayes_k(1e-3, weight_decay=0.01, max_size=1),
        "optax.contrib.muon": lambda: optax.contrib.muon(1e-3, weight_decay=0.01),
    }


def steps(workload: Workload, names: Sequence[str]) -> dict[str, Step]:
    """Create each optimizer with its own parameters, and gradients that all share."""
    random = np.random.default_rng(0)
    shapes = [_in_order_of_jax(shape) for shape in workload.shapes()]
    start = [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]
    grads = [jnp.asarray(np.float32(0.01) * random.standard_normal(shape, np.float32)) for shape in shapes]
    makers = {**matrix_optimizers(), **optimizers()}
    made = {name: (makers[name](), [jnp.copy(p) for p in start]) for name in names}
    return {
        name: _step(optimizer, params, _begun(name, optimizer.init(params)), grads)
        for name, (optimizer, params) in made.items()
    }


def roof(weights: int) -> None:
    """Return no loop to compare with: torch's uses the threads of our kernels, not JAX's."""


def _in_order_of_jax(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Convert a shape of torch, outputs x inputs x kernel, to kernel x inputs x outputs."""
    return (*shape[2:], *shape[1::-1]) if len(shape) > 1 else shape


def _begun(name: str, state: Any) -> Any:
    """Return the state of AdaBayes-K as if it were past the steps in which bases are refreshed more often."""
    if not name.startswith("AdaBayes-K"):
        return state
    return optax.tree_utils.tree_set(state, count=jnp.asarray(160, jnp.int32))


def _step(optimizer: Any, params: Any, state: Any, grads: Any) -> Step:
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> None:
        nonlocal params, state
        params, state = compiled(params, state, grads)
        jax.block_until_ready((params, state))  # type: ignore[no-untyped-call]

    return Step(step, lambda: size)
