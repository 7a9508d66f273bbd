"""All runs of a protocol: one after the other or several at a time, whatever becomes of each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from adabayes.lab import data, training
from adabayes.lab.data import Data
from adabayes.lab.display import Display
from adabayes.lab.protocol import Spec
from adabayes.lab.ranks import Ranks
from adabayes.lab.store import Busy, RunFolder, exclusive, folder_of, read_json, spec_from, write_atomically
from adabayes.lab.training import Interrupted, Progress

__all__ = ["Options", "Outcome", "Stop", "attempt", "estimate", "noted", "prepare", "run"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, diverged, failed (and why), or running, in another process."""

    spec: Spec
    status: str
    error: str | None = None
    is_new: bool = True  # and was not there already


class Stop:
    """Whether to stop at the next step. The first Ctrl-C asks for that, the second stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def on_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __call__(self) -> bool:
        return self.requested


@dataclass(frozen=True)
class Options:
    """How to run, wherever it is; none of it changes what comes out."""

    data_folder: Path | None = None
    checkpoint_seconds: float = training.CHECKPOINT_SECONDS
    tensorboard: bool = False

    def load(self, dataset: str) -> Data:
        return data.load(dataset, self.data_folder)

    @property
    def of_training(self) -> dict[str, Any]:
        """Those that :func:`attempt` hands on."""
        return {"checkpoint_seconds": self.checkpoint_seconds, "tensorboard": self.tensorboard}


def run(
    specs: Sequence[Spec],
    out: Path,
    display: Display,
    stop: Stop,
    options: Options = Options(),  # noqa: B008  (frozen)
    jobs: int = 1,
    ranks: Ranks | None = None,
) -> list[Outcome]:
    """Do what is not done yet; with ``ranks``, each in several processes. Raises :class:`Interrupted` when stopped."""
    prepare(specs, out, options.tensorboard)
    if jobs > 1:
        return _run_in_processes(specs, out, display, stop, options, jobs)
    loaded: dict[str, Data] = {}

    def load(name: str) -> Data:
        if name not in loaded:
            loaded.clear()  # one at a time: they are large
            loaded[name] = options.load(name)
        return loaded[name]

    def one(spec: Spec) -> Outcome:
        display.started(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = display.warned  # type: ignore[assignment]
            outcome = attempt(
                spec,
                folder_of(spec, out),
                lambda: load(spec.dataset),
                stop,
                ranks,
                report=lambda progress: display.progressed(spec, progress),
                **options.of_training,
            )
        display.ended(spec, outcome)
        return outcome

    return [one(spec) for spec in specs]


def prepare(specs: Sequence[Spec], out: Path, tensorboard: bool) -> None:
    """Add to ``sweep.json``, the list of all runs that were ever asked for here, so that missing ones are known."""
    if tensorboard:
        from adabayes.lab import events

        for folder in (folder_of(spec, out) for spec in specs):
            if folder.read("result.json"):
                events.catch_up(folder)
    with exclusive(out / ".lock", f"another process is writing to {out / 'sweep.json'}; try again", timeout=30):
        known = {spec.folder: spec for spec in [*noted(out), *specs]}
        write_atomically(out / "sweep.json", json.dumps([asdict(spec) for spec in known.values()], indent=1).encode())


def noted(out: Path) -> list[Spec]:
    """The runs that were asked for in a folder, and those that were copied into it."""
    path = out / "sweep.json"
    listed = [spec_from(entry, path) for entry in read_json(path) or ()]
    found = [RunFolder(path.parent).spec() for path in sorted((out / "runs").glob("*/spec.json"))]
    return list({spec.folder: spec for spec in [*listed, *found] if spec is not None}.values())


def attempt(
    spec: Spec,
    folder: RunFolder,
    load: Callable[[], Data],
    stop: Stop,
    ranks: Ranks | None = None,
    **options: Any,
) -> Outcome:
    """One run, with the options of ``train``; what goes wrong is noted in its folder, and no reason to stop others."""
    try:
        if result := folder.read("result.json"):
            return Outcome(spec, result["status"], is_new=False)
        return Outcome(spec, training.train(spec, folder, load(), ranks, should_stop=stop, **options))
    except Interrupted:
        raise
    except Busy as error:
        return Outcome(spec, "running", str(error))
    except Exception as error:  # anything at all that an optimizer, a model or a disk comes up with
        message = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        if ranks is None or ranks.is_first:  # what others have to say may be only that the first is gone
            folder.fail(message, traceback.format_exc())
        return Outcome(spec, "failed", message)


def _run_in_processes(
    specs: Sequence[Spec],
    out: Path,
    display: Display,
    stop: Stop,
    options: Options,
    jobs: int,
) -> list[Outcome]:
    """A process for each run, ``jobs`` at a time, the cores shared out among them."""
    threads = max(1, torch.get_num_threads() // jobs)
    lock = threading.Lock()  # of the display
    children: set[subprocess.Popen[str]] = set()

    def one(spec: Spec) -> Outcome | None:
        folder = folder_of(spec, out)
        if stop.requested:
            return None
        if result := folder.read("result.json"):
            outcome = Outcome(spec, result["status"], is_new=False)
        else:
            try:
                outcome = _in_process(spec, folder)
            except Exception as error:  # as in attempt
                outcome = Outcome(spec, "failed", f"{type(error).__name__}: {error}")
        if outcome.status != "interrupted":
            with lock:
                display.ended(spec, outcome)
        return outcome

    def _in_process(spec: Spec, folder: RunFolder) -> Outcome:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write("spec.json", asdict(spec))
        except OSError as error:
            return Outcome(spec, "failed", str(error))
        command = [sys.executable, "-m", "adabayes.lab.worker", str(folder.path), "--threads", str(threads)]
        command += ["--checkpoint-every", str(options.checkpoint_seconds)]
        command += ["--data", str(options.data_folder)] if options.data_folder else []
        command += ["--tensorboard"] if options.tensorboard else []
        with lock:
            display.started(spec)
        outcome = None
        # In a session of its own, so that Ctrl-C reaches it once, through us.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as child:
            children.add(child)
            if stop.requested:
                child.terminate()
            assert child.stdout is not None
            assert child.stderr is not None
            errors: list[str] = []
            reader = threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True)
            reader.start()
            for line in child.stdout:
                told = json.loads(line)
                if "status" in told:
                    outcome = Outcome(spec, told["status"], told["error"])
                    continue
                with lock:
                    if "warning" in told:
                        display.warned(f"{spec}: {told['warning']}")
                    else:
                        display.progressed(spec, Progress(**told))
            code = child.wait()
            reader.join()
            children.discard(child)
        if outcome:
            return outcome
        if stop.requested:
            return Outcome(spec, "interrupted")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        said = f": {errors[-1].strip()}" if errors else ""
        why = f"its process {how}{said}"
        folder.fail(why, "".join(errors))
        return Outcome(spec, "failed", why)

    asked = False
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, spec) for spec in specs]
        while not all(future.done() for future in futures):
            time.sleep(0.05)
            if stop.requested and not asked:
                asked = True
                for child in list(children):
                    child.terminate()
    if stop.requested:
        raise Interrupted("stopped")
    return [outcome for future in futures if (outcome := future.result()) is not None]


# What it will cost


def estimate(specs: Sequence[Spec], out: Path, data_folder: Path | None = None) -> float:
    """Seconds that runs will take on this machine, one after the other: from a few steps of each network."""
    seconds: dict[tuple[str, str], float] = {}
    total = 0.0
    for spec in specs:
        key = spec.dataset, spec.model
        if key not in seconds:
            seconds[key] = training.epoch_seconds(spec, data.load(spec.dataset, data_folder))
        total += seconds[key] * (spec.epochs - len(folder_of(spec, out).metrics()))
    return total
