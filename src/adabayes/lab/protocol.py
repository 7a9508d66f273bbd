"""Protocols: what is compared with what, as data; and the runs that follow."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from adabayes.lab import data, models

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["NAMES", "OptimizerSpec", "Protocol", "ProtocolError", "Spec", "load", "lr_factor"]

NAMES = ("quick", "mini", "paper", "text")


class ProtocolError(ValueError):
    """A protocol that cannot be run. The message names the entry and what is permitted."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by import path, its settings, those that differ for some models, and where to search for better."""

    name: str
    label: str
    path: str
    settings: dict[str, Any]
    of_models: dict[str, dict[str, Any]] = field(default_factory=dict)
    search: dict[str, tuple[float, float]] = field(default_factory=dict)  # ranges, to be searched in logarithms
    schedule: dict[str, Any] | None = None  # in place of the protocol's

    def settings_for(self, model: str) -> dict[str, Any]:
        return {**self.settings, **self.of_models.get(model, {})}


@dataclass(frozen=True)
class Spec:
    """One run, in full. Equal specifications give equal results."""

    dataset: str
    model: str
    model_options: dict[str, Any]
    optimizer: str  # its name in the protocol
    optimizer_class: str
    settings: dict[str, Any]
    seed: int
    epochs: int
    batch_size: int
    test_batch_size: int
    schedule: dict[str, Any]
    validation: float = 0.0  # share of the training data that is tested on in place of the test set
    device: str = "cpu"
    channels_last: bool = True
    autocast: bool = False  # mixed precision, in bfloat16
    compile: bool = False

    @property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]

    @property
    def folder(self) -> str:
        return f"{self.dataset}-{self.model}-{self.optimizer}-seed{self.seed}-{self.identity}"

    def __str__(self) -> str:
        return f"{self.dataset} {self.model} {self.optimizer} seed {self.seed}"


