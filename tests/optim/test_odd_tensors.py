"""Odd gradients, parameters and state: a step or an error, never a crash, a wrong number or a lost bit."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, kernels
from tests.conftest import Maker, assert_same

CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
if kernels.unavailable() is None:
    FORMS.append({"fused": True})
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)) + str(next(iter(form.values()))))


def moved(cls: Any, gradient: Tensor | None, start: Tensor | None = None, **options: Any) -> Tensor:
    """Where a parameter of ones is after a step."""
    w = nn.Parameter(torch.ones(gradient.shape if gradient is not None else 3) if start is None else start)
    w.grad = gradient
    cls([w], lr=1e-2, **options).step()
    return w.detach()


# Weights that have had no gradient yet


@EACH_FORM
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("unstarted", [3, 40])
def test_training_goes_on_exactly_while_some_weights_have_had_no_gradient(
    form: dict[str, Any], state_dtype: torch.dtype | None, unstarted: int
) -> None:
    """Few or many of them; each starts at a step of its own, some after the checkpoint."""

    def start() -> tuple[Tensor, AdaBayes]:
        w = torch.linspace(-1, 1, 100)
        return w, AdaBayes([w], lr=1e-2, state_dtype=state_dtype, **form)

    def go(w: Tensor, optimizer: AdaBayes, steps: range) -> None:
        for t in steps:
            w.grad = torch.randn(100, generator=torch.Generator().manual_seed(t))
            waits = torch.arange(100) % (100 // unstarted) == 0
            w.grad[waits & (torch.arange(100) > 10 * t)] = 0
            optimizer.step()

    w, optimizer = start()
    go(w, optimizer, range(5))
    assert (optimizer.state[w]["gain"] == 0).any()
    v, resumed = start()
    v.copy_(w)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    go(w, optimizer, range(5, 12))
    go(v, resumed, range(5, 12))
    assert_same(optimizer, resumed)


@EACH_FORM
def test_an_embedding_ends_with_the_same_bits_however_often_it_is_saved(form: dict[str, Any]) -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(200, 4)
    optimizers = [AdaBayes(copy.deepcopy(embedding).parameters(), **form) for _ in range(2)]
    for i in range(40):
        rows = torch.randint(200, (20,), generator=torch.Generator().manual_seed(i))
        for optimizer in optimizers:
            (weight,) = optimizer.param_groups[0]["params"]
            optimizer.zero_grad()
            nn.functional.embedding(rows, weight).square().mean().backward()
            optimizer.step()
        optimizers[1].load_state_dict(optimizers[1].state_dict())
    assert_same(*optimizers)


@EACH_FORM
def test_a_weight_whose_gain_has_underflown_is_not_one_without_gradient(form: dict[str, Any]) -> None:
    w = torch.zeros(3)
    optimizer = AdaBayes([w], lr=1e-3, lr_sgd=0.1, batch_size=10, **form)
    w.grad = torch.tensor([1e20, 0.0, 1.0])
    optimizer.step()
    assert optimizer.state[w]["gain"][0] == 0
    assert optimizer.effective_lr(w).tolist()[:2] == [0.0, pytest.approx(0.1)]
    assert optimizer.relative_gain(w).tolist()[:2] == [0.0, 1.0]


# Gradients without memory, or whose memory holds something else than their numbers


@CLASSES
@EACH_FORM
def test_gradients_that_are_zero_without_memory(cls: Any, form: dict[str, Any]) -> None:
    w = nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = cls([w], **form)
    for _ in range(3):
        optimizer.zero_grad()
        torch.sgn(w).sum().backward()
        assert w.grad is not None
        assert w.grad._is_zerotensor()
        optimizer.step()
    assert torch.equal(w, torch.linspace(-1, 1, 5))
    assert optimizer.state[w]["step"].item() == 3


@CLASSES
@EACH_FORM
def test_a_negated_view_is_descended(cls: Any, form: dict[str, Any]) -> None:
    """As autograd makes one for parameters of one element in complex arithmetic."""
    w = nn.Parameter(torch.tensor([0.5]))
    optimizer = cls([w], lr=1e-2, **form)
    loss = torch.complex(torch.tensor([0.0]), w).conj().imag.sum()  # -w
    (grad,) = torch.autograd.grad(loss, [w])
    assert grad.item() == -1
    w.grad = grad if grad.is_neg() else torch._neg_view(torch.ones(1))
    optimizer.step()
    assert w.item() > 0.5
    for size in (5, 300):
        lazy, plain = torch._neg_view(torch.ones(size)), -torch.ones(size)
        assert lazy.is_neg()
        assert torch.equal(moved(cls, lazy, **form), moved(cls, plain, **form))


def test_a_conjugated_view_is_resolved(make: Maker, foreach: bool) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(4, dtype=torch.complex64), torch.randn(4, dtype=torch.complex64)
    lazy = gradient.conj()
    assert lazy.is_conj()
    one, other = (moved(make, g, start.clone(), foreach=foreach) for g in (lazy, lazy.resolve_conj()))
    assert torch.equal(one, other)


NO_MEMORY = """
import torch
from adabayes import {cls}
for what, size in [("w.grad", 0), ("w", 0), ("w", 4), ("state", 0), ("state", 4)]:
    w = torch.ones(5)
    optimizer = {cls}([w])
    w.grad = torch.ones(5)
    optimizer.step()
    w.grad = torch.ones(5)
    tensor = {{"w.grad": w.grad, "w": w, "state": optimizer.state[w]["exp_avg"]}}[what]
    tensor.untyped_storage().resize_(size)
    try:
        optimizer.step()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize("form", ["", ", fused=False, foreach=True", ", fused=False, foreach=False"])
