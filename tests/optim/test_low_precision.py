"""bf16 state and bf16 parameters: what stochastic rounding keeps that rounding to nearest loses."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, kernels
from adabayes._util import random_bits
from adabayes.optim._engine import rounding
from tests.conftest import assert_same

CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])
FORMS: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
if kernels.unavailable() is None:
    FORMS.append({"fused": True})
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)) + str(next(iter(form.values()))))


def rounded(values: torch.Tensor, key: int, stream: str = "exp_avg") -> torch.Tensor:
    return rounding.round_to_bf16(values, values, key, stream)


@pytest.mark.parametrize("stream", list(random_bits.STREAMS))
@pytest.mark.parametrize("value", [1.0 + 1 / 1000, -3.14159, 1e-30, 123.456])
def test_mean_of_many_roundings_is_the_value(value: float, stream: str) -> None:
    """Within four standard errors; and only the two neighbours in bf16 occur."""
    count = 100_000
    x = torch.full((count,), value)
    key = random_bits.key_of(1, 2, 3)
    results = rounded(x, key, stream).double()
    low, high = results.min(), results.max()
    assert len(results.unique()) == 2
    ulp = (high - low).item()
    assert low <= value <= high
    assert results.mean().item() == pytest.approx(x[0].item(), abs=4 * ulp / 2 / math.sqrt(count))


def test_roundings_of_one_element_are_independent_from_step_to_step() -> None:
    """The mean over steps, of single elements; and no memory from one step to the next."""
    value = torch.full((64,), 1.0 + 0.3 / 128)
    up = torch.stack([rounded(value, random_bits.key_of(0, 0, t)) > 1 for t in range(4000)]).double()
    assert up.mean(0).sub(0.3).abs().max() < 5 * math.sqrt(0.3 * 0.7 / 4000)
    centred = up - up.mean(0)
    correlation = (centred[1:] * centred[:-1]).mean(0) / (0.3 * 0.7)
    assert correlation.abs().max() < 5 / math.sqrt(4000)


def test_streams_and_neighbours_are_not_alike() -> None:
    value = torch.full((10_000,), 1.0 + 0.5 / 128)
    draws = {stream: (rounded(value, 12345, stream) > 1).double() - 0.5 for stream in random_bits.STREAMS}
    for a in draws:
        for b in draws:
            if a != b:
                assert abs((draws[a] * draws[b]).mean()) < 0.25 * 5 / math.sqrt(10_000)


def test_special_values_stay() -> None:
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0]
    x = torch.tensor(special * 50)
    result = rounded(x, 7).float().reshape(50, 5)
    assert (result[:, 0] == math.inf).all()
    assert (result[:, 1] == -math.inf).all()
    assert result[:, 2].isnan().all()
    assert (result[:, 3:] == 0).all()
    strange = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(strange, 7).isnan().all()


@CLASSES
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forms_round_alike(cls: type[AdaBayes], param_dtype: torch.dtype) -> None:
    """The same random bits in every form: a difference in the last place of fp32 seldom shows in bf16."""
    results = []
    for form in FORMS:
        params = [torch.linspace(-1, 1, n).to(param_dtype) for n in (1000, 37)]
        params.append(torch.linspace(-1, 1, 240).reshape(2, 3, 8, 5).to(param_dtype, memory_format=torch.channels_last))
        optimizer = cls(
            params, lr=1e-2, weight_decay=0.1, state_dtype=torch.bfloat16, stochastic_rounding=True, seed=5, **form
        )
        for p in params:
            generator = torch.Generator().manual_seed(p.numel())
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()
        results.append([entry for p in params for entry in (p, *optimizer.state[p].values())])
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert a.dtype == b.dtype
            if a.dtype == torch.bfloat16:
                assert (a != b).double().mean() < 0.01
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)


@CLASSES
@EACH_FORM
def test_seed_decides(cls: type[AdaBayes], form: dict[str, Any]) -> None:
    def run(seed: int) -> Any:
        w = torch.linspace(-1, 1, 500)
        optimizer = cls([w], state_dtype=torch.bfloat16, seed=seed, **form)
        for t in range(3):
            w.grad = torch.randn(500, generator=torch.Generator().manual_seed(t))
            optimizer.step()
        return optimizer

    assert_same(run(1), run(1))
    one, two = run(1).state, run(2).state
    assert not torch.equal(next(iter(one.values()))["exp_avg"], next(iter(two.values()))["exp_avg"])


@CLASSES
@EACH_FORM
def test_state_takes_four_bytes_per_weight_and_is_saved_exactly(cls: type[AdaBayes], form: dict[str, Any]) -> None:
    def start() -> tuple[torch.Tensor, Any]:
        w = torch.linspace(-1, 1, 100)
        return w, cls([w], state_dtype=torch.bfloat16, **form)

    def go(w: torch.Tensor, optimizer: Any, steps: range) -> None:
        for t in steps:
            w.grad = torch.randn(100, generator=torch.Generator().manual_seed(t))
            optimizer.step()

    w, optimizer = start()
    go(w, optimizer, range(5))
    assert sum(v.nbytes for k, v in optimizer.state[w].items() if k != "step") == 400
    saved, weights = copy.deepcopy(optimizer.state_dict()), w.clone()
    go(w, optimizer, range(5, 10))
    v, resumed = start()
    v.copy_(weights)
    resumed.load_state_dict(saved)
    assert resumed.state[v]["exp_avg"].dtype == torch.bfloat16
    go(v, resumed, range(5, 10))
    assert_same(optimizer, resumed)


@EACH_FORM
def test_gain_relaxes_though_each_change_is_below_half_a_unit(form: dict[str, Any]) -> None:
    """At the paper's settings the gain changes by a thousandth a step: rounded to nearest it would stand still."""
    w = torch.zeros(4096)
    optimizer = AdaBayes([w], lr=1e-3, lr_sgd=0.1, batch_size=128, state_dtype=torch.bfloat16, **form)
    exact = AdaBayes([torch.zeros(1, dtype=torch.float64)], lr=1e-3, lr_sgd=0.1, batch_size=128)
    for t in range(600):
        for o in (optimizer, exact):
            (p,) = o.param_groups[0]["params"]
            p.grad = torch.full_like(p, 0.05 if t == 0 else 0.0)
            o.step()
    gain = optimizer.state[w]["gain"].double()
    (expected,) = (state["gain"].item() for state in exact.state.values())
    assert expected > 2 * 0.018  # it has moved far from where it began
    assert gain.mean().item() == pytest.approx(expected, rel=0.005)


