"""Muon for the matrices of a network, AdamW for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from adabayes.bench import muon
from adabayes.lab import models
from adabayes.lab.data import Data
from adabayes.lab.optimizers import find_class
from adabayes.lab.rivals import MuonAdamW
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Interrupted, Watch, train
from tests.support.marks import has_muon

from .conftest import spec_of, without_times


def test_a_torch_without_muon_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(RuntimeError, match=r"Muon came with torch 2\.9"):
        MuonAdamW(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"Muon came with torch 2\.9"):
        MuonAdamW([torch.zeros(2, 2)])


def test_import_path_of_records_gives_the_optimizer_of_the_bench() -> None:
    assert find_class("adabayes.lab.rivals.MuonAdamW") is muon.MuonAdamW


def names_of(model: nn.Module, optimizer: MuonAdamW) -> set[str]:
    ours = {id(p) for p in optimizer.param_groups[0]["params"]}
    return {name for name, p in model.named_parameters() if id(p) in ours}


@has_muon
def test_matrices_inside_of_a_network_go_to_muon() -> None:
    mlp = models.make("mlp", inputs=3, outputs=1, widths=[4, 5])
    assert names_of(mlp, MuonAdamW(mlp)) == {"0.weight", "2.weight"}  # the last is the output
    resnet = models.make("resnet8")
    found = names_of(resnet, MuonAdamW(resnet))
    assert "stem.0.weight" in found
    assert found == {name for name, p in resnet.named_parameters() if p.dim() == 4}
    transformer = models.make("transformer", width=8, layers=1)  # its output is bound to the embedding
    kinds = ("qkv", "out", "mlp.0", "mlp.2")
    assert names_of(transformer, MuonAdamW(transformer)) == {f"layers.0.{kind}.weight" for kind in kinds}


@has_muon
def test_steps_are_those_of_torchs_muon_and_adamw() -> None:
    torch.manual_seed(0)
    model = models.make("mlp", inputs=6, outputs=2, widths=[5, 4])
    twin = models.make("mlp", inputs=6, outputs=2, widths=[5, 4])
    twin.load_state_dict(model.state_dict())
    ours = MuonAdamW(model, lr=0.01, weight_decay=0.2)
    inner = [p for name, p in twin.named_parameters() if name in ("0.weight", "2.weight")]
    rest = [p for name, p in twin.named_parameters() if name not in ("0.weight", "2.weight")]
    both = [
        torch.optim.Muon(inner, lr=0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.2, betas=(0.9, 0.95)),
    ]
    for step in range(5):
        x = torch.randn(7, 6)
        for net, optimizers in ((model, [ours]), (twin, both)):
            net.zero_grad()
            net(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
                if optimizer is ours:
                    optimizer.param_groups[1]["lr"] = 0.01 / (step + 1)
                optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@has_muon
def test_a_convolution_steps_as_its_matrix_in_any_layout() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(4, 3, 3, 3), torch.randn(4, 3, 3, 3)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
        conv = model.get_parameter("0.weight")
        conv.data = start.clone(memory_format=layout)
        optimizer = MuonAdamW(model, lr=0.1)
        conv.grad = gradient.clone(memory_format=layout)
        optimizer.step()
        results.append(conv.detach().contiguous())
        assert not conv.equal(start)
    torch.testing.assert_close(*results)


@has_muon
def test_a_list_of_tensors_steps_as_a_network_with_these_matrices() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Linear(5, 2))
    model[2].requires_grad_(False)  # the output layer, which is no matrix for Muon
    tensors = [p.detach().clone().requires_grad_() for p in model.parameters() if p.requires_grad]
    ours, theirs = MuonAdamW(model, lr=0.1), MuonAdamW(tensors, lr=0.1)
    assert [p.dim() for p in theirs.param_groups[0]["params"]] == [4, 2]
    for _ in range(3):
        for p, q in zip(model.parameters(), tensors):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), tensors):
        assert torch.equal(p, q)


@has_muon
def test_runs_resume_bit_for_bit(digits: Data, tmp_path: Path) -> None:
    spec = spec_of("adamw", optimizer_class="adabayes.lab.rivals.MuonAdamW", settings={"lr": 3e-3}, epochs=3)
    whole, folder = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    train(spec, whole, digits)
    assert whole.metrics()[-1]["train_loss"] < whole.metrics()[0]["train_loss"]
    stops = iter([False] * 15 + [True])
    with pytest.raises(Interrupted):
        train(spec, folder, digits, watch=Watch(should_stop=lambda: next(stops)))
    train(spec, folder, digits)
    assert without_times(folder.metrics()) == without_times(whole.metrics())


@has_muon
def test_a_network_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match="has no matrices for Muon"):
        MuonAdamW(nn.Linear(3, 2))
