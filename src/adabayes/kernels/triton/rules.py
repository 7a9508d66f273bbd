"""The update rules in Triton, expression by expression as in ``cpu/rules.h``. Imported only where there is Triton.

A rule takes the gradient, both entries of state as they were, the new average of gradients, and its row of
coefficients, which :mod:`adabayes.kernels.coefficients` derives and explains. It returns the step and the new second
entry. Nothing may be contracted or approximated (``enable_fp_fusion=False``, ``div_rn``, ``sqrt_rn``), so that each
operation rounds as in C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adabayes.kernels import coefficients

__all__ = ["RULES", "load", "option", "slot"]


@triton.constexpr_function
def slot(rule, name):
    """Return the position of a coefficient in a row, which begins with the step count."""
    return 1 + coefficients.RULES[rule].coefficients.index(name)


@triton.constexpr_function
def option(rule, options, name):
    """Return whether an option of a rule is on."""
    return options[coefficients.RULES[rule].options.index(name)]


@triton.jit
def load(row, stride, SLOT: tl.constexpr):
    """Load a coefficient of a tensor; its coefficients are ``stride`` floats apart."""
    return tl.load(row + SLOT * stride)


@triton.jit
def adabayes(g, old, before, mean, row, stride, OPTIONS: tl.constexpr, BLOCK: tl.constexpr):
    MEMORY: tl.constexpr = option("adabayes", OPTIONS, "memory")
    half, slope = load(row, stride, slot("adabayes", "half")), load(row, stride, slot("adabayes", "slope"))
    unstarted = (before == 0) & (old == 0)
    slope_g = slope * g
    start = half + tl.sqrt_rn(half * half + slope_g * slope_g)
    started = tl.where(unstarted, tl.div_rn(tl.full([BLOCK], 1, tl.float32), start), before)
    if MEMORY:
        h_constant = load(row, stride, slot("adabayes", "h_constant"))
        h_slope = load(row, stride, slot("adabayes", "h_slope"))
        gain = tl.where(started < 1e-30, 1e-30, started)  # LEAST_GAIN of rates.py
        h, memory_g = h_constant + h_slope * gain, load(row, stride, slot("adabayes", "memory_slope")) * g * gain
        posterior = tl.div_rn(gain, h + tl.sqrt_rn(h * h + memory_g * memory_g))
    else:
        forget, noise = load(row, stride, slot("adabayes", "forget")), load(row, stride, slot("adabayes", "noise"))
        information = load(row, stride, slot("adabayes", "information"))
        next = started + (noise - forget * started)  # noqa: A001 (as in rules.h)
        prior = tl.where(next < noise, noise, next)
        posterior = tl.div_rn(prior, 1 + prior * (information * g * g))
    step = load(row, stride, slot("adabayes", "size")) * (posterior * mean)
    waits = unstarted & (g == 0) & (tl.broadcast_to(slope, [BLOCK]) != 0)
    return step, tl.where(waits, 0.0, posterior)


@triton.jit
def adabayes_fp(g, old, before, mean, row, stride, OPTIONS: tl.constexpr, BLOCK: tl.constexpr):
    CENTRED: tl.constexpr = option("adabayes_fp", OPTIONS, "centred")
    CAUTIOUS: tl.constexpr = option("adabayes_fp", OPTIONS, "cautious")
    beta2 = load(row, stride, slot("adabayes_fp", "beta2"))
    square_weight = load(row, stride, slot("adabayes_fp", "square_weight"))
    inside = load(row, stride, slot("adabayes_fp", "inside"))
    outside = load(row, stride, slot("adabayes_fp", "outside"))
    seen = g - old * load(row, stride, slot("adabayes_fp", "scale")) if CENTRED else g
    product = square_weight * (seen * seen)  # the square may overflow
    square = before * beta2 + tl.where(product <= 3.4028234663852886e38, product, square_weight * seen * seen)
    opposed = ((mean > 0) & (g <= 0)) | ((mean < 0) & (g >= 0))
    moving = tl.where(opposed, 0.0, mean) if CAUTIOUS else mean
    size = load(row, stride, slot("adabayes_fp", "size"))
    return size * tl.div_rn(moving, tl.sqrt_rn(square + inside) + outside), square


RULES = {"adabayes": adabayes, "adabayes_fp": adabayes_fp}
