"""Trains one run: deterministic from its seed, logged epoch by epoch, resumed after any interruption."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adabayes import __version__, diagnostics
from adabayes._util.machine import processor
from adabayes.bench.torch_steps import state_bytes
from adabayes.lab import compatibility, models, optimizers
from adabayes.lab.data import Data, DataError
from adabayes.lab.protocol import ProtocolError, Spec, lr_factor
from adabayes.lab.run.distributed import Ranks
from adabayes.lab.run.folder import RunFolder
from adabayes.optim.extend import TwoRateOptimizer

if TYPE_CHECKING:
    from adabayes.lab.run.events import Events

__all__ = ["Interrupted", "Progress", "Watch", "epoch_seconds", "step_seconds", "train"]

CHECKPOINT_SECONDS = 60.0  # between two within an epoch; there is one at each epoch's end
_SAMPLED = 10  # weights of each tensor in the learning-rate figure
_AGREE = 10  # steps after which several processes agree whether to report, save or stop
_RECALIBRATION = 50  # batches for new statistics of BatchNorm


class Interrupted(Exception):
    """Raised when a run was asked to stop; it has written a checkpoint."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run, reported a few times a second."""

    step: int
    steps: int
    epoch: int
    loss: float  # of the epoch so far, in training
    error: float
    test_error: float | None  # of the last epoch that is complete


@dataclass(frozen=True)
class Watch:
    """Callbacks of a run; by default, none does anything.

    Attributes:
        report: called with the progress.
        should_stop: called after each step.
        is_hopeless: called with the row of metrics of each epoch, in order, including epochs of an earlier start.
    """

    report: Callable[[Progress], None] = lambda _: None
    should_stop: Callable[[], bool] = lambda: False
    is_hopeless: Callable[[dict[str, Any]], bool] = lambda _: False


def train(
    spec: Spec,
    folder: RunFolder,
    data: Data,
    ranks: Ranks = Ranks(),  # noqa: B008  (has no state)
    watch: Watch = Watch(),  # noqa: B008  (frozen)
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    tensorboard: bool = False,
) -> str:
    """Train, or go on training, and return how it ended: "done", "diverged" or "pruned".

    With ``ranks``, this is one of several processes, of which the first writes. A run is pruned after a hopeless epoch.
    Raises :class:`~adabayes.lab.run.folder.Busy` if another process has the run, and :class:`Interrupted` when it was
    asked to stop.
    """
    with folder.lock() if ranks.is_first else nullcontext():
        if result := ranks.agreed(lambda: folder.read("result.json")):
            return str(result["status"])
        if ranks.is_first:
            folder.remove("failed.json")
            folder.write("spec.json", asdict(spec))
            _note_environment(folder, data, ranks)
        ranks.wait()
        with torch.random.fork_rng(devices=[]):
            return _Run(spec, folder, data, ranks, watch, checkpoint_seconds, tensorboard).run()


def epoch_seconds(spec: Spec, data: Data) -> float:
    """Estimate the seconds that an epoch of a run takes on this machine."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        return _Run(spec, RunFolder(Path(folder)), data, Ranks(), Watch(), CHECKPOINT_SECONDS, False).measure()


def step_seconds(specs: Sequence[Spec], data: Data) -> dict[str, float]:
    """Measure the seconds of a training step with each optimizer, on one thread.

    All take turns, several times, and the best counts; ten steps at a time, to include what is done once in so many.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
            place = RunFolder(Path(folder))
            runs = {s.optimizer: _Run(s, place, data, Ranks(), Watch(), CHECKPOINT_SECONDS, False) for s in specs}
            for run in runs.values():
                run.take_steps(3)  # the first ones make state
            rounds = [[run.take_steps(10) for run in runs.values()] for _ in range(5)]
            return {name: min(taken) / 10 for name, taken in zip(runs, zip(*rounds))}
    finally:
        torch.set_num_threads(before)


