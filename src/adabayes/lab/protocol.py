"""Protocols: comparisons as data, and the runs that they consist of."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from adabayes.lab import compatibility, data, models, schema
from adabayes.lab.schema import Kind, Misfit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ANCHORS",
    "DASHES",
    "NAMES",
    "PROTOCOL",
    "SPEC",
    "TRIAL_SEED",
    "WORKLOADS",
    "Execution",
    "OptimizerSpec",
    "Preset",
    "Protocol",
    "ProtocolError",
    "Spec",
    "load",
    "lr_factor",
]  # fmt: skip

NAMES = ("demo", "quick", "mini", "paper", "text")
TRIAL_SEED = 1_000_003  # of trials; comparisons have other seeds
WORKLOADS = (
    "digits", "cifar10-mini", "fashion-2c2d", "fashion-autoencoder", "text", "shakespeare", "pinn", "flights",
)  # fmt: skip
ANCHORS = ("nanogpt-cpu", "fmnist-2c2d")  # published experiments, to be run again
_PACKAGED = (
    *NAMES,
    *(f"suite/{name}" for name in (*WORKLOADS, "rivals")),
    *(f"anchors/{name}" for name in ANCHORS),
)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_MOST_SEEDS = 10_000


class ProtocolError(ValueError):
    """A protocol that cannot be run. The message names the entry and the values that are permitted."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer: its import path, its settings, those that differ for some models, and ranges to search."""

    name: str
    label: str
    path: str
    settings: dict[str, Any]
    of_models: dict[str, dict[str, Any]] = field(default_factory=dict)
    search: dict[str, tuple[float, float]] = field(default_factory=dict)  # ranges, on a logarithmic scale
    schedule: dict[str, Any] | None = None  # instead of the protocol's
    colour: tuple[str, str] | None = None  # of its line in figures, on a light and on a dark background
    dash: str | None = None

    def settings_for(self, model: str) -> dict[str, Any]:
        return {**self.settings, **self.of_models.get(model, {})}


@dataclass(frozen=True)
class Preset:
    """A choice of optimizers that a report can show together. Those that were not run are left out."""

    label: str
    optimizers: tuple[str, ...]


@dataclass(frozen=True)
class Execution:
    """How a run is computed."""

    device: str = "cpu"
    channels_last: bool = True
    autocast: bool = False  # mixed precision, in bfloat16
    compile: bool = False


