"""timm makes our optimizers by their names.

timm needs torchvision, which the package index has for CUDA builds of torch alone: ``pip install '.[timm]'`` beside one
of those, or skip these tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK

timm_optim: Any = pytest.importorskip("timm.optim")

from adabayes.integrations.timm import register  # noqa: E402

NAMES = pytest.mark.parametrize(
    ("name", "cls"), [("adabayesk", AdaBayesK), ("adabayesfp", AdaBayesFP), ("adabayes", AdaBayes)]
)


class Net(nn.Module):
    """Names its layers as timm's decay by layers wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stem(x).relu())
        return logits

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "blocks": [(r"^head", None)]}


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@NAMES
@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_an_optimizer_by_its_name_has_timms_groups_and_trains(
    name: str, cls: type[AdaBayes], layer_decay: float | None
) -> None:
    net = Net()
    optimizer = timm_optim.create_optimizer_v2(net, name, lr=1e-2, weight_decay=0.1, layer_decay=layer_decay)
    assert type(optimizer) is cls
    assert {(p.dim(), group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]} == {
        (1, 0.0),
        (2, 0.1),
    }
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    before = [p.detach().clone() for p in net.parameters()]
    net(torch.ones(5, 4)).square().sum().backward()
    optimizer.step()
    assert all((p != q).any() for p, q in zip(net.parameters(), before))


@NAMES
def test_timms_other_arguments_go_where_they_mean_something(name: str, cls: type[AdaBayes]) -> None:
    """``--opt-eps`` and ``--momentum`` mean nothing here, ``--opt-betas`` only where there are two."""
    optimizer = timm_optim.create_optimizer_v2(
        Net(), name, lr=1e-2, eps=1e-8, betas=(0.8, 0.7), momentum=0.5, lr_sgd=2.0
    )
    (group,) = optimizer.param_groups[:1]
    assert group["lr_sgd"] == 2.0
    assert group["betas"] == ((0.9,) if cls is AdaBayes else (0.8, 0.7))


def test_names_are_listed_once_and_a_second_call_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    register()
    assert {"adabayes", "adabayesfp", "adabayesk"} <= set(timm_optim.list_optimizers("adabayes*"))
    assert not caplog.records
