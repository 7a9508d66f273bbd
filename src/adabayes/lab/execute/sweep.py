"""What all executors share: attempting a run, the list of runs, stopping, and an estimate of the time."""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from adabayes._util.signals import Stopped, handled
from adabayes.lab import data, schema
from adabayes.lab.data import Data
from adabayes.lab.execute import threads
from adabayes.lab.protocol import Spec
from adabayes.lab.run import files, training
from adabayes.lab.run.distributed import Ranks
from adabayes.lab.run.folder import Busy, RunFolder, exclusive, folder_of, read_json, spec_from, write_atomically
from adabayes.lab.run.training import Interrupted, Watch

__all__ = ["Loader", "Options", "Outcome", "Stop", "attempt", "estimate", "noted", "prepare", "remove_leftovers"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, diverged or failed (with the reason), or that it is running in another process."""

    spec: Spec
    status: str
    error: str | None = None
    is_new: bool = True  # False if it was done already


class Stop:
    """A request to stop at the next step, made by the first Ctrl-C or SIGTERM. The second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._number: int = signal.SIGINT

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle signals as requests, and raise :class:`~adabayes._util.signals.Stopped` once one was followed."""
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
    """Options of execution, which do not change results."""

    data_folder: Path | None = None
    checkpoint_seconds: float = training.CHECKPOINT_SECONDS
    tensorboard: bool = False
    threads: int | None = None  # of each run; None: as :func:`adabayes.lab.execute.threads.choose` says

    def load(self, spec: Spec) -> Data:
        return data.load(spec.dataset, self.data_folder, spec.data_options)


class Loader:
    """Loads the data of runs, and keeps those of the last run. Data sets are large, so it keeps only one."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._name: str | None = None
        self._data: Data | None = None

    def __call__(self, spec: Spec) -> Data:
        name = f"{spec.dataset} {spec.data_options}"
        if self._data is None or name != self._name:
            self._data = None  # frees it before the next is loaded
            self._name, self._data = name, self.options.load(spec)
        return self._data


def prepare(specs: Sequence[Spec], out: Path, tensorboard: bool) -> None:
    """Add runs to ``sweep.json``, which lists all that were ever requested here, so that missing ones are known."""
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
    """Remove temporary files of a comparison that kills have left. The user's own files may be beside them."""
    for name in ("sweep.json", "results.csv", "results.json", "index.html", "tune.png", "tuned.toml", "tune.journal"):
        files.remove_leftovers(out, name)
    files.remove_leftovers(out / "figures")


def noted(out: Path) -> list[Spec]:
    """Return the runs that were requested in a folder, and those that were copied into it."""
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
    """Do one run. An error is noted in its folder and does not stop other runs."""
    try:
        if result := ranks.agreed(lambda: folder.read("result.json")):
            if ranks.is_first:
                folder.tidy()
            return Outcome(spec, result["status"], is_new=False)
        data = load()
        # The threads of distributed processes are set by their launcher.
        count = torch.get_num_threads() if ranks.world > 1 else threads.choose(spec, folder, data, options.threads)
        with threads.using(count):
            status = training.train(
                spec,
                folder,
                data,
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
    except Exception as error:  # an optimizer, a model or a disk may raise anything
        message = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        if ranks.is_first:  # the others may only report that the first is gone
            folder.fail(message, traceback.format_exc())
        return Outcome(spec, "failed", message)


def estimate(specs: Sequence[Spec], out: Path, options: Options) -> float:
    """Estimate the seconds that runs will take on this machine, one after the other, from a few steps of each."""
    seconds: dict[tuple[str, str], float] = {}
    total = 0.0
    for spec in specs:
        key = spec.dataset, spec.model
        if key not in seconds:
            data = options.load(spec)
            with threads.using(threads.choose(spec, folder_of(spec, out), data, options.threads)):
                seconds[key] = training.epoch_seconds(spec, data)
        total += seconds[key] * max(0.0, spec.epochs * spec.length - len(folder_of(spec, out).metrics()))
    return total
