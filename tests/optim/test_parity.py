"""One table of cases that the reference, torch's three forms and optax all run through, and must agree on.

tests/optax/test_parity.py has optax's part.

Gradients come from a list that is drawn beforehand, over seven decades of size; so what is compared is the optimizers
alone. Differences are relative to the largest weight, after all steps, and may be half a unit in the last place for
each step: what rounding the weights costs at worst. In float64 that is 6e-13 for 5,000 steps; 3e-14 was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adabayes import AdaBayes, AdaBayesFP, filtering, kernels, reference
from adabayes.rates import MEMORY

Array = NDArray[np.float64]
Method = Literal["exact", "memory", "paper", "fp"]
METHODS: tuple[Method, ...] = ("exact", "memory", "paper", "fp")
WEIGHTS, BATCH, B1, B2 = 64, 128, 0.9, 0.999


def constant(t: NDArray[np.int64]) -> Array:
    return np.ones(len(t))


def drop(t: NDArray[np.int64]) -> Array:
    return np.where(t < 0.75 * len(t), 1.0, 0.1)


def cosine(t: NDArray[np.int64]) -> Array:
    return 0.5 * (1 + np.cos(np.pi * t / (len(t) - 1)))  # ends at 0


def warm_up(t: NDArray[np.int64]) -> Array:
    return np.minimum(t / (0.1 * len(t)), 1.0)  # begins at 0


@dataclass(frozen=True)
class Case:
    method: Method = "exact"
    factor: Callable[[NDArray[np.int64]], Array] = constant  # of the learning rate, step by step
    steps: int = 300
    dtype: str = "float64"
    weight_decay: float = 0.0
    lr: float = 1e-3
    lr_sgd: float = 0.1

    @property
    def filter(self) -> dict[str, Any]:
        """Which filter: with a batch size, with a memory of so many steps, or the paper's."""
        if self.method == "memory":
            return {}
        return {"batch_size": BATCH, "dynamics": self.method}

    @property
    def gradients(self) -> Array:
        random = np.random.default_rng(1)
        sizes = np.geomspace(1e-5, 1e2, WEIGHTS)
        grads = sizes * (0.3 + random.standard_normal((self.steps, WEIGHTS)))
        grads[:20, ::7] = 0  # weights that have no gradient yet
        return self._rounded(grads)

    @property
    def start(self) -> Array:
        return self._rounded(np.random.default_rng(2).standard_normal(WEIGHTS))

    def _rounded(self, values: Array) -> Array:
        return torch.from_numpy(values).to(getattr(torch, self.dtype)).double().numpy()

    @property
    def bound(self) -> float:
        eps = torch.finfo(getattr(torch, self.dtype)).eps
        return 4 * eps if self.dtype == "bfloat16" else self.steps * eps / 2

    @property
    def factors(self) -> Array:
        return self.factor(np.arange(self.steps))


def combine(base: list[Case]) -> list[Case]:
    return [replace(case, method=method) for case in base for method in METHODS]


CASES = combine(
    [
        Case(),
        Case(factor=drop, weight_decay=0.05),
        Case(factor=cosine, weight_decay=0.05),
        Case(factor=warm_up),
        Case(lr=0.01, lr_sgd=0.5, weight_decay=0.01),
        Case(steps=5000, factor=drop, weight_decay=0.05),
        Case(dtype="float32", factor=cosine, weight_decay=0.05),
        Case(steps=5000, dtype="float32", factor=drop, weight_decay=0.05),
        Case(steps=100, dtype="bfloat16", lr=0.01, lr_sgd=1.0, weight_decay=0.05),
    ]
)


def by_reference(case: Case) -> Array:
    """Algorithms 1 and 2 to the letter; for the exact dynamics, the filter's equations one after the other."""
    if case.method in ("exact", "memory"):
        return exactly(case)
    # The paper divides by the learning rate. At 0, our Algorithm 1 waits, and our Algorithm 2 only does not move.
    live = np.flatnonzero(case.factors) if case.method == "paper" else np.arange(case.steps)
    factors, gradients = np.maximum(case.factors[live], 1e-30), case.gradients[live]
    run = reference.adabayes if case.method == "paper" else reference.adabayes_fp
    steps = run(
        lambda mu, t: -BATCH * gradients[t - 1],
        case.start,
        lr_adam=lambda t: case.lr * factors[t - 1],
        lr_sgd=lambda t: case.lr_sgd * factors[t - 1],
        minibatch_size=BATCH,
        lam=lambda t: case.lr * factors[t - 1] * case.weight_decay,
    )
    return list(islice(steps, len(live)))[-1][0]


