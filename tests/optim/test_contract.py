"""What torch's own test-suite holds torch's own optimizers to, for ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adabayes import AdaBayes
from adabayes.optim._engine.step import EngineOptimizer
from tests.conftest import MAKERS, Maker, assert_same


@pytest.fixture(params=[torch.float64, torch.float16], ids=["default-float64", "default-float16"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Set another default dtype for the test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Shapes that go wrong: a matrix, a scalar, nothing, a transpose, a strided view, channels_last."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = [random(3, 5), random(), random(0, 4), random(4, 3).t(), random(6, 4)[:, ::2]]
    tensors.append(random(2, 3, 4, 4).to(memory_format=torch.channels_last))
    return [nn.Parameter(t) for t in tensors]


def set_gradients(params: list[nn.Parameter], step: int, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 10.0 ** (i - 3)
        p.grad = None if i in without else grad.to(p.dtype)


# Gradients missing in some steps, in all, or coming and going as layers are frozen and thawed.
MISSING: list[tuple[int, ...]] = [(), (1,), (0, 2, 4), (), tuple(range(6)), (3,), (3, 5), ()]


def test_foreach_equals_single_to_the_last_state_entry(make: Maker) -> None:
    optimizers = [make(parameters(), lr=1e-2, weight_decay=0.1, foreach=flag) for flag in (False, True)]
    for t, without in enumerate(MISSING * 3):
        for optimizer in optimizers:
            set_gradients(optimizer.param_groups[0]["params"], t, without)
            optimizer.step()
        assert_same(*optimizers)


@pytest.mark.parametrize("name", list(MAKERS))
def test_forms_agree_under_other_default_dtypes(name: str, default_dtype: torch.dtype) -> None:
    optimizers = [MAKERS[name](parameters(default_dtype), foreach=flag) for flag in (False, True)]
    for t in range(3):
        for optimizer in optimizers:
            set_gradients(optimizer.param_groups[0]["params"], t)
            optimizer.step()
    assert_same(*optimizers)
    for state in optimizers[0].state.values():
        assert all(isinstance(entry, Tensor) for entry in state.values())
        assert state["step"].dtype == (torch.float64 if default_dtype == torch.float64 else torch.float32)  # as torch's
        assert state["step"].item() == 3


def test_state_is_made_for_parameters_with_gradients_only(make: Maker, foreach: bool) -> None:
    params = parameters()
    optimizer = make(params, foreach=foreach)
    assert isinstance(optimizer, EngineOptimizer)
    set_gradients(params, 0, without=(0, 3))
    optimizer.step()
    assert {i for i, p in enumerate(params) if p in optimizer.state} == {1, 2, 4, 5}
    for p in params:
        for name, entry in optimizer.state.get(p, {}).items():
            assert entry.shape == (
                () if name == "step" else optimizer._entries(optimizer.defaults, p)[name].shape_for(p)
            )
            assert name == "step" or entry.dtype == p.dtype


def test_state_takes_the_memory_format_of_the_parameter(make_elementwise: Maker) -> None:
    params = parameters()
    optimizer = make_elementwise(params)
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.state[params[5]]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_no_gradient_is_a_no_op(make: Maker, foreach: bool) -> None:
    params = parameters()
    before = copy.deepcopy(params)
    optimizer = make(params, weight_decay=0.1, foreach=foreach)
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(p, q) for p, q in zip(params, before))


def test_zero_gradients_move_nothing(make: Maker, foreach: bool) -> None:
    params = parameters()
    before = copy.deepcopy(params)
    optimizer = make(params, foreach=foreach)
    for _ in range(10):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    for p, q in zip(params, before):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_gradients_are_never_written_to(make: Maker, foreach: bool) -> None:
    params = parameters()
    optimizer = make(params, weight_decay=0.1, foreach=foreach)
    for t in range(3):
        set_gradients(params, t)
        before = [p.grad.clone() for p in params if p.grad is not None]
        versions = [p.grad._version for p in params if p.grad is not None]
        optimizer.step()
        grads = [p.grad for p in params if p.grad is not None]
        assert all(torch.equal(g, b) for g, b in zip(grads, before))  # also not through .data, which has no version
        assert versions == [g._version for g in grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_generator_is_left_alone(make: Maker, foreach: bool, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = make(params, foreach=foreach)
    set_gradients(params, 0)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_goes_downhill(make: Maker, foreach: bool, dtype: torch.dtype) -> None:
    """A least-squares problem, to a tenth of its loss or less."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 4, dtype=dtype), nn.Parameter(torch.zeros(4, 1, dtype=dtype))
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.1]], dtype=dtype)
    optimizer = make([weight], lr=0.03, foreach=foreach)

    def closure() -> Any:  # a tensor, as in most code; torch's types say a float
        optimizer.zero_grad()
        loss = 0.01 * (x @ weight - y).square().mean()  # gradients below 1 / (B lr), beyond which AdaBayes is slow
        (4 * loss if optimizer.param_groups[0].get("reduction") == "sum" else loss).backward()
        return loss

    first = closure().item()
    for _ in range(300):
        last = optimizer.step(closure)
    assert last < 0.1 * first


