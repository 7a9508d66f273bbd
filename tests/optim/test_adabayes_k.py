"""AdaBayes-K against independent oracles: AdaBayes-FP, SOAP, SGD, and its own definition in the weights' basis."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_optimizer import SOAP
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adabayes import AdaBayesFP, AdaBayesK, eigenbasis
from adabayes._blocks import blocks as blocks_module
from adabayes._blocks import schedule
from adabayes.filtering import fixed_point
from tests.conftest import all_state
from tests.support.gradients import KINDS, draw_gradient

F64 = torch.float64
FORMS: dict[str, dict[str, Any]] = {
    "fused": {},
    "foreach": {"fused": False, "foreach": True},
    "single": {"fused": False, "foreach": False},
}


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMS[request.param]


def gradients(*shape: int, steps: int, dtype: torch.dtype = F64, seed: int = 0) -> list[Tensor]:
    """Gradients whose rows and columns are correlated, about a mean."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=F64)

    left, right, mean = draw(shape[0], shape[0]), draw(shape[1], shape[1]), draw(*shape)
    return [(0.3 * mean + left @ draw(*shape) @ right).to(dtype) for _ in range(steps)]


def run(make: Callable[[list[Tensor]], torch.optim.Optimizer], start: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Return the weights after each step."""
    w = start.clone()
    optimizer = make([w])
    path = []
    for g in grads:
        w.grad = g.clone()
        optimizer.step()
        path.append(w.clone())
    return path


@pytest.mark.parametrize("cls", [AdaBayesFP, AdaBayesK])
def test_a_cautious_step_moves_nothing_against_the_newest_gradient(cls: Any, form: dict[str, Any]) -> None:
    """Nor where there is none; but a gradient that is not a number is not hidden."""
    w = torch.zeros(4)
    optimizer = cls([w], lr=0.1, betas=(0.9, 0.99), cautious=True, **({} if form == FORMS["fused"] else form))
    for g, moves in (([1.0, 1.0, -1.0, 0.0], [-1, -1, 1, 0]), ([1.0, -0.1, 0.0, 0.0], [-1, 0, 0, 0])):
        before = w.clone()
        w.grad = torch.tensor(g)
        optimizer.step()
        assert (w - before).sign().tolist() == moves
    w.grad = torch.tensor([math.nan, 1.0, 1.0, 1.0])
    optimizer.step()
    assert w.isnan().tolist() == [True, False, False, False]


def test_without_bases_it_is_adabayes_fp(form: dict[str, Any]) -> None:
    """Sides above ``max_size`` keep the identity."""
    grads, start = gradients(6, 4, steps=50), torch.ones(6, 4, dtype=F64)
    common: dict[str, Any] = {"lr": 0.02, "lr_sgd": 2.0, "betas": (0.9, 0.99), "weight_decay": 0.1}
    k = run(lambda p: AdaBayesK(p, **common, max_size=1, cautious=False, **form), start, grads)
    fp = run(lambda p: AdaBayesFP(p, **common, fused=False), start, grads)
    for a, b in zip(k, fp):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 5), (6, 4)])
def test_it_is_soap_when_sgd_has_no_say(shape: tuple[int, int], form: dict[str, Any]) -> None:
    """Step for step, once SOAP has been given what it left out in the first step, which it skips: its averages.

    Where the first gradient has no direction, any basis will do; SOAP gets ours.
    """
    grads, start = gradients(*shape, steps=45), torch.ones(*shape, dtype=F64)
    ours = start.clone()
    k = AdaBayesK([ours], lr=0.02, lr_sgd=1e12, matrix_scale=1, learn_every=1, cautious=False, **form)
    ours.grad = grads[0].clone()
    k.step()
    theirs = start.clone()
    soap = SOAP([theirs], lr=0.02, betas=(0.9, 0.99), eps=0.0, precondition_frequency=10, weight_decay=0.0)
    theirs.grad = grads[0].clone()
    soap.step()
    state = soap.state[theirs]
    state["Q"] = [k.state[ours][f"basis_{side}"][0].clone() for side in (0, 1)]
    state["exp_avg"].copy_(0.1 * grads[0])
    state["exp_avg_sq"].copy_(0.01 * soap.project(grads[0], state) ** 2)
    soap.param_groups[0]["step"] += 1
    ours.copy_(start)
    for t, g in enumerate(grads[1:], 2):
        ours.grad, theirs.grad = g.clone(), g.clone()
        state["precondition_frequency"] = schedule.interval(t, 10)
        k.step()
        is_refreshed = t % state["precondition_frequency"] == 0
        shifts = [_shift(factor, g, side) for side, factor in enumerate(state["GG"])] if is_refreshed else []
        for factor, shift in zip(state["GG"], shifts):  # SOAP's factors get the shift of our refreshes
            factor.diagonal().add_(shift / 0.99)
        soap.step()
        for factor, shift in zip(state["GG"], shifts):
            factor.diagonal().sub_(shift)
        if is_refreshed:  # after a refresh, ours bounds the squares from below
            least = eigenbasis.least_ratio(0.9, 0.99) * soap.project(state["exp_avg"], state) ** 2
            state["exp_avg_sq"].copy_(torch.maximum(state["exp_avg_sq"], least))
        # SOAP's QR is in fp32, which limits the agreement from its first refresh on.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 if t == 2 else 1e-5)


def _shift(factor: Tensor, gradient: Tensor, side: int) -> Tensor:
    """Return the shift of a refresh after a factor has learned from a gradient."""
    learned: Tensor = 0.99 * factor + 0.01 * eigenbasis.factor(gradient, side)
    return eigenbasis.SHIFT * learned.abs().max()


def test_it_is_sgd_with_averaged_momentum_when_adam_has_no_say(form: dict[str, Any]) -> None:
    grads, start = gradients(6, 4, steps=30), torch.ones(6, 4, dtype=F64)
    with pytest.warns(UserWarning, match="swapped"):
        ours = run(lambda p: AdaBayesK(p, lr=1e9, lr_sgd=0.05, matrix_scale=1, cautious=False, **form), start, grads)
    w, m = start.clone(), torch.zeros_like(start)
    for t, (g, a) in enumerate(zip(grads, ours), 1):
        m = 0.9 * m + 0.1 * g
        w = w - 0.05 * m / (1 - 0.9**t)
        torch.testing.assert_close(a, w, rtol=1e-7, atol=1e-7)


def orthogonal(n: int, seed: int) -> Tensor:
    Q: Tensor = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=F64))[0]
    return Q


@settings(max_examples=20, deadline=None)
@given(m=st.integers(1, 7), n=st.integers(1, 7), seed=st.integers(0, 1000), cautious=st.booleans())
def test_rotating_the_problem_rotates_the_path(m: int, n: int, seed: int, cautious: bool) -> None:
    """Of gradients that are full rank on both sides from the first on; below, a basis is arbitrary where nothing is."""
    square = max(m, n)
    grads, start = gradients(square, square, steps=25, seed=seed), torch.zeros(square, square, dtype=F64)
    left, right = orthogonal(square, seed + 1), orthogonal(square, seed + 2)
    make = lambda p: AdaBayesK(p, lr=0.01, lr_sgd=10.0, refresh=3, cautious=cautious, fused=False)  # noqa: E731
    with patch.multiple(eigenbasis, RAMP=0.0, SHIFT=0.0):  # which are tied to the weights' axes
        path = run(make, start, grads)
        rotated = run(make, start, [left @ g @ right for g in grads])
    for a, b in zip(path, rotated):
        torch.testing.assert_close(left @ a @ right, b, rtol=1e-6, atol=1e-6)


def test_the_first_step_is_taken_and_directions_not_seen_move_no_faster_than_sgd(form: dict[str, Any]) -> None:
    """A gradient of rank one: one direction moves like Adam, all others by no more than SGD at lr_sgd would."""
    torch.manual_seed(0)
    w = torch.zeros(6, 4)
    optimizer = AdaBayesK([w], lr=0.1, lr_sgd=1e4, matrix_scale=1, cautious=False, **form)
    u, v = torch.randn(6), torch.randn(4)
    w.grad = torch.outer(u, v)
    optimizer.step()
    along = torch.outer(u, v) / (u.norm() * v.norm())
    torch.testing.assert_close((w * along).sum().item(), -0.1, rtol=1e-3, atol=0)
    noise = 1e-6 * w.grad.norm()  # what rounding leaves of the gradient in the other directions
    assert (w + 0.1 * along).norm() <= 1e4 * noise


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1.0, 1.5e19, 1e20, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stay_finite_whatever_the_size_of_gradients(
    form: dict[str, Any], scale: float, dtype: torch.dtype
) -> None:
    w = torch.ones(8, 5, dtype=dtype)
    optimizer = AdaBayesK([w], lr=0.1, refresh=2, **form)
    for g in gradients(8, 5, steps=12, dtype=dtype):
        w.grad = g * scale
        w.grad[3] = 0  # a row that never gets a gradient
        optimizer.step()
        assert w.isfinite().all()
    assert all(x.isfinite().all() for name, x in optimizer.state[w].items() if name.startswith("basis"))
    assert scale > 0 or torch.equal(w, torch.ones(8, 5, dtype=dtype))


@pytest.mark.parametrize("cautious", [True, False])
def test_steps_stay_small_where_gradients_are_sparse_or_spike(cautious: bool, form: dict[str, Any]) -> None:
    """Bases turn far then. A coordinate moves by a few ``lr``, as a sum over directions; unbounded, it was 10,000."""
    torch.manual_seed(0)
    embedding = nn.Embedding(64, 64)
    dense = nn.Parameter(torch.zeros(64, 64))
    params = [*embedding.parameters(), dense]
    optimizer = AdaBayesK(params, lr=1e-3, matrix_scale=1, cautious=cautious, **form)
    for t in range(120):
        optimizer.zero_grad()
        (embedding(torch.randint(64, (2,))) * torch.randn(2, 64)).sum().backward()
        dense.grad = torch.randn(64, 64) * (1e6 if t == 50 else 1.0)
        before = [p.detach().clone() for p in params]
        optimizer.step()
        for p, old in zip(params, before):
            assert (p.detach() - old).abs().max() < 0.01


@pytest.mark.parametrize("at", [0, 20])
def test_weights_stay_finite_after_a_gradient_whose_square_is_nearly_infinite(at: int, form: dict[str, Any]) -> None:
    """Factors stay finite, but products with them would not."""
    torch.manual_seed(0)
    w = torch.zeros(64, 64)
    optimizer = AdaBayesK([w], lr=1e-3, **form)
    for t in range(40):
        w.grad = torch.randn(64, 64) * (1.5e19 if t == at else 1.0)
        optimizer.step()
    assert w.isfinite().all()


def test_first_gradients_with_few_rows_have_bases() -> None:
    """LAPACK's fp32 eigenvectors did not converge for one in ten of them."""
    for seed in range(20):
        torch.manual_seed(seed)
        embedding = nn.Embedding(1000, 64)
        embedding(torch.randint(100, (20,))).square().sum().backward()
        optimizer = AdaBayesK(embedding.parameters())
        optimizer.step()
        basis = optimizer.state[embedding.weight]["basis_1"]
        torch.testing.assert_close(basis @ basis.mT, torch.eye(64).expand_as(basis), atol=1e-5, rtol=0)


@given(beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.999), values=st.lists(st.floats(-10, 10), min_size=1))
def test_averaged_squares_are_at_least_their_share(beta1: float, beta2: float, values: list[float]) -> None:
    mean = square = 0.0
    for x in values:
        mean = beta1 * mean + (1 - beta1) * x
        square = beta2 * square + (1 - beta2) * x * x
    assert square >= eigenbasis.least_ratio(beta1, beta2) * mean * mean * (1 - 1e-9)


