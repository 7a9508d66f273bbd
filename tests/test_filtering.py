"""The filter's equations, against each other, against brute force, and over every kind of array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adabayes import filtering as f

etas = st.floats(1e-5, 1e-1)
ratios = st.floats(1.0, 1e4)  # sigma2 / eta
batch_sizes = st.floats(1, 1e5)
gradients = st.floats(1e-5, 1e2)


def settle(variance: float, curvature: float, dynamics: f.Dynamics, steps: int) -> float:
    for _ in range(steps):
        variance = f.update(f.predict(variance, dynamics), curvature)
    return variance


def to_torch(x: list[float]) -> Any:
    return torch.tensor(x, dtype=torch.float64)


ARRAYS = pytest.mark.parametrize("array", [np.array, to_torch], ids=["numpy", "torch"])


def assert_alike_on_floats_and_arrays(array: Callable[[list[float]], Any], rtol: float) -> None:
    """Every function gives the arrays that were put in, with the numbers that it gives for floats."""
    etas, sigma2s, grads = [1e-3, 2e-3], [0.1, 0.5], [3e-2, 4.0]

    def all_of(eta: Any, sigma2: Any, g: Any) -> list[Any]:
        k = f.drift(eta, sigma2, 128)
        h = f.curvature(g, 128)
        values = [k, h, f.fixed_point(g * g, eta, sigma2), f.mean_square_fixed_point(g * g, eta)]
        values.append(f.remember(sigma2 / 3, g, eta, sigma2, 100))
        for dynamics in (f.euler(k, sigma2), f.ornstein_uhlenbeck(k, sigma2)):
            prior = f.predict(sigma2, dynamics)
            values += [*dynamics, prior, f.update(prior, h), f.move(g, prior, g), f.exact_fixed_point(h, dynamics)]
        return [*values, f.fading_memory(eta).forget]

    together = all_of(array(etas), array(sigma2s), array(grads))
    one_by_one = [all_of(*numbers) for numbers in zip(etas, sigma2s, grads)]
    for i, value in enumerate(together):
        assert type(value) is type(array(etas))
        np.testing.assert_allclose(np.asarray(value), [row[i] for row in one_by_one], rtol=rtol)


@ARRAYS
def test_functions_work_alike_on_floats_and_arrays(array: Callable[[list[float]], Any]) -> None:
    assert_alike_on_floats_and_arrays(array, rtol=1e-14)  # a few roundings each, of 1e-16


def assert_unstarted_while_all_state_is_zero(array: Callable[[list[float]], Any]) -> None:
    found = f.is_unstarted(array([0.0, 0.0, 0.1, 0.1]), array([0.0, -1e-30, 0.0, 1.0]))
    assert found.tolist() == [True, False, False, False]


@ARRAYS
def test_a_weight_is_unstarted_while_all_of_its_state_is_zero(array: Callable[[list[float]], Any]) -> None:
    assert_unstarted_while_all_state_is_zero(array)


@given(etas, ratios, batch_sizes, st.lists(st.floats(-100, 100), min_size=1, max_size=30))
def test_mean_units_equal_the_papers_sum_units(eta: float, ratio: float, batch: float, grads: list[float]) -> None:
    lr_sgd = ratio * eta
    sigma2 = lr_sgd / batch
    in_sum = f.euler(f.drift(eta, sigma2), sigma2)
    in_mean = f.euler(f.drift(eta, lr_sgd, batch), lr_sgd)
    s2, gain = sigma2, lr_sgd
    for g in grads:
        s2 = f.update(f.predict(s2, in_sum), f.curvature(batch * g))
        gain = f.update(f.predict(gain, in_mean), f.curvature(g, batch))
        # Each step adds a few roundings of 1e-16; k = 1 cancels in (1 - k), where only the noise is left.
        assert gain == pytest.approx(batch * s2, rel=1e-12)


@given(etas, ratios, gradients)
def test_fixed_point_is_a_soft_minimum_of_the_two_learning_rates(eta: float, ratio: float, g: float) -> None:
    sigma2 = ratio * eta
    gain = f.fixed_point(g * g, eta, sigma2)
    assert gain <= min(sigma2, eta / g) * (1 + 1e-14)
    assert gain >= 1 / (1 / sigma2 + g / eta) * (1 - 1e-14)


@given(etas, ratios)
def test_fixed_point_limits_are_sgd_and_adam(eta: float, ratio: float) -> None:
    sigma2 = ratio * eta
    crossover = eta / sigma2
    assert f.fixed_point(0.0, eta, sigma2) == pytest.approx(sigma2, rel=1e-15)
    assert f.fixed_point((1e-6 * crossover) ** 2, eta, sigma2) == pytest.approx(sigma2, rel=2e-12)
    # One part in 2x away, with x the gradient in units of the crossover.
    assert f.fixed_point((1e6 * crossover) ** 2, eta, sigma2) == pytest.approx(eta / (1e6 * crossover), rel=6e-7)


@given(etas, ratios, batch_sizes, st.one_of(st.just(0.0), gradients), st.booleans())
def test_exact_fixed_point_is_one(eta: float, ratio: float, batch: float, g: float, exact: bool) -> None:
    sigma2 = ratio * eta
    k = f.drift(eta, sigma2, batch)
    dynamics = f.ornstein_uhlenbeck(k, sigma2) if exact else f.euler(min(k, 1.9), sigma2)
    h = f.curvature(g, batch)
    gain = f.exact_fixed_point(h, dynamics)
    # A few roundings of 1e-16.
    assert f.update(f.predict(gain, dynamics), h) == pytest.approx(gain, rel=1e-14)


@given(st.floats(1e-3, 0.5), st.floats(1e-3, 10), gradients, st.floats(1e-8, 1e3))
def test_gain_settles_at_the_exact_fixed_point_from_any_start(k: float, sigma2: float, g: float, start: float) -> None:
    dynamics = f.ornstein_uhlenbeck(k, sigma2)
    steps = int(20 / k)  # forgets the start at least as fast as exp(-2k)
    assert settle(start, g * g, dynamics, steps) == pytest.approx(f.exact_fixed_point(g * g, dynamics), rel=1e-9)


@pytest.mark.parametrize(("rms", "shortfall"), [(0.001, 0.0), (0.1, 0.005), (1.0, 0.06), (2.5, 0.15)])
def test_papers_fixed_point_overstates_the_gain_where_steps_are_large(rms: float, shortfall: float) -> None:
    eta, lr_sgd, batch = 1e-3, 0.1, 128
    dynamics = f.euler(f.drift(eta, lr_sgd, batch), lr_sgd)
    ratio = f.exact_fixed_point(f.curvature(rms, batch), dynamics) / f.fixed_point(rms * rms, eta, lr_sgd)
    # To first order, half of one gradient's information over the precision: B eta g / 2.
    assert 1 - ratio == pytest.approx(shortfall, abs=0.01)


def test_beyond_the_noise_the_gain_falls_faster_than_adams() -> None:
    """Where one gradient outweighs the process noise, 1 / (B eta), the limit is 1/H and not Adam's."""
    eta, lr_sgd, batch = 1e-3, 0.1, 128
    dynamics = f.ornstein_uhlenbeck(f.drift(eta, lr_sgd, batch), lr_sgd)
    g = 1e4 / (batch * eta)
    h = f.curvature(g, batch)
    assert f.exact_fixed_point(h, dynamics) == pytest.approx(1 / h, rel=1e-3)
    assert 1 / h < 1e-3 * eta / g


