"""The kernels equal the single-tensor form, whatever the shapes, types and threads, and never use a stale address."""

from __future__ import annotations

import copy
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adabayes import AdaBayes, AdaBayesFP, kernels
from adabayes.kernels import library
from tests.conftest import all_state, assert_same

pytestmark = pytest.mark.skipif(kernels.unavailable() is not None, reason=f"no kernels: {kernels.unavailable()}")

PAIR = [AdaBayes, AdaBayesFP]
FLOATS = "`fused=True` requires all the params to be floating point Tensors"  # the sentence that torch has
CLASSES = pytest.mark.parametrize("cls", PAIR)
VARIANTS: list[dict[str, Any]] = [
    {"cls": AdaBayes},
    {"cls": AdaBayes, "batch_size": 2},
    {"cls": AdaBayes, "dynamics": "paper"},
    {"cls": AdaBayes, "reduction": "sum", "batch_size": 7, "beta1": 0.0},
    {"cls": AdaBayes, "batch_size": 1e9, "maximize": True, "beta1": 0.3},
    {"cls": AdaBayesFP},
    {"cls": AdaBayesFP, "reduction": "sum", "batch_size": 7, "betas": (0.0, 0.9), "maximize": True},
    {"cls": AdaBayesFP, "cautious": True},
    {"cls": AdaBayesFP, "cautious": True, "centred": True},
]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["torch's threads", "own threads"])
def team(request: pytest.FixtureRequest) -> Iterator[None]:
    """On the threads of torch's OpenMP, and on those that the kernels start where there is none."""
    loaded: Any = library.load()
    if request.param == "own threads":
        loaded.adabayes_set_team(None)
    yield
    loaded.adabayes_set_team(library.team_of_torch())


def make(variant: dict[str, Any], params: list[Tensor], **more: Any) -> Any:
    options = {k: v for k, v in variant.items() if k != "cls"}
    return variant["cls"](params, lr=1e-2, weight_decay=0.1, **options, **more)


def laid_out(shape: list[int], layout: str, dtype: torch.dtype) -> Tensor:
    t = torch.randn(shape, dtype=torch.float64).to(dtype)
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels_last" and t.dim() == 4:
        return t.to(memory_format=torch.channels_last)
    return t


def set_gradients(params: list[Tensor], step: int, missing: bool) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        size = 10.0 ** torch.randint(-6, 3, p.shape, generator=generator).double()
        g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * size
        g[torch.rand(p.shape, generator=generator) < 0.2] = 0  # weights that start late
        p.grad = None if missing and (i + step) % 3 == 0 else torch.empty_like(p).copy_(g)


def assert_close(fused: Any, single: Any, dtype: torch.dtype) -> None:
    """Within 8 units in the last place of fp32 or float64 a step, beside the roundings of 16-bit parameters."""
    ulp = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for (p, state), (q, other) in zip(fused.state.items(), single.state.items()):
        coarse = 2 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
        torch.testing.assert_close(p, q, rtol=40 * ulp + coarse, atol=40 * ulp + 0.01 * coarse)
        for name in state:
            # Of a mean, a unit in the last place of its largest terms, not of what is left when they cancel.
            scale = max(1.0, other[name].abs().max().item()) if name == "exp_avg" and other[name].numel() else 0.0
            torch.testing.assert_close(state[name], other[name], rtol=40 * ulp, atol=8 * ulp * scale)


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
    params = [laid_out(shape, layout, dtype) for shape in shapes]
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
    """On tensors large enough to be shared out, with shares that begin and end anywhere."""
    shapes = [(3,), (70_001,), (33, 1027), (), (0,), (199_999,)]
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        params = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
        optimizer = make(variant, params, fused=True, state_dtype=state_dtype)
        for t in range(4):
            set_gradients(params, t, missing=False)
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
    """The best that this machine has, against what every machine of its kind has, with another optimisation level."""
    plain = tmp_path_factory.getbasetemp() / "plain.so"
    if not plain.exists():
        source = kernels.LIBRARY.with_name("fused.c")
        flags = ["-O1", "-std=c11", "-shared", "-fPIC", "-pthread", "-DPLAIN", "-ffp-contract=off"]
        subprocess.run(["gcc", *flags, "-o", plain, source, "-lm"], check=True)
    results = []
    for loaded in (library.load(), ctypes.CDLL(str(plain))):
        monkeypatch.setattr(library, "load", lambda loaded=loaded: loaded)
        params = [torch.linspace(-1, 1, n).to(dtype) for n in (1, 17, 1000)]
        state_dtype = None if dtype == torch.float64 else torch.bfloat16
        optimizer = make(variant, params, fused=True, state_dtype=state_dtype, stochastic_rounding=True)
        for t in range(4):
            set_gradients(params, t, missing=False)
            optimizer.step()
        results.append(optimizer)
    assert_same(*results)