def test_a_gradient_of_nan_makes_weights_nan_and_no_error(form: dict[str, Any]) -> None:
    for first in (True, False):
        w = torch.ones(4, 3)
        optimizer = AdaBayesK([w], refresh=1, **form)
        for t in range(4):
            w.grad = torch.full((4, 3), float("nan")) if t == (0 if first else 2) else torch.ones(4, 3)
            optimizer.step()
        assert w.isnan().any()


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    )


def backward(model: nn.Module, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    model.zero_grad()
    model(torch.randn(5, 2, 6, 6, generator=generator)).square().mean().backward()


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("at", [1, 2, 5, 10, 11])
def test_a_resumed_run_goes_on_to_the_same_bits(
    form: dict[str, Any], state_dtype: torch.dtype | None, at: int, tmp_path: Any
) -> None:
    """Saved at any step, between refreshes too, with torch and with safetensors."""
    from safetensors.torch import load_file, save_file

    options = {"lr": 0.01, "refresh": 4, "block_size": 7, "max_size": 20, "state_dtype": state_dtype, **form}
    model = network()
    optimizer = AdaBayesK(model.parameters(), **options)
    for t in range(12):
        backward(model, t)
        if t < 3:
            model.get_parameter("4.weight").grad = None  # thawed later than its twin
        optimizer.step()
        if t + 1 == at:
            weights, saved = copy.deepcopy(model.state_dict()), optimizer.state_dict()
            torch.save(saved, tmp_path / "state.pt")
            flat = {f"{i}/{k}": v for i, state in saved["state"].items() for k, v in state.items()}
            save_file(flat, tmp_path / "state.safetensors")
            groups = copy.deepcopy(saved["param_groups"])
    for kind in ("torch", "safetensors"):
        twin = network(1)
        twin.load_state_dict(weights)
        resumed = AdaBayesK(twin.parameters(), **options)
        if kind == "torch":
            resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        else:
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in load_file(tmp_path / "state.safetensors").items():
                i, name = key.split("/")
                state.setdefault(int(i), {})[name] = value
            resumed.load_state_dict({"state": state, "param_groups": groups})
        for t in range(at, 12):
            backward(twin, t)
            if t < 3:
                twin.get_parameter("4.weight").grad = None
            resumed.step()
        for p, q in zip(model.parameters(), twin.parameters()):
            assert torch.equal(p, q)
        for a, b in zip(all_state(optimizer), all_state(resumed)):
            assert torch.equal(a, b)


def test_state_takes_no_more_memory_when_other_parameters_get_gradients() -> None:
    """And the numbers are those of parameters that have an optimizer each."""
    torch.manual_seed(0)
    together, alone = ([nn.Parameter(torch.ones(8, 8)) for _ in range(8)] for _ in range(2))
    optimizer, single = AdaBayesK(together, refresh=1), [AdaBayesK([p], refresh=1) for p in alone]
    active = torch.rand(20, 8) < 0.5
    active[0] = True
    for row in active.tolist():
        for p, q, has in zip(together, alone, row):
            p.grad = q.grad = torch.randn(8, 8) if has else None
        for one in (optimizer, *single):
            one.step()
        entries = [x for state in optimizer.state.values() for x in state.values()]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in entries}
        assert sum(memory.values()) == sum(x.nbytes for x in entries)
    assert all(map(torch.equal, together, alone))


