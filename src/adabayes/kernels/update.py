"""The two updates of update.h in Triton, expression by expression: imported only where there is Triton.

One launch serves all tensors of a kind. A table has the addresses of each tensor; a list of pieces says which tensor,
and which block of it, each program takes: so a thousand tiny tensors cost one launch. Nothing may be contracted or
approximated (``enable_fp_fusion=False``, ``div_rn``, ``sqrt_rn``): each operation is then rounded as in C.

bf16 is handled as its bits, as in fused.c. Interpretation (TRITON_INTERPRET=1) is decided when this is imported.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_steps", "fused_step"]


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
def _filter(g, old, before, value, mean, shrink, size, row, columns, MEMORY: tl.constexpr, BLOCK: tl.constexpr):
    """AdaBayes: the new weights and the new gains."""
    half, slope = tl.load(row + 8 * columns), tl.load(row + 9 * columns)
    unstarted = (before == 0) & (old == 0)
    line = slope * g
    start = half + tl.sqrt_rn(half * half + line * line)
    begun = tl.where(unstarted, tl.div_rn(tl.full([BLOCK], 1, tl.float32), start), before)
    if MEMORY:
        rest, pull, share_slope = tl.load(row + 5 * columns), tl.load(row + 6 * columns), tl.load(row + 7 * columns)
        alive = tl.where(begun < 1e-30, 1e-30, begun)  # as in rates.py
        h, known = rest + pull * alive, share_slope * g * alive
        posterior = tl.div_rn(alive, h + tl.sqrt_rn(h * h + known * known))
    else:
        forget, noise = tl.load(row + 5 * columns), tl.load(row + 6 * columns)
        information = tl.load(row + 7 * columns)
        next = begun + (noise - forget * begun)  # noqa: A001 (as in update.h)
        prior = tl.where(next < noise, noise, next)
        posterior = tl.div_rn(prior, 1 + prior * (information * g * g))
    moved = value * shrink - size * (posterior * mean)
    waits = unstarted & (g == 0) & (tl.broadcast_to(slope, [BLOCK]) != 0)
    return moved, tl.where(waits, 0.0, posterior)


@triton.jit
def _settled(
    g, old, before, value, mean, shrink, size, row, columns, CENTRED: tl.constexpr, CAUTIOUS: tl.constexpr
):  # fmt: skip
    """AdaBayes-FP: the new weights and the new averages of squares."""
    beta2, weight2 = tl.load(row + 5 * columns), tl.load(row + 6 * columns)
    inside, outside = tl.load(row + 7 * columns), tl.load(row + 8 * columns)
    seen = g - old * tl.load(row + 9 * columns) if CENTRED else g
    product = weight2 * (seen * seen)  # whose square may overflow
    square = before * beta2 + tl.where(product <= 3.4028234663852886e38, product, weight2 * seen * seen)
    kept = tl.where(shrink == 0, 0.0, value * shrink)  # if 0, it need not be a number
    opposed = ((mean > 0) & (g <= 0)) | ((mean < 0) & (g >= 0))
    moving = tl.where(opposed, 0.0, mean) if CAUTIOUS else mean
    moved = kept - size * tl.div_rn(moving, tl.sqrt_rn(square + inside) + outside)
    return moved, square


@triton.jit
def _piece(
    at_p, at_g, at_m, at_s, first, numel, key, row, columns,
    FP: tl.constexpr, CENTRED: tl.constexpr, CAUTIOUS: tl.constexpr, MEMORY: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr,
    P_BF16: tl.constexpr, S_BF16: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One block of one tensor. WHOLE: it is full and starts at multiples of 16 bytes: vectors, without a mask."""
    i = tl.arange(0, BLOCK)
    p_, g_ = _pointer(at_p, P, WHOLE) + first + i, _pointer(at_g, P, WHOLE) + first + i
    m_, s_ = _pointer(at_m, S, WHOLE) + first + i, _pointer(at_s, S, WHOLE) + first + i
    mask = None if WHOLE else i < tl.minimum(numel - first, BLOCK).to(tl.int32)
    g = _widen(tl.load(g_, mask), P_BF16)
    old = _widen(tl.load(m_, mask), S_BF16)
    before = _widen(tl.load(s_, mask), S_BF16)
    value = _widen(tl.load(p_, mask), P_BF16)
    weight, beta1 = tl.load(row + columns), tl.load(row + 2 * columns)
    shrink, size = tl.load(row + 3 * columns), tl.load(row + 4 * columns)
    mean = beta1 * old + weight * g
    if FP:
        moved, second = _settled(g, old, before, value, mean, shrink, size, row, columns, CENTRED, CAUTIOUS)
    else:
        moved, second = _filter(g, old, before, value, mean, shrink, size, row, columns, MEMORY, BLOCK)
    who = (first.to(tl.uint32) + i.to(tl.uint32)) ^ key
    random, more = _mix(who), _mix(who ^ 0x9E3779B9) >> 16
    tl.store(p_, _narrow(moved, more, P, P_BF16, ROUND), mask)
    tl.store(m_, _narrow(mean, random, S, S_BF16, True), mask)
    tl.store(s_, _narrow(second, random >> 16, S, S_BF16, True), mask)