@given(st.floats(1e-8, 1e8), st.floats(1e-3, 10))
def test_exact_dynamics_are_stable_and_settle_at_sigma2(k: float, sigma2: float) -> None:
    dynamics = f.ornstein_uhlenbeck(k, sigma2)
    assert 0 <= dynamics.forget <= 1
    assert f.predict(sigma2, dynamics) == pytest.approx(sigma2, rel=1e-15)
    assert f.predict(0.5 * sigma2, dynamics) >= 0.5 * sigma2


@pytest.mark.parametrize("k", [1e-2, 1e-3, 1e-4])
def test_euler_is_the_exact_process_to_second_order_in_k(k: float) -> None:
    exact, euler = f.ornstein_uhlenbeck(k, 1.0), f.euler(k, 1.0)
    assert abs(exact.forget - euler.forget) == pytest.approx(k * k, rel=2 * k)  # e^-2k - (1-k)^2 = k^2 + O(k^3)
    assert abs(exact.noise - euler.noise) == pytest.approx(2 * k * k, rel=2 * k)


@given(etas, ratios, gradients, st.integers(1, 300), st.floats(-3, 3))
def test_a_filter_that_remembers_some_steps_settles_at_the_fixed_point(
    eta: float, ratio: float, g: float, steps: int, decades: float
) -> None:
    end = f.fixed_point(g * g, eta, ratio * eta)
    assert f.remember(end, g, eta, ratio * eta, steps) == pytest.approx(end, rel=1e-12)
    variance = min(end * 10**decades, ratio * eta)
    for _ in range(40 * steps):
        variance = f.remember(variance, g, eta, ratio * eta, steps)
    assert variance == pytest.approx(end, rel=1e-6)