@CLASSES
def test_fused_is_what_one_gets(cls: type[AdaBayes]) -> None:
    w = torch.zeros(3)
    optimizer = cls([w])
    w.grad = torch.ones(3)
    optimizer.step()
    assert optimizer._fused


@CLASSES
@pytest.mark.parametrize("option", ["foreach", "differentiable", "strides", "complex", "fused"])
def test_what_the_kernel_cannot_serve_falls_back(cls: type[AdaBayes], option: str) -> None:
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
def test_fused_true_says_why_it_cannot(cls: type[AdaBayes]) -> None:
    for w, message in [
        (torch.zeros(6, 4)[:, ::2], r"fused=True: .*shape \(6, 2\) and strides \(4, 2\) has gaps in memory"),
        (torch.zeros(3, dtype=torch.complex64), rf"{FLOATS}.*shape \(3,\) is of torch\.complex64 on cpu"),
        (torch.zeros(3, device="meta"), rf"{FLOATS}.*shape \(3,\) is of torch\.float32 on meta"),
    ]:
        optimizer = cls([w], fused=True)
        w.grad = torch.ones_like(w)
        with pytest.raises(RuntimeError, match=f"^{message}.*foreach is taken"):
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
def test_a_group_of_several_dtypes_equals_groups_of_their_own(cls: type[AdaBayes]) -> None:
    """As torch's fused AdamW takes one; also with gradients that come and go."""
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


# Memory that moves


def swap_data(p: nn.Parameter, optimizer: Any) -> None:
    p.data = p.data.clone()


def swap_back_and_forth(p: nn.Parameter, optimizer: Any) -> None:
    p.data, kept = torch.empty(0), p.data
    p.data = kept.clone()


def transpose_in_place(p: nn.Parameter, optimizer: Any) -> None:
    p.data = p.data.t().contiguous().t()


def move_state(p: nn.Parameter, optimizer: Any) -> None:
    for name, entry in optimizer.state[p].items():
        if name != "step":
            entry.data = entry.data.clone()


def replace_state(p: nn.Parameter, optimizer: Any) -> None:
    optimizer.state[p] = {name: entry.clone() for name, entry in optimizer.state[p].items()}


def replace_entries(p: nn.Parameter, optimizer: Any) -> None:
    for name, entry in list(optimizer.state[p].items()):
        optimizer.state[p][name] = entry.clone()


