"""The kernel that takes a step on a GPU, whatever the rule. Imported only where there is Triton.

One launch serves all tensors of one combination of dtypes. A table holds the addresses of each tensor. A list assigns a
tensor, and a block of it, to each program, so a thousand tiny tensors cost one launch.

bf16 values are handled as bits, as in fused.c. Triton decides at import whether to interpret (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from adabayes.kernels.triton.rules import RULES, load, slot

__all__ = ["RULES", "count_steps", "fused_step"]

# The columns of the table: addresses of parameter and state, number of elements, index, address of the step count
PARAM, EXP_AVG, SECOND_STATE, NUMEL, INDEX, STEP_COUNT = map(tl.constexpr, range(6))


@triton.jit
def _mix(x):
    x = x * 0x9E3779B1
    return x ^ (x >> 16)


@triton.jit
def _scatter(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _widen(x, BF16: tl.constexpr):
    if BF16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _narrow(x, random, TYPE: tl.constexpr, BF16: tl.constexpr, STOCHASTIC: tl.constexpr):
    if BF16:
        bits = x.to(tl.uint32, bitcast=True)
        carry = random & 0xFFFF if STOCHASTIC else ((bits >> 16) & 1) + 0x7FFF
        return (tl.where(x == x, bits + carry, 0x7FC00000) >> 16).to(tl.uint16)
    return x.to(TYPE)


@triton.jit
def _update(
    at_p, at_g, at_m, at_s, first, numel, key, row, stride,
    RULE: tl.constexpr, NAME: tl.constexpr, OPTIONS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    P_BF16: tl.constexpr, S_BF16: tl.constexpr, ROUND: tl.constexpr, RETURNS_STEP: tl.constexpr,
    BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor. FULL: it is complete and aligned to 16 bytes, so it needs vectors and no mask."""
    i = tl.arange(0, BLOCK)
    p_, g_ = _pointer(at_p, P, FULL) + first + i, _pointer(at_g, P, FULL) + first + i
    m_, s_ = _pointer(at_m, S, FULL) + first + i, _pointer(at_s, S, FULL) + first + i
    mask = None if FULL else i < tl.minimum(numel - first, BLOCK).to(tl.int32)
    g = _widen(tl.load(g_, mask), P_BF16)
    old = _widen(tl.load(m_, mask), S_BF16)
    before = _widen(tl.load(s_, mask), S_BF16)
    mean = load(row, stride, slot(NAME, "beta1")) * old + load(row, stride, slot(NAME, "weight")) * g
    step, second = RULE(g, old, before, mean, row, stride, OPTIONS, BLOCK)
    if RETURNS_STEP:
        moved = step
    else:
        moved = _widen(tl.load(p_, mask), P_BF16) * load(row, stride, slot(NAME, "shrink")) - step
    element = (first.to(tl.uint32) + i.to(tl.uint32)) ^ key
    state_bits, param_bits = _mix(element), _mix(element ^ 0x9E3779B9) >> 16
    tl.store(p_, _narrow(moved, param_bits, P, P_BF16, ROUND), mask)
    tl.store(m_, _narrow(mean, state_bits, S, S_BF16, True), mask)
    tl.store(s_, _narrow(second, state_bits >> 16, S, S_BF16, True), mask)


@triton.jit(do_not_specialize=["stride", "seed"])
def fused_step(
    table, grads, pieces, rows, found_inf, stride, seed,
    RULE: tl.constexpr, NAME: tl.constexpr, OPTIONS: tl.constexpr, P: tl.constexpr, S: tl.constexpr,
    P_BF16: tl.constexpr, S_BF16: tl.constexpr, ROUND: tl.constexpr, RETURNS_STEP: tl.constexpr,
    BLOCK: tl.constexpr, BITE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor in each program; do nothing if ``found_inf`` is given and not 0."""
    if found_inf is not None:  # noqa: SIM102 (decided at compile time)
        if tl.load(found_inf) != 0:
            return
    piece = tl.load(pieces + tl.program_id(0))  # the tensor in the upper half, the index of its block in the lower
    tensor, first = piece >> 32, (piece & 0xFFFFFFFF) * BLOCK
    entry = table + tensor * WIDTH
    at_p, at_m = tl.load(entry + PARAM), tl.load(entry + EXP_AVG)
    at_s, numel = tl.load(entry + SECOND_STATE), tl.load(entry + NUMEL)
    at_g = tl.load(grads + tensor)
    row = rows + tl.minimum(tensor, stride - 1)  # one row for all tensors, or one for each
    step = tl.load(row.to(tl.pointer_type(tl.uint32)))
    key = _scatter(_scatter(seed.to(tl.uint32) + tl.load(entry + INDEX).to(tl.uint32)) + step)
    if (((at_p | at_g | at_m | at_s) & 15) == 0) & (first + BLOCK <= numel):
        _update(
            at_p, at_g, at_m, at_s, first, numel, key, row, stride,
            RULE, NAME, OPTIONS, P, S, P_BF16, S_BF16, ROUND, RETURNS_STEP, BLOCK, True,
        )  # fmt: skip
    else:  # the end of a tensor, or a view that starts anywhere in memory: in small bites
        for at in range(0, tl.minimum(numel - first, BLOCK).to(tl.int32), BITE):
            _update(
                at_p, at_g, at_m, at_s, first + at, numel, key, row, stride,
                RULE, NAME, OPTIONS, P, S, P_BF16, S_BF16, ROUND, RETURNS_STEP, BITE, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def count_steps(
    table, counts, found_inf, tensors, STEP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Count a step of each tensor, unless ``found_inf`` is not 0, and write the counts as float64."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tensors
    step_ = tl.load(table + i * WIDTH + STEP_COUNT, mask).to(tl.pointer_type(STEP))
    step = tl.load(step_, mask)
    if found_inf is not None:
        step = tl.where(tl.load(found_inf) != 0, step, step + 1)
    else:
        step = step + 1
    tl.store(step_, step, mask)
    tl.store(counts + i, step.to(tl.float64), mask)
