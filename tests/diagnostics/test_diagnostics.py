"""Diagnostics, against known gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, optim
from adabayes.bench.torch_steps import state_bytes
from adabayes.diagnostics import Correlations, Observer, matrix_memory_plan, memory_plan, regimes
from adabayes.filtering import fixed_point
from adabayes.optim.extend import TwoRateOptimizer
from adabayes.rates import MATRIX_SCALE
from tests.support.operations import count_operations

matplotlib.use("agg")

LR, LR_SGD = 1e-3, 0.1
CROSSOVER = LR / LR_SGD
PAIR = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])


def steady(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor], steps: int = 20) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p, g in zip(params, gradients):
            p.grad = g.clone()
        optimizer.step()


@PAIR
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_shares_and_quantiles_of_known_gradients(cls: type[AdaBayes], reduction: Literal["mean", "sum"]) -> None:
    """Known sizes on either side of the crossover, in tensors of different size."""
    a, b = torch.zeros(100), torch.zeros(10, 30)
    optimizer = cls([("a", a), ("b", b)], LR, LR_SGD, reduction=reduction, batch_size=64)
    factor = 64 if reduction == "sum" else 1
    first = torch.where(torch.arange(100) < 25, 0.01 * CROSSOVER, 10 * CROSSOVER)
    second = torch.full((10, 30), 0.01 * CROSSOVER)
    steady(optimizer, [factor * first, factor * second])
    report = regimes(optimizer)
    assert [row.name for row in report.tensors] == ["a", "b"]
    assert [row.sgd_like for row in report.tensors] == [0.25, 1.0]
    assert report.total.weights == 400
    assert report.total.sgd_like == pytest.approx(325 / 400)
    assert report.total.adam_like == pytest.approx(75 / 400)
    slow, fast = fixed_point((10 * CROSSOVER) ** 2, LR, LR_SGD), LR_SGD
    assert report.tensors[0].lr_quantiles == pytest.approx((slow, slow, fast), rel=0.02)
    assert report.total.lr_quantiles == pytest.approx((slow, fast, fast), rel=0.02)  # weighted by size


@PAIR
def test_effective_learning_rates_follow_the_schedule(cls: type[AdaBayes]) -> None:
    w = torch.zeros(8)
    optimizer = cls([w], LR, LR_SGD)
    steady(optimizer, [torch.logspace(-4, 0, 8)])
    before = regimes(optimizer)
    optimizer.param_groups[0]["lr"] *= 0.1
    after = regimes(optimizer)
    assert after.total.lr_quantiles == pytest.approx([0.1 * lr for lr in before.total.lr_quantiles])
    assert after.total.lr_sgd == pytest.approx(0.01)
    assert after.total.sgd_like == before.total.sgd_like


@PAIR
def test_regimes_do_not_depend_on_the_schedule(cls: type[AdaBayes]) -> None:
    """At the end of a cosine, at lr = 0, nothing moves, but the shares are what they were."""
    w = torch.zeros(8)
    optimizer = cls([w], LR, LR_SGD)
    steady(optimizer, [torch.logspace(-4, 0, 8)])
    before = regimes(optimizer)
    assert 0 < before.total.sgd_like < 1
    optimizer.param_groups[0]["lr"] = 0.0
    after = regimes(optimizer)
    assert after.total.sgd_like == before.total.sgd_like
    assert after.total.lr_quantiles == (0.0, 0.0, 0.0)


def test_weights_that_are_nan_are_neither(tmp_path: Path) -> None:
    w = torch.zeros(4)
    optimizer = AdaBayes([w], LR, LR_SGD)
    observer = Observer(optimizer)
    steady(optimizer, [torch.tensor([float("nan"), 1e-6, 1.0, 1.0])])
    total = regimes(optimizer).total
    assert (total.sgd_like, total.adam_like) == (0.25, 0.5)
    observer.plot(tmp_path / "rates.png")


def test_total_over_large_tensors_is_sampled_but_right() -> None:
    w = torch.zeros(1_000_003)
    optimizer = AdaBayesFP([w], LR, LR_SGD)
    sizes = torch.logspace(-3, 1, 1_000_003) * CROSSOVER
    steady(optimizer, [sizes], steps=1)
    (row,) = regimes(optimizer).tensors
    assert row.sgd_like == pytest.approx(0.75, abs=1e-4)
    expected = fixed_point((0.1 * CROSSOVER) ** 2, LR, LR_SGD)  # the median gradient
    assert row.lr_quantiles[1] == pytest.approx(expected, rel=1e-3)


def test_weights_without_gradient_count_as_sgd_like() -> None:
    w = torch.zeros(4)
    optimizer = AdaBayes([w], LR, LR_SGD)
    steady(optimizer, [torch.tensor([0.0, 0.0, 0.0, 1.0])])
    assert regimes(optimizer).total.sgd_like == 0.75


@PAIR
@pytest.mark.parametrize("foreach", [False, True, None], ids=["single", "foreach", "fused"])
def test_a_gain_that_has_underflown_is_not_a_weight_without_gradient(cls: type[AdaBayes], foreach: bool | None) -> None:
    """In fp32, the square of 1e20 is infinite and the gain 0: the weight rests, it does not move at lr_sgd."""
    w = torch.zeros(3)
    optimizer = cls([w], LR, LR_SGD, batch_size=10, foreach=foreach)
    steady(optimizer, [torch.tensor([1e20, 0.0, 0.1 * CROSSOVER])], steps=1)
    underflown, unstarted, usual = optimizer.relative_gain(w).tolist()
    assert (underflown, unstarted) == (0.0, 1.0)
    assert 0 < usual < 1
    assert optimizer.effective_lr(w).tolist() == pytest.approx([0.0, LR_SGD, usual * LR_SGD])
    total = regimes(optimizer).total
    assert (total.sgd_like, total.adam_like) == pytest.approx((2 / 3, 1 / 3))


@PAIR
def test_relative_gains_are_those_of_the_components_of_complex_weights(cls: type[AdaBayes]) -> None:
    w = torch.zeros(2, 3, dtype=torch.complex64)
    optimizer = cls([w], LR, LR_SGD)
    assert not optimizer.has_state(w)
    with pytest.raises(RuntimeError, match="no state yet"):
        optimizer.relative_gain(w)
    steady(optimizer, [torch.full((2, 3), 1.0 + 0.0j)])
    assert optimizer.has_state(w)
    gain = optimizer.relative_gain(w)
    assert gain.shape == (2, 3, 2)
    assert (gain[..., 0] < 0.1).all()
    assert (gain[..., 1] == 1).all()


def test_table_fits_a_terminal_and_is_plain_data(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(30, 20))), nn.Linear(20, 1))
    net.register_parameter("a_name_that_is_as_long_as_names_in_transformers_are", nn.Parameter(torch.zeros(12_345_678)))
    optimizer = AdaBayes(net.parameters())
    for p in net.parameters():
        p.grad = torch.full_like(p, 0.0123)
    optimizer.step()
    report = regimes(optimizer, model=net)
    text = str(report)
    assert "0.0.0.weight" in text
    assert max(map(len, text.splitlines())) <= 80
    assert json.loads(json.dumps(report.as_dict()))["total"]["weights"] == 12_345_678 + 641
    report.print()
    printed = capsys.readouterr().out
    assert "0.0.0.weight" in printed
    assert "12,345,678" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_notebooks_show_tables_with_every_cell_and_no_markup_from_names() -> None:
    net = nn.ModuleDict({"<b>": nn.Linear(3, 2)})
    optimizer = AdaBayes(net.parameters(), lr=1e-3, lr_sgd=1e-2)
    watch = Correlations(net)
    for _ in range(3):
        net["<b>"](torch.randn(4, 3)).square().sum().backward()
        watch.see()
        optimizer.step()
    report = regimes(optimizer, net)
    for shown, cells in (
        (report._repr_html_(), [*report.cells(), (report.hint,)]),
        (watch._repr_html_(), [line.split("  ") for line in watch.table().splitlines()[:1]]),
        (memory_plan(7e9, 8)._repr_html_(), [("state", "7"), ("total", "14")]),
    ):
        assert shown.startswith("<table>")
        for cell in (cell for row in cells for cell in row):
            assert escape(cell.strip()) in shown
        assert "<b>" not in shown
    assert report._repr_html_().count("<tfoot>") == 1
    assert watch.verdict in watch._repr_html_()


@pytest.mark.parametrize(
    ("gradient", "hint"),
    [(1e-5, "move like SGD: lr has no effect"), (1.0, "move like Adam: lr_sgd has no effect"), (0.01, "")],
)
def test_a_learning_rate_without_effect_is_told(gradient: float, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    w = torch.zeros(100)
    optimizer = AdaBayes([w], lr_sgd=0.1)
    steady(optimizer, [torch.logspace(-0.3, 0.3, 100) * gradient])
    report = regimes(optimizer)
    report.print()
    if hint:
        assert hint in report.hint
        for text in (str(report), capsys.readouterr().out):
            assert hint in " ".join(text.split())
            assert max(map(len, text.splitlines())) <= 80
    else:
        assert report.hint == ""


def test_table_prints_without_rich() -> None:
    script = """
