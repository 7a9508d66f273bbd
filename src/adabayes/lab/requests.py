"""Requests to the lab's commands. :mod:`adabayes.cli` makes them from options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Choice",
    "DataFiles",
    "DataList",
    "Local",
    "Ray",
    "Report",
    "Reproduce",
    "Runs",
    "Suite",
    "Theory",
    "Train",
    "Training",
    "Tune",
]


@dataclass(frozen=True)
class Choice:
    """A protocol by name or file, and replacements for its entries. None leaves an entry as it is."""

    protocol: str = "quick"
    datasets: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    optimizers: tuple[str, ...] | None = None
    seeds: int | None = None  # their number
    epochs: int | None = None
    validation: float | None = None  # share of the training data to test on, instead of the test set


@dataclass(frozen=True)
class Training:
    """How runs are trained. The first four are part of a run's specification. The others do not change results."""

    device: str = "cpu"
    autocast: bool = False
    compile: bool = False
    channels_last: bool = True
    checkpoint_seconds: float = 60.0
    tensorboard: bool = False
    data: Path | None = None  # the folder of data sets; None is the user's
    threads: int | None = None  # of each run; None: one for a small network, else its share of the cores

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads}: a run has at least one thread")


@dataclass(frozen=True)
class Local:
    """Runs on this machine, ``jobs`` at a time."""

    jobs: int = 1

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"--jobs {self.jobs}: there must be at least one run at a time")


@dataclass(frozen=True)
class Ray:
    """Runs on the Ray cluster at an address. None starts one on this machine."""

    address: str | None = None
    cpus: float = 1.0  # of each run
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not (self.cpus > 0 and self.gpus >= 0):
            raise ValueError(f"--cpus-per-run {self.cpus:g} must be above 0, --gpus-per-run {self.gpus:g} at least 0")


@dataclass(frozen=True)
class Reproduce:
    """All runs of a protocol. ``command`` is the user's command line, which resumes them."""

    choice: Choice
    command: str
    training: Training = Training()
    executor: Local | Ray = Local()
    out: Path | None = None


@dataclass(frozen=True)
class Train:
    """One run: the choice has one optimizer, data set and model. ``settings`` replace the protocol's."""

    choice: Choice
    command: str
    training: Training = Training()
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    distributed: str | None = None  # ddp or fsdp2, as one of the processes of torchrun
    out: Path | None = None


@dataclass(frozen=True)
class Tune:
    """A search with ``budget`` trials of each optimizer."""

    choice: Choice
    command: str
    budget: int
    training: Training = Training()
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"--budget {self.budget}: there must be at least one trial of each optimizer")


@dataclass(frozen=True)
class Suite:
    """The suite, or a part of it.

    ``records`` is a folder of records to make the page from, and ``time_steps`` times the steps of records again. With
    either, nothing is trained.
    """

    command: str
    workloads: tuple[str, ...] | None = None
    optimizers: tuple[str, ...] | None = None
    budget: int = 10
    seeds: int | None = None  # their number; None: the protocols'
    executor: Local | Ray = Local()
    checkpoint_seconds: float = 60.0
    data: Path | None = None
    out: Path = Path("out/suite")
    records: Path | None = None
    time_steps: bool = False


@dataclass(frozen=True)
class Report:
    """A page about the runs of a folder, written there or to ``out``."""

    folder: Path
    out: Path | None = None
    figures: bool = False


@dataclass(frozen=True)
class Theory:
    """The checks of the theory, written to a folder."""

    out: Path


@dataclass(frozen=True)
class Runs:
    """A list of the runs in a folder."""

    folder: Path


@dataclass(frozen=True)
class DataList:
    """A list of all data sets. ``data`` is their folder; None is the user's."""

    data: Path | None = None


@dataclass(frozen=True)
class DataFiles:
    """Data sets with files, and the folder of these."""

    names: tuple[str, ...]
    data: Path | None = None