# Several matrices of a shape, matrices and convolutions that are cut, vocabularies, vectors, a number
SHAPES = [(4, 3), (4, 3), (4, 3), (8, 3), (5, 2, 3, 3), (5, 4, 3, 3), (50, 3), (50, 8), (6,), (6,), ()]


def train(kind: str, dtype: torch.dtype, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> list[Tensor]:
    """Return weights of all shapes after 50 steps with gradients of one kind."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.ones(shape, dtype=dtype) for shape in SHAPES]
    optimizer = make(params)
    for t in range(50):
        for i, p in enumerate(params):
            gradient = draw_gradient(kind, p.shape, t, i, generator)
            p.grad = None if gradient is None else gradient.to(dtype)
        optimizer.step()
    return params


def matrix_filter(**form: Any) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    options: dict[str, Any] = {"lr": 0.01, "block_size": 4, "max_size": 40, "weight_decay": 0.1}
    return lambda params: AdaBayesK(params, **options, **form)


@pytest.mark.parametrize("share_bases", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forms_agree(kind: str, share_bases: bool) -> None:
    """Also where gradients leave most of a basis undetermined: rounding does not determine it."""
    runs = [train(kind, F64, matrix_filter(share_bases=share_bases, **form)) for form in FORMS.values()]
    for a, b, c in zip(*runs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
        torch.testing.assert_close(b, c, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_in_fp32_changes_weights_by_less_than_a_few_steps(kind: str) -> None:
    """The bound is a multiple of the learning rate; docs/caveats.md has the differences, and AdamW's beside them."""
    exact, rounded = (train(kind, dtype, matrix_filter()) for dtype in (F64, torch.float32))
    for a, b in zip(exact, rounded):
        torch.testing.assert_close(a, b.double(), rtol=0, atol=0.1)


@pytest.mark.parametrize("shape", [(8, 8), (7, 5)])
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_loaded_state_takes_no_more_memory_than_it_has_numbers(shape: tuple[int, int], how: str) -> None:
    """Matrices of a shape have one memory, which torch saves once, and pickle with each of them."""

    def steps(optimizer: AdaBayesK) -> tuple[int, int]:
        for p in params:
            p.grad = torch.randn(shape)
        optimizer.step()
        entries = [x for state in optimizer.state.values() for name, x in state.items() if name != "step"]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in entries}
        return sum(memory.values()), sum(x.nbytes for x in entries)

    params = [torch.ones(shape) for _ in range(5)]
    optimizer, twin = AdaBayesK(params), AdaBayesK(params)
    steps(optimizer)
    saved = optimizer.state_dict()
    if how == "torch":
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        twin.load_state_dict(torch.load(buffer))
    else:
        twin.load_state_dict(pickle.loads(pickle.dumps(saved)))
    taken, needed = steps(twin)
    assert taken == needed


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_bases_stay_orthonormal_over_many_steps_with_badly_conditioned_factors(steps: int) -> None:
    torch.manual_seed(0)
    scales = torch.logspace(0, -8, 24)
    w = torch.zeros(24, 24)
    optimizer = AdaBayesK([w], refresh=1)  # as many refreshes as ten times the steps have at the default
    mixing = torch.linalg.qr(torch.randn(24, 24))[0]
    for _ in range(steps):
        w.grad = mixing @ (scales[:, None] * torch.randn(24, 24)) * scales
        optimizer.step()
    for side in (0, 1):
        basis = optimizer.state[w][f"basis_{side}"][0].double()
        assert (basis.T @ basis - torch.eye(24)).abs().max() < 1e-5