def test_a_storage_that_was_shrunk_is_an_error(form: str) -> None:
    """In a process of its own, which without this check would crash (as torch's optimizers do)."""
    script = "".join(
        NO_MEMORY.format(cls=cls).replace("([w])", f"([w]{form})")
        for cls in ("AdaBayes", "AdaBayesFP", "AdaBayesK", *([] if form else ["AdaBound"]))
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == (15 if form else 20)
    assert all("of shape (5,) needs 20 bytes of memory but its storage has" in line for line in said)


@CLASSES
def test_functionalization_is_an_error_or_a_step(cls: Any) -> None:
    w = torch.ones(3)
    optimizer = cls([w])

    def step(gradient: Tensor) -> Tensor:
        w.grad = gradient
        optimizer.step()
        return w.clone()

    try:
        torch.func.functionalize(step)(torch.ones(3))
    except RuntimeError:
        return
    assert (w < 1).all()


# Other types and shapes


@CLASSES
@EACH_FORM
@pytest.mark.parametrize("pair", [(torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)])
def test_a_gradient_of_another_dtype_is_converted(cls: Any, form: dict[str, Any], pair: Any) -> None:
    """Also where both have the same number of bytes."""
    param, gradient = pair
    if not hasattr(Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")

    def at_end(convert: bool) -> Tensor:
        w = nn.Parameter(torch.ones(5, dtype=param))
        w.grad_dtype = None if convert else gradient
        optimizer = cls([w], lr=1e-2, **form)
        for t in range(3):
            g = torch.linspace(-1, 2, 5).to(gradient) * (t + 1)
            w.grad = g.to(param) if convert else g
            optimizer.step()
        return w.detach()

    torch.testing.assert_close(at_end(False), at_end(True), rtol=1e-2 if param == torch.bfloat16 else 1e-6, atol=0)


@CLASSES
def test_state_that_is_replaced_as_a_whole_takes_effect_at_once(cls: Any) -> None:
    w = nn.Parameter(torch.ones(5))
    optimizer = cls([w])
    for _ in range(3):
        w.grad = torch.ones(5)
        optimizer.step()
    optimizer.state = defaultdict(dict)
    w.data.fill_(1.0)
    w.grad = torch.ones(5)
    optimizer.step()
    assert optimizer.state[w]["step"].item() == 1
    fresh = nn.Parameter(torch.ones(5))
    expected = cls([fresh])
    fresh.grad = torch.ones(5)
    expected.step()
    assert_same(optimizer, expected)


@pytest.mark.parametrize("named", [False, True])
def test_state_of_another_shape_is_refused_and_nothing_changes(make: Maker, named: bool) -> None:
    def made(columns: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, columns))
        optimizer = make(net.named_parameters() if named else net.parameters())
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return net, optimizer

    (_, other), (_, optimizer) = made(4), made(5)
    before = copy.deepcopy(optimizer.state_dict())
    name = r"parameter 2 \(1\.weight\)" if named else "parameter 2"
    with pytest.raises(ValueError, match=rf"exp_avg of {name} has shape \((1, )?4, 3\).*\(5, 3\).*Nothing was changed"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(v, after["state"][i][k]) for i, s in before["state"].items() for k, v in s.items())


def test_a_step_count_without_a_number_is_refused(make: Maker) -> None:
    w = torch.ones(3)
    optimizer = make([w])
    w.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.empty(0)
    with pytest.raises(ValueError, match=r"step of parameter 0 has shape \(0,\)"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[w]["step"].item() == 1


# Large numbers


@pytest.mark.skipif(kernels.unavailable() is not None, reason="compares with the kernels")
@CLASSES
@pytest.mark.parametrize("exponent", range(0, 31, 2))
def test_the_kernel_moves_a_weight_as_far_as_foreach_does(cls: Any, exponent: int) -> None:
    """Up to gradients whose mean square is beyond fp32 (6e20 at beta2 = 0.999), where nothing moves, as in AdamW."""
    for gradient in (10.0**exponent, 5 * 10.0**exponent, 1.9 * 10.0**exponent):
        w = [torch.zeros(70), torch.zeros(70)]
        for p, form in zip(w, ({"fused": True}, {"foreach": True})):
            optimizer = cls([p], lr=1e-2, **form)
            for sign in (1, 1, -1):
                p.grad = torch.full((70,), sign * gradient)
                optimizer.step()
        torch.testing.assert_close(*w, rtol=1e-5, atol=1e-7)
        assert all(p.isfinite().all() for p in w)
        if cls is AdaBayesFP and gradient < 1e20:
            assert (w[0] < -1e-3).all()
