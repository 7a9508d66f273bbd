"""The host's part of a fused step on a GPU: which kernel it chooses, what it sends, and that it never waits."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, cli
from adabayes.bench import gpu
from adabayes.kernels.backends import BACKENDS
from adabayes.kernels.coefficients import ADABAYES_FP, StepOptions
from adabayes.kernels.triton import launch as device
from adabayes.optim._engine import fused as fused_steps
from tests.conftest import assert_same
from tests.kernels.common import CLASSES, needs_kernels
from tests.support.marks import has_triton

pytestmark = [has_triton, needs_kernels]


class Recorded:
    """Replaces the Triton kernels, and records the arguments of their launches."""

    def __init__(self) -> None:
        self.RULES = device._kernels().RULES
        self.steps: list[dict[str, Any]] = []
        self.counted = 0
        self.fused_step, self.count_steps = _Launcher(self._step), _Launcher(self._count)

    def _step(self, blocks: int, *tables: Any, **fixed: Any) -> None:
        names = ("table", "grads", "pieces", "rows", "found_inf", "columns", "seed")
        self.steps.append({"blocks": blocks, **dict(zip(names, tables)), **fixed})

    def _count(self, blocks: int, table: Tensor, counts: Tensor, *rest: Any, **fixed: Any) -> None:
        self.counted += 1
        counts.fill_(self.counted)


class _Launcher:
    """Supports Triton's syntax of a launch: ``kernel[grid](*arguments, **constants)``."""

    def __init__(self, launch: Any) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **fixed: self._launch(*grid, *arguments, **fixed)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Record launches on CPU tensors instead of executing them."""
    recorder = Recorded()
    monkeypatch.setattr(device, "_kernels", lambda: recorder)
    with gpu.on_cpu_tensors():
        yield recorder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many bytes each transfer sends to the device."""
    sizes: list[int] = []
    send = device._send

    def recorded_send(host: Tensor, where: torch.device) -> Tensor:
        sizes.append(host.nbytes)
        return send(host, where)

    monkeypatch.setattr(device, "_send", recorded_send)
    return sizes


def params_with_gradients(count: int = 1000) -> list[Tensor]:
    params = [torch.zeros(10) for _ in range(count)]
    for p in params:
        p.grad = torch.ones(10)
    return params


# Which kernel


@CLASSES
def test_on_cuda_the_kernel_is_opt_in(cls: type[AdaBayes], recorded: Recorded) -> None:
    assert device.BY_DEFAULT is False, "once it is True, README and docs/gpu.md must say so"
    assert BACKENDS["cuda"].by_default is device.BY_DEFAULT
    BACKENDS["cpu"] = BACKENDS["cpu"]._replace(by_default=False)
    for fused, uses_kernel in ((None, False), (False, False), (True, True)):
        w = torch.zeros(3)
        w.grad = torch.ones(3)
        optimizer = cls([w], fused=fused)
        optimizer.step()
        assert bool(optimizer._fused) == uses_kernel
    assert len(recorded.steps) == 1
    matrix = torch.zeros(3, 2)
    matrix.grad = torch.ones(3, 2)
    AdaBayesK([matrix]).step()
    assert len(recorded.steps) == 1
    AdaBayesK([matrix], fused=True).step()
    assert len(recorded.steps) == 2


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
def test_without_a_compiler_foreach_is_used_and_fused_true_raises(cls: type[AdaBayes], recorded: Recorded) -> None:
    reason = "Triton needs a C compiler, and there is none (gcc); install gcc"
    BACKENDS["cpu"] = BACKENDS["cpu"]._replace(unavailable=lambda: reason)
    w = torch.zeros(3, 2)
    w.grad = torch.ones(3, 2)
    cls([w]).step()
    assert (w != 0).all()
    remedy = "(Leave `fused` out to use foreach|Or leave `fused` out: then foreach is used)"
    with pytest.raises(RuntimeError, match=rf"^fused=True: {re.escape(reason)}\. {remedy}\.$"):
        cls([w], fused=True).step()
    assert not recorded.steps


def test_unavailable_returns_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    device.unavailable.cache_clear()
    assert device.unavailable() is not None
    assert "no GPU" in str(device.unavailable())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for environment, message in (
        ({"CC": "no-such-compiler"}, r"needs a C compiler.*\(no-such-compiler\)"),
        ({}, r"^Triton 3"),
    ):
        device.unavailable.cache_clear()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert re.search(message, str(device.unavailable()))
        monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    device.unavailable.cache_clear()
    assert "cannot be imported" in str(device.unavailable())
    device.unavailable.cache_clear()


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, torch, adabayes; assert 'triton' not in sys.modules; w = torch.zeros(3); w.grad = torch.ones(3)"
    code += "; adabayes.AdaBayes([w]).step()"  # imports torch's compiler, which may import Triton
    code += "; assert not {f'adabayes.kernels.triton.{name}' for name in ('kernel', 'rules')} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_same_parameter_twice_is_refused(recorded: Recorded) -> None:
    """Its two steps would run at the same time."""
    w = torch.zeros(3)
    w.grad = torch.ones(3)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = AdaBayes([w, w], fused=True)
    with pytest.raises(RuntimeError, match="twice"):
        optimizer.step()


