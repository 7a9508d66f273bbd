"""The filter's equations over JAX's arrays, as test_filtering.py and test_matrix_filtering.py have them over others."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from adabayes import filtering as f
from tests.test_filtering import assert_alike_on_floats_and_arrays, assert_unstarted_while_all_state_is_zero
from tests.test_matrix_filtering import assert_alike_on_arrays_and_stacks


def to_jax(x: Any) -> Any:
    return jax.numpy.asarray(x)  # fp32, unless the whole process is told otherwise


def test_functions_work_alike_on_floats_and_arrays() -> None:
    assert_alike_on_floats_and_arrays(to_jax, rtol=1e-6)  # a few roundings each, of 6e-8


def test_dynamics_can_be_traced() -> None:
    forget, noise = jax.jit(f.ornstein_uhlenbeck)(1e-3, 0.1)
    assert forget == pytest.approx(-math.expm1(-2e-3))
    assert noise == pytest.approx(-0.1 * math.expm1(-2e-3))


def test_a_weight_is_unstarted_while_all_of_its_state_is_zero() -> None:
    assert_unstarted_while_all_state_is_zero(to_jax)


def test_functions_of_matrices_work_alike_on_all_arrays_and_on_stacks_of_matrices() -> None:
    assert_alike_on_arrays_and_stacks(to_jax, atol=1e-5)  # fp32, of matrices with a condition of 80
