"""The two groups that training code usually wants."""

from __future__ import annotations

import torch
from torch import nn

from adabayes import AdaBayes, param_groups


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5), nn.Embedding(7, 2))
    model[3](torch.zeros(1, 16))
    decaying, others = param_groups(model, 0.1)
    assert [name for name, _ in decaying["params"]] == ["0.weight", "3.weight", "4.weight"]
    assert [name for name, _ in others["params"]] == ["0.bias", "1.weight", "1.bias", "3.bias"]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_norms_and_biases_of_two_dimensions_do_not_decay_either() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm((3, 4)), "heads": nn.MultiheadAttention(4, 2, add_bias_kv=True)})
    decaying, _ = param_groups(model, 0.1)
    assert [name for name, _ in decaying["params"]] == ["heads.in_proj_weight", "heads.out_proj.weight"]


def test_all_weights_are_there_once_but_for_frozen_ones() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5), "frozen": nn.Linear(3, 3)})
    model["head"].weight = model["embed"].weight
    model["frozen"].requires_grad_(False)
    params = [p for group in param_groups(model, 0.1) for _, p in group["params"]]
    assert {id(p) for p in params} == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(params) == 2


def test_without_biases_there_is_one_group() -> None:
    (group,) = param_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert group["weight_decay"] == 0.1


def test_only_what_decays_shrinks() -> None:
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = AdaBayes(param_groups(model, 0.5), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 2), 0.95))
    torch.testing.assert_close(model.bias.detach(), torch.ones(2))