def test_closures_run_with_gradients_enabled_and_their_loss_is_returned(make: Maker) -> None:
    (w,) = params = [nn.Parameter(torch.ones(2))]
    optimizer = make(params)
    seen = []

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 2.0
    assert seen == [True]
    assert w[0] != 1


def test_maximize_mirrors_minimize(make: Maker, foreach: bool) -> None:
    down, up = parameters(), parameters()
    minimizer, maximizer = make(down, foreach=foreach), make(up, foreach=foreach, maximize=True)
    for t in range(4):
        set_gradients(down, t)
        for p, q in zip(down, up):
            q.grad = None if p.grad is None else -p.grad
        minimizer.step()
        maximizer.step()
    assert all(torch.equal(p, q) for p, q in zip(down, up))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_lr_equals_the_number(make: Maker, foreach: bool, shape: tuple[int, ...]) -> None:
    number = make(parameters(), lr=0.25, weight_decay=0.1, foreach=foreach)
    tensor = make(parameters(), lr=torch.full(shape, 0.25), weight_decay=0.1, foreach=foreach)
    for t in range(4):
        for optimizer in (number, tensor):
            set_gradients(optimizer.param_groups[0]["params"], t)
            optimizer.step()
        if t == 1:
            number.param_groups[0]["lr"] = 0.125
            tensor.param_groups[0]["lr"].fill_(0.125)  # as schedulers do
    assert_same(number, tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_equals_view_as_real(make: Maker, foreach: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = torch.randn(3, 4, dtype=dtype)
    w, pair = start.clone(), torch.view_as_real(start).clone()
    optimizers = [make([w], weight_decay=0.1, foreach=foreach), make([pair], weight_decay=0.1, foreach=foreach)]
    for _ in range(5):
        w.grad = torch.randn_like(w)
        pair.grad = torch.view_as_real(w.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(w), pair)
    for name, entry in optimizers[0].state[w].items():
        expected = optimizers[1].state[pair][name]
        assert torch.equal(torch.view_as_real(entry) if entry.is_complex() else entry, expected)


def test_mixed_dtypes_in_one_group_equal_groups_of_their_own(make: Maker, foreach: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bfloat16, torch.complex64]

    def mixed() -> list[Tensor]:
        return [torch.linspace(-1, 1, 6).to(dtype) for dtype in dtypes]

    together = make(mixed(), weight_decay=0.1, foreach=foreach)
    apart = make([{"params": [p]} for p in mixed()], weight_decay=0.1, foreach=foreach)
    for t in range(3):
        for optimizer in (together, apart):
            set_gradients([p for group in optimizer.param_groups for p in group["params"]], t)
            optimizer.step()
    assert_same(together, apart)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_state_and_round_once(
    make: Maker, foreach: bool, dtype: torch.dtype
) -> None:
    """A step is that of an fp32 parameter of the same value, rounded at the end."""
    low = torch.linspace(-1, 1, 64).to(dtype)
    high = low.float()
    optimizers = [make([p], lr=1e-2, weight_decay=0.1, foreach=foreach) for p in (low, high)]
    for t in range(5):
        high.copy_(low)
        generator = torch.Generator().manual_seed(t)
        low.grad = torch.randn(64, generator=generator).to(dtype)
        high.grad = low.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(low, high.to(dtype))
    for name, entry in optimizers[0].state[low].items():
        assert entry.dtype == torch.float32
        assert torch.equal(entry, optimizers[1].state[high][name])


def test_differentiable_step_passes_gradcheck(make_graphable: Maker) -> None:
    """Through two steps: by parameter and gradients."""

    def steps(p: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        w = p.clone()
        optimizer = make_graphable([w], lr=1e-2, weight_decay=0.1, differentiable=True)
        for grad in (first, second):
            w.grad = grad
            optimizer.step()
        return (w, *(entry for name, entry in optimizer.state[w].items() if name != "step"))

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(steps, inputs, eps=1e-7, atol=1e-5, rtol=1e-4)


def test_differentiable_schedule_passes_gradcheck(make_graphable: Maker) -> None:
    """By a learning rate that is a tensor, at a base that is a constant."""

    def steps(lr: Tensor) -> Tensor:
        w = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_().clone()
        optimizer = make_graphable([w], lr=1e-2, weight_decay=0.1, differentiable=True)
        optimizer.param_groups[0]["lr"] = lr
        for scale in (1.0, 1e-3, 0.1):
            w.grad = torch.linspace(-scale, 2 * scale, 5, dtype=torch.float64)
            optimizer.step()
        return w

    lr = torch.tensor(1e-2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(steps, [lr], eps=1e-7, atol=1e-6, rtol=1e-4)


def test_capturable_is_refused_where_torch_refuses_it(make_graphable: Maker, foreach: bool) -> None:
    params = parameters()
    optimizer = make_graphable(params, capturable=True, foreach=foreach)
    set_gradients(params, 0)
    with pytest.raises(AssertionError, match="capturable=True"):
        optimizer.step()


def test_grad_scaler_skips_steps_with_inf(make: Maker, foreach: bool) -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = make([w], foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step(w.sum() * float("inf"))
    assert torch.equal(w, torch.ones(3))
    assert not optimizer.state
    step(w.sum())
    plain = nn.Parameter(torch.ones(3))
    expected = make([plain], foreach=foreach)
    plain.grad = torch.ones(3)
    expected.step()
    assert_same(optimizer, expected)


def test_default_device_does_not_matter(make: Maker, foreach: bool) -> None:
    optimizers = [make(parameters(), foreach=foreach) for _ in range(2)]
    for t in range(2):
        for optimizer in optimizers:
            set_gradients(optimizer.param_groups[0]["params"], t)
        optimizers[0].step()
        with torch.device("meta"):
            optimizers[1].step()
    assert_same(*optimizers)


def test_meta_parameters_can_be_stepped(make: Maker, foreach: bool) -> None:
    """To plan memory before there is any."""
    w = torch.zeros(3, 4, device="meta")
    optimizer = make([w], foreach=foreach)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        optimizer.step()
    assert optimizer.state[w]["exp_avg"].is_meta


def test_fake_parameters_can_be_stepped(make: Maker, foreach: bool) -> None:
    with FakeTensorMode():
        w = torch.zeros(3, 4)
        optimizer = make([w], foreach=foreach)
        for _ in range(2):
            w.grad = torch.ones_like(w)
            optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_spoils_its_own_weight_only(make_elementwise: Maker, foreach: bool, value: float) -> None:
    bad, good = (torch.ones(4) for _ in range(2))
    optimizers = [make_elementwise([p], foreach=foreach) for p in (bad, good)]
    for t in range(3):
        for p, optimizer in zip((bad, good), optimizers):
            p.grad = torch.tensor([1.0, 0.1, 0.0, 1e-5])
            if p is bad and t == 1:
                p.grad[0] = value
            optimizer.step()
    assert torch.equal(bad[1:], good[1:])


# Groups


def test_groups_equal_separate_optimizers_bit_for_bit(make: Maker, foreach: bool) -> None:
    own: list[dict[str, Any]] = [{}, {"lr": 3e-2}, {}, {"lr": 1e-2, "weight_decay": 0.2}]
    probe = make([torch.zeros(1)])
    if hasattr(probe, "effective_lr"):
        own += [{"lr": 1e-2, "lr_sgd": 0.7}, {"lr_sgd": 0.3, "batch_size": 7}]
    if isinstance(probe, AdaBayes):
        own[0] = {"beta1": 0.5}
    params, twins = parameters()[: len(own)], parameters()[: len(own)]
    together = make([{"params": [p], **settings} for p, settings in zip(params, own)], foreach=foreach)
    apart = [make([p], foreach=foreach, **settings) for p, settings in zip(twins, own)]
    for t in range(5):
        set_gradients(params, t)
        set_gradients(twins, t)
        together.step()
        for optimizer in apart:
            optimizer.step()
    for p, q, optimizer in zip(params, twins, apart):
        assert torch.equal(p, q)
        assert all(torch.equal(together.state[p][k], v) for k, v in optimizer.state[q].items())


def test_a_groups_own_lr_scales_lr_sgd_and_its_own_lr_sgd_is_kept() -> None:
    groups: list[dict[str, Any]] = [{"lr": 1e-3}, {"lr": 1e-4}, {"lr": 1e-4, "lr_sgd": 0.5}, {"lr": torch.tensor(0.1)}]
    optimizer = AdaBayes([{"params": [torch.zeros(1)], **group} for group in groups], lr=1e-3, lr_sgd=0.3)
    assert [g["lr_sgd"] for g in optimizer.param_groups] == pytest.approx([0.3, 0.03, 0.5, 30])
    assert [g["base_lr"] for g in optimizer.param_groups] == pytest.approx([1e-3, 1e-4, 1e-4, 0.1])
    default = AdaBayes([{"params": [torch.zeros(1)], **group} for group in groups], lr=1e-3)
    assert [g["lr_sgd"] for g in default.param_groups] == pytest.approx([100, 10, 0.5, 1e4])
    paper = AdaBayes([{"params": [torch.zeros(1)], **group} for group in groups], lr=1e-3, batch_size=2)
    assert [g["lr_sgd"] for g in paper.param_groups] == pytest.approx([0.1, 0.01, 0.5, 10])


def test_a_group_added_under_a_scheduled_tensor_lr_has_the_right_base() -> None:
    """The scheduler changes the tensor in place, and that of the defaults is the same one."""
    optimizer = AdaBayes([torch.zeros(1)], lr=torch.tensor(1e-3), lr_sgd=0.1)
    optimizer.param_groups[0]["lr"].fill_(1e-4)
    optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 1e-3})
    optimizer.add_param_group({"params": [torch.zeros(1)]})
    assert [group["lr_sgd"] for group in optimizer.param_groups] == pytest.approx([0.1] * 3)
    assert [group["base_lr"] for group in optimizer.param_groups] == pytest.approx([1e-3] * 3)


def test_a_group_may_state_its_beta1() -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.zeros(1)], "beta1": 0.5}, {"params": [torch.zeros(1)]}]
    optimizer = AdaBayes(groups, beta1=0.8)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5,), (0.8,)]


def test_groups_can_be_added_later(make: Maker, foreach: bool) -> None:
    first, second = parameters()[:2]
    optimizer = make([first], foreach=foreach)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    first.grad = torch.ones_like(first)
    optimizer.step()
    scheduler.step()
    optimizer.add_param_group({"params": [second], "lr": 0.02})
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert optimizer.param_groups[1]["base_lr"] == 0.02
    alone = parameters()[1]
    alone.grad = torch.ones_like(alone)
    make([alone], lr=0.02, foreach=foreach).step()
    assert torch.equal(second, alone)


# Hooks


def test_hooks_run_in_order(make: Maker) -> None:
    (w,) = params = [nn.Parameter(torch.ones(2))]
    optimizer = make(params)
    calls: list[str] = []
    before = w.detach().clone()
    optimizer.register_step_pre_hook(lambda *_: calls.append(f"pre {torch.equal(w, before)}"))
    optimizer.register_step_post_hook(lambda *_: calls.append(f"post {torch.equal(w, before)}"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, __: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda _, __: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    w.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre True", "post False", "save", "saved", "load", "loaded"]
