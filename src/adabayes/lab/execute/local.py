"""Runs on this machine: one after the other in this process, or several at a time in others."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from adabayes.lab.display import Display
from adabayes.lab.execute.sweep import Loader, Options, Outcome, Stop, attempt, prepare
from adabayes.lab.execute.workers import Workers
from adabayes.lab.protocol import Spec
from adabayes.lab.run.distributed import Ranks
from adabayes.lab.run.folder import RunFolder, folder_of
from adabayes.lab.run.training import Interrupted, Progress, Watch

__all__ = ["run"]


def run(
    specs: Sequence[Spec],
    out: Path,
    display: Display,
    stop: Stop,
    options: Options = Options(),  # noqa: B008  (frozen)
    jobs: int = 1,
    ranks: Ranks = Ranks(),  # noqa: B008  (has no state)
    workers: Workers | None = None,
) -> list[Outcome]:
    """Do the runs that are not done yet, and raise :class:`Interrupted` when asked to stop.

    With ``jobs``, so many at a time, in ``workers`` that a caller keeps for more runs, or in new ones. With ``ranks``,
    each run in several processes.
    """
    prepare(specs, out, options.tensorboard)
    if jobs > 1:
        with workers or Workers() as pool:
            return _Parallel(out, display, stop, options, jobs, pool).run(specs)
    load = Loader(options)

    def one(spec: Spec) -> Outcome:
        display.started(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = display.warned  # type: ignore[assignment]
            outcome = attempt(
                spec,
                folder_of(spec, out),
                lambda: load(spec),
                Watch(lambda progress: display.progressed(spec, progress), stop),
                options,
                ranks,
            )
        display.ended(spec, outcome)
        return outcome

    return [one(spec) for spec in specs]


class _Parallel:
    """Several runs at a time, each in a process of ``workers``, with the cores shared out among them."""

    def __init__(self, out: Path, display: Display, stop: Stop, options: Options, jobs: int, workers: Workers) -> None:
        self.out, self.display, self.stop, self.options, self.workers = out, display, stop, options, workers
        self.jobs = jobs
        self.share = max(1, torch.get_num_threads() // jobs)  # threads of a run
        self.lock = threading.Lock()  # of the display

    def run(self, specs: Sequence[Spec]) -> list[Outcome]:
        asked = False
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(self._one, spec) for spec in specs]
            try:
                while not all(future.done() for future in futures):
                    time.sleep(0.05)
                    if self.stop.requested and not asked:
                        asked = True
                        self.workers.terminate()
            except KeyboardInterrupt:  # the second Ctrl-C
                self.workers.kill()
                raise
        if self.stop.requested:
            raise Interrupted("stopped")
        return [outcome for future in futures if (outcome := future.result()) is not None]

    def _one(self, spec: Spec) -> Outcome | None:
        folder = folder_of(spec, self.out)
        if self.stop.requested:
            return None
        if result := folder.read("result.json"):
            folder.tidy()
            outcome = Outcome(spec, result["status"], is_new=False)
        else:
            try:
                outcome = self._in_process(spec, folder)
            except Exception as error:  # as in attempt
                outcome = Outcome(spec, "failed", f"{type(error).__name__}: {error}")
        if outcome.status != "interrupted":
            with self.lock:
                self.display.ended(spec, outcome)
        return outcome

    def _in_process(self, spec: Spec, folder: RunFolder) -> Outcome:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write("spec.json", asdict(spec))
        except OSError as error:
            return Outcome(spec, "failed", str(error))
        with self.lock:
            self.display.started(spec)
        with self.workers.one() as worker:
            if self.stop.requested:
                worker.process.terminate()
            for told in worker.ask(folder.path, self.options, self.share):
                if "status" in told:
                    return Outcome(spec, told["status"], told["error"])
                with self.lock:
                    if "warning" in told:
                        self.display.warned(f"{spec}: {told['warning']}")
                    else:
                        self.display.progressed(spec, Progress(**told))
            why, errors = worker.death()
        if self.stop.requested:
            return Outcome(spec, "interrupted")
        folder.fail(why, errors)
        return Outcome(spec, "failed", why)