@dataclass
class _Position:
    """The position of a run, and the sums of its current epoch."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    errors: list[float] = field(default_factory=list)  # the task's sums
    seen: int = 0
    seconds: float = 0.0
    earlier: float = 0.0  # seconds of the epochs before


class _Run:
    def __init__(
        self,
        spec: Spec,
        folder: RunFolder,
        data: Data,
        ranks: Ranks,
        watch: Watch,
        checkpoint_seconds: float,
        tensorboard: bool,
    ) -> None:
        self.spec, self.folder, self.ranks, self.watch = spec, folder, ranks, watch
        self.checkpoint_seconds = checkpoint_seconds
        self.device = torch.device(spec.device)
        self.whole = data
        self.task = data.task
        self.data = (data.hold_out(spec.validation) if spec.validation else data).to(self.device)
        for split in ("train", "test"):
            if self.data.count(split) < 1:
                raise ProtocolError(
                    f"validation {spec.validation} leaves no example to {split} on; choose another share"
                )
        self.model, self.optimizer = make(spec, self.data, ranks)
        self.call = ranks.wrap(self.model)
        if spec.compile:
            self._compile()
        self.trainer = optimizers.Trainer(self.optimizer)
        self.base_lrs = [group.get("lr") for group in self.optimizer.param_groups]
        self.steps = math.ceil(self.data.count("train") / spec.batch_size)
        self.total = max(1, round(spec.length * spec.epochs * self.steps))  # of all epochs
        self.tests = {round(i * self.steps / spec.tests_per_epoch) for i in range(1, spec.tests_per_epoch)}
        # For the paper's learning-rate figure.
        self.observer: diagnostics.Observer | None = None
        if (
            isinstance(self.optimizer, TwoRateOptimizer) and ranks.kind != "fsdp2"
        ):  # where each process sees only a shard
            self.observer = diagnostics.Observer(self.optimizer, per_tensor=_SAMPLED, model=self.model)
        self.at = _Position()
        self.test_error: float | None = None
        self._saved = self._reported = time.monotonic()
        if (saved := ranks.restore(folder, self.model, self.optimizer)) is not None:
            ranks.load(self.model, saved["model"])
            of = saved["optimizer"]
            self.trainer.load({**of, "state_dict": ranks.scattered(of["state_dict"], self.optimizer)})
            if self.observer and saved["observer"]:
                self.observer.load_state_dict(saved["observer"])
            self.at = _Position(**compatibility.complete_position(saved["position"]))
        self.events: Events | None = None
        if tensorboard and ranks.is_first:
            from adabayes.lab.run.events import Events

            self.events = Events(folder, self.at.epoch)

    def run(self) -> str:
        try:
            status = self._run()
        finally:
            if self.events:
                self.events.close()
        result: dict[str, Any] = {"status": status, "epoch": min(self.at.epoch, math.ceil(self.total / self.steps) - 1)}
        if self.spec.test_at_end and status == "done":
            result["test_loss"], result["test_error"] = self._test(self.whole.to(self.device))
        weights = self.ranks.whole_weights(self.model)
        if self.ranks.is_first:
            self.folder.finish(weights, result)
        self.ranks.wait()
        return status

    def _run(self) -> str:
        for row in self.ranks.agreed(lambda: self.folder.metrics()[: self.at.epoch]):
            self.test_error = row["test_error"]
            if self.watch.is_hopeless(row):
                return "pruned"
        while self.at.epoch * self.steps < self.total:
            if not self._train_epoch():
                return "diverged"
            row = self._row()
            if self.ranks.is_first:
                self._log(row)
            if not math.isfinite(row["test_loss"]):
                return "diverged"
            self.test_error = row["test_error"]
            self.at = _Position(epoch=self.at.epoch + 1, earlier=self.at.earlier + self.at.seconds)
            self._save()
            if self.watch.is_hopeless(row):
                return "pruned"
        return "done"

    def _log(self, row: dict[str, Any]) -> None:
        self.folder.log(row)
        rates = self._rates() if self.observer else None
        if rates:
            self.folder.log(rates, "rates.jsonl")
        if self.events:
            self.events.write(row, rates)

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch; return whether the loss has stayed finite."""
        spec, at = self.spec, self.at
        order = torch.randperm(self.data.count("train"), generator=_generator(spec.seed, "order", at.epoch))
        # The sums of this process; the first one also keeps those from the checkpoint.
        loss_sum = torch.tensor(at.loss * self.ranks.is_first, dtype=torch.float64, device=self.device)
        before = at.errors if self.ranks.is_first else [0.0] * len(at.errors)
        errors = torch.tensor(before, dtype=torch.float64, device=self.device)
        self.model.train()
        self.trainer.for_training()
        started = time.perf_counter()
        steps = self._steps_of_epoch()
        while at.step < steps:
            indices = order[at.step * spec.batch_size : (at.step + 1) * spec.batch_size]
            loss, count, missed, seen = self._step(indices)
            loss_sum += loss.double() * count
            errors = errors + missed if len(errors) else missed.double()
            at.seen += seen
            at.step += 1
            if at.step in self.tests and at.step < steps:
                at.seconds += time.perf_counter() - started
                self._test_within()
                started = time.perf_counter()

            now, last = time.monotonic(), at.step == steps
            if self.ranks.world > 1 and at.step % _AGREE and not last:
                continue
            due, stop, save = self.ranks.any(
                now - self._reported > 0.2 or last,
                self.watch.should_stop(),
                now - self._saved > self.checkpoint_seconds and not last,
            )
            if due or stop or save:
                at.loss, at.errors = self.ranks.total(loss_sum), [self.ranks.total(e) for e in errors]
            if due or stop:
                self._reported = now
                if not math.isfinite(at.loss):
                    return False
                self._report()
            if stop or save:
                at.seconds += time.perf_counter() - started
                self._save()
                started = time.perf_counter()
            if stop:
                raise Interrupted(f"{spec}: stopped in epoch {at.epoch}")
        at.seconds += time.perf_counter() - started
        return math.isfinite(at.loss)

    def _steps_of_epoch(self) -> int:
        """Return the number of steps of the current epoch; the last epoch may be shorter."""
        return min(self.steps, self.total - self.at.epoch * self.steps)

    def _step(self, indices: Tensor) -> tuple[Tensor, int, Tensor, int]:
        """Take a step on a batch.

        Return the mean loss, the count of targets and the sums of errors of this process's share, and the count of all.
        """
        spec, at = self.spec, self.at
        torch.manual_seed(_derived(spec.seed, "noise", at.epoch, at.step))
        self._set_lr((at.epoch * self.steps + at.step) / self.total)
        inputs, targets = self.data.train_batch(indices, _generator(spec.seed, "augment", at.epoch, at.step))
        seen = self.task.count(targets)
        mine = self.ranks.share(len(indices))
        inputs, targets = inputs[mine], targets[mine]
        with self.trainer.sampling():
            loss, output = self._loss(inputs, targets)
            self.optimizer.zero_grad()
            # Gradients are averaged over processes, whatever their shares.
            count = self.task.count(targets)
            (loss * (count * self.ranks.world / seen)).backward()
        self.optimizer.step()
        return loss.detach(), count, self.task.sums(output.detach(), targets), seen

    def take_steps(self, count: int) -> float:
        """Take some steps, all on the first batch, and return the seconds."""
        self.model.train()
        self.trainer.for_training()
        indices = torch.arange(min(self.spec.batch_size, self.data.count("train")))
        started = time.perf_counter()
        for _ in range(count):
            self._step(indices)
        return time.perf_counter() - started

    def measure(self) -> float:
        """Estimate the seconds of an epoch from a few steps."""
        size = min(self.spec.batch_size, self.data.count("train"))
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < 2 or (len(taken) < 4 and time.perf_counter() - began < 20):
            taken.append(self.take_steps(1))
        # Testing an example takes about a third of the time of training on it.
        return min(taken[1:]) / size * (self.data.count("train") + self.data.count("test") / 3)

    def _compile(self) -> None:
        """Compile the model, anew for each run and shape, so that nothing depends on earlier runs."""
        torch.compiler.reset()
        self.call = torch.compile(self.call, dynamic=False)
        # Compiling does not count as training time: so run once with each shape, then restore the start.
        start = {name: t.clone() for name, t in self.model.state_dict().items()}
        count = self.data.count("train")
        for size in {min(count, self.spec.batch_size), count % self.spec.batch_size} - {0}:
            batch = self.data.train_batch(torch.arange(size), torch.Generator())
            loss, _ = self._loss(*(part[self.ranks.share(size)] for part in batch))
            loss.backward()
        self.optimizer.zero_grad()
        self.model.load_state_dict(start)

    def _loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self.spec.channels_last:
            inputs = inputs.contiguous()
        with self._autocast():
            if not len(targets):  # a batch smaller than the number of processes
                output = self.call(inputs)
                return output.sum(), output
            return self.task.loss(self.call, inputs, targets)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.spec.autocast else nullcontext()

    def _set_lr(self, progress: float) -> None:
        factor = lr_factor(self.spec.schedule, progress)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs):
            if base is not None:
                group["lr"] = base * factor

    def _row(self) -> dict[str, Any]:
        """Return the metrics of the completed epoch."""
        at = self.at
        started = time.perf_counter()
        test_loss, test_error = self._test(self.data)
        row = {
            "epoch": at.epoch,
            "train_loss": at.loss / at.seen,
            "train_error": self.task.value(at.errors, at.seen),
            "test_loss": test_loss,
            "test_error": test_error,
            "lr": self.optimizer.param_groups[0].get("lr"),
            "steps": self._steps_of_epoch(),
            "state_bytes": state_bytes(self.optimizer) / sum(p.numel() for p in self.model.parameters()),
            "train_seconds": at.seconds,
            "test_seconds": time.perf_counter() - started,
        }
        if isinstance(self.optimizer, TwoRateOptimizer) and self.ranks.is_first:
            total = diagnostics.regimes(self.optimizer).total
            row |= {"sgd_like": total.sgd_like, "adam_like": total.adam_like}
            row |= {f"lr_{q:.0%}": rate for q, rate in zip(diagnostics.QUANTILES, total.lr_quantiles)}
        return row

    def _rates(self) -> dict[str, Any]:
        """Return the learning rates of a sample of weights of each layer, and those that Adam would give them."""
        assert self.observer is not None
        points = [p for p in self.observer.points() if p.lr > 0]
        return {
            "epoch": self.at.epoch,
            "lr": points[0].lr if points else 0.0,
            "lr_sgd": points[0].lr_sgd if points else 0.0,
            "layers": [p.name for p in points],
            "adam": [_rounded(p.adam_lr) for p in points],
            "gain": [_rounded(p.effective_lr) for p in points],
        }

    @torch.no_grad()
    def _test(self, data: Data) -> tuple[float, float]:
        """Return loss and error on a test split."""
        self.trainer.for_testing()
        if self.trainer.switches:
            self._recalibrate()
        self.model.eval()
        sums: Tensor | None = None  # of losses, of targets, of errors
        for indices in torch.split(torch.arange(data.count("test")), self.spec.test_batch_size):
            inputs, targets = data.test_batch(indices[self.ranks.share(len(indices))])
            mean, output = self._loss(inputs, targets)
            count = self.task.count(targets)
            more = [mean.item() * count, count, *self.task.sums(output, targets).tolist()]
            sums = torch.tensor(more, dtype=torch.float64) + (0 if sums is None else sums)
        assert sums is not None
        loss, seen, *errors = map(self.ranks.total, sums)
        return loss / seen, self.task.value(errors, int(seen))

    def _test_within(self) -> None:
        """Test within an epoch, without any effect on training."""
        at = self.at
        test_loss, test_error = self._test(self.data)
        if self.ranks.is_first:
            row = {"epoch": at.epoch + at.step / self.steps, "test_loss": test_loss, "test_error": test_error}
            step = at.epoch * self.steps + at.step
            self.folder.log({**row, "step": step, "seconds": at.earlier + at.seconds}, "curve.jsonl")
        self.model.train()
        self.trainer.for_training()

    def _recalibrate(self) -> None:
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over all batches
        self.model.train()
        batches = torch.split(torch.arange(self.data.count("train")), self.spec.batch_size)
        for i, indices in enumerate(batches[:_RECALIBRATION]):
            mine = self.ranks.share(len(indices))
            batch = self.data.train_batch(indices, _generator(self.spec.seed, "calibrate", self.at.epoch, i))
            self._loss(*(part[mine] for part in batch))
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum

    def _save(self) -> None:
        tree = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.trainer.state(),
            "position": asdict(self.at),
            "observer": self.observer.state_dict() if self.observer else None,
        }
        self.ranks.save(self.folder, self.at.epoch * self.steps + self.at.step, tree)
        self._saved = time.monotonic()

    def _report(self) -> None:
        at = self.at
        self.watch.report(
            Progress(
                at.epoch * self.steps + at.step,
                self.total,
                at.epoch,
                at.loss / at.seen,
                self.task.value(at.errors, at.seen),
                self.test_error,
            )
        )