def train_with_replaced_parameters(steps: int, *, resume_at: int) -> list[Tensor]:
    """Train, replace parameters by others of other shapes at step 20, and resume in a new optimizer once."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.ones(shape, dtype=F64) for shape in ((6, 5), (4, 4), (7,), (9, 3))]
    optimizer = AdaBayesK(params, lr=0.01, refresh=4, block_size=4)
    for t in range(steps):
        if t == 20:
            params[0], params[2] = torch.ones(5, 2, dtype=F64), torch.ones(12, 8, dtype=F64)  # a vector, too
            for p in list(optimizer.state):
                if not any(p is q for q in params):
                    del optimizer.state[p]
            optimizer.param_groups[0]["params"][:] = params
        if t == resume_at:
            saved = optimizer.state_dict()
            optimizer = AdaBayesK(params, lr=0.01, refresh=4, block_size=4)
            optimizer.load_state_dict(saved)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=F64)
        optimizer.step()
    return params


@pytest.mark.parametrize("resume_at", [21, 30, 33])
def test_schedule_follows_the_shapes_of_replaced_parameters(resume_at: int) -> None:
    """The schedule depends only on present shapes: a resumed run continues with the same bits."""
    runs = (train_with_replaced_parameters(45, resume_at=at) for at in (-1, resume_at))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


def test_data_of_another_shape_is_refused_before_anything_changes(form: dict[str, Any]) -> None:
    """A vector's state does not fit a matrix, and the error says so."""
    w, v = torch.ones(4), torch.ones(3, 3)
    optimizer = AdaBayesK([v, w], weight_decay=0.1, **form)
    for p in (w, v):
        p.grad = torch.ones_like(p)
    optimizer.step()
    w.grad = None
    w.data = torch.ones(4, 4)
    w.grad = torch.ones(4, 4)
    before = v.clone()
    with pytest.raises(RuntimeError, match=r"parameter of shape \(4, 4\) has"):
        optimizer.step()
    assert torch.equal(v, before)
    assert optimizer.state[v]["step"] == 1
    del optimizer.state[w]
    optimizer.step()
    assert not torch.equal(w.data, torch.ones(4, 4))