import sys
sys.modules["rich"] = None
import torch
from adabayes import AdaBayes
from adabayes.diagnostics import regimes
w = torch.zeros(2)
optimizer = AdaBayes([w])
w.grad = torch.ones(2)
optimizer.step()
regimes(optimizer).print()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "group 0, parameter 0" in done.stdout


@PAIR
def test_observed_points_lie_on_the_fixed_point_curve(cls: type[AdaBayes]) -> None:
    """Steady gradients over five decades: the paper's learning-rate figure, in numbers."""
    w = torch.zeros(50, dtype=torch.float64)
    optimizer = cls([("w", w)], LR, LR_SGD)
    sizes = torch.logspace(-4, 1, 50, dtype=torch.float64) * CROSSOVER
    with Observer(optimizer, per_tensor=50) as observer:
        steady(optimizer, [sizes], steps=50)
    (points,) = observer.points()
    torch.testing.assert_close(points.adam_lr, LR / sizes)
    torch.testing.assert_close(points.effective_lr, fixed_point(sizes**2, LR, LR_SGD), rtol=0.02, atol=0)


def test_observer_changes_nothing() -> None:
    """Neither results nor the global generator, whatever the shapes."""

    def train(observed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 2))
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        scale = nn.Parameter(torch.ones(()))
        spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        params = [*net.parameters(), scale, spectrum, nn.Parameter(torch.empty(0))]
        optimizer = AdaBayes(params)
        observer = Observer(optimizer, per_tensor=5) if observed else None
        for _ in range(3):
            optimizer.zero_grad()
            (scale * net(torch.randn(2, 1, 4, 4)) * spectrum.abs().sum()).square().mean().backward()
            optimizer.step()
        if observer:
            assert [len(p.adam_lr) for p in observer.points()] == [5, 3, 5, 2, 1, 5]
        return [p.detach() for p in params] + [torch.rand(1)]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False)))


