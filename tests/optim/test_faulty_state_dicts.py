"""State dicts that do not fit are refused with one clear line, and change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound
from tests.conftest import Maker
from tests.support.saving import through_torch_save

NAN = float("nan")


def take_steps(optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                generator = torch.Generator().manual_seed(100 * step + i)
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def trained(cls: Any, *shapes: tuple[int, ...], **settings: Any) -> Any:
    optimizer = cls([torch.zeros(shape) for shape in shapes], **settings)
    take_steps(optimizer)
    return optimizer


def contents(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all values of an optimizer, for comparison."""
    entries = [(name, value.tolist()) for state in optimizer.state.values() for name, value in state.items()]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [entries, settings]


def assert_refused(optimizer: Any, state_dict: dict[str, Any], message: str) -> None:
    """Assert that loading fails with a message of one line, and that nothing changes."""
    before = contents(optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(state_dict)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Nothing was changed.")
    assert contents(optimizer) == before


# Shapes


SAME_BLOCKS = [  # shapes that are cut into the same stack of blocks
    ((512, 128), (128, 512)),
    ((512, 128), (256, 256)),
    ((500, 128), (499, 128)),
    ((64, 8, 3, 3), (64, 72)),
]


@pytest.mark.parametrize(("saved", "here"), SAME_BLOCKS)
def test_state_of_a_matrix_of_another_shape_is_refused(saved: tuple[int, ...], here: tuple[int, ...]) -> None:
    state_dict = through_torch_save(trained(AdaBayesK, saved).state_dict())
    assert_refused(
        trained(AdaBayesK, here), state_dict, rf"parameter 0 had shape \({saved[0]}, .*has shape \({here[0]}, "
    )
    trained(AdaBayesK, saved).load_state_dict(state_dict)


def test_state_of_parameters_in_another_order_is_refused() -> None:
    state_dict = trained(AdaBayesK, (512, 128), (128, 512), (3,)).state_dict()
    other = trained(AdaBayesK, (128, 512), (512, 128), (3,))
    assert_refused(other, state_dict, r"parameter 0 had shape \(512, 128\).*has shape \(128, 512\) here.*another order")


def test_a_refused_parameter_is_named() -> None:
    saved, here = (
        AdaBayesK([{"params": [("bias", torch.zeros(3))]}, {"params": [("weight", torch.zeros(shape))]}])
        for shape in ((512, 128), (128, 512))
    )
    for optimizer in (saved, here):
        take_steps(optimizer)
    assert_refused(here, saved.state_dict(), r"parameter 1 \(weight\) had shape")


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
def test_adamws_state_of_a_matrix_of_another_shape_is_refused(cls: Any) -> None:
    adamw = trained(torch.optim.AdamW, (3,), (512, 128))
    optimizer = trained(cls, (3,), (128, 512))
    before = contents(optimizer)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 1 has shape \(512, 128\).*has shape \(128, 512\)"):
        optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
    assert contents(optimizer) == before


def test_shapes_are_only_in_state_dicts_and_follow_added_groups() -> None:
    optimizer = AdaBayesK([torch.zeros(4, 3)])
    optimizer.add_param_group({"params": [torch.zeros(2), torch.zeros(5, 2)]})
    take_steps(optimizer)
    state_dict = optimizer.state_dict()
    assert [group["param_shapes"] for group in state_dict["param_groups"]] == [[[4, 3]], [[2], [5, 2]]]
    optimizer.load_state_dict(state_dict)
    assert all("param_shapes" not in group for group in optimizer.param_groups)


def test_state_dicts_without_shapes_load() -> None:
    """Those of version 0.2, and groups that a distributed checkpoint has split."""
    optimizer = trained(AdaBayesK, (4, 3), (5, 2))
    for shapes in (None, [[4, 3]]):
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["param_groups"][0]["param_shapes"] = shapes
        if shapes is None:
            del state_dict["param_groups"][0]["param_shapes"]
        trained(AdaBayesK, (4, 3), (5, 2)).load_state_dict(state_dict)


def test_state_with_the_shape_of_its_parameter_needs_no_list_of_shapes() -> None:
    for cls in (AdaBayes, AdaBayesFP, AdaBound):
        assert "param_shapes" not in trained(cls, (4, 3)).state_dict()["param_groups"][0]


# Settings and step counts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refresh": 0}, "Invalid refresh: 0"),
        ({"refresh": 2.5}, r"Invalid refresh: 2\.5\. It must be an integer"),
        ({"learn_every": -1}, "Invalid learn_every: -1"),
        ({"block_size": 0}, "Invalid block_size: 0"),
        ({"block_size": (1, 2, 3)}, "Invalid block_size"),
        ({"max_size": 0}, "Invalid max_size: 0"),
        ({"batch_dims": -1}, "Invalid batch_dims: -1"),
        ({"matrix_scale": NAN}, "Invalid matrix_scale: nan"),
        ({"betas": (1.5, 2.0)}, r"Invalid beta parameter at index 0: 1\.5"),
        ({"betas": (0.9,)}, "There must be 2"),
        ({"lr": NAN}, "Invalid learning rate: nan"),
        ({"base_lr": NAN}, "Invalid base_lr: nan"),
        ({"lr_sgd": 0.0}, "Invalid lr_sgd: 0"),
        ({"weight_decay": "much"}, "Invalid weight_decay value: 'much' is not a number"),
        ({"reduction": "max"}, "Invalid reduction: 'max'"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    state_dict = copy.deepcopy(trained(AdaBayesK, (4, 3), (3,)).state_dict())
    state_dict["param_groups"][0].update(settings)
    assert_refused(trained(AdaBayesK, (4, 3), (3,)), state_dict, message)


@pytest.mark.parametrize("step", [NAN, float("inf"), -1.0, 2.5])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_invalid_step_counts_are_refused(make: Maker, step: float, as_tensor: bool) -> None:
    state_dict = copy.deepcopy(trained(make, (4, 3), (3,)).state_dict())
    state_dict["state"][1]["step"] = torch.tensor(step) if as_tensor else step
    assert_refused(trained(make, (4, 3), (3,)), state_dict, f"Invalid step count of parameter 1: {step}")


def test_a_learning_rate_that_a_schedule_has_driven_below_zero_loads() -> None:
    optimizer = trained(AdaBayesK, (4, 3))
    optimizer.param_groups[0]["lr"] = -1e-20
    trained(AdaBayesK, (4, 3)).load_state_dict(optimizer.state_dict())


def test_settings_that_need_a_kernel_load_where_there_is_none() -> None:
    """The next step says that there is none."""
    state_dict = trained(AdaBayesK, (4, 3)).state_dict()
    state_dict["param_groups"][0].update(fused=True, foreach=True)
    trained(AdaBayesK, (4, 3)).load_state_dict(state_dict)


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
@pytest.mark.parametrize("entry", ["step", "exp_avg", "exp_avg_sq"])
def test_adamws_state_without_an_entry_is_refused(cls: Any, entry: str) -> None:
    state_dict = trained(torch.optim.AdamW, (4, 3)).state_dict()
    del state_dict["state"][0][entry]
    with pytest.raises(
        ValueError, match=rf"not the state dict of an AdamW: the state of parameter 0.*not \['{entry}'\]"
    ):
        trained(cls, (4, 3)).from_adamw(state_dict)


@pytest.mark.parametrize("cls", [AdaBayes, AdaBayesFP, AdaBayesK])
def test_adamws_step_count_that_is_no_count_is_refused(cls: Any) -> None:
    state_dict = trained(torch.optim.AdamW, (4, 3)).state_dict()
    state_dict["state"][0]["step"] = torch.tensor(NAN)
    with pytest.raises(ValueError, match="Invalid step count of parameter 0: nan"):
        trained(cls, (4, 3)).from_adamw(state_dict)


def test_never_refreshing_costs_nothing() -> None:
    """An interval is a number, whatever its size; a loaded one as well."""
    rare = trained(AdaBayesK, (4, 3), refresh=10**9)
    loaded = trained(AdaBayesK, (4, 3))
    loaded.load_state_dict(rare.state_dict())
    for optimizer in (rare, loaded):
        for fused in (None, False):
            optimizer.param_groups[0]["fused"] = fused
            with torch.profiler.profile(profile_memory=True) as profile:
                take_steps(optimizer, 2)
            most = max(abs(event.self_cpu_memory_usage) for event in profile.key_averages())
            assert most < 2**20


# Version 0.2


def as_saved_by_0_2(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict = copy.deepcopy(state_dict)
    for group in state_dict["param_groups"]:
        for name in ("matrix_scale", "batch_dims", "share_bases", "param_shapes"):
            del group[name]
    return state_dict


def run_on(optimizer: Any, state_dict: dict[str, Any]) -> list[Tensor]:
    optimizer.load_state_dict(state_dict)
    take_steps(optimizer, 20)
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("given", [{}, {"matrix_scale": 5.0, "share_bases": True, "batch_dims": 1}])
def test_a_checkpoint_of_0_2_continues_with_steps_of_scale_1(given: dict[str, Any]) -> None:
    """Whatever the defaults are, and whatever the constructor was given."""
    shapes = [(12, 8), (5, 4, 3), (3,)]
    saved = as_saved_by_0_2(trained(AdaBayesK, *shapes, matrix_scale=1.0, block_size=4).state_dict())
    expected = AdaBayesK([torch.zeros(shape) for shape in shapes], matrix_scale=1.0, block_size=4)
    complete = copy.deepcopy(saved)
    complete["param_groups"][0].update(matrix_scale=1.0, batch_dims=0, share_bases=False)
    optimizer = AdaBayesK([torch.zeros(shape) for shape in shapes], **given)
    assert all(map(torch.equal, run_on(optimizer, saved), run_on(expected, complete)))
    (group,) = optimizer.param_groups
    assert (group["matrix_scale"], group["batch_dims"], group["share_bases"]) == (1.0, 0, False)


def test_a_pruned_group_gets_the_defaults() -> None:
    state_dict = trained(AdaBayesK, (4, 3)).state_dict()
    state_dict["param_groups"] = [
        {name: group[name] for name in ("lr", "params")} for group in state_dict["param_groups"]
    ]
    optimizer = AdaBayesK([torch.zeros(4, 3)], matrix_scale=3.0)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["matrix_scale"] == 3.0


def test_a_run_of_adamws_continues_with_the_optimizers_own_scale() -> None:
    adamw = trained(torch.optim.AdamW, (4, 3))
    alternatives: list[dict[str, Any]] = [{}, {"matrix_scale": 3.0, "share_bases": True}]
    for settings in alternatives:
        optimizer = AdaBayesK([torch.zeros(4, 3)], **settings)
        before = {name: optimizer.param_groups[0][name] for name in ("matrix_scale", "batch_dims", "share_bases")}
        optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
        assert {name: optimizer.param_groups[0][name] for name in before} == before