@dataclass(frozen=True)
class Spec:
    """The full specification of a run. Equal specifications give equal results."""

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
    validation: float = 0.0  # share of the training data to test on, instead of the test set
    device: str = "cpu"
    channels_last: bool = True
    autocast: bool = False  # mixed precision, in bfloat16
    compile: bool = False
    data_options: dict[str, Any] = field(default_factory=dict)  # of the data set
    tests_per_epoch: int = 1
    test_at_end: bool = False  # once on the test set, if all other tests are on held-out training data
    length: float = 1.0  # share of all steps to train, with a schedule as short as that

    @property
    def identity(self) -> str:
        """Return a hash of all fields, which names the run's folder."""
        fields = compatibility.fields_to_hash(asdict(self))
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:10]

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
    data_options: dict[str, Any] = field(default_factory=dict)
    validation: float = 0.0
    tests_per_epoch: int = 1
    test_at_end: bool = False
    length: float = 1.0  # share of all steps to train
    published: dict[str, dict[str, dict[str, Sequence[float | None]]]] = field(default_factory=dict)  # error, loss
    presets: dict[str, Preset] = field(default_factory=dict)

    @classmethod
    def restored(cls, entry: dict[str, Any]) -> Protocol:
        """Return the protocol that ``asdict`` made this entry from. It must be of the kind PROTOCOL."""
        optimizers = {name: OptimizerSpec(**of) for name, of in entry["optimizers"].items()}
        presets = {key: Preset(**preset) for key, preset in entry.get("presets", {}).items()}
        return cls(**{**entry, "optimizers": optimizers, "presets": presets})

    def narrowed(
        self,
        datasets: Sequence[str] | None = None,
        models_: Sequence[str] | None = None,
        optimizers: Sequence[str] | None = None,
        seeds: int | None = None,
        epochs: int | None = None,
    ) -> Protocol:
        """Return the protocol with some of its optimizers, or other data sets, models, seeds or epochs."""
        for name in optimizers or ():
            _check_choice("optimizer", name, self.optimizers, f" in protocol {self.name}")
        if seeds is not None:
            _checked(self.name, _FILE["seeds"], "seeds", seeds)
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

    def panel(self, said: str) -> tuple[str, str]:
        """Return the data set and the model. Raise an error that begins with ``said`` if there are several."""
        if len(self.datasets) > 1 or len(self.models) > 1:
            raise ProtocolError(
                f"{said}; protocol {self.name} has {', '.join(self.datasets)} and {', '.join(self.models)}: choose "
                "with --dataset and --model"
            )
        return self.datasets[0], self.models[0]

    def check(self) -> None:
        for name in self.datasets:
            _check_choice("data set", name, data.NAMES)
        for name in self.models:
            _check_choice("model", name, models.NAMES)
        for what in ("datasets", "models", "seeds", "optimizers"):
            entries = list(getattr(self, what))
            if not entries:
                raise ProtocolError(f"{self.name}: there are no {what}; there must be at least one")
            if len(set(entries)) < len(entries):
                twice = next(entry for entry in entries if entries.count(entry) > 1)
                raise ProtocolError(f"{self.name}: {twice!r} occurs twice in {what}")
        for what in ("epochs", "batch_size", "test_batch_size", "validation"):
            _checked(self.name, _FILE[what], what, getattr(self, what))

    def runs(self, execution: Execution = Execution()) -> list[Spec]:  # noqa: B008  (frozen)
        """Return all runs, ordered by seed, so that there is something to compare early."""
        return [
            self.spec(dataset, model, self.optimizers[optimizer], seed, execution)
            for seed in self.seeds
            for dataset in self.datasets
            for model in self.models
            for optimizer in self.optimizers
        ]

    def spec(
        self,
        dataset: str,
        model: str,
        optimizer: OptimizerSpec,
        seed: int,
        execution: Execution = Execution(),  # noqa: B008
    ) -> Spec:
        return Spec(
            dataset=dataset,
            model=model,
            model_options=self.model_options,
            optimizer=optimizer.name,
            optimizer_class=optimizer.path,
            settings=optimizer.settings_for(model),
            seed=seed,
            epochs=self.epochs,
            batch_size=self.batch_size,
            test_batch_size=self.test_batch_size,
            schedule=self.schedule if optimizer.schedule is None else optimizer.schedule,
            validation=self.validation,
            data_options=self.data_options,
            tests_per_epoch=self.tests_per_epoch,
            test_at_end=self.test_at_end,
            length=self.length,
            **asdict(execution),
        )


# Schedules


def lr_factor(schedule: Mapping[str, Any], progress: float) -> float:
    """Return the factor of the learning rate after a share ``progress`` of all steps.

    >>> [lr_factor({"kind": "step", "at": [0.75], "factor": 0.1}, epoch / 200) for epoch in (0, 149, 150)]
    [1.0, 1.0, 0.1]
    >>> [lr_factor({"kind": "cosine", "warmup": 0.5, "final": 0.1}, progress) for progress in (0.25, 0.5, 1.0)]
    [0.5, 1.0, 0.1]
    """
    if schedule["kind"] == "step":
        return float(schedule["factor"] ** sum(progress >= at for at in schedule["at"]))
    if schedule["kind"] == "cosine":
        warmup = schedule["warmup"]
        if progress < warmup:
            return progress / warmup  # type: ignore[no-any-return]
        final = schedule.get("final", 0.0)
        return final + (1 - final) * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2  # type: ignore[no-any-return]
    return 1.0


# Permitted values

_POSITIVE = schema.whole(1)
_SHARE = schema.kind("a share, from 0 to below 1", lambda v: schema.is_number(v) and 0 <= v < 1)
_SCHEDULES: dict[str, tuple[dict[str, Kind], dict[str, Kind]]] = {  # required entries, optional ones
    "constant": ({}, {}),
    "step": ({"at": schema.listed(_SHARE, "a list of at most 100 shares", 100), "factor": schema.number(0, 100)}, {}),
    "cosine": ({"warmup": _SHARE}, {"final": _SHARE}),
}