def test_observer_stops_when_closed() -> None:
    w = torch.zeros(3)
    optimizer = AdaBayes([w])
    observer = Observer(optimizer)
    steady(optimizer, [torch.ones(3)])
    observer.close()
    before = observer.points()[0].adam_lr
    steady(optimizer, [torch.full((3,), 5.0)])
    assert torch.equal(observer.points()[0].adam_lr, before)


def test_plot_draws_the_weights_and_the_four_lines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    a, b = torch.zeros(40), torch.zeros(30)
    groups: list[dict[str, Any]] = [{"params": [("a", a)]}, {"params": [("b", b)], "lr": 1e-2}]
    optimizer = AdaBayes(groups, LR, LR_SGD)
    observer = Observer(optimizer)
    steady(optimizer, [torch.logspace(-4, 0, 40), torch.zeros(30)])
    ax = observer.plot(tmp_path / "rates.png")
    legend = ax.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["Adam, lr / rms(g)", "SGD, lr_sgd", "fixed point", "crossover", "weights"]
    drawn = [np.size(line.get_xdata()) for line in ax.get_lines() if line.get_marker() == "."]
    assert drawn[:2] == [40, 30]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_all_optimizers_with_two_learning_rates_are_listed_once() -> None:
    public = [getattr(optim, name) for name in optim.__all__]
    ours = [value for value in public if isinstance(value, type) and issubclass(value, TwoRateOptimizer)]
    assert list(optim.TWO_RATE_OPTIMIZERS) == ours


def test_wrong_calls() -> None:
    w = torch.zeros(2)
    with pytest.raises(TypeError, match=r"SGD has one learning rate.*AdaBayes"):
        regimes(torch.optim.SGD([w], 0.1))
    with pytest.raises(TypeError, match="Adam has one learning rate"):
        Observer(torch.optim.Adam([w]))
    with pytest.raises(RuntimeError, match="take a step with gradients"):
        regimes(AdaBayes([w]))
    with pytest.raises(RuntimeError, match="nothing to draw"):
        Observer(AdaBayes([w])).plot()
    with pytest.raises(ValueError, match="Invalid per_tensor: 0"):
        Observer(AdaBayes([w]), per_tensor=0)
    with pytest.raises(ValueError, match=r"Invalid beta2: 1\.0"):
        Observer(AdaBayes([w]), beta2=1.0)


