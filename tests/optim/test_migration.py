"""The same settings as in the code that the paper's author published, and what comes out: docs/migration.md.

That code is told here in formulas, in its own units: gradients of the summed loss, ``s2`` the posterior variance.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP

BATCH, LR, LR_SGD, BETA1, BETA2 = 128, 1e-3, 0.1, 0.9, 0.999
K = BATCH * LR**2 / (2 * LR_SGD)
STEPS = 200


def gradients(steps: int = STEPS) -> Tensor:
    """Of the mean loss: three decades around the crossover between SGD and Adam, at 0.01."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(steps, 50, dtype=torch.float64, generator=random) * torch.logspace(-3, 0, 50)


def authors_adabayes(grads: Tensor, rates: list[float], drift: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the final weights, which start at 1; the gains, in units of the mean loss; and all steps."""
    w, m = torch.ones_like(grads[0]), torch.zeros_like(grads[0])
    s2 = torch.full_like(w, LR_SGD / BATCH)
    steps = []
    for t, (g, lr) in enumerate(zip(BATCH * grads, rates), 1):
        sigma2 = lr * (LR_SGD / LR) / BATCH
        decay = math.exp(-(lr**2) / sigma2)
        s2 = decay * s2 + sigma2 * (1 - decay)
        s2 = 1 / (1 / s2 + g**2)
        m = BETA1 * m + (1 - BETA1) * g
        steps.append(s2 * m / (1 - BETA1**t))
        w = (w - steps[-1]) * (1 - drift * lr / LR)
    return w, BATCH * s2, torch.stack(steps)


def authors_fp(grads: Tensor, drift: float = 0.0, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    w, m, v = torch.ones_like(grads[0]), torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    half = BATCH / (2 * LR_SGD)
    steps = []
    for t, g in enumerate(BATCH * grads, 1):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g**2
        precision = half + (half**2 + (v / (1 - BETA2**t) + eps) / LR**2).sqrt()
        steps.append(m / (1 - BETA1**t) / precision)
        w = (w - steps[-1]) * (1 - drift)
    return w, torch.stack(steps)


def ours(optimizer: Any, w: Tensor, grads: Tensor, rates: list[float]) -> None:
    for g, lr in zip(grads, rates):
        optimizer.param_groups[0]["lr"] = lr
        w.grad = g.clone()
        optimizer.step()


def started_as_authors(w: Tensor, **settings: Any) -> AdaBayes:
    """Every gain at lr_sgd, for which the default waits for a first gradient."""
    optimizer = AdaBayes([w], lr=LR, lr_sgd=LR_SGD, batch_size=BATCH, **settings)
    saved = optimizer.state_dict()
    start = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(w), "gain": torch.full_like(w, LR_SGD)}
    optimizer.load_state_dict({**saved, "state": {0: start}})
    return optimizer


@pytest.fixture
def w() -> Tensor:
    return torch.ones(50, dtype=torch.float64)


CONSTANT = [LR] * STEPS
DROP = [LR] * (STEPS // 2) + [LR / 10] * (STEPS // 2)


def test_adabayes_from_the_same_start_has_the_same_trajectory(w: Tensor) -> None:
    expected, gain, _ = authors_adabayes(gradients(), CONSTANT)
    optimizer = started_as_authors(w)
    ours(optimizer, w, gradients(), CONSTANT)
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(optimizer.effective_lr(w), gain, rtol=1e-10, atol=0)


def test_decay_comes_before_the_step_and_not_after_it(w: Tensor) -> None:
    """(1 - λ)(w - u) there, (1 - λ) w - u here: the difference d grows by λ u a step, and shrinks as the weights do."""
    drift = 5e-5
    expected, _, steps = authors_adabayes(gradients(), CONSTANT, drift)
    ours(started_as_authors(w, weight_decay=drift / LR), w, gradients(), CONSTANT)
    difference = torch.zeros_like(w)
    for u in steps:
        difference = (1 - drift) * difference + drift * u
    assert difference.abs().max() > 1e-8
    torch.testing.assert_close(w + difference, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rates", [CONSTANT, DROP], ids=["constant", "drop"])
def test_the_papers_dynamics_are_the_authors_to_the_first_order(w: Tensor, rates: list[float]) -> None:
    """Euler's noise is a share k above the exact one, so is each step at most; schedule and start are the author's."""
    expected, _, steps = authors_adabayes(gradients(), rates)
    ours(AdaBayes([w], lr=LR, lr_sgd=LR_SGD, batch_size=BATCH, dynamics="paper"), w, gradients(), rates)
    difference = (w - expected).abs()
    assert difference.max() > 1e-9
    assert (difference <= 1.1 * K * steps.abs().sum(0)).all()


def test_the_papers_dynamics_start_at_the_scheduled_rate_and_the_authors_at_the_base(w: Tensor) -> None:
    """Under a warm-up; without gradients of note, a gain is still where it began."""
    tiny = torch.full((1, 50), 1e-9, dtype=torch.float64)
    _, gain, _ = authors_adabayes(tiny, [LR / 10])
    optimizer = AdaBayes([w], lr=LR, lr_sgd=LR_SGD, batch_size=BATCH, dynamics="paper")
    ours(optimizer, w, tiny, [LR / 10])
    torch.testing.assert_close(gain, torch.full_like(w, LR_SGD), rtol=1e-3, atol=0)
    torch.testing.assert_close(optimizer.effective_lr(w), torch.full_like(w, LR_SGD / 10), rtol=1e-3, atol=0)


def test_the_default_forgets_its_other_start(w: Tensor) -> None:
    """From the first gradient's fixed point, not from lr_sgd; both filters forget it, in some 780 steps."""
    grads = gradients(6000)
    _, gain, _ = authors_adabayes(grads, [LR] * 6000)
    optimizer = AdaBayes([w], lr=LR, lr_sgd=LR_SGD, batch_size=BATCH)
    ours(optimizer, w, grads[:1], [LR])
    assert not torch.allclose(optimizer.effective_lr(w), authors_adabayes(grads[:1], [LR])[1], rtol=0.5)
    ours(optimizer, w, grads[1:], [LR] * 5999)
    torch.testing.assert_close(optimizer.effective_lr(w), gain, rtol=1e-3, atol=0)


def test_fp_has_the_same_trajectory_but_for_eps(w: Tensor) -> None:
    optimizer = AdaBayesFP([w], lr=LR, lr_sgd=LR_SGD)
    ours(optimizer, w, gradients(), CONSTANT)
    without, _ = authors_fp(gradients(), eps=0.0)
    torch.testing.assert_close(w, without, rtol=0, atol=1e-12)
    published, _ = authors_fp(gradients())
    assert 0 < (w - published).abs().max() < 1e-9


def test_decay_of_fp_comes_before_the_step_too(w: Tensor) -> None:
    drift = 5e-5
    ours(AdaBayesFP([w], lr=LR, lr_sgd=LR_SGD, weight_decay=drift / LR), w, gradients(), CONSTANT)
    expected, steps = authors_fp(gradients(), drift, eps=0.0)
    difference = torch.zeros_like(w)
    for u in steps:
        difference = (1 - drift) * difference + drift * u
    torch.testing.assert_close(w + difference, expected, rtol=0, atol=1e-12)