@given(etas, gradients, st.integers(2, 300))
def test_it_remembers_so_many_steps_whatever_the_size_of_gradients(eta: float, g: float, steps: int) -> None:
    """A small deviation is forgotten as by an exponential average whose span is n, by 2 / (n + 1) a step."""
    end = f.fixed_point(g * g, eta, 1e6 * eta / g)
    after = f.remember(1.001 * end, g, eta, 1e6 * eta / g, steps)
    assert (after / end - 1) / 0.001 == pytest.approx((steps - 1) / (steps + 1), abs=0.002)


@given(etas, ratios, gradients, st.integers(20, 300))
def test_to_remember_some_steps_is_to_take_the_batch_size_that_does(
    eta: float, ratio: float, g: float, steps: int
) -> None:
    """From anywhere within a factor of 3, to first order in 1 / n, the paper's predict and update."""
    sigma2 = ratio * eta
    start = min(3 * f.fixed_point(g * g, eta, sigma2), sigma2)
    found = f.remember(start, g, eta, sigma2, steps)
    batch_size = found / (steps * eta * eta)
    flow = f.ornstein_uhlenbeck(f.drift(eta, sigma2, batch_size), sigma2)
    assert f.update(f.predict(start, flow), f.curvature(g, batch_size)) == pytest.approx(
        found, rel=20 / steps**2 + 0.02
    )


@given(st.floats(1e-3, 0.5), gradients)
def test_fading_memory_gives_a_mean_square_normaliser(lam: float, g: float) -> None:
    settled = settle(1.0, g * g, f.fading_memory(lam), int(60 / lam))
    assert settled == pytest.approx(f.mean_square_fixed_point(g * g, lam), rel=1e-9)


def test_fading_memory_is_process_noise_in_proportion_to_the_variance() -> None:
    lam, variance = 0.1, 0.3
    assert f.predict(variance, f.fading_memory(lam)) == pytest.approx(variance + lam / (1 - lam) * variance)


@given(
    st.floats(1e-3, 0.3),
    st.floats(1e-2, 10),
    st.lists(st.tuples(st.floats(1e-2, 1e2), st.floats(-10, 10)), min_size=1, max_size=12),
    st.booleans(),
)
def test_filter_is_the_brute_force_gaussian_posterior(
    k: float, sigma2: float, observations: list[tuple[float, float]], exact: bool
) -> None:
    """Condition the joint Gaussian of all optima and gradients at once, and compare the last optimum's posterior."""
    dynamics = f.ornstein_uhlenbeck(k, sigma2) if exact else f.euler(k, sigma2)
    factor = (1 - dynamics.forget) ** 0.5
    steps = len(observations)
    hessians = np.array([h for h, _ in observations])

    # Prior covariance of the optima w*(1..T), started from variance sigma2 at t = 0.
    covariance = np.zeros((steps, steps))
    variance = sigma2
    for t in range(steps):
        variance = factor**2 * variance + dynamics.noise
        for s in range(t, steps):
            covariance[s, t] = covariance[t, s] = factor ** (s - t) * variance

    mean, posterior, shifted = 0.0, sigma2, []
    for h, g in observations:
        mean, prior = factor * mean, f.predict(posterior, dynamics)
        shifted.append(g + h * mean)  # the gradient, measured from 0 instead of the filter's prior mean (Eq. 12)
        posterior = f.update(prior, h)
        mean = f.move(mean, posterior, g)

    # shifted = H w* + noise of covariance H
    H = np.diag(hessians)
    weights = np.linalg.solve((H @ covariance @ H + H).T, (covariance @ H).T).T
    joint_mean = weights @ np.array(shifted)
    joint_covariance = covariance - weights @ H @ covariance
    assert posterior == pytest.approx(joint_covariance[-1, -1], rel=1e-6)
    assert mean == pytest.approx(joint_mean[-1], rel=1e-6, abs=1e-9)
