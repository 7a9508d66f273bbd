"""Wrong calls: each gets an error of the kind torch raises, with the value and what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from adabayes import AdaBayes, AdaBayesFP, AdaBound
from tests.conftest import Maker

NAN, INF = float("nan"), float("inf")

COMMON = [
    ("lr", -0.5, r"Invalid learning rate: -0\.5.*at least 0"),
    ("lr", NAN, "Invalid learning rate: nan"),
    ("lr", INF, "Invalid learning rate: inf.*finite"),
    ("lr", torch.tensor([0.1, 0.2]), r"Tensor lr must be 1-element.*\(2,\).*parameter groups"),
    ("lr", torch.tensor(-1.0), "Invalid learning rate: -1"),
    ("weight_decay", -0.1, r"Invalid weight_decay value: -0\.1"),
    ("weight_decay", NAN, "Invalid weight_decay value: nan"),
]
TWO_RATES = [
    ("lr_sgd", -1.0, r"Invalid lr_sgd: -1.*above 0; leave it out for 100(000)? \* lr"),
    ("lr_sgd", NAN, "Invalid lr_sgd: nan"),
    ("lr_sgd", INF, "Invalid lr_sgd: inf"),
    ("lr_sgd", 0.0, "Invalid lr_sgd: 0.*lr=0"),
    ("reduction", "none", "Invalid reduction: 'none'.*'mean', 'sum'"),
    ("batch_size", 0, "Invalid batch_size: 0.*at least 1"),
    ("batch_size", INF, "Invalid batch_size: inf"),
    ("batch_size", NAN, "Invalid batch_size: nan"),
]
BETAS = [
    ("betas", (1.0, 0.999), "Invalid beta parameter at index 0: 1.*below 1"),
    ("betas", (0.9, -0.1), r"Invalid beta parameter at index 1: -0\.1"),
]
CASES: list[tuple[Any, str, Any, str]] = [
    *((AdaBayes, *case) for case in COMMON + TWO_RATES),
    (AdaBayes, "beta1", 1.0, "Invalid beta parameter at index 0: 1"),
    (AdaBayes, "beta1", -0.1, r"Invalid beta parameter at index 0: -0\.1"),
    (AdaBayes, "beta1", NAN, "Invalid beta parameter at index 0: nan"),
    (AdaBayes, "dynamics", "euler", "Invalid dynamics: 'euler'.*'exact', 'paper'"),
    *((AdaBayesFP, *case) for case in COMMON + TWO_RATES + BETAS),
    (AdaBayesFP, "reduction", "sum", "needs batch_size"),
    *((AdaBound, *case) for case in COMMON + BETAS),
    (AdaBound, "final_lr", -1.0, "Invalid final learning rate: -1"),
    (AdaBound, "gamma", 1.0, "Invalid gamma parameter: 1"),
    (AdaBound, "eps", -1e-8, "Invalid epsilon value: -1e-08"),
]


@pytest.mark.parametrize(("cls", "name", "value", "message"), CASES)
def test_value_out_of_range(cls: Any, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([torch.zeros(2)], **{name: value})


@pytest.mark.parametrize(("cls", "name", "value", "message"), CASES)
def test_value_out_of_range_in_a_group(cls: Any, name: str, value: Any, message: str) -> None:
    """Which torch does not check; nothing is added."""
    optimizer = cls([torch.zeros(2)])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.zeros(2)], name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_not_a_number(make: Maker, name: str) -> None:
    """Such as YAML makes of 1e-3."""
    with pytest.raises(TypeError, match="'1e-3' is not a number but a str"):
        make([torch.zeros(2)], **{name: "1e-3"})


@pytest.mark.parametrize("cls", [AdaBayesFP, AdaBound])
def test_wrong_number_of_betas(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid betas: \(0\.9,\)\. There must be 2"):
        cls([torch.zeros(2)], betas=(0.9,))


def test_foreach_with_differentiable(make_graphable: Maker) -> None:
    with pytest.raises(RuntimeError, match="`foreach=True` does not support `differentiable=True`"):
        make_graphable([torch.zeros(2)], foreach=True, differentiable=True)
    optimizer = make_graphable([torch.zeros(2)], differentiable=True)
    with pytest.raises(RuntimeError, match="`foreach=True` does not support `differentiable=True`"):
        optimizer.add_param_group({"params": [torch.zeros(2)], "foreach": True})


def test_sparse_gradients(make: Maker, foreach: bool) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = make(embedding.parameters(), foreach=foreach)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"does not support sparse gradients.*\(10, 3\).*sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_bare_tensor(make: Maker) -> None:
    with pytest.raises(TypeError, match=r"should be an iterable of Tensors or dicts, but got torch\.FloatTensor"):
        make(torch.zeros(2))


def test_empty_list(make: Maker) -> None:
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        make([])


def test_duplicates(make: Maker) -> None:
    w = torch.zeros(2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        make([w, w])
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        make([{"params": [w]}, {"params": [w]}])


def test_group_that_is_not_a_dict(make: Maker) -> None:
    optimizer: Any = make([torch.zeros(2)])
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([torch.zeros(2)])


def test_non_leaf_and_set(make: Maker) -> None:
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        make([torch.zeros(2, requires_grad=True) * 2])
    with pytest.raises(TypeError, match="ordered collections"):
        make([{"params": {torch.zeros(2)}}])


@pytest.mark.parametrize("cls", [AdaBayes, partial(AdaBayesFP, betas=(0.9, 0.99))])
def test_effective_lr_of_a_stranger_or_before_the_first_step(cls: Any) -> None:
    w = torch.zeros(2)
    optimizer = cls([w])
    with pytest.raises(RuntimeError, match="take a step with a gradient first"):
        optimizer.effective_lr(w)
    with pytest.raises(ValueError, match=r"shape \(2,\) does not belong to this optimizer"):
        optimizer.effective_lr(torch.zeros(2))