def _schedule(key: str, value: Any) -> None:
    entries: dict[str, Kind] = {"kind": schema.choice(*_SCHEDULES)}
    schema.table(entries, others=schema.ANYTHING, permitted="a table, like { kind = 'constant' }")(key, value)
    required, optional = _SCHEDULES[value["kind"]]
    schema.table(entries | required, optional)(key, value)


def _presets(key: str, value: Any) -> None:
    schema.tables(_PRESET, "tables, like [presets.mine]", schema.NAME)(key, value)
    if two := schema.meeting(["all", "train", *value]):  # they become names of files
        raise Misfit(f"{key} has {two[1]!r}, but {two[0]!r} exists already (all and train always do)")


_NAMES = schema.listed(schema.TEXT)
_SETTINGS = schema.tables(schema.PLAIN)
_DATA_OPTIONS = schema.table({}, {"examples": _POSITIVE, "augment": schema.FLAG})
_COLOUR = schema.pair(
    "two colours, for light and dark backgrounds, like ['#0072b2', '#7cc4f5']",
    lambda v: isinstance(v, str) and re.fullmatch("#[0-9a-fA-F]{6}", v) is not None,
)
_PRESET = schema.record(Preset, {"label": schema.LINE, "optimizers": _NAMES})


def _is_figure(value: Any) -> bool:
    return schema.is_number(value) and math.isfinite(value)


_FIGURE = schema.kind("a number", _is_figure)
_FIGURES = schema.either(
    "two numbers, an error in percent and a loss, or a table of one of them, like { loss = 1.88 }",
    schema.pair("two numbers", _is_figure),
    schema.table({}, {"error": _FIGURE, "loss": _FIGURE}),
)
_RANGE = schema.pair(
    "two numbers, the lower one above 0 and first",
    lambda v: schema.is_number(v) and 0 < v < math.inf,
    lambda low, high: low < high,
)

# The entries of an optimizer (all others are its settings), and those of a file.
_ENTRIES: dict[str, Kind] = {
    "label": schema.LINE,
    "class": schema.kind(
        "an import path, like 'torch.optim.RAdam'",
        lambda v: isinstance(v, str) and "." in v and all(part.isidentifier() for part in v.split(".")),
    ),
    "models": schema.tables(_SETTINGS),
    "search": schema.tables(_RANGE, "a table, like { lr = [1e-4, 1e-1] }"),
    "schedule": _schedule,
    "colour": _COLOUR,
    "dash": schema.choice(*DASHES),
}
_FILE: dict[str, Kind] = {
    "extends": schema.TEXT,
    "description": schema.TEXT,
    "datasets": schema.listed(schema.TEXT, "a list, like ['digits']"),
    "models": schema.listed(schema.TEXT, "a list, like ['resnet8']"),
    "compare": schema.listed(schema.TEXT, "a list of optimizers"),
    "seeds": schema.either(
        f"a number of seeds, at most {_MOST_SEEDS}, or a list of whole numbers from 0 on",
        schema.whole(0, _MOST_SEEDS),
        schema.listed(schema.whole(0), most=_MOST_SEEDS),
    ),
    "epochs": _POSITIVE,
    "batch_size": _POSITIVE,
    "test_batch_size": _POSITIVE,
    "validation": _SHARE,
    "tests_per_epoch": _POSITIVE,
    "test_at_end": schema.FLAG,
    "length": schema.kind("a share, above 0 and at most 1", lambda v: schema.is_number(v) and 0 < v <= 1),
    "schedule": _schedule,
    "model_options": _SETTINGS,
    "data_options": _DATA_OPTIONS,
    "published": schema.tables(schema.tables(schema.tables(_FIGURES))),
    "presets": _presets,
    "optimizers": schema.tables(
        schema.table({}, _ENTRIES, others=schema.PLAIN), "tables, like [optimizers.adam]", schema.NAME
    ),
}