def test_blocks_are_refreshed_at_every_step_at_first_and_once_in_every_refresh_steps_later() -> None:
    params = [torch.ones(12, 8), torch.ones(4, 4), torch.ones(10, 3)]
    optimizer = AdaBayesK(params, refresh=3, block_size=4)
    early, late = (torch.zeros(10, dtype=torch.long) for _ in range(2))  # refreshes of each block
    for t in range(1, 44):
        before = [optimizer.state[p]["basis_1"].clone() for p in params] if t > 1 else None
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
        if before:
            changed = [(optimizer.state[p]["basis_1"] != old).any((1, 2)) for p, old in zip(params, before)]
            count = early if t < 16 else late if t >= 32 else torch.zeros(10)
            count += torch.cat(changed)
    assert early.unique().tolist() == [14]
    assert late.unique().tolist() == [4]


@given(place=st.integers(0, 300), longest=st.integers(1, 200), first=st.integers(2, 3000))
def test_every_block_has_its_turn(place: int, longest: int, first: int) -> None:
    """Within two intervals, also where they grow."""
    window = range(first, first + 2 * longest)
    assert any((t - place) % schedule.interval(t, longest) == 0 for t in window)


def test_a_block_is_a_matrix_of_its_own(form: dict[str, Any]) -> None:
    """A matrix that is cut takes the steps of its blocks, each given by itself."""
    grads, start = gradients(6, 8, steps=12), torch.ones(6, 8, dtype=F64)
    options: dict[str, Any] = {"lr": 0.02, "refresh": 1, "weight_decay": 0.1, **form}
    whole = run(lambda p: AdaBayesK(p, **options, block_size=4), start, grads)
    for rows in (slice(0, 3), slice(3, 6)):
        for columns in (slice(0, 4), slice(4, 8)):
            parts = [g[rows, columns] for g in grads]
            alone = run(lambda p: AdaBayesK(p, **options), start[rows, columns], parts)
            for a, b in zip(whole, alone):
                torch.testing.assert_close(a[rows, columns], b, rtol=1e-9, atol=1e-9)


