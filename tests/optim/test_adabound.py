"""AdaBound and AMSBound equal the authors' package, less its defects."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import adabound
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adabayes import AdaBound


def gradients(steps: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = scale * torch.logspace(-6, 2, 9, dtype=torch.float64)
    return sizes * torch.randn(steps, 9, dtype=torch.float64, generator=generator)


def path(optimizer: torch.optim.Optimizer, grads: torch.Tensor, drop_at: int | None = None) -> torch.Tensor:
    (w,) = optimizer.param_groups[0]["params"]
    points = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This overload of add", UserWarning)  # the package's own, of 2019
        warnings.filterwarnings("ignore", "This overload of addcmul", UserWarning)
        for t, g in enumerate(grads):
            if t == drop_at:
                optimizer.param_groups[0]["lr"] *= 0.1
            w.grad = g.clone()
            optimizer.step()
            points.append(w.detach().clone())
    return torch.stack(points)


def start() -> torch.Tensor:
    return torch.linspace(-1, 1, 9, dtype=torch.float64)


@settings(deadline=None, max_examples=25)
@given(
    st.floats(1e-4, 1e-1),
    st.floats(1e-3, 1.0),
    st.floats(1e-4, 0.5),
    st.sampled_from([0.0, 5e-4, 0.1]),
    st.booleans(),
    st.booleans(),
)
def test_equals_the_published_package(
    lr: float, final_lr: float, gamma: float, decay: float, amsbound: bool, foreach: bool
) -> None:
    common: dict[str, Any] = {
        "lr": lr,
        "final_lr": final_lr,
        "gamma": gamma,
        "weight_decay": decay,
        "amsbound": amsbound,
    }
    theirs = path(adabound.AdaBound([start()], **common), gradients(60), drop_at=40)
    ours = path(AdaBound([start()], **common, foreach=foreach), gradients(60), drop_at=40)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_gamma_zero_is_adam() -> None:
    """Where the package divides by zero."""
    ours = path(AdaBound([start()], lr=1e-2, gamma=0.0, eps=0.0), gradients(20))
    adam = path(torch.optim.Adam([start()], lr=1e-2, eps=0.0), gradients(20))
    torch.testing.assert_close(ours, adam, rtol=1e-12, atol=0)


def test_gamma_zero_at_lr_zero_moves_nothing(foreach: bool) -> None:
    w = start()
    path(AdaBound([w], lr=0.0, gamma=0.0, foreach=foreach), gradients(3))
    assert torch.equal(w, start())


@pytest.mark.parametrize("amsbound", [False, True])
def test_bounds_close_in_on_sgd(amsbound: bool) -> None:
    optimizer = AdaBound([start()], final_lr=0.1, gamma=0.5, amsbound=amsbound)
    grads = gradients(2000)
    points = path(optimizer, grads)
    (state,) = optimizer.state.values()
    torch.testing.assert_close(points[-1] - points[-2], -0.1 * state["exp_avg"], rtol=2e-3, atol=0)


def test_deepcopies_and_later_groups_keep_their_base_rates() -> None:
    """The package keeps them beside the groups: a copy lacks them, and a later group is never stepped."""
    w, v = start(), start()
    optimizer = AdaBound([w], lr=1e-3)
    optimizer.add_param_group({"params": [v], "lr": 1e-2})
    twin = copy.deepcopy(optimizer)
    for o in (optimizer, twin):
        for group in o.param_groups:
            group["lr"] *= 0.1
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        o.step()
    assert not torch.equal(v, start())
    assert [torch.equal(p, q) for p, q in zip(optimizer.state, twin.state)] == [True, True]
    assert [g["base_lr"] for g in twin.param_groups] == [1e-3, 1e-2]