# Dataclasses as JSON. They are checked only as far as needed, because earlier versions permitted more.
_KNOWN_SCHEDULE = schema.table({"kind": schema.TEXT}, others=schema.PLAIN)
_KNOWN_FIGURES = schema.pair("two numbers or nulls", lambda v: v is None or _is_figure(v))
_SPEC_FIELDS = schema.record(
    Spec,
    {
        "dataset": schema.PART,
        "model": schema.PART,
        "model_options": _SETTINGS,
        "optimizer": schema.PART,
        "optimizer_class": schema.TEXT,
        "settings": _SETTINGS,
        "seed": schema.INTEGER,
        "epochs": _POSITIVE,
        "batch_size": _POSITIVE,
        "test_batch_size": _POSITIVE,
        "schedule": _KNOWN_SCHEDULE,
        "validation": _SHARE,
        "device": schema.TEXT,
        "channels_last": schema.FLAG,
        "autocast": schema.FLAG,
        "compile": schema.FLAG,
        "data_options": _DATA_OPTIONS,
        "tests_per_epoch": _POSITIVE,
        "test_at_end": schema.FLAG,
        "length": schema.number(0, 1),
    },
)
_OPTIMIZER = schema.record(
    OptimizerSpec,
    {
        "name": schema.TEXT,
        "label": schema.TEXT,
        "path": schema.TEXT,
        "settings": _SETTINGS,
        "of_models": schema.tables(_SETTINGS),
        "search": schema.tables(_RANGE),
        "schedule": schema.nothing_or(_KNOWN_SCHEDULE),
        "colour": schema.nothing_or(_COLOUR),
        "dash": schema.nothing_or(_ENTRIES["dash"]),
    },
)
PROTOCOL = schema.record(
    Protocol,
    _FILE
    | {
        "name": schema.TEXT,
        "seeds": schema.listed(schema.INTEGER),
        "optimizers": schema.tables(_OPTIMIZER),
        "schedule": _KNOWN_SCHEDULE,
        "published": schema.tables(schema.tables(schema.tables(_KNOWN_FIGURES))),
    },
)


def _spec(key: str, value: Any) -> None:
    _SPEC_FIELDS(key, value)
    if len((folder := Spec(**value).folder).encode()) > 255:
        raise Misfit(f"the name of its folder, {folder[:60]}..., is longer than file systems permit")


SPEC: Kind = _spec


# Files

# Entries that change the experiment, so that published figures no longer apply.
_DIFFERENT = {
    "datasets", "models", "epochs", "length", "batch_size", "schedule", "model_options", "data_options", "validation",
}  # fmt: skip
_SHOWN = {"label", "colour", "dash", "search"}  # entries that do not change an optimizer's results


def check_workload(name: str) -> None:
    """Raise if the suite has no such workload."""
    _check_choice("workload", name, WORKLOADS)


def load(name: str | Path) -> Protocol:
    """Load a protocol by its name, or from a TOML file."""
    table = _read(name)
    stem = str(name).replace("/", "-") if str(name) in _PACKAGED else Path(name).stem
    _checked(name, schema.NAME, "the name of the file, which names a folder too,", stem)
    for key in ("datasets", "models", "epochs", "batch_size"):
        if key not in table:
            raise ProtocolError(f"{name}: there is no {key}; add it, or extend another protocol: extends = 'quick'")
    optimizers = {key: _optimizer(name, key, entry) for key, entry in table.get("optimizers", {}).items()}
    compare = table.get("compare", list(optimizers))
    for key in compare:
        _check_choice("optimizer", key, optimizers, f" (compare) in {name}")
    for dataset, of_models in table.get("published", {}).items():
        _check_choice("data set", dataset, data.NAMES, f" (published) in {name}")
        for model, figures in of_models.items():
            _check_choice("model", model, models.NAMES, f" (published.{dataset}) in {name}")
            for key in figures:
                _check_choice("optimizer", key, optimizers, f" (published.{dataset}.{model}) in {name}")
    seeds = table.get("seeds", 1)
    given = {key: table[key] for key in table if key in {f.name for f in fields(Protocol)}}
    given |= {
        "name": stem,
        "description": table.get("description", ""),
        "datasets": tuple(table["datasets"]),
        "models": tuple(table["models"]),
        "seeds": tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
        "test_batch_size": table.get("test_batch_size", table["batch_size"]),
        "optimizers": {key: optimizers[key] for key in compare},
        "published": {
            dataset: {model: {key: _figures(found) for key, found in of.items()} for model, of in of_models.items()}
            for dataset, of_models in table.get("published", {}).items()
        },
        "presets": {
            key: Preset(preset["label"], tuple(preset["optimizers"]))
            for key, preset in table.get("presets", {}).items()
        },
    }
    protocol = Protocol(**given)
    protocol.check()
    return protocol


