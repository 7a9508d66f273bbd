"""Any optimizer by its import path, and what some need beside ``step()``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from adabayes.lab.protocol import ProtocolError, Spec

__all__ = ["Trainer", "make"]


def make(spec: Spec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a run. One that takes a ``batch_size`` gets the protocol's, unless it is stated."""
    cls = find_class(spec.optimizer_class)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in spec.settings.items()}
    if "batch_size" in inspect.signature(cls).parameters:
        settings.setdefault("batch_size", spec.batch_size)
    try:
        optimizer: torch.optim.Optimizer = cls(parameters, **settings)
    except TypeError as error:
        taken = ", ".join(list(inspect.signature(cls).parameters)[1:])
        raise ProtocolError(f"{spec.optimizer_class} with {settings}: {error}. It takes {taken}") from error
    return optimizer


def find_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ProtocolError(f"{path!r} is not an import path; write it like 'torch.optim.RAdam'")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ProtocolError(
            f"cannot import {path}: {error}. Install the package that has it; or, if it is a file of your own, say "
            "where: PYTHONPATH=FOLDER adabayes ..."
        ) from error
    except AttributeError:
        raise ProtocolError(f"there is no {name} in {module}") from None


class Trainer:
    """How to train with an optimizer that needs more than ``step()``; for all others, nothing.

    Schedule-Free ones (``schedulefree``) have other weights for training than for testing, and are told which;
    BatchNorm has not seen those for testing, so its statistics are taken anew. IVON draws the weights at which
    gradients are taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.switches = hasattr(optimizer, "train") and hasattr(optimizer, "eval")

    def state(self) -> dict[str, Any]:
        """All that a checkpoint must hold; some count steps in attributes that their state dict does not have."""
        plain = {k: v for k, v in vars(self.optimizer).items() if k[0] != "_" and isinstance(v, int | float | str)}
        return {"state_dict": self.optimizer.state_dict(), "attributes": plain}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["state_dict"])
        for name, value in state["attributes"].items():
            setattr(self.optimizer, name, value)

    def for_training(self) -> None:
        if self.switches:
            self.optimizer.train()  # type: ignore[attr-defined]

    def for_testing(self) -> None:
        if self.switches:
            self.optimizer.eval()  # type: ignore[attr-defined]

    def sampling(self) -> AbstractContextManager[Any]:
        """For forward and backward passes."""
        if hasattr(self.optimizer, "sampled_params"):
            return self.optimizer.sampled_params(train=True)  # type: ignore[no-any-return]
        return nullcontext()
