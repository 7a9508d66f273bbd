"""Checkpoints that version 0.1 saved load, and go on as they would have then.

``fixtures/saved_by_0_1.safetensors`` holds, for each case: weights and state after SAVED steps, and after all STEPS in
every form. Run this file with version 0.1 installed to write it again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adabayes import AdaBayes, AdaBayesFP, AdaBound, kernels

FILE = Path(__file__).with_name("fixtures") / "saved_by_0_1.safetensors"
SHAPES: list[tuple[int, ...]] = [(3, 5), (), (70,)]
SAVED, STEPS = 5, 12

OPTIMIZERS: dict[str, Any] = {
    "adabayes": AdaBayes,
    "adabayes-paper": partial(AdaBayes, dynamics="paper"),
    "adabayes-sum": partial(AdaBayes, reduction="sum", batch_size=4, maximize=True, beta1=0.5),
    "adabayes-fp": AdaBayesFP,
    "adabayes-fp-sum": partial(AdaBayesFP, reduction="sum", batch_size=4, maximize=True, betas=(0.5, 0.9)),
    "adabound": AdaBound,
    "amsbound": partial(AdaBound, amsbound=True, maximize=True),
}
DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64")
LOW: dict[str, Any] = {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 7}
FORMS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": None, "fused": True},
}


def cases() -> Iterator[tuple[str, str, str]]:
    """Optimizer, dtype of the weights, and whether the state is bf16."""
    for name in OPTIMIZERS:
        for dtype in DTYPES:
            yield name, dtype, "fp32"
            if "bound" not in name and dtype in ("float32", "bfloat16", "float16"):
                yield name, dtype, "bf16"


def forms(name: str, dtype: str) -> list[str]:
    return [form for form in FORMS if form != "fused" or ("bound" not in name and dtype != "complex64")]


def numbers(seed: str, shape: tuple[int, ...], dtype: torch.dtype, spread: float = 0.0, zeros: float = 0.0) -> Tensor:
    """Numbers that no version of torch draws otherwise."""
    draw = random.Random(seed)
    count = 2 * int(torch.tensor(shape).prod()) if shape else 2
    values = [draw.gauss(0, 1) * 10 ** draw.uniform(-spread, spread) * (draw.random() >= zeros) for _ in range(count)]
    flat = torch.tensor(values, dtype=torch.float64)
    if dtype.is_complex:
        return torch.view_as_complex(flat.reshape(*shape, 2)).to(dtype)
    return flat[: count // 2].reshape(shape).to(dtype)


def step(optimizer: Any, params: list[Tensor], steps: range) -> None:
    """Of the last tensor, many weights have no gradient until the checkpoint, and some none until after it."""
    for t in steps:
        for i, p in enumerate(params):
            p.grad = numbers(f"{t} {i}", tuple(p.shape), p.dtype, spread=2.0)
            if i == 2:
                p.grad[: 40 if t < SAVED - 1 else 20 if t < SAVED + 2 else 0] = 0
        optimizer.step()


def made(name: str, dtype: str, state: str, form: str) -> tuple[list[Tensor], Any]:
    params = [numbers(f"start {i}", shape, getattr(torch, dtype)) for i, shape in enumerate(SHAPES)]
    options = {"lr": 1e-2, "weight_decay": 0.1, **(LOW if state == "bf16" else {}), **FORMS[form]}
    if "bound" in name:
        options.pop("fused")
    return params, OPTIMIZERS[name](params, **options)


def flat(optimizer: Any, params: list[Tensor]) -> dict[str, Tensor]:
    """Weights and state, each entry in one piece."""
    names = [name for name in optimizer.state[params[0]] if name != "step"]
    pieces = {"param": params, **{name: [optimizer.state[p][name] for p in params] for name in names}}
    return {
        name: torch.cat([torch.view_as_real(t).flatten() if t.is_complex() else t.flatten() for t in tensors])
        for name, tensors in pieces.items()
    }


def unflat(pieces: dict[str, Tensor], params: list[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Copy the weights from the result of :func:`flat` into ``params``, and return the state."""
    counts = [p.numel() * (2 if p.is_complex() else 1) for p in params]
    entries = {name: piece.clone().split(counts) for name, piece in pieces.items()}  # loading does not copy

    def shaped(t: Tensor, p: Tensor) -> Tensor:
        return torch.view_as_complex(t.reshape(*p.shape, 2)) if p.is_complex() else t.reshape(p.shape)

    for p, value in zip(params, entries.pop("param")):
        p.copy_(shaped(value, p))
    return {
        i: {"step": torch.tensor(float(SAVED)), **{name: shaped(parts[i], p) for name, parts in entries.items()}}
        for i, p in enumerate(params)
    }


@pytest.mark.parametrize(("name", "dtype", "state"), list(cases()))
def test_goes_on_as_it_did(name: str, dtype: str, state: str) -> None:
    with safe_open(FILE, "pt") as file:
        prefix = f"{name}|{dtype}|{state}|"
        saved = {key[len(prefix) :]: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
        groups = json.loads(file.metadata()[prefix])
    for form in forms(name, dtype):
        if form == "fused" and kernels.unavailable():
            continue
        params, optimizer = made(name, dtype, state, form)
        pieces = {key[len("saved|") :]: value for key, value in saved.items() if key.startswith("saved|")}
        loaded = {"state": unflat(pieces, params), "param_groups": groups}
        for group in groups:
            group.update({k: v for k, v in FORMS[form].items() if k in group})
        optimizer.load_state_dict(loaded)
        step(optimizer, params, range(SAVED, STEPS))
        for entry, value in flat(optimizer, params).items():
            expected = saved[f"{form}|{entry}"]
            assert value.dtype == expected.dtype
            if form == "fused":  # plain C, the same on every machine
                assert torch.equal(value, expected), (form, entry)
            else:  # torch's own kernels may round otherwise on another machine: a unit in the last place for each step
                eps = (STEPS - SAVED) * torch.finfo(value.dtype).eps
                torch.testing.assert_close(value, expected, rtol=eps, atol=eps * expected.abs().max().item())


def write() -> None:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, dtype, state in cases():
        prefix = f"{name}|{dtype}|{state}|"
        params, optimizer = made(name, dtype, state, "single")
        step(optimizer, params, range(SAVED))
        saved = flat(optimizer, params)
        tensors.update({f"{prefix}saved|{entry}": value.clone() for entry, value in saved.items()})
        groups = optimizer.state_dict()["param_groups"]
        metadata[prefix] = json.dumps(groups)
        for form in forms(name, dtype):
            params, optimizer = made(name, dtype, state, form)
            now = json.loads(metadata[prefix])
            for group in now:
                group.update({k: v for k, v in FORMS[form].items() if k in group})
            optimizer.load_state_dict({"state": unflat(saved, params), "param_groups": now})
            step(optimizer, params, range(SAVED, STEPS))
            tensors.update({f"{prefix}{form}|{entry}": v.clone() for entry, v in flat(optimizer, params).items()})
    FILE.parent.mkdir(exist_ok=True)
    save_file(tensors, FILE, metadata)


if __name__ == "__main__":
    write()