@dataclass(frozen=True)
class Protocol:
    """A comparison: every optimizer on every data set and model, with every seed."""

    name: str
    description: str
    datasets: tuple[str, ...]
    models: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    test_batch_size: int
    optimizers: dict[str, OptimizerSpec]
    schedule: dict[str, Any] = field(default_factory=lambda: {"kind": "constant"})
    model_options: dict[str, Any] = field(default_factory=dict)
    validation: float = 0.0
    published: dict[str, dict[str, dict[str, Sequence[float]]]] = field(default_factory=dict)  # error, loss

    def narrowed(
        self,
        datasets: Sequence[str] | None = None,
        models_: Sequence[str] | None = None,
        optimizers: Sequence[str] | None = None,
        seeds: int | None = None,
        epochs: int | None = None,
    ) -> Protocol:
        """The same protocol for some of its optimizers, or other data sets, models, seeds and lengths."""
        for name in optimizers or ():
            _check_choice("optimizer", name, self.optimizers, f" in protocol {self.name}")
        protocol = replace(
            self,
            datasets=tuple(datasets or self.datasets),
            models=tuple(models_ or self.models),
            seeds=tuple(range(seeds)) if seeds is not None else self.seeds,
            epochs=self.epochs if epochs is None else epochs,
            optimizers={name: self.optimizers[name] for name in optimizers or self.optimizers},
            published=self.published if epochs in (None, self.epochs) else {},
        )
        protocol.check()
        return protocol

    def check(self) -> None:
        for name in self.datasets:
            _check_choice("data set", name, data.NAMES)
        for name in self.models:
            _check_choice("model", name, models.NAMES)
        for name in ("epochs", "batch_size", "test_batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ProtocolError(f"{self.name}: {name} is {value!r}; it must be a whole number of at least 1")
        for what in ("datasets", "models", "seeds", "optimizers"):
            entries = list(getattr(self, what))
            if not entries:
                raise ProtocolError(f"{self.name}: there are no {what}; there must be at least one")
            if twice := [entry for entry in entries if entries.count(entry) > 1]:
                raise ProtocolError(f"{self.name}: {twice[0]!r} is twice among the {what}")
        for seed in self.seeds:
            if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
                raise ProtocolError(f"{self.name}: a seed is {seed!r}; it must be a whole number of at least 0")
        if not 0 <= self.validation < 1:
            raise ProtocolError(
                f"{self.name}: validation is {self.validation!r}; it must be a share, from 0 to below 1"
            )
        _check_schedule(self.name, self.schedule)
        for optimizer in self.optimizers.values():
            if optimizer.schedule is not None:
                _check_schedule(f"{self.name}, [optimizers.{optimizer.name}]", optimizer.schedule)

    def runs(self, **options: Any) -> list[Spec]:
        """What there is to do, seed by seed, so that a comparison is there early. Options are those of a Spec."""
        return [
            self.spec(dataset, model, self.optimizers[optimizer], seed, **options)
            for seed in self.seeds
            for dataset in self.datasets
            for model in self.models
            for optimizer in self.optimizers
        ]

    def spec(self, dataset: str, model: str, optimizer: OptimizerSpec, seed: int, **options: Any) -> Spec:
        given = {
            "dataset": dataset,
            "model": model,
            "model_options": self.model_options,
            "optimizer": optimizer.name,
            "optimizer_class": optimizer.path,
            "settings": optimizer.settings_for(model),
            "seed": seed,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "test_batch_size": self.test_batch_size,
            "schedule": self.schedule if optimizer.schedule is None else optimizer.schedule,
            "validation": self.validation,
        }
        return Spec(**{**given, **options})


# Schedules

_SCHEDULES: dict[str, tuple[str, ...]] = {"constant": (), "step": ("at", "factor"), "cosine": ("warmup",)}


def lr_factor(schedule: Mapping[str, Any], progress: float) -> float:
    """What learning rates are multiplied with when a share ``progress`` of all steps has been taken.

    >>> [lr_factor({"kind": "step", "at": [0.75], "factor": 0.1}, epoch / 200) for epoch in (0, 149, 150)]
    [1.0, 1.0, 0.1]
    """
    if schedule["kind"] == "step":
        return float(schedule["factor"] ** sum(progress >= at for at in schedule["at"]))
    if schedule["kind"] == "cosine":
        warmup = schedule["warmup"]
        if progress < warmup:
            return progress / warmup  # type: ignore[no-any-return]
        return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2
    return 1.0


def _check_schedule(name: str, schedule: Mapping[str, Any]) -> None:
    kind = schedule.get("kind")
    _check_choice("schedule", kind, _SCHEDULES, f" (kind) in {name}")
    if set(schedule) != {"kind", *_SCHEDULES[str(kind)]}:
        raise ProtocolError(
            f"{name}: a schedule of kind {kind!r} has the entries {', '.join(('kind', *_SCHEDULES[str(kind)]))}; "
            f"here are {', '.join(schedule)}"
        )
    shares = {"step": schedule.get("at"), "cosine": [schedule.get("warmup")]}.get(str(kind), [])
    if not isinstance(shares, list) or not all(isinstance(s, int | float) and 0 <= s < 1 for s in shares):
        raise ProtocolError(f"{name}: schedule has {shares!r}; these are shares of the training, from 0 to below 1")


# Files

_KEYS = {f.name for f in fields(Protocol)} - {"name"} | {"extends", "compare"}
_OPTIMIZER_KEYS = ("label", "class", "models", "search", "schedule")  # all others are settings


_FIGURES = {"datasets", "models", "epochs", "batch_size", "schedule", "model_options", "validation"}  # depend on these
_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "description": (str, "a text"),
    "extends": (str, "the name of a protocol, or a file"),
    "datasets": (list, "a list, like ['digits']"),
    "models": (list, "a list, like ['resnet8']"),
    "compare": (list, "a list of optimizers"),
    "seeds": ((int, list), "a number of seeds, or a list of them"),
    "epochs": (int, "a whole number"),
    "batch_size": (int, "a whole number"),
    "test_batch_size": (int, "a whole number"),
    "validation": ((int, float), "a share, from 0 to below 1"),
    "schedule": (dict, "a table, like { kind = 'constant' }"),
    "model_options": (dict, "a table"),
    "published": (dict, "a table"),
    "optimizers": (dict, "tables, like [optimizers.adam]"),
}


def load(name: str | Path) -> Protocol:
    """A protocol by its name, or from a TOML file."""
    table = _read(name)
    stem = Path(name).stem
    unknown = set(table) - _KEYS
    if unknown:
        raise ProtocolError(f"{name}: unknown entry {min(unknown)!r}; there may be {', '.join(sorted(_KEYS))}")
    optimizers = {key: _optimizer(stem, key, entry) for key, entry in _tables(name, table, "optimizers").items()}
    compare = table.get("compare", list(optimizers))
    for key in compare:
        _check_choice("optimizer", key, optimizers, f" (compare) in {name}")
    given = {key: table[key] for key in table if key in _KEYS - {"extends", "compare", "optimizers"}}
    missing = {"datasets", "models", "epochs", "batch_size"} - set(given)
    if missing:
        raise ProtocolError(
            f"{name}: there is no {min(missing)}; state it, or extend another protocol: extends = 'quick'"
        )
    seeds = given.get("seeds", 1)
    given["seeds"] = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    for key in ("datasets", "models"):
        given[key] = tuple(given[key])
    given.setdefault("test_batch_size", given["batch_size"])
    given.setdefault("description", "")
    protocol = Protocol(name=stem, optimizers={key: optimizers[key] for key in compare}, **given)
    protocol.check()
    return protocol


