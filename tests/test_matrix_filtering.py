"""The filter of a whole matrix: its closed form and limits over covariances of all kinds, against the filter itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from adabayes import filtering
from adabayes import matrix_filtering as f

Matrix = NDArray[np.float64]


@st.composite
def informations(draw: st.DrawFn, low: float = -3.0, high: float = 3.0) -> Matrix:
    """Positive definite matrices of 1 to 6 rows, with eigenvalues from 10^low to 10^high and any eigenvectors."""
    exponents = draw(st.lists(st.floats(low, high), min_size=1, max_size=6))
    Q = orthogonal(len(exponents), draw(st.integers(0, 1000)))
    return np.asarray((Q * 10.0 ** np.array(exponents)) @ Q.T)


def orthogonal(size: int, seed: int) -> Matrix:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))[0]


def apart(P: Matrix, expected: Matrix) -> float:
    """Return the difference relative to the expected matrix, in the spectral norm."""
    return float(np.linalg.norm(P - expected, 2) / np.linalg.norm(expected, 2))


etas = st.floats(1e-3, 1.0)
ratios = st.floats(1.0, 1e3)  # sigma2 / eta


@given(informations(), etas, ratios)
def test_fixed_point_solves_its_riccati_equation(H: Matrix, eta: float, ratio: float) -> None:
    sigma2 = ratio * eta
    L = np.linalg.inv(f.fixed_point(H, eta, sigma2))
    # Eigenvalues of L span six decades at most, which is what an inverse may lose of 1e-16.
    assert apart(L @ L - L / sigma2, H / eta**2) < 1e-8


@given(informations(), etas, ratios)
def test_fixed_point_of_vanishing_gradients_is_sgd(H: Matrix, eta: float, ratio: float) -> None:
    sigma2 = ratio * eta
    small = 1e-9 * eta**2 / sigma2**2 * H / np.linalg.norm(H, 2)  # below the crossover, by which P differs
    for P in (f.fixed_point(small, eta, sigma2), f.fixed_point(H, 1e9 * sigma2, sigma2)):
        assert apart(P, sigma2 * np.eye(len(H))) < 2e-9


@given(informations(), etas)
def test_fixed_point_without_a_prior_is_the_matrix_root(H: Matrix, eta: float) -> None:
    P = f.fixed_point(H, eta, 1e12)
    # One part in 2x away, with x = 1e12 sqrt(h) / eta at least 1e10; the rest is rounding.
    assert apart(P @ H @ P, eta**2 * np.eye(len(H))) < 1e-8


@given(informations(), etas, ratios)
def test_fixed_point_lies_between_the_limits_in_every_direction(H: Matrix, eta: float, ratio: float) -> None:
    sigma2 = ratio * eta
    P = f.fixed_point(H, eta, sigma2)
    root = f.of_eigenvalues(lambda h: eta * h**-0.5, H)
    for upper in (sigma2 * np.eye(len(H)), root):
        assert np.linalg.eigvalsh(upper - P).min() >= -1e-9 * np.linalg.norm(upper, 2)


@given(informations(), etas, ratios, st.integers(0, 1000))
def test_a_rotated_problem_has_the_rotated_fixed_point(H: Matrix, eta: float, ratio: float, seed: int) -> None:
    R = orthogonal(len(H), seed)
    assert apart(f.fixed_point(R @ H @ R.T, eta, ratio * eta), R @ f.fixed_point(H, eta, ratio * eta) @ R.T) < 1e-8


@settings(max_examples=25, deadline=None)
@given(informations(), st.floats(0.05, 0.5), st.floats(1e-2, 10))
def test_the_filter_settles_at_the_exact_fixed_point(H: Matrix, k: float, sigma2: float) -> None:
    dynamics, P = filtering.euler(k, sigma2), 0.1 * sigma2 * np.eye(len(H))
    noise = dynamics.noise * np.eye(len(H))
    for _ in range(int(15 / k)):  # forgets the start at least as fast as (1 - k)^2
        P = f.update(filtering.predict(P, filtering.Dynamics(dynamics.forget, noise)), H)
    assert apart(P, f.exact_fixed_point(H, dynamics)) < 1e-9


@settings(max_examples=25, deadline=None)
@given(informations(), st.floats(0.05, 0.5))
def test_forgetting_settles_at_the_natural_gradient(H: Matrix, lam: float) -> None:
    P = np.eye(len(H))
    for _ in range(int(40 / lam)):
        P = f.update(filtering.predict(P, filtering.fading_memory(lam)), H)
    assert apart(P, f.natural_gradient(H, lam)) < 1e-8
    assert apart(f.natural_gradient(H, lam) @ H, lam * np.eye(len(H))) < 1e-8


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])  # beyond, g gᵀ is rounded by more than the crossover
def test_directions_that_no_gradient_has_shown_get_the_learning_rate_of_sgd(size: float) -> None:
    g = size * np.array([3.0, 0.0, 4.0])
    P = f.fixed_point(np.outer(g, g), 1e-3, 0.1)
    np.testing.assert_allclose(P @ np.array([4.0, 0.0, -3.0]), 0.1 * np.array([4.0, 0.0, -3.0]), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(P @ g, filtering.fixed_point(g @ g, 1e-3, 0.1) * g, rtol=1e-6, atol=1e-9 * size)


def to_torch(x: Matrix) -> Any:
    return torch.tensor(x, dtype=torch.float64)


def assert_alike_on_arrays_and_stacks(array: Callable[[Matrix], Any], atol: float) -> None:
    """Every function gives the arrays that were put in, and for a stack what it gives for each matrix in NumPy."""
    Q, dynamics = orthogonal(4, 0), filtering.euler(0.1, 0.5)
    stack = np.stack([(Q * h) @ Q.T for h in ([1.0, 2.0, 3.0, 4.0], [0.1, 0.5, 2.0, 8.0])])
    functions: list[Callable[[Any], Any]] = [
        lambda H: f.fixed_point(H, 0.1, 0.5),
        lambda H: f.exact_fixed_point(H, dynamics),
        lambda H: f.natural_gradient(H, 0.1),
        lambda H: f.update(H, 2 * H),
    ]
    for function in functions:
        together = function(array(stack))
        assert isinstance(together, type(array(stack)))
        one_by_one = np.stack([function(H) for H in stack])
        np.testing.assert_allclose(np.asarray(together), one_by_one, atol=atol)


def test_functions_work_alike_on_all_arrays_and_on_stacks_of_matrices() -> None:
    assert_alike_on_arrays_and_stacks(to_torch, atol=1e-12)
