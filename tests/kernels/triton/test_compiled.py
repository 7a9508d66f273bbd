"""The code that Triton compiles for GPUs: its instructions, and its results on an emulator. Neither needs a GPU."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK
from adabayes.bench import gpu
from adabayes.kernels.backends import BACKENDS
from adabayes.kernels.check import compiled
from adabayes.kernels.check.compiled import Variant
from adabayes.kernels.coefficients import RULES
from adabayes.kernels.triton import launch as device
from tests.conftest import all_state, assert_same
from tests.kernels.common import needs_kernels
from tests.kernels.test_launch import OPTIMIZERS, coefficients_of, compute_steps, extreme_columns
from tests.support.gpu.emulator import Fault, Program, Region
from tests.support.gpu.launching import Emulated, program_of, region_of
from tests.support.marks import has_triton

pytestmark = [has_triton, needs_kernels]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PLAIN_FP = (False, False)  # neither centred nor cautious
FEW = [
    Variant("adabayes", F32, F32, (True,)),
    Variant("adabayes_fp", BF16, BF16, PLAIN_FP, round_params=True),
    Variant("adabayes_fp", F32, F32, PLAIN_FP, returns_step=True),
]
ALL = list(compiled.variants())


# The code


def check(target: str, variants: list[Variant]) -> None:
    for variant in variants:
        made = compiled.compile_for(target, variant)
        assert made.forbidden == []
        assert made.spills == 0
        assert made.registers <= device.REGISTERS
        if target.startswith("sm_"):
            # Vectors transfer exactly the bytes that a step must read and write, so the main path has no other access.
            assert made.wide_bytes == variant.bytes_per_weight


@pytest.mark.parametrize("target", compiled.TARGETS)
def test_code_is_exact_in_vectors_and_within_its_registers(target: str) -> None:
    check(target, FEW)


@pytest.mark.long
@pytest.mark.parametrize("target", compiled.TARGETS)
def test_code_of_every_variant_is_exact_in_vectors_and_within_its_registers(target: str) -> None:
    check(target, ALL)


def test_bytes_per_weight_are_those_of_torchs_fused_adamw() -> None:
    """In fp32, a step reads four arrays and writes three. A returned step is written, but no weight is read."""
    assert Variant("adabayes", F32, F32, (False,)).bytes_per_weight == 28
    assert Variant("adabayes", F32, BF16, (False,)).bytes_per_weight == 20
    assert Variant("adabayes", BF16, BF16, (False,)).bytes_per_weight == 14
    assert Variant("adabayes", F32, F32, (False,), returns_step=True).bytes_per_weight == 24


def test_variants_are_distinct_and_include_all_options() -> None:
    assert len(set(ALL)) == len(ALL)
    for rule in RULES.values():
        chosen = [variant for variant in ALL if variant.rule == rule.name]
        assert len({variant.options for variant in chosen}) == 2 ** len(rule.options)
        assert {(variant.param, variant.state) for variant in chosen} == device.PAIRS
        returning = {variant.options for variant in chosen if variant.returns_step}
        assert returning == {variant.options for variant in chosen}
    assert str(FEW[0]) == "adabayes float32/float32 memory"
    assert str(FEW[2]) == "adabayes_fp float32/float32 returns_step"


def test_contraction_and_approximation_would_be_noticed() -> None:
    """Insert the instructions that Triton emits with its default options."""
    code = compiled.compile_for("sm_90", FEW[0]).code
    for exact, inexact in (("mul.rn.f32", "fma.rn.f32"), ("div.rn.f32", "div.full.f32"), ("sqrt.rn", "sqrt.approx")):
        changed = code.replace(exact, inexact)
        assert compiled.Compiled(changed, 1, 0, 28.0).forbidden
    assert compiled.Compiled(code.replace("add.rn.f32", "add.rn.ftz.f32"), 1, 0, 28.0).forbidden


# Its results


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Emulated]:
    """Return a function that lets compiled code take the steps of CPU tensors."""

    def emulate(target: str, change: Callable[[Program], Program] = lambda program: program) -> Emulated:
        emulator = Emulated(target, change)
        monkeypatch.setattr(device, "_kernels", lambda: emulator)
        return emulator

    return emulate


def assert_bits(make: Any, param: torch.dtype, state: torch.dtype, emulator: Emulated) -> None:
    expected = gpu.trained(make, param, state, "cpu")
    with gpu.on_cpu_tensors():
        emulated = gpu.trained(make, param, state, "cpu")
    assert len(emulator.launches) == 3
    assert gpu.differing(expected, emulated)[0] == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["AdaBayes", "AdaBayes-FP"])
@pytest.mark.parametrize(("param", "state"), [(F32, F32), (BF16, BF16)])
def test_compiled_code_gives_the_bits_of_c(
    name: str, param: torch.dtype, state: torch.dtype, target: str, emulated: Callable[..., Emulated]
) -> None:
    assert_bits(gpu.VARIANTS[name], param, state, emulated(target))


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", list(gpu.VARIANTS))
@pytest.mark.parametrize(("param", "state"), sorted(device.PAIRS, key=str))
def test_compiled_code_of_every_variant_gives_the_bits_of_c(
    name: str, param: torch.dtype, state: torch.dtype, target: str, emulated: Callable[..., Emulated]
) -> None:
    assert_bits(gpu.VARIANTS[name], param, state, emulated(target))


def assert_step_is_computed(name: str, emulator: Emulated) -> None:
    """Compare with the CPU kernel. The emulator permits no loads from the memory that receives the step."""
    optimizer = OPTIMIZERS[name]
    c, columns = coefficients_of(optimizer), extreme_columns(F32)
    expected = columns.copies()
    steps = compute_steps(optimizer.KERNEL, expected, c, 5.0)
    with gpu.on_cpu_tensors():
        emulated_steps = compute_steps(optimizer.KERNEL, columns, c, 5.0)
    assert [variant.returns_step for variant in emulator.launches] == [True]
    for emulated, column in zip((emulated_steps, *columns), (steps, *expected), strict=True):
        assert all(map(torch.equal, emulated, column))


@pytest.mark.parametrize("name", ["adabayes", "adabayes_fp"])
def test_compiled_code_computes_the_step_of_c(name: str, emulated: Callable[..., Emulated]) -> None:
    assert_step_is_computed(name, emulated("sm_90"))


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_compiled_code_of_every_option_computes_the_step_of_c(
    name: str, target: str, emulated: Callable[..., Emulated]
) -> None:
    assert_step_is_computed(name, emulated(target))


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])
def test_compiled_code_skips_steps_of_a_scaler(
    cls: type[AdaBayes], emulated: Callable[..., Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped step is not counted and changes no bits, also if it is the first."""
    emulator = emulated("sm_90")
    results = []
    for uses_emulator in (False, True):
        w = nn.Parameter(torch.linspace(-1, 1, 1500))
        optimizer = cls([w], lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for t in range(5):
            optimizer.zero_grad()
            scaler.scale((w * (float("inf") if t in (0, 3) else 1.0)).square().mean()).backward()
            if uses_emulator:
                with gpu.on_cpu_tensors():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        results.append(optimizer)
    assert len(emulator.launches) == 5
    assert results[1].state[w]["step"].item() == 3
    assert_same(*results)


def test_matrices_use_the_kernel_for_element_wise_operations(
    emulated: Callable[..., Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulated("sm_90")
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cpu"]._replace(matrix_launch=None))
    results = []
    for uses_emulator in (False, True):
        params = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in [(20, 30)] * 2 + [(7,)]]
        optimizer = AdaBayesK(params, fused=True)
        for t in range(3):
            generator = torch.Generator().manual_seed(t)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            if uses_emulator:
                with gpu.on_cpu_tensors():
                    optimizer.step()
            else:
                optimizer.step()
        results.append(optimizer)
    assert [variant.returns_step for variant in emulator.launches] == [True, False] * 3  # matrices, then the vector
    assert_same(*results)


def test_compiled_code_supports_several_step_counts_of_float64(emulated: Callable[..., Emulated]) -> None:
    """Each tensor has a row of coefficients. Counts beyond the precision of fp32 select the random bits."""
    emulated("sm_90")
    results = []
    for uses_emulator in (False, True):
        params = [torch.linspace(-1, 1, n) for n in (5, 2000, 9)]
        optimizer = AdaBayesFP(params, fused=True, state_dtype=BF16)
        for p, step in zip(params, (0.0, 7.0, 2.0**24 + 3)):
            optimizer.state[p] = {
                "step": torch.tensor(step, dtype=torch.float64),
                "exp_avg": torch.zeros_like(p, dtype=BF16),
                "exp_avg_sq": torch.zeros_like(p, dtype=BF16),
            }
            p.grad = torch.linspace(0.1, 1, len(p))
        if uses_emulator:
            with gpu.on_cpu_tensors():
                optimizer.step()
        else:
            optimizer.step()
        results.append(optimizer)
    assert_same(*results)


# Whether the tests would notice errors

SWAPS = {
    "add": "sub",
    "sub": "add",
    "mul.rn.f32": "add.rn.f32",
    "div": "mul",
    "sqrt.rn.f32": "neg.f32",
    "and.b32": "or.b32",
    "xor.b32": "or.b32",
    "setp.lt": "setp.gt",
    "setp.eq": "setp.ne",
    "setp.neu": "setp.eq",
    "shr.u32": "shl.b32",
    "shl.b32": "shr.u32",
    "selp": "selp",  # with its values exchanged
    "ld.global": "ld.global",  # from elsewhere
    "st.global": "st.global",
}


def mutants(variant: Variant, count: int, seed: int) -> Iterator[tuple[str, Program]]:
    """Yield programs with one instruction changed, on the main path or at the ends of tensors."""
    program = program_of("sm_90", variant)
    candidates = [
        i
        for i, x in enumerate(program.code)
        if any(".".join(x.parts).startswith(swap) for swap in SWAPS) and x.operands
    ]
    for index in random.Random(seed).sample(candidates, count):
        old = program.code[index]
        name = ".".join(old.parts)
        swap = next(swap for swap in SWAPS if name.startswith(swap))
        parts = tuple(name.replace(swap, SWAPS[swap], 1).split(".")) if SWAPS[swap] != swap else old.parts
        operands = list(old.operands)
        if swap == "div":
            parts = ("mul", "rn", "f32")
        if swap == "selp":
            operands[1], operands[2] = operands[2], operands[1]
        if swap in ("ld.global", "st.global"):
            side = 1 if swap == "ld.global" else 0
            address = operands[side].strip("[] ")
            base, _, offset = address.partition("+")
            operands[side] = f"[{base}+{int(offset or 0) + 16}]"
        changed = Program.__new__(Program)
        changed.__dict__.update(program.__dict__)
        changed.code = [
            *program.code[:index],
            old._replace(parts=parts, operands=tuple(operands)),
            *program.code[index + 1 :],
        ]
        yield f"{index}: {name} {', '.join(old.operands)}", changed


def bytes_of_steps(variant: Variant) -> list[list[int]]:
    """Take or compute steps with a variant; return the bytes of all results, in which all nan are the same."""
    if variant.returns_step:
        optimizer = next(
            optimizer
            for optimizer in OPTIMIZERS.values()
            if optimizer.KERNEL.name == variant.rule
            and optimizer.KERNEL.chosen_options(coefficients_of(optimizer)) == variant.options
        )
        columns = extreme_columns(variant.param)
        steps = compute_steps(optimizer.KERNEL, columns, coefficients_of(optimizer), 5.0)
        results = [*steps, *columns.exp_avgs, *columns.second_states]
    elif variant.rule == "adabayes":
        make: Any = partial(AdaBayes, batch_size=None if variant.options[0] else 100)
        results = all_state(gpu.trained(make, variant.param, variant.state, "cpu"))
    else:
        centred, cautious = variant.options
        make = partial(AdaBayesFP, centred=centred, cautious=cautious)
        results = all_state(gpu.trained(make, variant.param, variant.state, "cpu"))
    return [torch.where(x.isnan(), torch.nan, x).flatten().view(torch.uint8).tolist() for x in results]


def unnoticed(variant: Variant, count: int, seed: int, emulated: Callable[..., Emulated]) -> list[str]:
    """Return the mutants whose results are those of the CPU kernel."""
    expected = bytes_of_steps(variant)
    missed = []
    for name, program in mutants(variant, count, seed):
        emulated("sm_90", lambda _, program=program: program)
        try:
            with gpu.on_cpu_tensors():
                results = bytes_of_steps(variant)
        except (Fault, KeyError, NotImplementedError, IndexError):
            continue
        if results == expected:
            missed.append(name)
    return missed


@pytest.mark.parametrize("variant", FEW, ids=str)
def test_a_wrong_instruction_is_noticed(variant: Variant, emulated: Callable[..., Emulated]) -> None:
    assert unnoticed(variant, 8, 0, emulated) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "variant",
    [*FEW, Variant("adabayes", F16, BF16, (False,)), Variant("adabayes_fp", F32, F32, PLAIN_FP)],
    ids=str,
)
def test_wrong_instructions_are_noticed_except_for_a_few_that_change_no_result(
    variant: Variant, emulated: Callable[..., Emulated]
) -> None:
    """Examples are a loop that continues over masked elements, and a check for an overflow that fp16 cannot have."""
    assert len(unnoticed(variant, 60, 1, emulated)) <= 2


# The emulator itself

HEAD = ".visible .entry k(\n\t.param .u64 .ptr .global .align 1 k_param_0\n)\n.reqntid 32\n{\n"


def execute(body: str, memory: torch.Tensor, blocks: int = 1) -> None:
    start = (
        "ld.param.b64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n"
    )
    Program(HEAD + start + body + "\nret;\n}\n").launch(blocks, [memory.data_ptr()], [region_of(memory)])


def test_emulator_refuses_errors_and_inexact_instructions() -> None:
    memory = torch.zeros(32)
    execute("ld.global.b32 %r2, [%rd3];\nst.global.b32 [%rd3], %r1;", memory)
    assert memory.view(torch.int32).tolist() == list(range(32))
    for wrong in ("ld.global.b32 %r2, [%rd3+4]", "ld.global.b32 %r2, [%rd3+-4]", "ld.global.b32 %r2, [%rd3+2]"):
        with pytest.raises(Fault, match=r"outside|aligned"):
            execute(wrong + ";", memory)
    with pytest.raises(Fault, match="before it is written"):
        execute("add.s32 %r2, %r9, %r1;", memory)
    with pytest.raises(Fault, match="end"):
        execute("$again:\nbra.uni $again;", memory)
    with pytest.raises(Fault, match="barrier"):
        execute("setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $out;\nbar.sync 0;\n$out:", memory)
    for inexact in ("fma.rn.f32 %f1, %f1, %f1, %f1", "div.full.f32 %f1, %f1, %f1", "add.rn.ftz.f32 %f1, %f1, %f1"):
        with pytest.raises(NotImplementedError, match="not exact"):
            execute(inexact + ";", memory)
    with pytest.raises(NotImplementedError):
        execute("sin.f32 %f1, %f1;", memory)


def test_emulator_rounds_like_c() -> None:
    """It rounds after each operation, and keeps subnormal numbers."""
    memory = torch.tensor([1e-40, 3.0] * 16)
    execute(
        "ld.global.b32 %f1, [%rd3];\nmov.b32 %f2, 0f3F000000;\nmul.rn.f32 %f1, %f1, %f2;\nsqrt.rn.f32 %f1, %f1;\n"
        "st.global.b32 [%rd3], %f1;",
        memory,
    )
    expected = np.sqrt(np.array([1e-40, 3.0] * 16, np.float32) * np.float32(0.5))
    assert memory.numpy().tobytes() == expected.tobytes()


def test_lanes_that_branch_differently_meet_again() -> None:
    memory = torch.zeros(32)
    execute(
        "mov.u32 %r2, 0;\n$loop:\nadd.s32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, %r1;\n@%p1 bra $loop;\n"
        "st.global.b32 [%rd3], %r2;",
        memory,
    )
    assert memory.view(torch.int32).tolist() == [max(1, i) for i in range(32)]


def test_emulator_permits_access_only_to_declared_memory() -> None:
    memory = torch.zeros(40)
    code = HEAD + "ld.param.b64 %rd1, [k_param_0];\nst.global.b32 [%rd1+128], 1;\nret;\n}\n"
    Program(code).launch(1, [memory.data_ptr()], [region_of(memory)])
    with pytest.raises(Fault):
        Program(code).launch(1, [memory.data_ptr()], [Region(memory.data_ptr(), 128)])
    output = Region(memory.data_ptr(), memory.nbytes, readable=False)
    Program(code).launch(1, [memory.data_ptr()], [output])
    load = HEAD + "ld.param.b64 %rd1, [k_param_0];\nld.global.b32 %r1, [%rd1];\nret;\n}\n"
    with pytest.raises(Fault, match="not readable"):
        Program(load).launch(1, [memory.data_ptr()], [output])
    assert re.fullmatch(r"k_param_0", Program(code).params[0])
