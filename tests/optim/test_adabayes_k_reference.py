"""Every form of AdaBayes-K computes the weights of ``adabayes.reference.adabayes_k``, block by block, in float64.

Eigenvectors have arbitrary signs, so weights are compared. ``tests.support.block_reference`` derives the tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adabayes import AdaBayesK, reference
from adabayes.kernels.cpu import library as kernels
from tests.support.block_reference import Array, Problem, Shape, draw_problem, reference_path, tolerance
from tests.support.torchrun import torchrun
from tests.workers import sharded_reference as worker

FORMS: dict[str, dict[str, bool]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"fused": True},
}
SHAPES: list[Shape] = [
    (4, 4),
    (3, 4),
    (7, 7),  # 2 x 2 blocks, padded at both edges
    (8, 12),  # 2 x 3 blocks
    (8, 20),  # 2 blocks, whose right side is above max_size
    (20, 3),  # its left side is above max_size
    (4, 1, 2, 2),
    (4, 5, 2, 2),
    (2, 1),
    (20, 20),  # both sides are above max_size: AdaBayes-FP
    (3,),
    (),
]
STEPS = 48  # the intervals of the schedule are 1, then 2 from step 16 on, then 4 from step 32 on


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> dict[str, bool]:
    if request.param == "fused" and (reason := kernels.unavailable()):
        pytest.skip(reason)
    return FORMS[request.param]


def train(problem: Problem, **options: Any) -> list[list[Array]]:
    """Return the weights after each step of the optimizer."""
    start, gradients, lrs, lr_sgd, block_size, max_size = problem
    weights = [torch.tensor(x) for x in start]
    optimizer = AdaBayesK(weights, lr=lrs[0], lr_sgd=lr_sgd, block_size=block_size, max_size=max_size, **options)
    path = []
    for lr, row in zip(lrs, gradients):
        optimizer.param_groups[0]["lr"] = lr
        for w, gradient in zip(weights, row):
            w.grad = torch.tensor(gradient)
        optimizer.step()
        path.append([w.numpy().copy() for w in weights])
    return path


def assert_equals_reference(path: list[list[Array]], problem: Problem, **options: Any) -> None:
    for t, (weights, expected) in enumerate(zip(path, reference_path(problem, **options), strict=True), 1):
        for w, e in zip(weights, expected, strict=True):
            np.testing.assert_allclose(
                w, e, rtol=0, atol=tolerance(problem), err_msg=f"step {t}, parameter of shape {w.shape}"
            )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learn_every": 1, "refresh": 1},
        {"learn_every": 2, "refresh": 3},
        {"learn_every": 4, "refresh": 10},
        {"cautious": False},
        {"centred": True},
        {"cautious": False, "centred": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_weights_equal_the_reference(form: dict[str, bool], options: dict[str, Any]) -> None:
    problem = draw_problem(SHAPES, steps=STEPS)
    assert_equals_reference(train(problem, **options, **form), problem, **options)


def test_weights_equal_the_reference_when_intervals_are_longest(form: dict[str, bool]) -> None:
    """From step 128 on, an eighth of the steps is above ``refresh``."""
    problem = draw_problem([(8, 8), (3, 4), (4, 4)], steps=160)
    assert_equals_reference(train(problem, **form), problem)


@settings(max_examples=10, deadline=None)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    lr_sgd=st.sampled_from([0.1, 10.0]),
    seed=st.integers(0, 2**32 - 1),
    options=st.fixed_dictionaries(
        {
            "learn_every": st.integers(1, 5),
            "refresh": st.integers(1, 10),
            "betas": st.sampled_from([(0.9, 0.99), (0.0, 0.9), (0.9, 0.5)]),  # V has no lower bound in the last case
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "cautious": st.booleans(),
            "centred": st.booleans(),
        }
    ),
)
@pytest.mark.parametrize("form_name", list(FORMS))
def test_weights_equal_the_reference_for_all_settings(
    form_name: str, shapes: list[Shape], lr_sgd: float, seed: int, options: dict[str, Any]
) -> None:
    if form_name == "fused" and (reason := kernels.unavailable()):
        pytest.skip(reason)
    problem = draw_problem(shapes, steps=STEPS, lr_sgd=lr_sgd, seed=seed)
    assert_equals_reference(train(problem, **options, **FORMS[form_name]), problem, **options)


def test_weights_equal_the_reference_in_two_processes() -> None:
    """The worker compares sharded and replicated parameters, and fails if they differ."""
    torchrun(2, worker.__name__)


# The equalities above say something about a rule only if the weights depend on it.


@pytest.mark.parametrize(
    "options",
    [
        {"learn_every": 1},
        {"learn_every": 4},
        {"refresh": 1},
        {"refresh": 3},
        {"cautious": False},
        {"centred": True},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_weights_depend_on_each_option(options: dict[str, Any]) -> None:
    problem = draw_problem([(4, 4)], steps=STEPS)
    assert largest_difference(reference_path(problem), reference_path(problem, **options)) > 1e-4


@pytest.mark.parametrize("name", ["_interval", "_least_ratio"])
def test_weights_depend_on_the_schedule_and_on_the_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw_problem([(4, 4)], steps=STEPS)
    path = reference_path(problem)
    replacements = {"_interval": lambda t, longest: longest, "_least_ratio": lambda beta1, beta2: 0.0}
    monkeypatch.setattr(reference, name, replacements[name])
    assert largest_difference(path, reference_path(problem)) > 1e-4


def test_weights_depend_on_the_offset_and_on_the_sides() -> None:
    start, gradients, *_ = draw_problem([(4, 4)], steps=STEPS)

    def last(**options: Any) -> Array:
        steps = reference.adabayes_k(lambda _, t: gradients[t - 1][0], start[0], lr=0.01, lr_sgd=10.0, **options)
        return [next(steps) for _ in range(STEPS)][-1]

    for options in ({"offset": 1}, {"sides": (0,)}, {"sides": (1,)}, {"sides": ()}):
        assert np.abs(last(**options) - last()).max() > 1e-4


def largest_difference(one: list[list[Array]], other: list[list[Array]]) -> float:
    return max(float(np.abs(a - b).max()) for x, y in zip(one, other) for a, b in zip(x, y))