def make(
    spec: Spec,
    data: Data,
    ranks: Ranks = Ranks(),  # noqa: B008  (has no state)
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make the network of a run, initialised from its seed, and the optimizer."""
    torch.manual_seed(_derived(spec.seed, "weights"))
    model = models.make(spec.model, **{**data.model_options(), **spec.model_options}).to(spec.device)
    if spec.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = ranks.place(model)
    optimizer = optimizers.make(spec, model)
    ranks.prepare(optimizer)
    return model, optimizer


def _rounded(values: Tensor) -> list[float]:
    """Round to four digits, enough for a figure; a weight without a gradient would have an infinite rate."""
    return [float(f"{min(value, 1e30):.4g}") for value in values.tolist()]


def _derived(seed: int, *what: object) -> int:
    """Derive a seed for one purpose: different for every use, and the same whenever a run is resumed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *what)).encode()).digest()[:7], "big")


def _generator(seed: int, *what: object) -> torch.Generator:
    return torch.Generator().manual_seed(_derived(seed, *what))


# The environment of a run


def _note_environment(folder: RunFolder, data: Data, ranks: Ranks) -> None:
    """Add an entry to the log of starts; raise if the data have changed."""
    now = environment() | {"data": data.fingerprint(), "processes": ranks.world}
    starts = folder.read("environment.json") or []
    if starts:
        last = compatibility.complete_start(starts[-1])
        if last["data"] != now["data"]:
            raise DataError(
                f"{folder.path} was begun with other data ({last['data']}, now {now['data']}). For a text that is "
                "Python's own library: go on with the same Python, or choose another --out."
            )
        changed = [key for key in ("torch", "threads", "processes", "adabayes") if last[key] != now[key]]
        if changed:
            what = ", ".join(f"{key} {last[key]} then, {now[key]} now" for key in changed)
            warnings.warn(f"{folder.path.name} goes on elsewhere ({what}): its last digits may differ", stacklevel=2)
    folder.write("environment.json", [*starts, now])


def environment() -> dict[str, Any]:
    return {
        "adabayes": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "process": os.getpid(),
        "host": platform.node(),
    }


def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from, if any; with + if files have changed since."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        here = Path(__file__).parent
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, cwd=here).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
