"""The update rules that have kernels, and the scalar coefficients that their kernels read.

The coefficients of a step are derived here, once, in float64: the kernels in C and in Triton only read them. A kernel
finds a coefficient by its name: ``cpu/rules.h`` and ``triton/rules.py`` use the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from adabayes._blocks.schedule import interval, learns
from adabayes._util.averages import bias_correction
from adabayes._util.tensors import Scalar, as_float
from adabayes.eigenbasis import least_ratio
from adabayes.rates import newest_weight

__all__ = ["ADABAYES", "ADABAYES_FP", "RULES", "Rule", "StepOptions", "derive_matrix_coefficients"]


class StepOptions(NamedTuple):
    """Settings of one step that do not depend on the rule."""

    unscale: Scalar = 1.0  # undoes the scaling of the gradients by a GradScaler
    shrink: Scalar = 1.0  # factor of the weights: weight decay
    sign: int = 1  # 1 to descend, -1 to ascend
    found_inf: Tensor | None = None  # if it is given and not 0, nothing changes
    seed: int = 0  # of the stochastic rounding
    round_params: bool = False  # whether to round bf16 parameters stochastically


class Rule(NamedTuple):
    """An update rule that has kernels, for state that consists of ``exp_avg`` and one more entry.

    Args:
        name: the rule's name in C and Triton.
        second_state: the name of the second entry of state.
        coefficients: the names of the coefficients that the kernels read. ``weight``, ``beta1`` and ``shrink`` must be
            among them.
        options: settings for which the kernels have separate code, on or off. They are attributes of the optimizer's
            coefficients.
        derive: computes the kernels' coefficients from the optimizer's, the step count and the options of the step. Any
            of these may be a tensor on a device.
    """

    name: str
    second_state: str
    coefficients: tuple[str, ...]
    options: tuple[str, ...]
    derive: Callable[[Any, Any, StepOptions], tuple[Scalar, ...]]

    def chosen_options(self, coefficients: Any) -> tuple[bool, ...]:
        """Return which of the options are on."""
        return tuple(bool(getattr(coefficients, option)) for option in self.options)


class _AdaBayes(NamedTuple):
    weight: Scalar  # of the new gradient in the average, including `unscale`
    beta1: Scalar
    shrink: Scalar
    size: Scalar  # of the step: the learning rate and the bias correction of the average
    forget: Scalar  # predict: gain + (noise - forget * gain)
    noise: Scalar
    information: Scalar  # update: prior / (1 + prior * information * g^2)
    half: Scalar  # start: 1 / (half + sqrt(half^2 + (slope g)^2)); a slope of 0 starts at lr_sgd
    slope: Scalar
    h_constant: Scalar  # memory: gain / (h + sqrt(h^2 + (memory_slope g gain)^2)), h = h_constant + h_slope * gain
    h_slope: Scalar
    memory_slope: Scalar


def _derive_adabayes(c: Any, t: Any, options: StepOptions) -> _AdaBayes:
    unscale: Any = options.unscale
    half = 0.5 / c.lr_sgd if isinstance(c.lr_sgd, Tensor) or c.lr_sgd else math.inf
    slope = (c.to_mean / c.eta if c.exact else 0.0) * unscale
    newest = newest_weight(t, c.memory) if c.memory else 0.0
    return _AdaBayes(
        weight=(1 - c.beta1) * unscale,
        beta1=c.beta1,
        shrink=options.shrink,
        size=options.sign * c.step_scale / bias_correction(c.beta1, t),
        forget=c.forget,
        noise=c.noise,
        information=c.information * unscale * unscale,
        half=half,
        slope=slope,
        h_constant=(1 - newest) / 2,
        h_slope=newest * half,
        memory_slope=_sqrt(newest) * slope,
    )


ADABAYES = Rule("adabayes", "gain", _AdaBayes._fields, ("memory",), _derive_adabayes)


class _AdaBayesFP(NamedTuple):
    weight: Scalar  # of the new gradient in the average, including `unscale`
    beta1: Scalar
    shrink: Scalar
    size: Scalar  # of the step: the learning rate and both bias corrections
    square_weight: Scalar  # of the new square in its average, including `unscale`
    beta2: Scalar
    inside: Scalar  # denominator: sqrt(exp_avg_sq + inside) + outside
    outside: Scalar
    scale: Scalar  # of the gradients: a GradScaler's


def _derive_adabayes_fp(c: Any, t: Any, options: StepOptions) -> _AdaBayesFP:
    unscale: Any = options.unscale
    # Multiply numerator and denominator by the root of the squares' bias correction, so that they are used as is.
    root = _sqrt(bias_correction(c.beta2, t))
    half = root * (c.eps / 2)
    return _AdaBayesFP(
        weight=(1 - c.beta1) * unscale,
        beta1=c.beta1,
        shrink=options.shrink,
        size=options.sign * c.lr * root / bias_correction(c.beta1, t),
        square_weight=(1 - c.beta2) * unscale * unscale,
        beta2=c.beta2,
        inside=half * half,
        outside=half,
        scale=1 / unscale,
    )


ADABAYES_FP = Rule("adabayes_fp", "exp_avg_sq", _AdaBayesFP._fields, ("centred", "cautious"), _derive_adabayes_fp)

RULES = {rule.name: rule for rule in (ADABAYES, ADABAYES_FP)}


def derive_matrix_coefficients(c: Any, t: int, options: StepOptions) -> tuple[float, ...]:
    """Return the coefficients of AdaBayes-K that precede those of AdaBayes-FP: ``matrix_coefficients`` of matrix.h.

    At the first step the bases are new, and their factors have learned already.
    """
    every, later = interval(t, c.learn_every), t > 1
    return (
        t,
        as_float(options.unscale),
        as_float(options.shrink),
        later and learns(0, t, every),
        later and learns(1, t, every),
        c.beta2**every,
        interval(t, c.refresh) if later else 0,
        0.0 if c.centred else least_ratio(c.beta1, c.beta2),
    )


def _sqrt(x: Any) -> Any:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)