@pytest.mark.parametrize("low", [False, True])
def test_the_memory_plan_is_what_is_measured(low: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10))
    optimizer = AdaBayes(net.parameters(), state_dtype=torch.bfloat16 if low else None)
    net(torch.ones(4, 30)).sum().backward()
    optimizer.step()
    params = list(net.parameters())
    plan = memory_plan(sum(p.numel() for p in params), state_dtype=torch.bfloat16 if low else None)
    assert plan.parameters == sum(p.nbytes for p in params)
    assert plan.gradients == sum(p.grad.nbytes for p in params if p.grad is not None)
    assert plan.state == state_bytes(optimizer)
    assert plan.moved == sum(p.numel() for p in params) * (20 if low else 28)  # bytes per weight
    assert memory_plan(8e9, 8).seconds(28e9) == 1
    with pytest.raises(ValueError, match="devices 0 at least 1"):
        memory_plan(1e9, 0)


@pytest.mark.parametrize("block_size", [2, 4, 100])
@pytest.mark.parametrize("max_size", [4, 8, 2048])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, None),
    ],
)
def test_the_plan_for_matrices_is_what_is_measured(
    block_size: int, max_size: int, dtype: torch.dtype, state_dtype: torch.dtype | None
) -> None:
    shapes = [(5,), (), (6, 4), (12, 3), (3, 1), (4, 3, 2, 2), (9, 9), (0, 3)]
    params = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    optimizer = AdaBayesK(params, block_size=block_size, max_size=max_size, state_dtype=state_dtype)
    optimizer.step()
    shapes_now = (p.shape for p in params)
    plan = matrix_memory_plan(shapes_now, block_size, max_size, param_dtype=dtype, state_dtype=state_dtype)
    scalars = 2 * (state_dtype or optimizer.state[params[1]]["exp_avg"].dtype).itemsize  # counted as steps are: not
    assert plan.state == state_bytes(optimizer) + scalars
    assert plan.parameters == plan.gradients == sum(p.nbytes for p in params)


def test_the_plan_for_matrices_in_numbers() -> None:
    """2 mn + 2 (m² + n²) of them; AdaBayes-FP's where nothing is rotated."""
    assert matrix_memory_plan([(30, 20), (10,)]).state == 4 * (2 * 610 + 2 * (30**2 + 20**2))
    assert matrix_memory_plan([(30, 20)], max_size=20).state == 4 * (2 * 600 + 2 * 20**2)
    assert matrix_memory_plan([(30, 20)], state_dtype=torch.bfloat16).state == 2 * 2 * 600 + 4 * 2 * (30**2 + 20**2)
    assert matrix_memory_plan([(30, 20), (10,)], max_size=19) == memory_plan(610)
    for name in ("block_size", "max_size", "devices", "learn_every", "refresh"):
        with pytest.raises(ValueError, match=f"Invalid {name}: 0. It must be at least 1"):
            matrix_memory_plan([(30, 20)], **{name: 0})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"Invalid {name}: 2.5. It must be an integer"):
            matrix_memory_plan([(30, 20)], **{name: 2.5})  # type: ignore[arg-type]
        assert matrix_memory_plan([(30, 20)], **{name: 2.0}) == matrix_memory_plan([(30, 20)], **{name: 2})  # type: ignore[arg-type]
    assert matrix_memory_plan([(256, 384)]).state == 4 * 6 * 256 * 384  # whole blocks: 4 numbers beside AdamW's 2


def test_the_plan_counts_the_operations_of_a_step() -> None:
    """Products of matrices are counted by torch, decompositions here; on the average over a round of refreshes."""
    shapes = [(5,), (6, 4), (12, 3), (4, 3, 2, 2), (9, 9), (20, 3)]
    params = [torch.randn(shape) for shape in shapes]
    optimizer = AdaBayesK(params, block_size=4, max_size=15, learn_every=2, refresh=3, fused=False)

    def step() -> None:
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()

    for _ in range(32):  # bases are made, and refreshed more often at first
        step()
    counted = sum(count_operations(step) for _ in range(6)) / 6  # until all is as it was
    plan = matrix_memory_plan(shapes, 4, 15, learn_every=2, refresh=3)
    assert plan.rotations + plan.refreshes == pytest.approx(counted, rel=1e-12)
    more_often = matrix_memory_plan(shapes, 4, 15, refresh=1)
    assert more_often.refreshes == pytest.approx(3 * plan.refreshes, rel=1e-12)


# AdaBayes-K, whose learning rates are those of eigendirections


