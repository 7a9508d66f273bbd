"""Launches compute a step or take it, with coefficients for the step count of each tensor.

The tests use the launch of the "cpu" backend. So, under the plugin of ``tests/support/gpu/interpreter.py``, they check
the GPU kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP
from adabayes.kernels.backends import BACKENDS
from adabayes.kernels.coefficients import RULES, Rule, StepOptions
from adabayes.kernels.launch import Operands
from adabayes.optim._engine.batch import Batch
from tests.kernels.common import needs_kernels

pytestmark = needs_kernels

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
LENGTHS = (1, 0, 37, 63, 64, 65, 130, 1024, 2500)  # full units and blocks, incomplete ones, and no elements
OPTIMIZERS: dict[str, Any] = {  # all options of all rules
    "adabayes": AdaBayes([torch.zeros(1)]),
    "adabayes, batch size": AdaBayes([torch.zeros(1)], batch_size=100),
    "adabayes, paper": AdaBayes([torch.zeros(1)], dynamics="paper"),
    "adabayes_fp": AdaBayesFP([torch.zeros(1)]),
    "adabayes_fp, centred": AdaBayesFP([torch.zeros(1)], centred=True),
    "adabayes_fp, cautious": AdaBayesFP([torch.zeros(1)], cautious=True),
    "adabayes_fp, centred and cautious": AdaBayesFP([torch.zeros(1)], centred=True, cautious=True),
}
EACH_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
EACH_DTYPE = pytest.mark.parametrize("dtype", [F32, F64], ids=["fp32", "float64"])


def coefficients_of(optimizer: Any) -> Any:
    return optimizer.coefficients(optimizer.param_groups[0], 1e-2)


class Columns(NamedTuple):
    """Gradients and state of several tensors."""

    grads: list[Tensor]
    exp_avgs: list[Tensor]
    second_states: list[Tensor]

    def copies(self) -> Columns:
        return Columns(*([x.clone() for x in column] for column in self))


def moderate_columns(dtype: torch.dtype, lengths: Sequence[int] = LENGTHS) -> Columns:
    """Return gradients and state of about 1."""
    generator = torch.Generator().manual_seed(0)
    grads, exp_avgs = ([torch.randn(n, generator=generator).to(dtype) for n in lengths] for _ in range(2))
    return Columns(grads, exp_avgs, [(0.5 + torch.rand(n, generator=generator)).to(dtype) for n in lengths])


def extreme_columns(dtype: torch.dtype, lengths: Sequence[int] = LENGTHS) -> Columns:
    """Return gradients and state of very different sizes.

    Some gradients are 0, some are so large that the square overflows in fp32, and some filters have not started.
    """
    columns = moderate_columns(dtype, lengths)
    generator = torch.Generator().manual_seed(1)
    for g, m, s in zip(*columns):
        for x in (g, m, s):
            x *= 10.0 ** torch.randint(-6, 3, x.shape, generator=generator).to(dtype)
        unstarted = torch.rand(g.shape, generator=generator) < 0.3
        m[unstarted], s[unstarted] = 0, 0
        g[torch.rand(g.shape, generator=generator) < 0.2] = 0
        g[torch.rand(g.shape, generator=generator) < 0.05] = -1e20
    return columns


def take_steps(
    rule: Rule, columns: Columns, params: Sequence[Tensor], counts: Sequence[float], c: Any, **options: Any
) -> list[Tensor]:
    """Take a step in one launch, and return the step counts. All tensors have the same random bits."""
    grads, exp_avgs, second_states = columns
    steps = [torch.tensor(count) for count in counts]
    launch = BACKENDS["cpu"].launch(rule, Operands(params, exp_avgs, second_states, steps, [0] * len(params)))
    launch.take_step([g.data_ptr() for g in grads], c, StepOptions(**options))
    return steps


def compute_steps(rule: Rule, columns: Columns, c: Any, t: float) -> list[Tensor]:
    """Compute the steps in memory that is full of nan, and check that the memory around them stays so."""
    grads, exp_avgs, second_states = columns
    memory = grads[0].new_full((sum(len(g) + 9 for g in grads),), math.nan)
    begins = [sum(len(g) + 9 for g in grads[:i]) for i in range(len(grads))]
    outputs = [memory[begin : begin + len(g)] for begin, g in zip(begins, grads)]
    launch = BACKENDS["cpu"].launch(rule, Operands(outputs, exp_avgs, second_states, None, [0] * len(grads)))
    launch.compute_step([g.data_ptr() for g in grads], c, t)
    results = [output.clone() for output in outputs]
    for output in outputs:
        output.fill_(math.nan)
    assert memory.isnan().all()
    return results


@EACH_OPTIMIZER
@EACH_DTYPE
def test_a_computed_step_is_what_a_step_subtracts(optimizer: Any, dtype: torch.dtype) -> None:
    """Expect the same bits: a kernel computes ``p * shrink - step``, and rounds after each operation."""
    rule, c, shrink = optimizer.KERNEL, coefficients_of(optimizer), 0.99
    for t in (1, 2, 300):
        columns = extreme_columns(dtype)
        taken, computed = columns.copies(), columns.copies()
        steps = compute_steps(rule, computed, c, float(t))
        before = [torch.randn(g.shape, dtype=dtype) for g in columns.grads]
        after = [p.clone() for p in before]
        take_steps(rule, taken, after, [t - 1.0] * len(after), c, shrink=shrink)
        for p, q, step in zip(before, after, steps, strict=True):
            assert torch.equal(p * shrink - step, q)
        at_zero = [torch.zeros_like(p) for p in before]
        take_steps(rule, columns, at_zero, [t - 1.0] * len(after), c)
        assert all(torch.equal(-p, step) for p, step in zip(at_zero, steps))
        for name in Columns._fields:  # including the gradients, which nothing may change
            assert all(map(torch.equal, getattr(computed, name), getattr(taken, name)))


@EACH_OPTIMIZER
@EACH_DTYPE
def test_a_computed_step_is_that_of_foreach(optimizer: Any, dtype: torch.dtype) -> None:
    """Expect differences of rounding: about ten operations, each within half a unit in the last place of its operands.

    With gradients and state of about 1, no operand is much larger than the largest step, relative to the step's size.
    """
    c = coefficients_of(optimizer)
    for t in (1.0, 7.0, 300.0):
        columns = moderate_columns(dtype)
        expected = columns.copies()
        steps = compute_steps(optimizer.KERNEL, columns, c, t)
        gradient, *state = (Batch(column, in_place=True) for column in expected)
        reference = optimizer.direction(gradient, dict(zip(optimizer.STATE, state)), c, t).value().tensors
        ulp = torch.finfo(dtype).eps
        for results, references in zip((steps, *columns), (reference, *expected), strict=True):
            largest = max(x.abs().max().item() for x in references if len(x))
            for x, y in zip(results, references, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=8 * ulp * largest)


@EACH_OPTIMIZER
@EACH_DTYPE
def test_the_memory_of_a_computed_step_is_not_read(optimizer: Any, dtype: torch.dtype) -> None:
    """It is full of nan before. Lengths are around multiples of 64, which the CPU kernel processes at a time."""
    lengths = (1, 2, *range(60, 69), 127, 128, 129, 1000, 1024)
    for columns in (moderate_columns, extreme_columns):
        steps = compute_steps(optimizer.KERNEL, columns(dtype, lengths), coefficients_of(optimizer), 3.0)
        assert all(step.isfinite().all() for step in steps)


@EACH_OPTIMIZER
@pytest.mark.parametrize(("param", "state"), [(F32, F32), (F64, F64), (BF16, BF16)], ids=str)
def test_each_tensor_has_the_coefficients_of_its_step_count(
    optimizer: Any, param: torch.dtype, state: torch.dtype
) -> None:
    """Compare one launch with a launch for each tensor. Some counts are equal, and all tensors have the same values."""
    rule, c = optimizer.KERNEL, coefficients_of(optimizer)
    counts = [0.0, 6.0, 0.0, 98.0, 2.0**20, 6.0, 1.0]
    (g,), (m,), (s,) = moderate_columns(state, [100])
    columns = Columns(*([x.clone() for _ in counts] for x in (g.to(param), m, s)))
    params = [torch.zeros(100, dtype=param) for _ in counts]
    options = {"unscale": 0.5, "shrink": 0.9, "sign": -1, "seed": 3, "round_params": True}
    alone = []
    for count in counts:
        one, p = Columns(*([x[0].clone()] for x in columns)), torch.zeros(100, dtype=param)
        (step,) = take_steps(rule, one, [p], [count], c, **options)
        assert step.item() == count + 1
        alone.append((p, one.exp_avgs[0], one.second_states[0]))
    steps = take_steps(rule, columns, params, counts, c, **options)
    assert [step.item() for step in steps] == [count + 1 for count in counts]
    for together, separate in zip(zip(params, *columns[1:]), alone, strict=True):
        assert all(map(torch.equal, together, separate))
    assert torch.equal(params[0], params[2])
    assert torch.equal(params[1], params[5])
    assert not any(torch.equal(params[0], params[i]) for i in (1, 3, 4, 6))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_kernel_reads_every_coefficient(rule: Rule) -> None:
    """Replace each coefficient by nan: with some options, the step or the state becomes nan."""
    optimizers = [optimizer for optimizer in OPTIMIZERS.values() if rule == optimizer.KERNEL]
    assert len({rule.chosen_options(coefficients_of(optimizer)) for optimizer in optimizers}) == 2 ** len(rule.options)
    unread = set(rule.coefficients)
    for optimizer in optimizers:
        c = coefficients_of(optimizer)
        for index, name in enumerate(rule.coefficients):

            def derive(*arguments: Any, index: int = index) -> tuple[Any, ...]:
                values = rule.derive(*arguments)
                return (*values[:index], math.nan, *values[index + 1 :])

            columns = moderate_columns(F32, [3])
            columns.exp_avgs[0][0] = columns.second_states[0][0] = 0  # a filter that starts
            params = [torch.ones(3)]
            take_steps(rule._replace(derive=derive), columns, params, [4.0], c)
            if any(x[0].isnan().any() for x in (params, *columns[1:])):
                unread.discard(name)
    assert unread == set()
