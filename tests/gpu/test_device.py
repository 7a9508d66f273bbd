"""The host's side of the fused step on a GPU: which kernel is chosen, what is sent, and that nothing waits."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, cli, kernels
from adabayes.bench import gpu
from adabayes.kernels import device
from adabayes.optim import _fused
from tests.conftest import assert_same
from tests.marks import has_triton

pytestmark = [
    has_triton,
    pytest.mark.skipif(kernels.unavailable() is not None, reason=f"no kernels: {kernels.unavailable()}"),
]
CLASSES = pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP])


class Recorded:
    """Takes the place of the Triton kernels, and notes what they were launched with."""

    def __init__(self) -> None:
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
    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **fixed: self._run(*grid, *arguments, **fixed)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """Launches on tensors of the CPU are noted, not run."""
    recorder = Recorded()
    monkeypatch.setattr(device, "_kernels", lambda: recorder)
    with gpu.on_cpu_tensors():
        yield recorder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is sent to the device."""
    sizes: list[int] = []
    send = device._sent

    def noted(host: Tensor, where: torch.device) -> Tensor:
        sizes.append(host.nbytes)
        return send(host, where)

    monkeypatch.setattr(device, "_sent", noted)
    return sizes


def with_gradients(count: int = 1000) -> list[Tensor]:
    params = [torch.zeros(10) for _ in range(count)]
    for p in params:
        p.grad = torch.ones(10)
    return params


# Which kernel


@CLASSES
def test_on_cuda_the_kernel_is_taken_on_request_only(cls: type[AdaBayes], recorded: Recorded) -> None:
    assert device.BY_DEFAULT is False, "and once it is True, README and docs/gpu.md must say so"
    assert _fused.BACKENDS["cuda"].by_default is device.BY_DEFAULT
    _fused.BACKENDS["cpu"] = _fused.BACKENDS["cpu"]._replace(by_default=False)
    for fused, taken in ((None, False), (False, False), (True, True)):
        w = torch.zeros(3)
        w.grad = torch.ones(3)
        optimizer = cls([w], fused=fused)
        optimizer.step()
        assert bool(optimizer._fused) == taken
    assert len(recorded.steps) == 1
    matrix = torch.zeros(3, 2)
    matrix.grad = torch.ones(3, 2)
    AdaBayesK([matrix]).step()
    assert len(recorded.steps) == 1
    AdaBayesK([matrix], fused=True).step()
    assert len(recorded.steps) == 2


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
def test_without_what_triton_needs_foreach_is_taken_and_fused_true_says_what(
    cls: type[AdaBayes], recorded: Recorded
) -> None:
    reason = "Triton needs a C compiler, and there is none (gcc); install gcc"
    _fused.BACKENDS["cpu"] = _fused.BACKENDS["cpu"]._replace(unavailable=lambda: reason)
    w = torch.zeros(3, 2)
    w.grad = torch.ones(3, 2)
    cls([w]).step()
    assert (w != 0).all()
    with pytest.raises(RuntimeError, match=r"^fused=True: Triton needs a C compiler.*foreach is taken"):
        cls([w], fused=True).step()
    assert not recorded.steps