@CLASSES
@EACH_FORM
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_small_decay_shrinks_bf16_weights(cls: type[AdaBayes], form: dict[str, Any], stochastic: bool) -> None:
    """1e-5 a step: rounded to nearest, nothing ever happens."""
    w = torch.ones(4096, dtype=torch.bfloat16)
    optimizer = cls([w], lr=1e-3, weight_decay=0.01, stochastic_rounding=stochastic, **form)
    steps = 1000
    for _ in range(steps):
        w.grad = torch.zeros_like(w)
        optimizer.step()
    expected = (1 - 1e-5) ** steps if stochastic else 1.0
    # A random walk of steps of 1/256 with probability 1e-5 * 256 each: over all weights, a spread of 1e-4.
    assert w.double().mean().item() == pytest.approx(expected, abs=5e-4 if stochastic else 0)


@CLASSES
def test_weights_with_gaps_in_memory_round_as_without(cls: type[AdaBayes]) -> None:
    """A view that takes every other number; no kernel serves it."""
    together = torch.linspace(-1, 1, 12).reshape(4, 3).bfloat16()
    apart = torch.zeros(4, 6, dtype=torch.bfloat16)[:, ::2].copy_(together)
    for w in (together, apart):
        optimizer = cls([w], lr=1e-2, foreach=True, stochastic_rounding=True)
        for _ in range(5):
            w.grad = torch.ones(4, 3, dtype=torch.bfloat16)
            optimizer.step()
    assert torch.equal(together, apart)


@CLASSES
@EACH_FORM
def test_small_steps_arrive_in_bf16_weights(cls: type[AdaBayes], form: dict[str, Any]) -> None:
    """Steps of a tenth of the least change of a bf16 weight, against the same in fp32."""
    low, high = torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096)
    rounding: dict[str, Any] = {"stochastic_rounding": True}
    for w, options in ((low, {**form, **rounding}), (high, form)):
        optimizer = cls([w], lr=1e-4, lr_sgd=4e-4, **options)
        for _ in range(200):
            w.grad = torch.ones_like(w)
            optimizer.step()
    assert low.double().mean().item() == pytest.approx(high.double().mean().item(), abs=1e-3)
    assert high.mean() < 0.99


@CLASSES
def test_training_with_bf16_state_ends_as_with_fp32(cls: type[AdaBayes]) -> None:
    """A real network on real data: the difference is within the spread of seeds."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)

    def final_loss(seed: int, state_dtype: torch.dtype | None) -> float:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = cls(net.parameters(), lr=3e-3, lr_sgd=0.3, state_dtype=state_dtype, seed=seed)
        for _ in range(20):
            for batch in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            return nn.functional.cross_entropy(net(x), y).item()

    fp32, bf16 = ([final_loss(seed, dtype) for seed in range(4)] for dtype in (None, torch.bfloat16))
    assert np.mean(fp32) < 0.2
    standard_error = math.sqrt((np.var(fp32, ddof=1) + np.var(bf16, ddof=1)) / 4)
    assert abs(np.mean(fp32) - np.mean(bf16)) < 3 * standard_error


def test_compiled_step_rounds_alike() -> None:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        w = torch.linspace(-1, 1, 64)
        optimizer = AdaBayes([w], state_dtype=torch.bfloat16, foreach=True)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for t in range(3):
            w.grad = torch.randn(64, generator=torch.Generator().manual_seed(t))
            step()
        results.append(optimizer.state[w]["gain"])
    assert (results[0] != results[1]).double().mean() < 0.05


def test_wrong_calls() -> None:
    wrongs: list[Any] = [torch.float16, "float8"]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"Invalid state_dtype: .*torch\.bfloat16"):
            AdaBayes([torch.zeros(1)], state_dtype=wrong)
    w = torch.zeros(1, dtype=torch.float64)
    optimizer = AdaBayes([w], state_dtype=torch.bfloat16)
    w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match=r"not for torch\.float64"):
        optimizer.step()