def settled_k(singular: torch.Tensor) -> tuple[torch.Tensor, AdaBayesK, torch.Tensor]:
    """Return a matrix, its optimizer and the gradient, with these singular values, that it has had many times."""
    n = len(singular)
    generator = torch.Generator().manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(2, n, n, generator=generator, dtype=torch.float64))[0]
    gradient = left @ singular.double().diag() @ right.mT
    w = torch.zeros(n, n, dtype=torch.float64)
    optimizer = AdaBayesK([("w", w)], LR, LR_SGD)
    steady(optimizer, [gradient])
    return w, optimizer, gradient


def test_regimes_of_a_matrix_are_those_of_its_eigendirections() -> None:
    """A gradient of rank 3, far from any coordinate: three directions move like Adam, the other 61 like SGD."""
    singular = torch.tensor([10, 20, 30, 0, 0, 0, 0, 0]) * CROSSOVER
    w, optimizer, gradient = settled_k(singular)
    report = regimes(optimizer)
    (row,) = report.tensors
    assert (row.name, row.weights, report.bounded) == ("w", 64, True)
    assert row.adam_like == 3 / 64
    assert row.sgd_like == 61 / 64
    below = (optimizer.state[w]["exp_avg_sq"] / (1 - 0.99**20)).sqrt() <= CROSSOVER
    assert row.sgd_like == below.double().mean()
    assert row.lr_quantiles[1:] == pytest.approx((MATRIX_SCALE * LR_SGD, MATRIX_SCALE * LR_SGD))
    fixed = AdaBayesFP([torch.zeros(8, 8, dtype=torch.float64)], LR, LR_SGD)
    steady(fixed, [gradient])
    assert regimes(fixed).total.adam_like > 0.5  # by coordinates it looks otherwise


def test_points_of_a_matrix_lie_on_the_fixed_point_curve_and_come_from_all_over_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.zeros(20, 20, dtype=torch.float64)
    optimizer = AdaBayesK([("w", w)], LR, LR_SGD)
    left, right = (torch.randn(20, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    observer = Observer(optimizer, per_tensor=20)
    for _ in range(30):
        noise = torch.randn(20, 20, generator=generator, dtype=torch.float64)
        w.grad = CROSSOVER * left @ (torch.logspace(-3, 1, 20, dtype=torch.float64).diag() @ noise) @ right
        optimizer.step()
    (points,) = observer.points()
    assert len(points.adam_lr) == 20
    lr, lr_sgd = MATRIX_SCALE * LR, MATRIX_SCALE * LR_SGD
    torch.testing.assert_close(points.effective_lr, fixed_point((lr / points.adam_lr) ** 2, lr, lr_sgd))
    # Every 20th would be the first column, of the largest eigenvalue.
    every = optimizer.effective_lr(w)
    columns = [(every == lr).nonzero()[0, 1].item() for lr in points.effective_lr]
    assert len(set(columns)) > 8
    torch.testing.assert_close(observer.points()[0].adam_lr, points.adam_lr)  # the same ones each time
    ax = observer.plot(tmp_path / "rates.png")
    assert len(ax.get_lines()[0].get_xdata()) == 20  # type: ignore[arg-type]
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_observing_a_matrix_follows_no_gradients_of_weights() -> None:
    w, optimizer, _ = settled_k(torch.tensor([10.0, 1.0]) * CROSSOVER)
    observer = Observer(optimizer)
    steady(optimizer, [torch.ones_like(w)], steps=2)
    assert observer.state_dict() == {"tracked": {}}
    assert len(observer.points()[0].adam_lr) == 4


@pytest.mark.parametrize(("cls", "hint"), [(AdaBayesFP, "move like Adam: lr_sgd has no effect"), (AdaBayesK, "")])
def test_a_bound_that_is_not_reached_needs_no_advice(cls: type[AdaBayesFP], hint: str) -> None:
    """lr_sgd of AdaBayes-K is there for directions not seen yet: that all move like Adam is as it should be."""
    w = torch.zeros(4, 4)
    optimizer = cls([w], LR, 1e5 * LR)
    for seed in range(5):
        steady(optimizer, [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))], steps=1)
    report = regimes(optimizer)
    assert report.total.adam_like == 1
    assert hint in report.hint
    assert bool(report.hint) == bool(hint)


def test_too_much_of_sgd_is_told_of_a_matrix_too() -> None:
    _, optimizer, _ = settled_k(torch.full((4,), 1e-6))
    assert "move like SGD: lr has no effect" in regimes(optimizer).hint