def test_float64_falls_back_to_foreach(recorded: Recorded) -> None:
    w = torch.zeros(3, dtype=torch.float64)
    w.grad = torch.ones_like(w)
    AdaBayes([w]).step()
    assert (w != 0).all()
    with pytest.raises(RuntimeError, match=r"no kernel for parameters of torch\.float64"):
        AdaBayes([w], fused=True).step()


# Step counts


@CLASSES
def test_step_counts_are_on_the_device_of_torchs_optimizers(cls: type[AdaBayes]) -> None:
    """They are with the parameters if a kernel counts, and on the CPU if the host does, as in AdaBayes-K."""
    p = torch.zeros(3, device="meta")
    cases: list[tuple[dict[str, Any], str]] = [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
    for options, where in cases:
        optimizer: Any = cls([p], **options)
        assert optimizer._step_count(0.0, p, optimizer.param_groups[0]).device.type == where
    matrices: Any = AdaBayesK([p], fused=True)
    assert matrices._step_count(0.0, p, matrices.param_groups[0]).device.type == "cpu"


def test_require_library_step_counts_move_to_the_device_of_new_ones() -> None:
    """Foreach, whose host would wait for each count, can load those of a fused optimizer on a GPU, and vice versa."""
    w = torch.zeros(3)
    w.grad = torch.ones(3)
    optimizer = AdaBayes([w])
    optimizer.step()
    saved = optimizer.state_dict()
    there: Any = AdaBayes([torch.zeros(3, device="meta")], fused=True)
    there.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "fused": True}]})
    assert next(iter(there.state.values()))["step"].device.type == "meta"
    here: Any = AdaBayes([torch.zeros(3, device="meta")])
    here.load_state_dict(saved)
    assert next(iter(here.state.values()))["step"].device.type == "cpu"


# What is sent


@CLASSES
def test_only_addresses_that_changed_are_sent(cls: type[AdaBayes], recorded: Recorded, sent: list[int]) -> None:
    params = params_with_gradients()
    optimizer = cls(params, fused=True)
    optimizer.step()
    assert len(sent) == 2  # the table and the gradients
    optimizer.step()
    assert len(sent) == 2
    for p in params[:3]:
        p.grad = torch.ones(10) + 1
    optimizer.step()
    assert sent[2:] == [8 * len(params)]
    addresses = recorded.steps[-1]["grads"].tolist()
    assert addresses == [p.grad.data_ptr() for p in params if p.grad is not None]
    params[5].data = params[5].data.clone()
    optimizer.step()
    assert len(sent) == 5
    assert len(recorded.steps) == 4  # one launch per step


@CLASSES
def test_tables_are_made_whatever_the_default_device_is(cls: type[AdaBayes], recorded: Recorded) -> None:
    params = params_with_gradients(3)
    optimizer: Any = cls(params, fused=True)
    device._pieces.cache_clear()
    with torch.device("meta"):
        optimizer.step()
        for p, step in zip(params, (1.0, 2.0, 3.0)):
            optimizer.state[p]["step"].fill_(step)
        launch: Any = next(iter(optimizer._fused._plans.values()))[0]._batches[0].launch
        launch.counts_on_device = False
        c = optimizer.coefficients(optimizer.param_groups[0], 1e-3)
        launch.take_step([p.grad.data_ptr() for p in params if p.grad is not None], c, StepOptions())
    for launched in recorded.steps:
        assert {launched[name].device.type for name in ("table", "grads", "pieces", "rows")} == {"cpu"}
    assert recorded.steps[-1]["rows"][0].view(torch.int32).tolist() == [2, 3, 4]


def test_coefficients_are_written_only_when_they_change(recorded: Recorded) -> None:
    """The kernel gets a learning rate that a scheduler has changed."""
    optimizer = AdaBayesFP(params_with_gradients(3), lr=0.25, fused=True, weight_decay=1.0)
    shrink, beta1 = (1 + ADABAYES_FP.coefficients.index(name) for name in ("shrink", "beta1"))
    optimizer.step()
    rows = recorded.steps[-1]["rows"]
    assert rows[shrink].tolist() == [0.75] * 3
    optimizer.param_groups[0]["lr"] = 0.5
    rows[beta1] = 7.0  # stays, because beta1 is not written again
    optimizer.step()
    rows = recorded.steps[-1]["rows"]
    assert rows[shrink].tolist() == [0.5] * 3
    assert rows[beta1].tolist() == [7.0] * 3
    assert rows[0].view(torch.int32).tolist() == [2] * 3


def test_blocks_cover_every_element_once() -> None:
    numels = (0, 1, 1023, 1024, 1025, 5000)
    pieces = device._pieces(numels, torch.device("cpu")).tolist()
    blocks = [(piece >> 32, piece & 0xFFFFFFFF) for piece in pieces]
    assert blocks == [(i, k) for i, n in enumerate(numels) for k in range(math.ceil(n / device.BLOCK))]