def load_own_state(p: nn.Parameter, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def to_double_and_back(p: nn.Parameter, optimizer: Any) -> None:
    p.data = p.data.double().float()


@CLASSES
@pytest.mark.parametrize(
    "move",
    [
        swap_data,
        swap_back_and_forth,
        transpose_in_place,
        move_state,
        replace_state,
        replace_entries,
        load_own_state,
        to_double_and_back,
    ],
)
def test_storage_that_moves_between_steps_is_followed(cls: type[AdaBayes], move: Any) -> None:
    """The same training with and without the move, bit for bit; and old memory is not written to."""
    torch.manual_seed(0)
    start = torch.randn(5, 5)
    moved, unmoved = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [cls([moved]), cls([unmoved])]
    for t in range(6):
        for p in (moved, unmoved):
            p.grad = torch.randn(5, 5, generator=torch.Generator().manual_seed(t))
        if t >= 2:
            old = [moved.data, *(v for v in optimizers[0].state[moved].values())]
            before = [x.clone() for x in old]
            moved_away = [x.data_ptr() for x in old]
            move(moved, optimizers[0])
            now = [moved, *optimizers[0].state[moved].values()]
            gone = [x for x, a, y in zip(old, moved_away, now) if y.data_ptr() != a and x.data_ptr() == a]
            kept = [x for x, y in zip(before, old) if any(y is g for g in gone)]
        for optimizer in optimizers:
            optimizer.step()
        if t >= 2:
            assert all(torch.equal(x, y) for x, y in zip(gone, kept))
    torch.testing.assert_close(moved, unmoved, rtol=1e-5, atol=1e-7)
    assert optimizers[0].state[moved]["step"].item() == 6


@CLASSES
def test_a_view_of_the_same_memory_in_another_order_is_noticed(cls: type[AdaBayes]) -> None:
    """Same object, address and size; only the strides tell."""
    torch.manual_seed(0)
    start, grad = torch.randn(5, 5), torch.randn(5, 5)
    turned, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [cls([turned]), cls([plain], fused=False)]
    for t in range(3):
        for p, optimizer in zip((turned, plain), optimizers):
            if t == 1:
                p.data = p.data.t()
                for name, entry in optimizer.state[p].items():
                    optimizer.state[p][name] = entry.t()
            p.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(turned, plain, rtol=1e-5, atol=1e-7)


@CLASSES
@pytest.mark.parametrize("lend", [lambda o: o.state, lambda o: o.state_dict()["state"]], ids=["state", "state_dict"])
def test_state_that_was_taken_in_hand_once_is_followed_ever_after(cls: type[AdaBayes], lend: Any) -> None:
    """Steps trust that state stays in place while nobody else has it: here someone has, and moves it much later."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5))
    twin = nn.Parameter(w.detach().clone())
    optimizers = [cls([w]), cls([twin], fused=False)]
    held: list[dict[str, torch.Tensor]] = []
    for t in range(8):
        for p in (w, twin):
            p.grad = torch.ones(5) * (t + 1)
        if t == 2:
            held = [state for optimizer in optimizers for state in lend(optimizer).values()]
        if t == 5:
            for state in held:
                state["exp_avg"].data = torch.zeros(5)
        if t == 6:
            for state in held:
                state["exp_avg"] = torch.ones(5)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(w, twin, rtol=1e-5, atol=1e-7)


@CLASSES
def test_parameters_that_change_size_or_dtype_get_no_wild_writes(cls: type[AdaBayes]) -> None:
    """A smaller parameter at the same address: its gradient tells, and the step is refused as torch would refuse it."""
    w = nn.Parameter(torch.zeros(10))
    optimizer = cls([w])
    w.grad = torch.ones(10)
    optimizer.step()
    guard = w.data
    w.grad = None
    w.data = guard[:4]
    w.grad = torch.ones(4)
    before = guard.clone()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(guard, before)
    w.grad = None
    w.data = guard
    w.grad = torch.ones(10)
    w.data = guard[:4]  # and with the old gradient
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(guard, before)


@CLASSES
def test_gradients_of_another_layout_are_understood(cls: type[AdaBayes]) -> None:
    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last)) for _ in range(2))
    v.data.copy_(w.data)
    fused, single = cls([w]), cls([v], foreach=False)
    for _ in range(3):
        w.grad = torch.randn(3, 4, 5, 5)  # contiguous
        v.grad = w.grad.clone()
        for optimizer in (fused, single):
            optimizer.step()
    assert fused._fused
    assert_close(fused, single, torch.float32)


@CLASSES
def test_memory_around_the_tensors_is_not_touched(cls: type[AdaBayes]) -> None:
    """Tensors of every length up to three vectors and more, each between guards."""
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


# With the rest of torch


@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_leaves_unscaling_to_the_kernel(cls: type[AdaBayes], dtype: torch.dtype) -> None:
    """As to torch's fused optimizers; also of fp16, which it refuses to unscale itself. Gradients stay as they are."""
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
def test_state_goes_from_form_to_form_and_back(cls: type[AdaBayes]) -> None:
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
                w.grad[3] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]  # as GPUs write nan
                w.grad[5] = float("inf")
            optimizer.step()
        state = optimizer.state[w]
        assert state["exp_avg"][3].isnan()
        assert state["exp_avg"][5] == float("inf")
        assert w[3].isnan()
        fine = torch.ones(100, dtype=torch.bool)
        fine[[3, 5]] = False
        assert all(entry[fine].isfinite().all() for entry in (w, state["exp_avg"], state[list(optimizer.STATE)[1]]))


def test_a_gradient_far_above_all_others_does_not_overflow_in_the_filter_that_remembers() -> None:
    """From a gain of lr_sgd = 100, 1e15 is near the limit of fp32 for squares of gain * gradient / lr / 10."""
    tensors = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    optimizers = AdaBayes([tensors[0]], fused=True), AdaBayes([tensors[1]], foreach=True), AdaBayes([tensors[2]])
    for g in [*[1e-9] * 100, 1e15]:
        for p, optimizer in zip(tensors, optimizers):
            p.grad = torch.full_like(p, g)
            optimizer.step()
    gains = [optimizer.state[p]["gain"].item() for p, optimizer in zip(tensors, optimizers)]
    assert gains[:2] == pytest.approx([gains[2]] * 2, rel=1e-5, abs=0)  # all are near 1e-17


@CLASSES
def test_state_is_trusted_again_once_nobody_else_has_it(cls: type[AdaBayes]) -> None:
    """And not before: neither while its dict, an entry of it or only a view of its memory is still held."""
    w = nn.Parameter(torch.randn(5))
    optimizer: Any = cls([w])

    def steps(count: int = 8) -> bool:
        for _ in range(count):
            w.grad = torch.ones(5)
            optimizer.step()
        return bool(optimizer._fused._lent)

    assert not steps()
    holders: list[Callable[[], Any]] = [
        lambda: optimizer.state,
        lambda: optimizer.state[w],
        lambda: optimizer.state[w]["exp_avg"],
        lambda: optimizer.state[w]["exp_avg"].view(-1),
        lambda: optimizer.state[w]["step"],
        lambda: optimizer.state_dict(),
        lambda: optimizer.state_dict()["state"],
    ]
    for hold in holders:
        held = hold()
        assert steps()
        del held
        assert not steps()
        hold()
        assert not steps()
