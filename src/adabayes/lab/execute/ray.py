"""Runs on a Ray cluster. Each is a task, which resumes on another worker or node when its own dies.

All nodes must see the folder of results under the same path, as on a cluster with a shared file system, because a run
resumes from the checkpoints and logs there.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adabayes._util.missing_extra import missing_extra
from adabayes.lab.data import Data, DataError
from adabayes.lab.display import Display
from adabayes.lab.execute import sweep
from adabayes.lab.execute.sweep import Options, Outcome, Stop
from adabayes.lab.protocol import Spec
from adabayes.lab.run.folder import folder_of
from adabayes.lab.run.training import Interrupted, Progress, Watch

try:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.exceptions import RayError, TaskCancelledError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise missing_extra("--executor ray needs Ray", "ray") from error

__all__ = ["run"]

_PATIENCE = 180.0  # seconds for which a dying process, or a dead node, may still hold a run
_RETRIES = 20  # of a run whose worker or node dies


def run(
    specs: Sequence[Spec],
    out: Path,
    display: Display,
    stop: Stop,
    options: Options,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> list[Outcome]:
    """Do the runs that are not done yet on the cluster at ``address``, or on one started on this machine.

    As :func:`adabayes.lab.execute.local.run` does.
    """
    _check_address(address)
    local: dict[str, Any] = {"include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(f"there is no Ray cluster at {address}: {str(error).splitlines()[0]}") from error
    with stop.on_signals():  # ray.init has replaced the handlers
        try:
            if options.data_folder:
                options = replace(options, data_folder=options.data_folder.resolve())
            return _Cluster(specs, out.resolve(), display, stop).run(options, cpus, gpus)
        finally:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise if nothing answers at HOST:PORT. Ray itself would wait for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise ConnectionError(f"there is no Ray cluster at {address}: {error}") from error


class _Cluster:
    def __init__(self, specs: Sequence[Spec], out: Path, display: Display, stop: Stop) -> None:
        self.specs, self.out, self.display, self.stop = specs, out, display, stop
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        lasting = {"max_restarts": -1, "max_task_retries": -1}
        self.board: Any = ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here, **lasting).remote()
        self.started: set[str] = set()
        self.told_to_stop = False
        self.by_folder = {spec.folder: spec for spec in specs}

    def run(self, options: Options, cpus: float, gpus: float) -> list[Outcome]:
        sweep.prepare(self.specs, self.out, options.tensorboard)
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        offers = [node["Resources"] for node in nodes if node["Alive"]]
        if not any(offer.get("CPU", 0) >= cpus and offer.get("GPU", 0) >= gpus for offer in offers):
            most = max(offer.get("CPU", 0) for offer in offers), max(offer.get("GPU", 0) for offer in offers)
            self.display.warned(
                f"no node has {cpus:g} CPUs and {gpus:g} GPUs for a run, but at most {most[0]:g} and {most[1]:g}: runs "
                "wait for a node that has. Or stop, and change --cpus-per-run and --gpus-per-run"
            )
        outcomes: dict[str, Outcome] = {}
        tasks: dict[Any, Spec] = {}
        for spec in self.specs:
            if result := folder_of(spec, self.out).read("result.json"):
                outcomes[spec.folder] = self._ended(Outcome(spec, result["status"], is_new=False))
                continue
            work = ray.remote(_work).options(num_cpus=cpus, num_gpus=gpus, max_retries=_RETRIES, name=str(spec))
            tasks[work.remote(spec, self.out, self.board, options, max(1, int(cpus)))] = spec
        while tasks:
            done, _ = ray.wait(list(tasks), timeout=0.2)
            self._show()
            for task in done:
                spec = tasks.pop(task)
                outcome = self._outcome(task, spec)
                if outcome.status == "interrupted" and not self.stop.requested:
                    outcome = Outcome(spec, "failed", "Ray has cancelled it; run the command again")
                if outcome.status != "interrupted":
                    outcomes[spec.folder] = self._ended(outcome)
            if self.stop.requested and not self.told_to_stop:
                self._stop(tasks)
        if self.stop.requested:
            raise Interrupted("stopped")
        return [outcomes[spec.folder] for spec in self.specs]

    def _stop(self, tasks: dict[Any, Spec]) -> None:
        """Let runs that have started write a checkpoint, and do not start the others."""
        self.told_to_stop = True
        ray.get(self.board.stop.remote())
        for task, spec in tasks.items():
            if spec.folder not in self.started:
                ray.cancel(task)

    def _outcome(self, task: Any, spec: Spec) -> Outcome:
        try:
            status, error = ray.get(task)
            return Outcome(spec, status, error)
        except TaskCancelledError:
            return Outcome(spec, "interrupted")
        except RayError as error:  # the worker cannot start, as on a node without this package
            why = str(error).strip().splitlines()[-1]
            folder_of(spec, self.out).fail(why, str(error))
            return Outcome(spec, "failed", why)

    def _ended(self, outcome: Outcome) -> Outcome:
        self.display.ended(outcome.spec, outcome)
        return outcome

    def _show(self) -> None:
        for folder, told in ray.get(self.board.take.remote()):
            spec = self.by_folder[folder]
            if isinstance(told, Progress):
                self.display.progressed(spec, told)
            elif isinstance(told, str):
                self.display.warned(f"{spec}: {told}")
            elif folder in self.started:
                self.display.warned(f"{spec}: its worker or node died; it resumes from its last checkpoint")
            else:
                self.started.add(folder)
                self.display.started(spec)


class _Board:
    """An actor beside the driver, to which workers report, and which tells them when to stop."""

    def __init__(self) -> None:
        self._told: list[tuple[str, Any]] = []
        self._stopping = False

    def tell(self, folder: str, what: Any) -> bool:
        self._told.append((folder, what))
        return self._stopping

    def take(self) -> list[tuple[str, Any]]:
        told, self._told = self._told, []
        return told

    def stop(self) -> None:
        self._stopping = True


def _work(spec: Spec, out: Path, board: Any, options: Options, threads: int) -> tuple[str, str | None]:
    """Do one run on this node, and return its status and, if it failed, the reason."""
    folder = folder_of(spec, out)
    stop = Stop()

    def tell(what: Any) -> None:
        try:
            stop.requested = ray.get(board.tell.remote(spec.folder, what)) or stop.requested
        except RayError:  # the driver is gone
            stop.requested = True

    def load() -> Data:
        if not (out / "sweep.json").exists():
            raise DataError(f"{out} does not exist on {platform.node()}: --out must be a folder that all nodes share")
        return options.load(spec)

    tell(None)
    torch.set_num_threads(threads)
    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_: tell(str(message))
    began = time.monotonic()
    while True:
        try:
            outcome = sweep.attempt(spec, folder, load, Watch(tell, stop), options)
        except Interrupted:
            return "interrupted", None
        if outcome.status != "running" or time.monotonic() - began > _PATIENCE:
            return outcome.status, outcome.error
        time.sleep(0.5)