def test_blocks_that_are_filled_up_move_as_if_they_were_not(form: dict[str, Any]) -> None:
    """5 rows are two blocks of 3, one row of which is not there: it has no gradient and moves nothing."""
    grads, start = gradients(5, 4, steps=12), torch.ones(5, 4, dtype=F64)
    options: dict[str, Any] = {"lr": 0.02, "refresh": 1, **form}
    whole = run(lambda p: AdaBayesK(p, **options, block_size=4), start, grads)
    alone = run(lambda p: AdaBayesK(p, **options), start[3:], [g[3:] for g in grads])
    for a, b in zip(whole, alone):
        torch.testing.assert_close(a[3:], b, rtol=1e-7, atol=1e-7)


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple),
    block_size=st.integers(1, 5),
    max_size=st.integers(1, 30),
)
def test_blocks_are_put_together_to_what_was_cut(shape: tuple[int, ...], block_size: int, max_size: int) -> None:
    blocks = blocks_module.cut(shape, block_size, max_size)
    matrix = shape[0], math.prod(shape[1:])
    if blocks is None:
        assert all(size == 1 or size > max_size or block_size == 1 for size in matrix)
        return
    counts, lengths = (blocks.rows, blocks.columns), (blocks.m, blocks.n)
    for side, (size, count, length) in enumerate(zip(matrix, counts, lengths)):
        assert 0 <= count * length - size < count
        assert length <= block_size or (size > max_size and count == 1 and side not in blocks.sides)
    x = torch.arange(math.prod(shape)).reshape(shape)
    cuts = blocks_module.to_blocks(x, blocks)
    assert cuts.shape == blocks.shape
    assert torch.equal(cuts[0], x.reshape(matrix)[: blocks.m, : blocks.n])
    assert torch.equal(blocks_module.from_blocks(cuts, blocks, shape), x)


def test_convolutions_and_vocabularies_have_bases_where_they_fit() -> None:
    shapes: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {
        (8, 4, 3, 3): {0: (1, 8), 1: (1, 36)},
        (8, 40, 3, 3): {0: (1, 8)},
        (100, 6): {1: (1, 6)},
        (80, 90): {0: (6, 40), 1: (6, 30)},
        (7,): {},
        (): {},
    }
    params = [torch.zeros(shape) for shape in shapes]
    optimizer = AdaBayesK(params, block_size=40, max_size=90)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, sizes in zip(params, shapes.values()):
        state = optimizer.state[p]
        assert {name: tuple(x.shape[:2]) for name, x in state.items() if name.startswith("basis")} == {
            f"basis_{side}": size for side, size in sizes.items()
        }
        assert state["exp_avg"].numel() == p.numel()