def test_reasons_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device.unavailable.cache_clear()
    assert device.unavailable() is not None
    assert "no GPU" in str(device.unavailable())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for environment, said in (
        ({"CC": "no-such-compiler"}, r"needs a C compiler.*\(no-such-compiler\)"),
        ({}, r"^Triton 3"),
    ):
        device.unavailable.cache_clear()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert re.search(said, str(device.unavailable()))
        monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    device.unavailable.cache_clear()
    assert "cannot be imported" in str(device.unavailable())
    device.unavailable.cache_clear()


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, torch, adabayes; assert 'triton' not in sys.modules; w = torch.zeros(3); w.grad = torch.ones(3)"
    code += (
        "; adabayes.AdaBayes([w]).step(); assert 'adabayes.kernels.update' not in sys.modules"  # torch may want Triton
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_same_parameter_twice_is_refused(recorded: Recorded) -> None:
    """Both steps would be taken at once."""
    w = torch.zeros(3)
    w.grad = torch.ones(3)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = AdaBayes([w, w], fused=True)
    with pytest.raises(RuntimeError, match="twice"):
        optimizer.step()


def test_float64_goes_to_foreach(recorded: Recorded) -> None:
    w = torch.zeros(3, dtype=torch.float64)
    w.grad = torch.ones_like(w)
    AdaBayes([w]).step()
    assert (w != 0).all()
    with pytest.raises(RuntimeError, match=r"no kernel for parameters of torch\.float64"):
        AdaBayes([w], fused=True).step()


# Step counts


@CLASSES
def test_step_counts_are_where_torch_has_them(cls: type[AdaBayes]) -> None:
    """With the parameters, if a kernel counts; on the CPU, if the host does: also those of AdaBayes-K."""
    p = torch.zeros(3, device="meta")
    asked: list[tuple[dict[str, Any], str]] = [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
    for options, where in asked:
        optimizer: Any = cls([p], **options)
        assert optimizer._step_count(0.0, p, optimizer.param_groups[0]).device.type == where
    matrices: Any = AdaBayesK([p], fused=True)
    assert matrices._step_count(0.0, p, matrices.param_groups[0]).device.type == "cpu"


def test_loaded_step_counts_move_to_where_they_belong() -> None:
    """From a fused optimizer of a GPU to foreach, whose host would wait for each; here from another device."""
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
def test_nothing_is_sent_while_nothing_moves_and_one_copy_when_gradients_do(
    cls: type[AdaBayes], recorded: Recorded, sent: list[int]
) -> None:
    params = with_gradients()
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
    assert len(recorded.steps) == 4  # one launch a step


@CLASSES
def test_tables_are_made_whatever_the_default_device_is(cls: type[AdaBayes], recorded: Recorded) -> None:
    params = with_gradients(3)
    optimizer = cls(params, fused=True)
    device._pieces.cache_clear()
    with torch.device("meta"):
        optimizer.step()
        for p, step in zip(params, (1.0, 2.0, 3.0)):
            optimizer.state[p]["step"].fill_(step)
        launch = next(iter(optimizer._fused._plans.values()))._parts[0].launch
        steps = [optimizer.state[p]["step"] for p in params]
        numbers = {"unscale": 1.0, "beta1": 0.9, "beta2": 0.9, "shrink": 1.0, "rate": 1.0, "eps": 1.0}
        launch.run("adabayes_fp_step", [p.grad.data_ptr() for p in params if p.grad is not None], numbers, steps=steps)
    for launched in recorded.steps:
        assert {launched[name].device.type for name in ("table", "grads", "pieces", "rows")} == {"cpu"}
    assert recorded.steps[-1]["rows"][0].view(torch.int32).tolist() == [2, 3, 4]


def test_numbers_are_written_when_they_change(recorded: Recorded) -> None:
    """Those of a row that stay are not written again, and a scheduler's learning rate arrives."""
    optimizer = AdaBayesFP(with_gradients(3), lr=0.25, fused=True, weight_decay=1.0)
    optimizer.step()
    shrink = recorded.steps[-1]["rows"][3].clone()
    assert shrink.tolist() == [0.75] * 3
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert recorded.steps[-1]["rows"][3].tolist() == [0.5] * 3
    assert recorded.steps[-1]["rows"][0].view(torch.int32).tolist() == [2] * 3


def test_blocks_cover_every_element_once() -> None:
    numels = (0, 1, 1023, 1024, 1025, 5000)
    pieces = device._pieces(numels, torch.device("cpu")).tolist()
    found = [(piece >> 32, piece & 0xFFFFFFFF) for piece in pieces]
    assert found == [(i, k) for i, n in enumerate(numels) for k in range(math.ceil(n / device.BLOCK))]


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a GPU: to look at a number, or to copy one to or from pageable memory."""

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
    """With counts, learning rate, scale and verdict on the device; the first step may wait."""
    monkeypatch.setattr(_fused, "_kept", lambda x, where: x.double() if isinstance(x, Tensor) else x)
    rate = torch.tensor(1e-2) if lr == "tensor" else lr
    optimizer: Any = cls(with_gradients(5), lr=rate, fused=True, capturable=True, weight_decay=0.1)
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


def test_a_graph_reads_nothing_that_may_go_or_change(
    recorded: Recorded, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addresses and numbers are its own, and its tables outlive the optimizer."""
    params = with_gradients(200)
    optimizer = AdaBayes(params, fused=True, capturable=True)
    optimizer.step()
    before, copies = recorded.steps[-1], len(sent)
    for p in params:
        p.grad = torch.ones(10)  # as in a capture, whose gradients are in memory of its own
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
        AdaBayes(with_gradients(2), fused=True, capturable=True).step()


# Numbers


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["adabayes_step", "adabayes_fp_step"]),
    st.sampled_from([0.0, 100.0]),
    st.integers(1, 10**6),
    st.floats(0, 0.9999),
    st.floats(0, 0.9999),
    st.sampled_from([1.0, 1 / 65536, 0.125]),
)
def test_numbers_worked_out_on_the_device_are_those_of_the_host(
    function: str, memory: float, t: int, beta1: float, beta2: float, unscale: float
) -> None:
    """In float64; a power may differ in its last digits, and 1 - beta^t then by a few more where it is small."""
    c = {"beta1": beta1, "beta2": beta2, "unscale": unscale, "shrink": 0.99, "rate": 1e-3}
    c |= {"eps": 1e-5, "centred": False, "forget": 1e-3, "noise": 1e-4, "information": 128.0, "half": 5.0, "slope": 1e3}
    c["memory"] = memory
    host = device.row(function, c, float(t))
    there = device.row(function, c, torch.tensor([float(t)], dtype=torch.float64))
    assert len(host) == len(there) == device.NUMBERS
    for a, b in zip(host, there):
        assert float(b) == pytest.approx(float(a), rel=1e-11, abs=0)


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


