"""All runs of a protocol on this machine: one after the other or several at a time, whatever becomes of each."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from adabayes.lab.data import Data
from adabayes.lab.display import Display
from adabayes.lab.execute.sweep import Options, Outcome, Stop, attempt, prepare
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
) -> list[Outcome]:
    """Do what is not done yet; with ``ranks``, each in several processes. Raises :class:`Interrupted` when stopped."""
    prepare(specs, out, options.tensorboard)
    if jobs > 1:
        return _run_in_processes(specs, out, display, stop, options, jobs)
    loaded: dict[str, Data] = {}

    def load(spec: Spec) -> Data:
        name = f"{spec.dataset} {spec.data_options}"
        if name not in loaded:
            loaded.clear()  # one at a time: they are large
            loaded[name] = options.load(spec)
        return loaded[name]

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

    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        return [one(spec) for spec in specs]
    finally:
        torch.set_num_threads(before)


def _run_in_processes(
    specs: Sequence[Spec],
    out: Path,
    display: Display,
    stop: Stop,
    options: Options,
    jobs: int,
) -> list[Outcome]:
    """A process for each run, ``jobs`` at a time, the cores shared out among them."""
    threads = options.threads or max(1, torch.get_num_threads() // jobs)
    lock = threading.Lock()  # of the display
    children: set[subprocess.Popen[str]] = set()

    def one(spec: Spec) -> Outcome | None:
        folder = folder_of(spec, out)
        if stop.requested:
            return None
        if result := folder.read("result.json"):
            folder.tidy()
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
        command = [sys.executable, "-m", "adabayes.lab.execute.worker", str(folder.path), "--threads", str(threads)]
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
        try:
            while not all(future.done() for future in futures):
                time.sleep(0.05)
                if stop.requested and not asked:
                    asked = True
                    for child in list(children):
                        child.terminate()
        except KeyboardInterrupt:  # the second Ctrl-C
            for child in list(children):
                child.kill()
            raise
    if stop.requested:
        raise Interrupted("stopped")
    return [outcome for future in futures if (outcome := future.result()) is not None]