def _read(name: str | Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A protocol's table, with that of the protocol that it extends below it."""
    if str(name) in above:
        raise ProtocolError(f"{name} extends itself: {' <- '.join([*above, str(name)])}")
    if str(name) in NAMES:
        text = (resources.files("adabayes.lab") / "protocols" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        path = Path(name)
        if not path.is_file():
            raise ProtocolError(f"no protocol {str(name)!r}: there are {', '.join(NAMES)}, or give a TOML file")
        text = path.read_text(encoding="utf-8")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProtocolError(f"{name} is not TOML: {error}") from error
    for key, (kind, what) in _TYPES.items():
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool)):
            raise ProtocolError(f"{name}: {key} is {table[key]!r}; it must be {what}")
    below = table.get("extends")
    if below is None:
        return table
    base = _read(below if below in NAMES else Path(name).parent / below, (*above, str(name)))
    merged = {**base, **table, "optimizers": dict(base.get("optimizers", {}))}
    changed = _tables(name, table, "optimizers")
    for key, entry in changed.items():
        merged["optimizers"][key] = {**merged["optimizers"].get(key, {}), **entry}
    if "published" not in table:  # the base's are of another experiment where this one differs
        same = {} if not _FIGURES.isdisjoint(table) else base.get("published", {})
        merged["published"] = {
            dataset: {model: {o: v for o, v in of.items() if o not in changed} for model, of in models.items()}
            for dataset, models in same.items()
        }
    return merged


def _tables(name: str | Path, table: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = table.get(key, {})
    if not all(isinstance(entry, dict) for entry in entries.values()):
        raise ProtocolError(f"{name}: {key} must be tables, like [{key}.adam]")
    return entries


def _optimizer(protocol: str, name: str, entry: Mapping[str, Any]) -> OptimizerSpec:
    kinds = (("label", str, "a text"), ("models", dict, "tables"), ("search", dict, "a table"))
    for key, kind, what in (*kinds, ("schedule", dict, _TYPES["schedule"][1])):
        if not isinstance(entry.get(key, kind()), kind):
            raise ProtocolError(f"{protocol}: {key} in [optimizers.{name}] is {entry[key]!r}; it must be {what}")
    for key, value in entry.get("models", {}).items():
        if not isinstance(value, dict):
            raise ProtocolError(f"{protocol}: models.{key} in [optimizers.{name}] is {value!r}; it must be a table")
    for key, value in entry.items():
        if key not in _OPTIMIZER_KEYS and not isinstance(value, int | float | str | list):
            raise ProtocolError(f"{protocol}: {key} in [optimizers.{name}] is {value!r}, which no optimizer takes")
    if not isinstance(entry.get("class"), str):
        raise ProtocolError(f"{protocol}: [optimizers.{name}] has no class; it is an import path: 'torch.optim.RAdam'")
    search = entry.get("search", {})
    for key, limits in search.items():
        numbers = isinstance(limits, list) and all(isinstance(limit, int | float) for limit in limits)
        if not (numbers and len(limits) == 2 and 0 < limits[0] < limits[1]):
            raise ProtocolError(
                f"{protocol}: search of {key} in [optimizers.{name}] is {limits!r}; it must be two numbers, the lower "
                "one above 0 and first"
            )
    return OptimizerSpec(
        name,
        entry.get("label", name),
        entry["class"],
        {key: value for key, value in entry.items() if key not in _OPTIMIZER_KEYS},
        entry.get("models", {}),
        {key: (float(low), float(high)) for key, (low, high) in search.items()},
        entry.get("schedule"),
    )


def _check_choice(what: str, name: Any, choices: Any, where: str = "") -> None:
    if name not in choices:
        raise ProtocolError(f"unknown {what} {name!r}{where}; there are {', '.join(choices)}")


def described() -> Iterator[tuple[str, str]]:
    """The protocols that come with the package, and what they are."""
    for name in NAMES:
        yield name, str(_read(name)["description"])