def exactly(case: Case) -> Array:
    k = filtering.drift(case.lr, case.lr_sgd, BATCH)
    flow = filtering.ornstein_uhlenbeck(k, case.lr_sgd)
    mu, m, gain = case.start, np.zeros(WEIGHTS), np.zeros(WEIGHTS)
    for t, (g, factor) in enumerate(zip(case.gradients, case.factors), 1):
        begun = np.where(gain == 0, filtering.fixed_point(g * g, case.lr, case.lr_sgd), gain)
        if case.method == "memory":
            after = filtering.remember(begun, g, case.lr, case.lr_sgd, min(t, MEMORY))
        else:
            after = filtering.update(filtering.predict(begun, flow), filtering.curvature(g, BATCH))
        gain = np.where((gain == 0) & (g == 0), 0, after)
        m = B1 * m + (1 - B1) * g
        shrunk = (1 - case.lr * factor * case.weight_decay) * mu
        mu = filtering.move(shrunk, factor * gain, -m / (1 - B1**t))
    return mu


def by_torch(case: Case, **form: Any) -> Array:
    weights = torch.from_numpy(case.start).to(getattr(torch, case.dtype))
    options: dict[str, Any] = {"lr": case.lr, "lr_sgd": case.lr_sgd, "weight_decay": case.weight_decay, **form}
    if case.method == "fp":
        optimizer: torch.optim.Optimizer = AdaBayesFP([weights], betas=(B1, B2), **options)
    else:
        optimizer = AdaBayes([weights], beta1=B1, **case.filter, **options)
    for g, factor in zip(torch.from_numpy(case.gradients).to(weights.dtype), case.factors):
        optimizer.param_groups[0]["lr"] = case.lr * factor
        weights.grad = g
        optimizer.step()
    return weights.double().numpy()


FORMS: dict[str, Callable[[Case], Array]] = {
    "single": lambda case: by_torch(case, foreach=False),
    "foreach": lambda case: by_torch(case, foreach=True),
    "fused": lambda case: by_torch(case, fused=True),
}


def assert_agrees(run: Callable[[Case], Array], case: Case) -> None:
    # bf16 weights lose most of each step to rounding, which the reference does not have: forms agree with one another.
    expected = by_torch(case, foreach=False) if case.dtype == "bfloat16" else by_reference(case)
    bound = case.bound * np.abs(expected).max()
    assert np.abs(expected - case.start).max() > 4 * bound  # something has moved, and that would be seen
    assert np.abs(run(case) - expected).max() < bound


ALL_CASES = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.method}-{c.factor.__name__}-{c.steps}-{c.dtype}-{c.lr}"
)


@pytest.mark.parametrize("form", FORMS)
@ALL_CASES
def test_all_forms_agree(case: Case, form: str) -> None:
    if form == "fused" and (reason := kernels.unavailable()):
        pytest.skip(reason)
    assert_agrees(FORMS[form], case)


def in_two_groups(case: Case) -> Array:
    """Return the final weights; the second half has a lower learning rate and no decay."""
    half = WEIGHTS // 2
    slow = replace(case, lr=3e-4, lr_sgd=0.03, weight_decay=0.0)
    return np.concatenate([exactly(case)[:half], exactly(slow)[half:]])


def test_groups_agree() -> None:
    case = Case(weight_decay=0.05)
    half = WEIGHTS // 2
    parts = [torch.from_numpy(case.start[:half].copy()), torch.from_numpy(case.start[half:].copy())]
    groups = [{"params": parts[:1], "weight_decay": 0.05}, {"params": parts[1:], "lr": 3e-4}]
    optimizer = AdaBayes(groups, lr=1e-3, lr_sgd=0.1, batch_size=BATCH)  # what scales lr scales lr_sgd
    for g in case.gradients:
        parts[0].grad, parts[1].grad = torch.from_numpy(g[:half].copy()), torch.from_numpy(g[half:].copy())
        optimizer.step()
    np.testing.assert_allclose(torch.cat(parts).numpy(), in_two_groups(case), rtol=0, atol=1e-10)