class NoWaiting(TorchDispatchMode):
    """Refuses operations that would wait for a GPU because they read a value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if any(word in name for word in ("_local_scalar_dense", "is_nonzero", "equal.", "nonzero", "item")):
            raise AssertionError(f"{name} would wait for the device")
        return function(*args, **(kwargs or {}))


@CLASSES
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("lr", [1e-2, "tensor"])
def test_nothing_in_a_step_waits_for_the_device(
    cls: type[AdaBayes], scaled: bool, lr: Any, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step counts, learning rate, scale and found_inf are on the device. Only the first step may wait."""
    monkeypatch.setattr(fused_steps, "_without_sync", lambda x, where: x.double() if isinstance(x, Tensor) else x)
    rate = torch.tensor(1e-2) if lr == "tensor" else lr
    optimizer: Any = cls(params_with_gradients(5), lr=rate, fused=True, capturable=True, weight_decay=0.1)
    optimizer.step()
    if scaled:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    with NoWaiting():
        optimizer.step()
    assert len(recorded.steps) == 2
    assert (recorded.steps[-1]["found_inf"] is not None) == scaled
    with pytest.raises(AssertionError, match="would wait"), NoWaiting():
        torch.ones(1).item()


# Graphs


def test_a_graph_reads_only_memory_that_stays(
    recorded: Recorded, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has separate memory for addresses and coefficients, and its tables outlive the optimizer."""
    params = params_with_gradients(200)
    optimizer = AdaBayes(params, fused=True, capturable=True)
    optimizer.step()
    before, copies = recorded.steps[-1], len(sent)
    for p in params:
        p.grad = torch.ones(10)  # as in a capture, whose gradients are in separate memory
    monkeypatch.setattr(device, "is_capturing", lambda where: True)
    optimizer.step()
    captured = recorded.steps[-1]
    assert len(sent) == copies  # a replay would read the host's memory again
    assert captured["grads"].tolist() == [p.grad.data_ptr() for p in params if p.grad is not None]
    for own in ("grads", "rows"):
        assert captured[own].data_ptr() != before[own].data_ptr()
    for kept in ("table", "pieces"):
        assert any(t is captured[kept] for t in device._captured)
    monkeypatch.setattr(device, "is_capturing", lambda where: False)
    optimizer.step()
    assert recorded.steps[-1]["rows"].data_ptr() == before["rows"].data_ptr()


def test_a_graph_cannot_capture_the_first_step(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_capturing", lambda where: True)
    with pytest.raises(RuntimeError, match=r"cannot capture the first step.*take one before"):
        AdaBayes(params_with_gradients(2), fused=True, capturable=True).step()


# Parameters and gradients


@CLASSES
def test_autograd_notices_that_weights_have_changed(cls: type[AdaBayes], recorded: Recorded) -> None:
    w = nn.Parameter(torch.ones(3))
    loss = (w * w).sum()
    w.grad = torch.ones(3)
    cls([w], fused=True).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@CLASSES
def test_a_null_gradient_is_refused(cls: type[AdaBayes], recorded: Recorded) -> None:
    w = nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    optimizer = cls([w], fused=True)
    optimizer.step()
    w.grad = torch.ones(3)
    w.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="needs 12 bytes of memory but its storage has 0"):
        optimizer.step()
    assert len(recorded.steps) == 1


# The doctor's checks that need no GPU


def test_the_doctors_gpu_checks_pass_on_the_cpu() -> None:
    assert gpu.scaler("cpu").well
    assert gpu.matrices("cpu").well
    assert gpu.speed("cpu", "tiny", repeats=2).message.startswith("AdamW fused ")


def test_the_doctor_reports_a_missing_gpu_and_failed_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    no_gpu, triton = itertools.islice(gpu.findings(), 2)
    assert "none that torch can use" in no_gpu.message
    assert triton.name == "Triton"
    monkeypatch.setattr(gpu, "findings", lambda: [no_gpu, gpu.Finding("bits", True, "all")])
    cli.main(["doctor", "--gpu"])
    assert "bits      ok: all" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "findings", lambda: [gpu.Finding("bits", False, "some differ")])
    with pytest.raises(SystemExit, match="1"):
        cli.main(["doctor", "--gpu"])
    assert "WRONG: some differ" in capsys.readouterr().out


def test_a_check_that_raises_is_reported_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> gpu.Finding:
        raise OSError("no process")

    monkeypatch.setattr(gpu, "bits_interpreted", fails)
    monkeypatch.setattr(gpu, "code", lambda targets, chosen: gpu.Finding("code", True, ", ".join(targets)))
    if not torch.cuda.is_available():
        *_, bits, code = gpu.findings()
        assert bits == ("bits", False, "failed: OSError: no process")
        assert code.message == "sm_80, sm_90, sm_100, sm_120, gfx942"


def test_differing_counts_values_whose_bits_differ() -> None:
    one, two = (gpu.trained(AdaBayes, torch.float32, torch.float32, "cpu", lengths=(40,)) for _ in range(2))
    assert_same(one, two)
    assert gpu.differing(one, two)[0] == 0
    two.param_groups[0]["params"][0][7] += 1
    assert gpu.differing(one, two)[0] == 1
