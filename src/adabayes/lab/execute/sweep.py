"""All runs of a protocol: one after the other or several at a time, whatever becomes of each."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from adabayes._signals import Stopped, handled
from adabayes.lab import data, schema
from adabayes.lab.data import Data
from adabayes.lab.protocol import Spec
from adabayes.lab.run import files, training
from adabayes.lab.run.distributed import Ranks
from adabayes.lab.run.folder import Busy, RunFolder, exclusive, folder_of, read_json, spec_from, write_atomically
from adabayes.lab.run.training import Interrupted, Watch

__all__ = ["Options", "Outcome", "Stop", "attempt", "estimate", "noted", "prepare", "remove_leftovers"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, diverged, failed (and why), or running, in another process."""

    spec: Spec
    status: str
    error: str | None = None
    is_new: bool = True  # and was not there already


class Stop:
    """Whether to stop at the next step. The first Ctrl-C or SIGTERM asks for that, the second stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._number: int = signal.SIGINT

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take signals for requests. What is interrupted for one ends as :class:`~adabayes._signals.Stopped`."""
        with handled(self._handle):
            try:
                yield
            except Interrupted as interrupted:
                raise Stopped(self._number) from interrupted

    def _handle(self, number: int) -> None:
        if self.requested:
            raise Stopped(number)
        self.requested, self._number = True, number

    def __call__(self) -> bool:
        return self.requested


@dataclass(frozen=True)
class Options:
    """How to run, wherever it is; none of it changes what comes out."""

    data_folder: Path | None = None
    checkpoint_seconds: float = training.CHECKPOINT_SECONDS
    tensorboard: bool = False
    threads: int | None = None  # of each run; None: this process's, shared out

    def load(self, spec: Spec) -> Data:
        return data.load(spec.dataset, self.data_folder, spec.data_options)


def prepare(specs: Sequence[Spec], out: Path, tensorboard: bool) -> None:
    """Add to ``sweep.json``, the list of all runs that were ever asked for here, so that missing ones are known."""
    if tensorboard:
        from adabayes.lab.run import events

        for folder in (folder_of(spec, out) for spec in specs):
            if folder.read("result.json"):
                events.catch_up(folder)
    with exclusive(out / ".lock", f"another process is writing to {out / 'sweep.json'}; try again", timeout=30):
        remove_leftovers(out)
        known = {spec.folder: spec for spec in [*noted(out), *specs]}
        write_atomically(out / "sweep.json", json.dumps([asdict(spec) for spec in known.values()], indent=1).encode())


def remove_leftovers(out: Path) -> None:
    """Remove what kills have left of the files of a whole comparison; they may lie among files of the user's."""
    for name in ("sweep.json", "results.csv", "results.json", "index.html", "tune.png", "tuned.toml", "tune.journal"):
        files.remove_leftovers(out, name)
    files.remove_leftovers(out / "figures")


def noted(out: Path) -> list[Spec]:
    """The runs that were asked for in a folder, and those that were copied into it."""
    path = out / "sweep.json"
    listed = [spec_from(entry, path) for entry in read_json(path, schema.listed(schema.ANYTHING)) or ()]
    found = [RunFolder(path.parent).spec() for path in sorted((out / "runs").glob("*/spec.json"))]
    return list({spec.folder: spec for spec in [*listed, *found] if spec is not None}.values())


def attempt(
    spec: Spec,
    folder: RunFolder,
    load: Callable[[], Data],
    watch: Watch,
    options: Options,
    ranks: Ranks = Ranks(),  # noqa: B008  (has no state)
) -> Outcome:
    """Do one run. What goes wrong is noted in its folder, and is no reason to stop others."""
    try:
        if result := ranks.agreed(lambda: folder.read("result.json")):
            if ranks.is_first:
                folder.tidy()
            return Outcome(spec, result["status"], is_new=False)
        status = training.train(
            spec,
            folder,
            load(),
            ranks,
            watch,
            checkpoint_seconds=options.checkpoint_seconds,
            tensorboard=options.tensorboard,
        )
        return Outcome(spec, status)
    except Interrupted:
        raise
    except Busy as error:
        return Outcome(spec, "running", str(error))
    except Exception as error:  # anything at all that an optimizer, a model or a disk comes up with
        message = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        if ranks.is_first:  # what others have to say may be only that the first is gone
            folder.fail(message, traceback.format_exc())
        return Outcome(spec, "failed", message)


def estimate(specs: Sequence[Spec], out: Path, data_folder: Path | None = None) -> float:
    """Seconds that runs will take on this machine, one after the other: from a few steps of each network."""
    seconds: dict[tuple[str, str], float] = {}
    total = 0.0
    for spec in specs:
        key = spec.dataset, spec.model
        if key not in seconds:
            seconds[key] = training.epoch_seconds(spec, data.load(spec.dataset, data_folder, spec.data_options))
        total += seconds[key] * (spec.epochs - len(folder_of(spec, out).metrics()))
    return total
