"""The code that Triton compiles for GPUs, without one: what is in it, and what it computes, run by an emulator."""

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

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, kernels
from adabayes.bench import gpu
from adabayes.kernels import compiled, device
from adabayes.kernels.compiled import Variant
from tests.conftest import assert_same
from tests.gpu.emulator import Fault, Program, Region
from tests.gpu.launching import Emulated, program_of, region_of
from tests.marks import has_triton

pytestmark = [
    has_triton,
    pytest.mark.skipif(kernels.unavailable() is not None, reason=f"no kernels: {kernels.unavailable()}"),
]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FEW = [Variant("adabayes_step", F32, F32, memory=True), Variant("adabayes_fp_step", BF16, BF16, round_params=True)]
ALL = list(compiled.variants())


# The code


def check(target: str, variants: list[Variant]) -> None:
    for variant in variants:
        made = compiled.compile_for(target, variant)
        assert made.forbidden == []
        assert made.spills == 0
        assert made.registers <= device.REGISTERS
        if target.startswith("sm_"):
            # All that a step must read and write, and no more, goes in vectors: so the main path has nothing else.
            assert made.wide_bytes == variant.bytes_per_weight


@pytest.mark.parametrize("target", compiled.TARGETS)
def test_code_is_exact_in_vectors_and_within_its_registers(target: str) -> None:
    check(target, FEW)


@pytest.mark.long
@pytest.mark.parametrize("target", compiled.TARGETS)
def test_code_of_every_variant_is_exact_in_vectors_and_within_its_registers(target: str) -> None:
    check(target, ALL)


def test_bytes_per_weight_are_those_of_torchs_fused_adamw() -> None:
    """fp32: four arrays read, three written. bf16 state: 8 bytes less."""
    assert Variant("adabayes_step", F32, F32).bytes_per_weight == 28
    assert Variant("adabayes_step", F32, BF16).bytes_per_weight == 20
    assert Variant("adabayes_step", BF16, BF16).bytes_per_weight == 14


def test_contraction_and_approximation_would_be_noticed() -> None:
    """The same kernel, compiled as Triton does unless told otherwise."""
    code = compiled.compile_for("sm_90", FEW[0]).code
    for written, instead in (("mul.rn.f32", "fma.rn.f32"), ("div.rn.f32", "div.full.f32"), ("sqrt.rn", "sqrt.approx")):
        changed = code.replace(written, instead)
        assert compiled.Compiled(changed, 1, 0, 28.0).forbidden
    assert compiled.Compiled(code.replace("add.rn.f32", "add.rn.ftz.f32"), 1, 0, 28.0).forbidden


# Its results


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Emulated]:
    """Lets the compiled code take the steps of tensors of the CPU."""

    def begin(target: str, change: Callable[[Program], Program] = lambda program: program) -> Emulated:
        emulator = Emulated(target, change)
        monkeypatch.setattr(device, "_kernels", lambda: emulator)
        return emulator

    return begin


