"""Diagnostics of AdaBayes-K account for the factor of its steps of matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adabayes import AdaBayesK
from adabayes.diagnostics import Correlations, Observer, regimes

LR, LR_SGD, SCALE = 0.01, 10.0, 3.0


def trained(lr: float = LR, **settings: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return an optimizer after a step on a matrix and a vector with the same gradients."""
    matrix, vector = torch.zeros(6, 4, dtype=torch.float64), torch.zeros(24, dtype=torch.float64)
    settings = {"lr_sgd": LR_SGD, "matrix_scale": SCALE, "cautious": False, **settings}
    optimizer = AdaBayesK([("matrix", matrix), ("vector", vector)], lr=lr, **settings)
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix.grad, vector.grad = gradient, gradient.flatten().clone()
    optimizer.step()
    return optimizer, matrix, vector


def test_the_effective_learning_rate_is_that_of_the_step() -> None:
    """In the eigenbasis, the first step is the gradient times the effective learning rate."""
    optimizer, matrix, _ = trained()
    state = optimizer.state[matrix]
    left, right = state["basis_0"][0], state["basis_1"][0]
    step, gradient = (left.mT @ x @ right for x in (-matrix, matrix.grad))
    torch.testing.assert_close(step, gradient * optimizer.effective_lr(matrix)[0], rtol=1e-9, atol=1e-12)


def test_both_rates_of_a_matrix_are_scaled_and_those_of_a_vector_are_not() -> None:
    optimizer, matrix, vector = trained()
    (group,) = optimizer.param_groups
    assert optimizer.current_rates(group) == (LR, LR_SGD)
    assert optimizer.current_rates(group, vector) == (LR, LR_SGD)
    assert optimizer.current_rates(group, matrix) == (SCALE * LR, SCALE * LR_SGD)
    optimizer.param_groups[0]["lr"] /= 2  # a schedule
    assert optimizer.current_rates(group, matrix) == pytest.approx((SCALE * LR / 2, SCALE * LR_SGD / 2))


def test_a_scale_is_a_larger_learning_rate_with_the_same_ratio() -> None:
    """Gains relative to the highest one and averaged squares are those of both."""
    scaled, matrix, _ = trained()
    plain, other, _ = trained(lr=SCALE * LR, lr_sgd=SCALE * LR_SGD, matrix_scale=1.0)
    torch.testing.assert_close(matrix, other)
    torch.testing.assert_close(scaled.effective_lr(matrix), plain.effective_lr(other))
    torch.testing.assert_close(scaled.relative_gain(matrix), plain.relative_gain(other))
    torch.testing.assert_close(scaled.mean_square(matrix), plain.mean_square(other))


def test_regimes_tell_the_highest_learning_rate_of_each_tensor() -> None:
    optimizer, matrix, _ = trained()
    report = regimes(optimizer)
    assert [row.lr_sgd for row in report.tensors] == [SCALE * LR_SGD, LR_SGD]
    assert report.total.lr_sgd == SCALE * LR_SGD
    quantiles = torch.quantile(optimizer.effective_lr(matrix).double(), torch.tensor([0.0, 1.0]).double()).tolist()
    assert quantiles[0] <= report.tensors[0].lr_quantiles[1] <= quantiles[1]


def test_points_of_the_learning_rate_figure_lie_on_the_curve_of_their_tensor() -> None:
    optimizer, matrix, _ = trained()
    points = Observer(optimizer).points()[0]
    assert (points.lr, points.lr_sgd) == (SCALE * LR, SCALE * LR_SGD)
    square = optimizer.mean_square(matrix).flatten().double()
    assert points.adam_lr.max() <= SCALE * LR / square.sqrt().min() * (1 + 1e-6)
    inverse = 1 / (2 * points.lr_sgd) + (1 / (4 * points.lr_sgd**2) + 1 / points.adam_lr**2).sqrt()
    torch.testing.assert_close(points.effective_lr, 1 / inverse, rtol=1e-5, atol=0)


def test_correlations_of_a_stack_are_those_of_its_matrices() -> None:
    """A stack is not one matrix, whose columns are those of all its matrices."""
    random = torch.Generator().manual_seed(0)
    stack = torch.zeros(3, 4, 5)
    matrices = [torch.zeros(4, 5) for _ in range(3)]
    one, other = (
        Correlations(AdaBayesK(params, batch_dims=dims), block_size=(2, 5))
        for params, dims in (([stack], 1), (matrices, 0))
    )
    for _ in range(20):
        mixing = torch.randn(1, 1, 5, generator=random)
        stack.grad = torch.randn(3, 4, 5, generator=random) + 2 * mixing
        for matrix, gradient in zip(matrices, stack.grad):
            matrix.grad = gradient
        one.see()
        other.see()
    (fraction,) = [layer.shares["right"] or 0.0 for layer in one.layers()]
    fractions = [layer.shares["right"] or 0.0 for layer in other.layers()]
    assert min(fractions) <= fraction <= max(fractions)