def test_what_the_doctor_does_with_a_gpu_runs_here_on_the_cpu() -> None:
    assert gpu.scaler("cpu").well
    assert gpu.matrices("cpu").well
    assert gpu.speed("cpu", "tiny", repeats=2).said.startswith("AdamW fused ")


def test_the_doctor_says_that_there_is_no_gpu_and_that_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    there_is_none, triton = itertools.islice(gpu.findings(), 2)
    assert "none that torch can use" in there_is_none.said
    assert triton.name == "Triton"
    monkeypatch.setattr(gpu, "findings", lambda: [there_is_none, gpu.Finding("bits", True, "all")])
    cli.main(["doctor", "--gpu"])
    assert "bits      ok: all" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "findings", lambda: [gpu.Finding("bits", False, "some differ")])
    with pytest.raises(SystemExit, match="1"):
        cli.main(["doctor", "--gpu"])
    assert "WRONG: some differ" in capsys.readouterr().out


def test_a_check_that_fails_is_told_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> gpu.Finding:
        raise OSError("no process")

    monkeypatch.setattr(gpu, "bits_interpreted", fails)
    monkeypatch.setattr(gpu, "code", lambda targets, chosen: gpu.Finding("code", True, ", ".join(targets)))
    if not torch.cuda.is_available():
        *_, bits, code = gpu.findings()
        assert bits == ("bits", False, "failed: OSError: no process")
        assert code.said == "sm_80, sm_90, sm_100, sm_120, gfx942"


def test_differing_counts_bits() -> None:
    one, two = (gpu.trained(AdaBayes, torch.float32, torch.float32, "cpu", lengths=(40,)) for _ in range(2))
    assert_same(one, two)
    assert gpu.differing(one, two)[0] == 0
    two.param_groups[0]["params"][0][7] += 1
    assert gpu.differing(one, two)[0] == 1