def test_squares_are_carried_over_as_variances_of_uncorrelated_components() -> None:
    """By sampling: components with these variances, in another basis."""
    torch.manual_seed(0)
    variances = torch.rand(3, 4, dtype=F64)
    turns = orthogonal(3, 1), orthogonal(4, 2)
    samples = torch.randn(200_000, 3, 4, dtype=F64) * variances.sqrt()
    measured = (turns[0].T @ samples @ turns[1]).square().mean(0)
    torch.testing.assert_close(eigenbasis.carry_over(variances, turns), measured, rtol=0.02, atol=0.0)


def test_it_goes_on_from_adamw_without_a_jump() -> None:
    """A step after the switch is of AdamW's size, and the loss goes on falling."""
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = torch.sin(x @ torch.randn(20, 5))
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for t in range(steps):
            batch = torch.randint(256, (64,), generator=torch.Generator().manual_seed(t))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            losses.append(nn.functional.mse_loss(model(x), y).item())
        return losses

    before = train(adamw, 200)
    k = AdaBayesK(model.parameters(), lr=3e-3)
    k.load_state_dict(k.from_adamw(adamw.state_dict()))
    assert k.param_groups[0]["betas"] == (0.9, 0.99)
    after = train(k, 100)
    assert max(after[:20]) < 1.05 * before[-1]
    assert after[-1] < 0.9 * before[-1]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_adamws_average_is_the_first_gradient_of_a_matrix(steps: int) -> None:
    """After no step of AdamW, as if an overflow had stopped it, there is none yet."""
    matrix, vector, mean = torch.ones(6, 4, dtype=F64), torch.ones(3, dtype=F64), torch.randn(6, 4, dtype=F64)
    adamw = torch.optim.AdamW([matrix, vector], betas=(0.9, 0.95))
    fresh = AdaBayesK([torch.ones(6, 4, dtype=F64)])
    for t in range(max(steps, 1)):
        matrix.grad, vector.grad = mean + (t == 0), torch.full((3,), t + 1.0, dtype=F64)
        adamw.step()
    saved = adamw.state_dict()
    for entry in saved["state"].values() if not steps else ():
        for x in entry.values():
            x.zero_()
    warm = AdaBayesK([matrix, vector])
    warm.load_state_dict(warm.from_adamw(saved))
    average = saved["state"][0]["exp_avg"] / ((1 - 0.9**steps) or 1.0)
    ours = warm.state[matrix]
    assert ours["step"] == min(steps, 1)
    assert warm.state[vector]["step"] == steps
    torch.testing.assert_close(warm.state[vector]["exp_avg"], saved["state"][1]["exp_avg"])
    fresh.param_groups[0]["params"][0].grad = average
    fresh.step()
    (theirs,) = fresh.state.values()
    if steps:
        for name in ("factor_0", "factor_1", "exp_avg"):
            torch.testing.assert_close(ours[name].abs(), theirs[name].abs())  # eigenvectors have no sign
    matrix.grad, vector.grad = mean, None
    warm.step()
    assert matrix.isfinite().all()


def test_gains_are_those_of_the_fixed_point_in_each_direction() -> None:
    w = torch.zeros(4, 3)
    optimizer = AdaBayesK([w], lr=0.1, lr_sgd=10.0)
    w.grad = torch.randn(4, 3)
    optimizer.step()
    mean_square = optimizer.state[w]["exp_avg_sq"] / 0.01
    gain = 4 * fixed_point(mean_square, 0.1, 10.0)
    torch.testing.assert_close(optimizer.effective_lr(w), gain, rtol=1e-4, atol=0)


def test_the_same_parameter_twice_takes_two_steps() -> None:
    """As with torch's optimizers, which warn and step twice."""
    once, twice = torch.ones(4, 3, dtype=F64), torch.ones(4, 3, dtype=F64)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = AdaBayesK([twice, twice])
    reference = AdaBayesK([once])
    (gradient,) = gradients(4, 3, steps=1)
    twice.grad, once.grad = gradient, gradient.clone()
    optimizer.step()
    reference.step()
    reference.step()
    torch.testing.assert_close(once, twice, rtol=0, atol=1e-10)  # lr_sgd is 300


