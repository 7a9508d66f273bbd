"""Fused steps equal the single-tensor form, for all shapes, dtypes and numbers of threads, and work with torch."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP, kernels
from adabayes.kernels.cpu import library
from tests.conftest import all_state, assert_same
from tests.kernels.common import CLASSES, VARIANTS, assert_close, make, needs_kernels, set_gradients

pytestmark = needs_kernels

FLOATS = "`fused=True` requires all the params to be floating point Tensors"  # as in torch's message


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["torch's threads", "own threads"])
def team(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use the threads of torch's OpenMP, or those that the kernels start where there is none."""
    loaded: Any = library.load()
    if request.param == "own threads":
        loaded.adabayes_set_team(None)
    yield
    loaded.adabayes_set_team(library.team_of_torch())


def random_tensor(shape: list[int], layout: str, dtype: torch.dtype) -> Tensor:
    t = torch.randn(shape, dtype=torch.float64).to(dtype)
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels_last" and t.dim() == 4:
        return t.to(memory_format=torch.channels_last)
    return t


@pytest.mark.filterwarnings("ignore:batch_size=.*leaves AdaBayes no room")
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(VARIANTS),
    st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=1, max_size=5),
    st.sampled_from(["contiguous", "transposed", "channels_last"]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.integers(1, 4),
)
def test_fused_equals_single(
    variant: dict[str, Any], shapes: list[list[int]], layout: str, dtype: torch.dtype, missing: bool, threads: int
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    params = [random_tensor(shape, layout, dtype) for shape in shapes]
    fused = make(variant, copy.deepcopy(params), fused=True)
    single = make(variant, copy.deepcopy(params), foreach=False)
    for t in range(5):
        for optimizer in (fused, single):
            set_gradients(optimizer.param_groups[0]["params"], t, missing)
            optimizer.step()
            if t == 2:
                optimizer.param_groups[0]["lr"] *= 0.1
    assert_close(fused, single, dtype)


@pytest.mark.filterwarnings("ignore:batch_size=.*leaves AdaBayes no room")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
def test_every_number_of_threads_gives_the_same_bits(
    variant: dict[str, Any], state_dtype: torch.dtype | None, team: None
) -> None:
    """Use tensors that are large enough to be split among threads, into chunks that begin and end anywhere."""
    shapes = [(3,), (70_001,), (33, 1027), (), (0,), (199_999,)]
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        params = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
        optimizer = make(variant, params, fused=True, state_dtype=state_dtype)
        for t in range(4):
            set_gradients(params, t)
            optimizer.step()
        results.append(optimizer)
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.filterwarnings("ignore:batch_size=.*leaves AdaBayes no room")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_instruction_set_gives_the_same_bits(
    variant: dict[str, Any],
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare this machine's best instruction set with the most basic one, at another optimization level."""
    plain = tmp_path_factory.getbasetemp() / "plain.so"
    if not plain.exists():
        sources = sorted(kernels.LIBRARY.parent.glob("*.c"))
        flags = ["-O1", "-std=c11", "-shared", "-fPIC", "-pthread", "-DPLAIN", "-ffp-contract=off"]
        subprocess.run(["gcc", *flags, "-o", plain, *sources, "-lm"], check=True)
    results = []
    for loaded in (library.load(), ctypes.CDLL(str(plain))):
        monkeypatch.setattr(library, "load", lambda loaded=loaded: loaded)
        params = [torch.linspace(-1, 1, n).to(dtype) for n in (1, 17, 1000)]
        state_dtype = None if dtype == torch.float64 else torch.bfloat16
        optimizer = make(variant, params, fused=True, state_dtype=state_dtype, stochastic_rounding=True)
        for t in range(4):
            set_gradients(params, t)
            optimizer.step()
        results.append(optimizer)
    assert_same(*results)


@CLASSES
def test_fused_is_the_default_on_the_cpu(cls: type[AdaBayes]) -> None:
    w = torch.zeros(3)
    optimizer = cls([w])
    w.grad = torch.ones(3)
    optimizer.step()
    assert optimizer._fused


@CLASSES
@pytest.mark.parametrize("option", ["foreach", "differentiable", "strides", "complex", "fused"])
def test_unsupported_settings_fall_back_to_foreach(cls: type[AdaBayes], option: str) -> None:
    params = {
        "strides": torch.zeros(6, 4)[:, ::2],
        "complex": torch.zeros(3, dtype=torch.complex64),
    }
    w = params.get(option, torch.zeros(3))
    options: dict[str, Any] = {
        "foreach": {"foreach": True},
        "differentiable": {"differentiable": True},
        "fused": {"fused": False},
    }.get(option, {})
    optimizer = cls([w], **options)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert not optimizer._fused
    assert (w != 0).all()


@CLASSES
def test_fused_true_explains_why_it_is_impossible(cls: type[AdaBayes]) -> None:
    for w, message in [
        (torch.zeros(6, 4)[:, ::2], r"fused=True: .*shape \(6, 2\) and strides \(4, 2\) has gaps in memory"),
        (torch.zeros(3, dtype=torch.complex64), rf"{FLOATS}.*shape \(3,\) is of torch\.complex64 on cpu"),
        (torch.zeros(3, device="meta"), rf"{FLOATS}.*shape \(3,\) is of torch\.float32 on meta"),
    ]:
        optimizer = cls([w], fused=True)
        w.grad = torch.ones_like(w)
        with pytest.raises(RuntimeError, match=rf"^{message}.*Leave `fused` out to use foreach\.$"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        cls([torch.zeros(3)], fused=True, foreach=True)
    w = torch.zeros(3)
    w.grad = torch.ones(3)
    with pytest.raises(AssertionError, match="capturable=True, params and state_steps must be on supported devices"):
        cls([w], fused=True, capturable=True).step()
    with pytest.raises(RuntimeError, match=r"^`fused` does not support `differentiable`.*single-tensor form"):
        cls([torch.zeros(3)], fused=True, differentiable=True)


@CLASSES
def test_a_group_of_several_dtypes_equals_separate_groups(cls: type[AdaBayes]) -> None:
    """Torch's fused AdamW accepts such a group, too. Gradients are missing at some steps."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bfloat16, torch.float32]

    def mixed() -> list[Tensor]:
        return [torch.linspace(-1, 1, 70).to(dtype) for dtype in dtypes]

    together = cls(mixed(), weight_decay=0.1, fused=True)
    apart = cls([{"params": [p]} for p in mixed()], weight_decay=0.1, fused=True)
    for t in range(4):
        for optimizer in (together, apart):
            set_gradients([p for group in optimizer.param_groups for p in group["params"]], t, missing=True)
            optimizer.step()
    assert_same(together, apart)


@CLASSES
def test_memory_around_the_tensors_is_not_touched(cls: type[AdaBayes]) -> None:
    """Use tensors of every length from 0 to 69, each surrounded by values that must not change."""
    arena = torch.full((70 * 200,), 7.0)
    lengths = list(range(70))
    params = [arena[200 * n + 60 : 200 * n + 60 + n] for n in lengths]
    optimizer = cls(params, fused=True)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    inside = torch.zeros(len(arena), dtype=torch.bool)
    for n in lengths:
        inside[200 * n + 60 : 200 * n + 60 + n] = True
    assert (arena[~inside] == 7).all()
    assert (arena[inside] != 7).all()


@CLASSES
def test_autograd_notices_that_weights_have_changed(cls: type[AdaBayes]) -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = cls([w], fused=True)
    loss = (w * w).sum()
    w.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_leaves_unscaling_to_the_kernel(cls: type[AdaBayes], dtype: torch.dtype) -> None:
    """It does so for torch's fused optimizers, too, and refuses to unscale fp16. Gradients are not modified."""
    w, v = nn.Parameter(torch.linspace(-1, 1, 5).to(dtype)), nn.Parameter(torch.linspace(-1, 1, 5))
    scaled, plain = cls([w], lr=1e-2, fused=True), cls([v], lr=1e-2, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for t in range(6):
        scaled.zero_grad()
        bad = t in (1, 4)
        scaler.scale((w.float() * (float("inf") if bad else 1.0)).square().mean()).backward()
        assert w.grad is not None
        before = w.grad.clone()
        scaler.step(scaled)
        torch.testing.assert_close(w.grad, before, rtol=0, atol=0, equal_nan=True)
        if not bad:
            v.grad = before.float() / scaler.get_scale()
            plain.step()
        scaler.update()
    assert scaled.state[w]["step"].item() == 4
    assert not plain._step_supports_amp_scaling
    torch.testing.assert_close(w.float(), v, rtol=0, atol=1e-6 if dtype == torch.float32 else 4 * 5e-4)


@CLASSES
def test_state_can_be_passed_between_forms(cls: type[AdaBayes]) -> None:
    torch.manual_seed(0)
    start = torch.randn(6, 7)
    straight, hopping = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    reference, optimizer = cls([straight], foreach=False), cls([hopping], fused=True)
    for t in range(12):
        if t % 3 == 0 and t:
            form: dict[str, Any] = [{"fused": True}, {"foreach": True}, {"foreach": False}][t // 3 % 3]
            successor = cls([hopping], **form)
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][0].update({"fused": None, "foreach": None, **form})
            successor.load_state_dict(saved)
            optimizer = successor
        for p, o in ((straight, reference), (hopping, optimizer)):
            p.grad = torch.randn(6, 7, generator=torch.Generator().manual_seed(t))
            o.step()
    torch.testing.assert_close(hopping, straight, rtol=1e-5, atol=1e-6)
    for a, b in zip(all_state(optimizer), all_state(reference)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@CLASSES
def test_nan_and_infinity_stay_where_they_are(cls: type[AdaBayes]) -> None:
    for state_dtype in (None, torch.bfloat16):
        w = torch.zeros(100)
        optimizer = cls([w], fused=True, state_dtype=state_dtype)
        for t in range(3):
            w.grad = torch.full((100,), 0.1)
            if t == 1:
                w.grad[3] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]  # the nan of GPUs
                w.grad[5] = float("inf")
            optimizer.step()
        state = optimizer.state[w]
        assert state["exp_avg"][3].isnan()
        assert state["exp_avg"][5] == float("inf")
        assert w[3].isnan()
        fine = torch.ones(100, dtype=torch.bool)
        fine[[3, 5]] = False
        assert all(entry[fine].isfinite().all() for entry in (w, state["exp_avg"], state[list(optimizer.STATE)[1]]))


def test_a_huge_gradient_does_not_overflow_in_the_filter_with_memory() -> None:
    """At a gain of lr_sgd = 100, a gradient of 1e15 is near the limit of fp32: gain * gradient / lr / 10 is squared."""
    tensors = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    optimizers = AdaBayes([tensors[0]], fused=True), AdaBayes([tensors[1]], foreach=True), AdaBayes([tensors[2]])
    for g in [*[1e-9] * 100, 1e15]:
        for p, optimizer in zip(tensors, optimizers):
            p.grad = torch.full_like(p, g)
            optimizer.step()
    gains = [optimizer.state[p]["gain"].item() for p, optimizer in zip(tensors, optimizers)]
    assert gains[:2] == pytest.approx([gains[2]] * 2, rel=1e-5, abs=0)  # all are near 1e-17


def test_tensor_betas_give_the_bits_of_float_betas() -> None:
    params = [torch.ones(100), torch.ones(100)]
    betas: list[Any] = [(0.5, 0.75), (torch.tensor(0.5), torch.tensor(0.75))]  # exact in fp32
    for p, pair in zip(params, betas):
        optimizer = AdaBayesFP([p], betas=pair, fused=True)
        for t in range(5):
            p.grad = torch.linspace(-1, 1, 100) * (t + 1)
            optimizer.step()
    assert torch.equal(*params)
