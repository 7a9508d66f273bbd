"""The optimizers equal the paper's algorithms, as the reference states them, step for step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from adabayes import AdaBayes, AdaBayesFP, reference
from tests.conftest import Maker

STEPS = 1000
BATCH = 128
LR, LR_SGD, DECAY = 1e-3, 0.1, 0.05


def schedule(t: int) -> float:
    """Return the factor of the paper's schedule: a tenfold drop at three quarters of the run (t = 1, 2, ...)."""
    return 1.0 if t <= 0.75 * STEPS else 0.1


class Problem:
    """A noisy quadratic of the mean loss, whose gradients span seven decades from weight to weight."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.curvature = 10.0 ** np.linspace(-6, 1, 24)
        self.noise = self.curvature**0.5 * rng.standard_normal((STEPS, 24))
        self.start = rng.standard_normal(24)

    def mean_gradient(self, w: Any, t: int) -> Any:
        return self.curvature * w + self.noise[t - 1]


def run(make: Maker, reduction: str, **settings: Any) -> tuple[Any, Any]:
    """Return the parameters after each step, and the optimizer."""
    problem = Problem()
    w = torch.tensor(problem.start, requires_grad=True)
    optimizer = make([w], lr=LR, lr_sgd=LR_SGD, weight_decay=DECAY, reduction=reduction, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: schedule(i + 1))
    path = []
    for t in range(1, STEPS + 1):
        factor = BATCH if reduction == "sum" else 1
        w.grad = torch.tensor(factor * problem.mean_gradient(w.detach().numpy(), t))
        optimizer.step()
        scheduler.step()
        path.append(w.detach().numpy().copy())
    return np.array(path), optimizer


def paper(algorithm: Any, **settings: Any) -> tuple[Any, Any]:
    """Do the same with the reference, which ascends along gradients of the sum."""
    problem = Problem()
    steps = algorithm(
        lambda mu, t: -BATCH * problem.mean_gradient(mu, t),
        problem.start,
        lr_adam=lambda t: LR * schedule(t),
        lr_sgd=lambda t: LR_SGD * schedule(t),
        minibatch_size=BATCH,
        lam=lambda t: LR * schedule(t) * DECAY,
        **settings,
    )
    path, s2_post = zip(*(next(steps) for _ in range(STEPS)))
    return np.array(path), s2_post[-1]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adabayes_equals_algorithm_1(foreach: bool, reduction: str, beta1: float) -> None:
    path, optimizer = run(AdaBayes, reduction, dynamics="paper", batch_size=BATCH, beta1=beta1, foreach=foreach)
    expected, s2_post = paper(reference.adabayes, beta1=beta1)
    np.testing.assert_allclose(path, expected, rtol=1e-10, atol=1e-12)
    (w,) = optimizer.param_groups[0]["params"]
    np.testing.assert_allclose(optimizer.state[w]["gain"], BATCH * s2_post, rtol=1e-10)
    np.testing.assert_allclose(optimizer.effective_lr(w), BATCH * s2_post, rtol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_adabayes_fp_equals_algorithm_2(foreach: bool, reduction: str) -> None:
    path, optimizer = run(AdaBayesFP, reduction, betas=(0.9, 0.99), batch_size=BATCH, foreach=foreach)
    expected, s2_post = paper(reference.adabayes_fp, beta1=0.9, beta2=0.99)
    np.testing.assert_allclose(path, expected, rtol=1e-10, atol=1e-12)
    (w,) = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["lr"] = LR * schedule(STEPS)  # the scheduler is a step ahead, at the same rate
    np.testing.assert_allclose(optimizer.effective_lr(w), BATCH * s2_post, rtol=1e-10)


def test_the_two_algorithms_differ_from_each_other() -> None:
    """So that the equalities above say something about each."""
    one, _ = paper(reference.adabayes)
    two, _ = paper(reference.adabayes_fp)
    assert np.abs(one - two).max() > 1e-3


def test_papers_filter_starts_at_lr_sgd() -> None:
    w = torch.tensor([0.0, 0.0], dtype=torch.float64)
    optimizer = AdaBayes([w], lr=LR, lr_sgd=LR_SGD, batch_size=1, dynamics="paper")
    w.grad = torch.tensor([0.0, 1e-9], dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[w]["gain"].tolist() == pytest.approx([LR_SGD, LR_SGD], rel=1e-9)


def test_papers_filter_starts_at_the_lr_sgd_of_a_warm_up() -> None:
    """The letter of Algorithm 1, with the learning rates of the moment; a first step at 0 begins nothing."""
    w = torch.zeros(1, dtype=torch.float64)
    optimizer = AdaBayes([w], lr=LR, lr_sgd=LR_SGD, batch_size=1, dynamics="paper")
    w.grad = torch.ones_like(w)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.state[w]["gain"].item() == 0
    assert w.item() == 0
    w.grad = torch.full_like(w, 1e-9)
    optimizer.param_groups[0]["lr"] = 0.01 * LR
    optimizer.step()
    assert optimizer.state[w]["gain"].item() == pytest.approx(0.01 * LR_SGD, rel=1e-6)