@pytest.mark.parametrize("change", [{"block_size": 2}, {"max_size": 4}, {"block_size": 2, "max_size": 4}], ids=str)
def test_blocks_cannot_change_once_there_is_state(change: dict[str, int]) -> None:
    """Nothing is changed by the step that raises; with the settings set back, training goes on."""
    w, bias = torch.ones(6, 6), torch.ones(6)
    optimizer = AdaBayesK([w, bias])
    for p in (w, bias):
        p.grad = torch.ones_like(p)
    optimizer.step()
    before, group = w.clone(), optimizer.param_groups[0]
    usual = {name: group[name] for name in change}
    group.update(change)
    with pytest.raises(RuntimeError, match=r"shape \(6, 6\) .* cannot change once there is state: set them back"):
        optimizer.step()
    assert torch.equal(w, before)
    group.update(usual)
    optimizer.step()
    assert not torch.equal(w, before)


def test_what_it_cannot_do_is_said() -> None:
    w = torch.zeros(3, 3)
    with pytest.raises(TypeError, match=r"takes no capturable. .* use AdaBayesFP"):
        AdaBayesK([w], capturable=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"takes no differentiable. .* use AdaBayesFP"):
        AdaBayesK([w], differentiable=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="Invalid refresh: 0"):
        AdaBayesK([w], refresh=0)
    with pytest.raises(ValueError, match=r"Invalid refresh: 2.5. It must be an integer"):
        AdaBayesK([w], refresh=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes no differentiable"):
        AdaBayesK([{"params": [w], "differentiable": True}])
    group = AdaBayesK([w], refresh=10.0, block_size=16.0).param_groups[0]  # type: ignore[arg-type]
    assert [type(group[name]) for name in ("refresh", "block_size")] == [int, int]
    with pytest.raises(ValueError, match="Invalid block_size: 0"):
        AdaBayesK([w], block_size=0)
    with pytest.raises(ValueError, match="Invalid max_size: 0"):
        AdaBayesK([w], max_size=0)
    w.grad = torch.zeros(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        AdaBayesK([w]).step()


class _Waits(TorchDispatchMode):
    """Notes where a program would wait for a device: where it asks for a number, or for how many there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        asks = name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")
        if asks and args[0].dtype != torch.float64:  # step counts, which are on the host, are float64 here
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_after_the_first_a_step_waits_for_no_number() -> None:
    """So nothing in it waits for a GPU, refreshes included; seen on the CPU, where the same code runs."""
    params = [torch.ones(shape) for shape in ((12, 8), (5, 3), (6,), (4, 2, 3, 3))]
    optimizer = AdaBayesK(params, refresh=2, block_size=4, fused=False)
    for t in range(5):
        for p in params:
            p.grad = torch.randn(p.shape)
        if t == 1:
            for state in optimizer.state.values():
                state["step"] = state["step"].double()
        with _Waits() as waits:
            optimizer.step()
        assert t == 0 or not waits.seen
    with _Waits() as waits:
        params[0].sum().item()
    assert waits.seen == ["aten::_local_scalar_dense"]


def test_settings_given_as_floats_work_as_integers() -> None:
    """Also after construction, and without an effect on other optimizers."""
    for changes in ({"block_size": 4.0}, {"refresh": 10.0}, {"block_size": 4}):
        w = torch.ones(6, 6)
        optimizer = AdaBayesK([w], block_size=4)
        optimizer.param_groups[0].update(changes)
        for _ in range(3):
            w.grad = torch.randn(6, 6)
            optimizer.step()
    optimizer.param_groups[0]["refresh"] = 2.5
    with pytest.raises(ValueError, match=r"Invalid refresh: 2\.5\. It must be an integer"):
        optimizer.step()


@pytest.mark.parametrize("form", [{}, {"fused": False}, {"foreach": False, "fused": False}])
def test_a_step_inside_autocast_equals_one_outside(form: dict[str, Any]) -> None:
    weights = []
    for enabled in (True, False):
        torch.manual_seed(0)
        w, b = torch.randn(6, 4), torch.zeros(6)
        optimizer = AdaBayesK([w, b], **form)
        for _ in range(4):
            w.grad, b.grad = torch.randn(6, 4), torch.randn(6)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        weights.append(w)
    torch.testing.assert_close(*weights, rtol=0, atol=0)