def _figures(found: Any) -> list[float | None]:
    """Return a published error and loss. What was not published is None."""
    return [found.get("error"), found.get("loss")] if isinstance(found, dict) else list(found)


def _read(name: str | Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a protocol's table, merged into that of the protocol that it extends."""
    if str(name) in _PACKAGED:
        text = (resources.files("adabayes.lab") / "protocols" / f"{name}.toml").read_bytes()
    else:
        text = _text(Path(name))
    path = Path(name).resolve()
    if path in above:
        raise ProtocolError(f"{name} extends itself: {' <- '.join(map(str, [*above, path]))}")
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{name} is not TOML: {error}") from error
    try:
        schema.check(schema.table({}, _FILE), table)
    except Misfit as error:
        raise ProtocolError(f"{name}: {error}") from error
    is_tuned = compatibility.is_tuned_file(text)
    below = table.get("extends")
    if below is None:
        return table
    base = _read(below if below in _PACKAGED else Path(name).parent / below, (*above, path))
    merged = {**base, **table, "optimizers": dict(base.get("optimizers", {}))}
    for key, entry in table.get("optimizers", {}).items():
        both = {**merged["optimizers"].get(key, {}), **entry}
        merged["optimizers"][key] = compatibility.complete_tuned(both, entry) if is_tuned else both
    if "published" not in table:  # the base's figures apply only where the experiment is the same
        changed = {key for key, entry in table.get("optimizers", {}).items() if not _SHOWN.issuperset(entry)}
        same = {} if not _DIFFERENT.isdisjoint(table) else base.get("published", {})
        merged["published"] = {
            dataset: {model: {o: v for o, v in of.items() if o not in changed} for model, of in models.items()}
            for dataset, models in same.items()
        }
    return merged


def _text(path: Path) -> bytes:
    try:
        if path.is_file():
            return path.read_bytes()
        why = ""
    except OSError as error:
        why = f" ({error.strerror})"
    known = f"there are {', '.join(NAMES)}, suite/WORKLOAD, anchors/NAME, or give a TOML file"
    known += schema.suggestion(str(path), _PACKAGED)
    raise ProtocolError(f"no protocol {str(path)!r}{why}: {known}")


def _optimizer(protocol: str | Path, name: str, entry: Mapping[str, Any]) -> OptimizerSpec:
    if "class" not in entry:
        raise ProtocolError(
            f"{protocol}: [optimizers.{name}] has no class; it is an import path, like 'torch.optim.RAdam'"
        )
    for model in entry.get("models", {}):
        _check_choice("model", model, models.NAMES, f" (optimizers.{name}.models) in {protocol}")
    settings = {key: value for key, value in entry.items() if key not in _ENTRIES}
    return OptimizerSpec(
        name,
        entry.get("label", name),
        entry["class"],
        compatibility.settings_to_store(entry["class"], settings),
        entry.get("models", {}),
        {key: (float(low), float(high)) for key, (low, high) in entry.get("search", {}).items()},
        entry.get("schedule"),
        tuple(entry["colour"]) if "colour" in entry else None,
        entry.get("dash"),
    )


def _checked(where: str | Path, kind: Kind, key: str, value: Any) -> None:
    try:
        kind(key, value)
    except Misfit as error:
        raise ProtocolError(f"{where}: {error}") from error


def _check_choice(what: str, name: str, choices: Iterable[str], where: str = "") -> None:
    if name not in choices:
        known = f"there are {', '.join(choices)}{schema.suggestion(name, choices)}"
        raise ProtocolError(f"unknown {what} {name!r}{where}; {known}")
