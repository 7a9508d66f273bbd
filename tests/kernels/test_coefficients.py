"""The coefficients of the rules: the same names in Python, C and Triton, and the same values on host and device."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adabayes.kernels.coefficients import ADABAYES, ADABAYES_FP, RULES, Rule, StepOptions
from adabayes.kernels.cpu import library
from adabayes.optim import adabayes, adabayes_fp
from tests.kernels.common import needs_kernels
from tests.support.marks import has_triton

EACH_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.mark.skipif(not library.LIBRARY.exists(), reason="the kernels were not built")
@EACH_RULE
def test_c_reads_the_coefficients_and_options_of_each_rule(rule: Rule) -> None:
    """Read the names from the file: `needs_kernels` would skip a library with other names, which does not load."""
    names = library._names(ctypes.CDLL(str(library.LIBRARY)), rule.name)
    assert len(names) == len(set(names))
    assert set(names) == {*rule.coefficients, *rule.options}


@needs_kernels
@EACH_RULE
def test_a_library_with_other_coefficients_is_refused(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    load: Any = library.load.__wrapped__  # without the cache
    assert not isinstance(load(), str)
    for other in (
        rule._replace(coefficients=(*rule.coefficients, "another")),
        rule._replace(options=rule.options[1:]),
        rule._replace(name="another"),
    ):
        monkeypatch.setitem(RULES, rule.name, other)
        assert "was built from another version of adabayes" in load()


@needs_kernels
@EACH_RULE
def test_coefficients_are_passed_to_c_in_its_order(rule: Rule) -> None:
    names = (*rule.options, *rule.coefficients)  # another order
    values = library.order_coefficients(rule.name, {name: float(i) for i, name in enumerate(names)})
    assert [names[int(value)] for value in values] == library.coefficient_names(rule.name)
    with pytest.raises(KeyError):
        library.order_coefficients(rule.name, dict.fromkeys(names[:-1], 0.0))


@has_triton
@EACH_RULE
def test_triton_has_a_slot_for_each_coefficient(rule: Rule) -> None:
    """The step count has the first slot."""
    from adabayes.kernels.triton import rules

    assert set(rules.RULES) == set(RULES)
    slots = [rules.slot(rule.name, name) for name in rule.coefficients]
    assert slots == list(range(1, 1 + len(rule.coefficients)))


def settings_of(rule: Rule, lr: Any, beta1: float, beta2: float, option: bool, exact: bool) -> Any:
    """Return the coefficients of an optimizer at a learning rate, which may be a tensor."""
    if rule is ADABAYES_FP:
        return adabayes_fp.Coefficients(lr, beta1, beta2, eps=1e-5, cautious=option, centred=not option)
    assert rule is ADABAYES
    return adabayes.Coefficients(
        step_scale=lr / 1e-3,
        beta1=beta1,
        forget=1e-3,
        noise=1e-4,
        asymptotic_gain=0.1,
        information=128.0,
        exact=exact,
        eta=1e-3,
        lr_sgd=0.1 if exact else 100 * lr,
        to_mean=0.5,
        memory=100 if option else None,
        may_sync=False,
    )


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(list(RULES.values())),
    st.integers(1, 10**6),
    st.floats(0, 0.9999),
    st.floats(0, 0.9999),
    st.sampled_from([1.0, 1 / 65536, 0.125]),
    st.sampled_from([1, -1]),
    st.booleans(),
    st.booleans(),
)
def test_coefficients_on_the_device_are_those_of_the_host(
    rule: Rule, t: int, beta1: float, beta2: float, unscale: float, sign: int, option: bool, exact: bool
) -> None:
    """Derive them from floats, from step counts on the device, and from settings on the device as well.

    All are float64. A power may differ in its last digits, and 1 - beta^t by a few more where it is small.
    """
    lr, shrink = 1e-3, 0.99
    host = rule.derive(settings_of(rule, lr, beta1, beta2, option, exact), float(t), StepOptions(unscale, shrink, sign))
    assert len(host) == len(rule.coefficients)
    assert not any(isinstance(x, Tensor) for x in host)
    counts = torch.tensor([float(t), 1.0], dtype=torch.float64)
    settings_on_device: list[Any] = [torch.tensor(x, dtype=torch.float64) for x in (lr, unscale, shrink)]
    for rate, by, decay in ([lr, unscale, shrink], settings_on_device):
        device = rule.derive(settings_of(rule, rate, beta1, beta2, option, exact), counts, StepOptions(by, decay, sign))
        for name, expected, value in zip(rule.coefficients, host, device, strict=True):
            if isinstance(value, Tensor):
                assert value.dtype == torch.float64, name
                assert value.shape in (counts.shape, ()), name
                value = value.expand(2)[0].item()
            assert value == pytest.approx(expected, rel=1e-11, abs=0), name