@triton.jit(do_not_specialize=["columns", "seed"])
def fused_step(
    table, grads, pieces, rows, found_inf, columns, seed,
    FP: tl.constexpr, CENTRED: tl.constexpr, CAUTIOUS: tl.constexpr, MEMORY: tl.constexpr,
    P: tl.constexpr, S: tl.constexpr,
    P_BF16: tl.constexpr, S_BF16: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
    BITE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One block of one tensor for each program; none, if ``found_inf`` is given and not 0."""
    if found_inf is not None:  # noqa: SIM102 (one is decided when it is compiled)
        if tl.load(found_inf) != 0:
            return
    piece = tl.load(pieces + tl.program_id(0))  # the tensor in the upper half, the number of the block in the lower
    tensor, first = piece >> 32, (piece & 0xFFFFFFFF) * BLOCK
    entry = table + tensor * WIDTH
    at_p, at_m, at_s, numel = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    at_g = tl.load(grads + tensor)
    row = rows + tl.minimum(tensor, columns - 1)  # one row for all, or one for each
    step = tl.load(row.to(tl.pointer_type(tl.uint32)))
    key = _scatter(_scatter(seed.to(tl.uint32) + tl.load(entry + 4).to(tl.uint32)) + step)
    if (((at_p | at_g | at_m | at_s) & 15) == 0) & (first + BLOCK <= numel):
        _piece(
            at_p, at_g, at_m, at_s, first, numel, key, row, columns,
            FP, CENTRED, CAUTIOUS, MEMORY, P, S, P_BF16, S_BF16, ROUND, BLOCK, True,
        )  # fmt: skip
    else:  # the end of a tensor, or a view that starts anywhere in memory: in small bites
        for at in range(0, tl.minimum(numel - first, BLOCK).to(tl.int32), BITE):
            _piece(
                at_p, at_g, at_m, at_s, first + at, numel, key, row, columns,
                FP, CENTRED, CAUTIOUS, MEMORY, P, S, P_BF16, S_BF16, ROUND, BITE, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tensors"])
def count_steps(
    table, counts, found_inf, tensors, STEP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Count a step of each tensor, unless ``found_inf`` is not 0, and list the counts in float64."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tensors
    step_ = tl.load(table + i * WIDTH + 5, mask).to(tl.pointer_type(STEP))
    step = tl.load(step_, mask)
    if found_inf is not None:
        step = tl.where(tl.load(found_inf) != 0, step, step + 1)
    else:
        step = step + 1
    tl.store(step_, step, mask)
    tl.store(counts + i, step.to(tl.float64), mask)
