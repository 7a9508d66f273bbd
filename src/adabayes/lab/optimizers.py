"""Optimizers by import path, and training with those that need more than ``step()``."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from adabayes.lab import compatibility, schema
from adabayes.lab.protocol import SPEC, ProtocolError, Spec
from adabayes.lab.schema import Misfit, suggestion

__all__ = ["Trainer", "check", "make"]


def check(specs: Iterable[Spec]) -> None:
    """Raise if a run cannot be started, or its specification cannot be read again, before anything is written.

    Every optimizer is made once with each of its settings, for a small network.
    """
    checked = set()
    for spec in specs:
        try:
            schema.check(SPEC, asdict(spec))
        except Misfit as error:
            raise ProtocolError(f"{spec}: {error}") from error
        settings = json.dumps([spec.optimizer_class, spec.settings], sort_keys=True)
        if settings not in checked:
            checked.add(settings)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it will warn again in the run
                make(spec, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def make(spec: Spec, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a run.

    One that takes a ``batch_size`` gets the protocol's, unless the settings have one, or "unknown". One whose first
    argument is ``model`` gets the network instead of its parameters.
    """
    cls = find_class(spec.optimizer_class)
    stored = compatibility.complete_settings(spec.optimizer_class, spec.settings)
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
    first, *taken = list(inspect.signature(cls).parameters) or [""]
    if "batch_size" in taken:
        settings.setdefault("batch_size", spec.batch_size)
        settings |= {"batch_size": None} if settings["batch_size"] == "unknown" else {}
    try:
        return cls(model if first == "model" else model.parameters(), **settings)
    except TypeError as error:
        meant = "".join(suggestion(key, taken) for key in settings if key not in taken)
        takes = f"It takes {', '.join(taken)}{meant}"
        raise ProtocolError(f"{spec.optimizer_class} with {settings}: {error}. {takes}") from error
    except Exception as error:  # an optimizer may raise anything
        raise ProtocolError(f"{spec.optimizer_class} with {settings}: {_said(error)}") from error


def find_class(path: str) -> Callable[..., torch.optim.Optimizer]:
    """Import an optimizer by its path. That runs its module, but nothing is called that is not an optimizer."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ProtocolError(f"{path!r} is not an import path; write it like 'torch.optim.RAdam'")
    try:
        found = importlib.import_module(module)
        cls = getattr(found, name, None)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ProtocolError(
            f"cannot import {path}: {_said(error)}. Install the package that has it; or, if it is your own file, "
            "name its folder: PYTHONPATH=FOLDER adabayes ..."
        ) from error
    if cls is None:
        others = [key for key, value in vars(found).items() if _is_optimizer(value)]
        raise ProtocolError(f"there is no {name} in {module}{suggestion(name, others)}")
    if not _is_optimizer(cls):
        raise ProtocolError(f"{path} is not an optimizer: it must be a class derived from torch.optim.Optimizer")
    return cls  # type: ignore[no-any-return]


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {error}"


class Trainer:
    """Does what some optimizers need beside ``step()``.

    Schedule-Free ones (``schedulefree``) use different weights for training and testing, and must be switched.
    BatchNorm has not seen the weights for testing, so its statistics are computed again. IVON samples the weights at
    which gradients are taken.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.switches = hasattr(optimizer, "train") and hasattr(optimizer, "eval")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: the state dict, and attributes, in which some optimizers count steps."""
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
        """Return the context for forward and backward passes."""
        if hasattr(self.optimizer, "sampled_params"):
            return self.optimizer.sampled_params(train=True)  # type: ignore[no-any-return]
        return nullcontext()