def assert_bits(make: Any, param: torch.dtype, state: torch.dtype, emulator: Emulated) -> None:
    expected = gpu.trained(make, param, state, "cpu")
    with gpu.on_cpu_tensors():
        found = gpu.trained(make, param, state, "cpu")
    assert emulator.launches == 3
    assert gpu.differing(expected, found)[0] == 0


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


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])
def test_a_scalers_verdict_is_read_by_the_compiled_code(
    cls: type[AdaBayes], emulated: Callable[..., Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the first step; a step that is skipped is not counted, and changes no bit."""
    emulator = emulated("sm_90")
    results = []
    for through in (False, True):
        w = nn.Parameter(torch.linspace(-1, 1, 1500))
        optimizer = cls([w], lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for t in range(5):
            optimizer.zero_grad()
            scaler.scale((w * (float("inf") if t in (0, 3) else 1.0)).square().mean()).backward()
            if through:
                with gpu.on_cpu_tensors():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        results.append(optimizer)
    assert emulator.launches == 5
    assert results[1].state[w]["step"].item() == 3
    assert_same(*results)


def test_matrices_take_the_kernel_element_by_element(emulated: Callable[..., Emulated]) -> None:
    emulator = emulated("sm_90")
    results = []
    for through in (False, True):
        params = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in [(20, 30)] * 2 + [(7,)]]
        optimizer = AdaBayesK(params, fused=True)
        for t in range(3):
            generator = torch.Generator().manual_seed(t)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            if through:
                with gpu.on_cpu_tensors():
                    optimizer.step()
            else:
                optimizer.step()
        results.append(optimizer)
    assert emulator.launches == 6  # a step has one for the matrices, one for the vector
    assert_same(*results)


def test_steps_of_several_counts_and_of_float64_counts(emulated: Callable[..., Emulated]) -> None:
    """A row of numbers for each tensor; counts beyond what fp32 holds, for the random bits."""
    emulated("sm_90")
    results = []
    for through in (False, True):
        params = [torch.linspace(-1, 1, n) for n in (5, 2000, 9)]
        optimizer = AdaBayesFP(params, fused=True, state_dtype=BF16)
        for p, step in zip(params, (0.0, 7.0, 2.0**24 + 3)):
            optimizer.state[p] = {
                "step": torch.tensor(step, dtype=torch.float64),
                "exp_avg": torch.zeros_like(p, dtype=BF16),
                "exp_avg_sq": torch.zeros_like(p, dtype=BF16),
            }
            p.grad = torch.linspace(0.1, 1, len(p))
        if through:
            with gpu.on_cpu_tensors():
                optimizer.step()
        else:
            optimizer.step()
        results.append(optimizer)
    assert_same(*results)


# Whether errors would be seen

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
    """Yield programs with one instruction changed, among those of the main path and of the ends of tensors."""
    whole = program_of("sm_90", variant)
    chooser = random.Random(seed)
    places = [
        i for i, x in enumerate(whole.code) if any(".".join(x.parts).startswith(swap) for swap in SWAPS) and x.operands
    ]
    for place in chooser.sample(places, count):
        old = whole.code[place]
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
        changed.__dict__.update(whole.__dict__)
        changed.code = [
            *whole.code[:place],
            old._replace(parts=parts, operands=tuple(operands)),
            *whole.code[place + 1 :],
        ]
        yield f"{place}: {name} {', '.join(old.operands)}", changed


def unnoticed(variant: Variant, count: int, seed: int, emulated: Callable[..., Emulated]) -> list[str]:
    batch_size = None if variant.memory else 100
    make = partial(AdaBayes if variant.function == "adabayes_step" else AdaBayesFP, batch_size=batch_size)
    expected = gpu.trained(make, variant.param, variant.state, "cpu")
    missed = []
    for name, program in mutants(variant, count, seed):
        emulated("sm_90", lambda _, program=program: program)
        try:
            with gpu.on_cpu_tensors():
                found = gpu.trained(make, variant.param, variant.state, "cpu")
        except (Fault, KeyError, NotImplementedError, IndexError):
            continue
        if gpu.differing(expected, found)[0] == 0:
            missed.append(name)
    return missed


@pytest.mark.parametrize("variant", FEW, ids=str)
def test_a_wrong_instruction_is_noticed(variant: Variant, emulated: Callable[..., Emulated]) -> None:
    assert unnoticed(variant, 8, 0, emulated) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", [*FEW, Variant("adabayes_step", F16, BF16), Variant("adabayes_fp_step", F32, F32)], ids=str
)
def test_wrong_instructions_are_noticed_but_for_a_few_that_change_no_result(
    variant: Variant, emulated: Callable[..., Emulated]
) -> None:
    """Such as a loop that goes on over elements that are masked, and what fp16 cannot overflow to."""
    assert len(unnoticed(variant, 60, 1, emulated)) <= 2


# The emulator itself

HEAD = ".visible .entry k(\n\t.param .u64 .ptr .global .align 1 k_param_0\n)\n.reqntid 32\n{\n"


def run(body: str, memory: torch.Tensor, blocks: int = 1) -> None:
    start = (
        "ld.param.b64 %rd1, [k_param_0];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd2, %r1, 4;\nadd.s64 %rd3, %rd1, %rd2;\n"
    )
    Program(HEAD + start + body + "\nret;\n}\n").run(blocks, [memory.data_ptr()], [region_of(memory)])


def test_emulator_refuses_what_a_gpu_would() -> None:
    memory = torch.zeros(32)
    run("ld.global.b32 %r2, [%rd3];\nst.global.b32 [%rd3], %r1;", memory)
    assert memory.view(torch.int32).tolist() == list(range(32))
    for wrong in ("ld.global.b32 %r2, [%rd3+4]", "ld.global.b32 %r2, [%rd3+-4]", "ld.global.b32 %r2, [%rd3+2]"):
        with pytest.raises(Fault, match=r"outside|aligned"):
            run(wrong + ";", memory)
    with pytest.raises(Fault, match="before it is written"):
        run("add.s32 %r2, %r9, %r1;", memory)
    with pytest.raises(Fault, match="end"):
        run("$again:\nbra.uni $again;", memory)
    with pytest.raises(Fault, match="barrier"):
        run("setp.lt.u32 %p1, %r1, 5;\n@%p1 bra $out;\nbar.sync 0;\n$out:", memory)
    for inexact in ("fma.rn.f32 %f1, %f1, %f1, %f1", "div.full.f32 %f1, %f1, %f1", "add.rn.ftz.f32 %f1, %f1, %f1"):
        with pytest.raises(NotImplementedError, match="not exact"):
            run(inexact + ";", memory)
    with pytest.raises(NotImplementedError):
        run("sin.f32 %f1, %f1;", memory)


def test_emulator_rounds_as_c_does() -> None:
    """Each operation by itself, subnormals kept."""
    memory = torch.tensor([1e-40, 3.0] * 16)
    run(
        "ld.global.b32 %f1, [%rd3];\nmov.b32 %f2, 0f3F000000;\nmul.rn.f32 %f1, %f1, %f2;\nsqrt.rn.f32 %f1, %f1;\n"
        "st.global.b32 [%rd3], %f1;",
        memory,
    )
    expected = np.sqrt(np.array([1e-40, 3.0] * 16, np.float32) * np.float32(0.5))
    assert memory.numpy().tobytes() == expected.tobytes()


def test_lanes_that_go_different_ways_meet_again() -> None:
    memory = torch.zeros(32)
    run(
        "mov.u32 %r2, 0;\n$loop:\nadd.s32 %r2, %r2, 1;\nsetp.lt.u32 %p1, %r2, %r1;\n@%p1 bra $loop;\n"
        "st.global.b32 [%rd3], %r2;",
        memory,
    )
    assert memory.view(torch.int32).tolist() == [max(1, i) for i in range(32)]


def test_memory_is_what_was_declared() -> None:
    memory = torch.zeros(40)
    code = HEAD + "ld.param.b64 %rd1, [k_param_0];\nst.global.b32 [%rd1+128], 1;\nret;\n}\n"
    Program(code).run(1, [memory.data_ptr()], [region_of(memory)])
    with pytest.raises(Fault):
        Program(code).run(1, [memory.data_ptr()], [Region(memory.data_ptr(), 128)])
    assert re.fullmatch(r"k_param_0", Program(code).params[0])
