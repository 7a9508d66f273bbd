"""One run: trained deterministically from its seed, logged epoch by epoch, and continued after any interruption."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adabayes import __version__, diagnostics
from adabayes._machine import processor
from adabayes.bench.torch_steps import state_bytes
from adabayes.lab import models, optimizers
from adabayes.lab.data import Data
from adabayes.lab.files import DataError
from adabayes.lab.protocol import ProtocolError, Spec, lr_factor
from adabayes.lab.ranks import Ranks
from adabayes.lab.store import RunFolder
from adabayes.optim._two_rates import TwoRateOptimizer

if TYPE_CHECKING:
    from adabayes.lab.events import Events

__all__ = ["Interrupted", "Progress", "train"]

CHECKPOINT_SECONDS = 60.0  # between two within an epoch; there is one at each epoch's end
_SAMPLED = 10  # weights of each tensor in the learning-rate figure
_AGREE = 10  # steps after which several processes agree whether to report, save or stop
_RECALIBRATION = 50  # batches for new statistics of BatchNorm


class Interrupted(Exception):
    """The run was asked to stop and has written a checkpoint to go on from."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, a few times a second."""

    step: int
    steps: int
    epoch: int
    loss: float  # of the epoch so far, in training
    error: float
    test_error: float | None  # of the last epoch that is complete


def train(
    spec: Spec,
    folder: RunFolder,
    data: Data,
    ranks: Ranks | None = None,
    **options: Any,
) -> str:
    """Train, or go on training, until the run is done, has diverged, or is pruned; which of these.

    With ``ranks``, as one of several processes, of which the first writes. Options are callbacks,
    ``checkpoint_seconds`` and ``tensorboard``: ``report`` is told a :class:`Progress` a few times a second. A run is
    pruned after an epoch whose row of metrics ``is_hopeless``, which is asked of every epoch in order, also of those
    that were run before. Raises :class:`~adabayes.lab.store.Busy` if another process has the run, and
    :class:`Interrupted` if ``should_stop`` says so.
    """
    ranks = ranks or Ranks()
    with folder.lock() if ranks.is_first else nullcontext():
        if result := folder.read("result.json"):
            return str(result["status"])
        if ranks.is_first:
            folder.remove("failed.json")
            folder.write("spec.json", asdict(spec))
            _note_environment(folder, data, ranks)
        ranks.wait()
        with torch.random.fork_rng(devices=[]):
            return _Run(spec, folder, data, ranks, **options).run()


def epoch_seconds(spec: Spec, data: Data) -> float:
    """How long an epoch of a run takes on this machine, about."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        return _Run(spec, RunFolder(Path(folder)), data, Ranks()).measure()


@dataclass
class _Position:
    """Where a run is, and what the epoch has summed up so far."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    wrong: int = 0
    seen: int = 0
    seconds: float = 0.0


class _Run:
    def __init__(
        self,
        spec: Spec,
        folder: RunFolder,
        data: Data,
        ranks: Ranks,
        report: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        is_hopeless: Callable[[dict[str, Any]], bool] = lambda _: False,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        tensorboard: bool = False,
    ) -> None:
        self.spec, self.folder, self.ranks, self.report, self.should_stop = spec, folder, ranks, report, should_stop
        self.is_hopeless, self.checkpoint_seconds = is_hopeless, checkpoint_seconds
        self.device = torch.device(spec.device)
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
        # For the paper's learning-rate figure.
        self.observer: diagnostics.Observer | None = None
        if isinstance(self.optimizer, TwoRateOptimizer) and ranks.kind != "fsdp2":  # of which one sees a shard
            self.observer = diagnostics.Observer(self.optimizer, per_tensor=_SAMPLED, model=self.model)
        self.at = _Position()
        self.test_error: float | None = None
        self._saved = self._reported = time.monotonic()
        if (saved := folder.load()) is not None:
            ranks.load(self.model, saved["model"])
            of = saved["optimizer"]
            self.trainer.load({**of, "state_dict": ranks.scattered(of["state_dict"], self.optimizer)})
            if self.observer and saved["observer"]:
                self.observer.load_state_dict(saved["observer"])
            self.at = _Position(**saved["position"])
        self.events: Events | None = None
        if tensorboard and ranks.is_first:
            from adabayes.lab.events import Events

            self.events = Events(folder, self.at.epoch)

    def run(self) -> str:
        try:
            status = self._run()
        finally:
            if self.events:
                self.events.close()
        weights = self.ranks.gathered(dict(self.model.state_dict()))
        if self.ranks.is_first:
            self.folder.finish(weights, {"status": status, "epoch": min(self.at.epoch, self.spec.epochs - 1)})
        self.ranks.wait()
        return status

    def _run(self) -> str:
        for row in self.folder.metrics()[: self.at.epoch]:
            self.test_error = row["test_error"]
            if self.is_hopeless(row):
                return "pruned"
        while self.at.epoch < self.spec.epochs:
            if not self._train_epoch():
                return "diverged"
            row = self._row()
            if self.ranks.is_first:
                self._log(row)
            if not math.isfinite(row["test_loss"]):
                return "diverged"
            self.test_error = row["test_error"]
            self.at = _Position(epoch=self.at.epoch + 1)
            self._save()
            if self.is_hopeless(row):
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
        """Train to the end of the epoch; whether the loss has stayed finite."""
        spec, at = self.spec, self.at
        order = torch.randperm(self.data.count("train"), generator=_generator(spec.seed, "order", at.epoch))
        # Of this process; what was summed before is with the first.
        loss_sum = torch.tensor(at.loss * self.ranks.is_first, dtype=torch.float64, device=self.device)
        wrong = torch.tensor(at.wrong * self.ranks.is_first, device=self.device)
        self.model.train()
        self.trainer.for_training()
        started = time.perf_counter()
        while at.step < self.steps:
            indices = order[at.step * spec.batch_size : (at.step + 1) * spec.batch_size]
            loss, count, missed, seen = self._step(indices)
            loss_sum += loss.double() * count
            wrong += missed
            at.seen += seen
            at.step += 1

            now, last = time.monotonic(), at.step == self.steps
            if self.ranks.world > 1 and at.step % _AGREE and not last:
                continue
            due, stop, save = self.ranks.any(
                now - self._reported > 0.2 or last,
                self.should_stop(),
                now - self._saved > self.checkpoint_seconds and not last,
            )
            if due or stop or save:
                at.loss, at.wrong = self.ranks.total(loss_sum), int(self.ranks.total(wrong))
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

    def _step(self, indices: Tensor) -> tuple[Tensor, int, Tensor, int]:
        """A step on a batch. Of our share: mean loss, how many targets, how many missed; of all: how many targets."""
        spec, at = self.spec, self.at
        torch.manual_seed(_derived(spec.seed, "noise", at.epoch, at.step))
        self._set_lr((at.epoch * self.steps + at.step) / (spec.epochs * self.steps))
        inputs, targets = self.data.train_batch(indices, _generator(spec.seed, "augment", at.epoch, at.step))
        seen = targets.numel()
        mine = self.ranks.share(len(indices))
        inputs, targets = inputs[mine], targets[mine]
        with self.trainer.sampling():
            loss, output = self._loss(inputs, targets)
            self.optimizer.zero_grad()
            # Gradients are averaged over processes, whatever their shares.
            (loss * (targets.numel() * self.ranks.world / seen)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach(), targets.numel(), (output.detach().argmax(-1) != targets).sum(), seen

    def measure(self) -> float:
        """Seconds that an epoch takes, from a few steps."""
        self.model.train()
        self.trainer.for_training()
        size = min(self.spec.batch_size, self.data.count("train"))
        taken: list[float] = []
        began = time.perf_counter()
        while len(taken) < 2 or (len(taken) < 4 and time.perf_counter() - began < 20):
            started = time.perf_counter()
            self._step(torch.arange(size))
            taken.append(time.perf_counter() - started)
        # To test an example takes about a third of what it takes to train on it.
        return min(taken[1:]) / size * (self.data.count("train") + self.data.count("test") / 3)

    def _compile(self) -> None:
        """Compile the model: anew for each run and shape, so that nothing depends on what was run before."""
        torch.compiler.reset()
        self.call = torch.compile(self.call, dynamic=False)
        # Compiling is no part of training's time: so once through with each shape, and back to the start.
        start = {name: t.clone() for name, t in self.model.state_dict().items()}
        count = self.data.count("train")
        for size in {min(count, self.spec.batch_size), count % self.spec.batch_size} - {0}:
            batch = self.data.train_batch(torch.arange(size), torch.Generator())
            loss, _ = self._loss(*(part[self.ranks.share(size)] for part in batch))
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        self.model.load_state_dict(start)

    def _loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self.spec.channels_last:
            inputs = inputs.contiguous()
        with self._autocast():
            output = self.call(inputs)
            if not len(targets):  # a batch smaller than the number of processes
                return output.sum(), output
            return F.cross_entropy(output.flatten(0, -2), targets.flatten()), output

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.spec.autocast else nullcontext()

    def _set_lr(self, progress: float) -> None:
        factor = lr_factor(self.spec.schedule, progress)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs):
            if base is not None:
                group["lr"] = base * factor

    def _row(self) -> dict[str, Any]:
        """What is logged of the epoch that is complete."""
        at = self.at
        started = time.perf_counter()
        test_loss, test_error = self._test()
        row = {
            "epoch": at.epoch,
            "train_loss": at.loss / at.seen,
            "train_error": 100 * at.wrong / at.seen,
            "test_loss": test_loss,
            "test_error": test_error,
            "lr": self.optimizer.param_groups[0].get("lr"),
            "steps": self.steps,
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
        """Of a sample of weights of each layer, what Adam would give them and what they get."""
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
    def _test(self) -> tuple[float, float]:
        """Loss and error in percent on the test split."""
        self.trainer.for_testing()
        if self.trainer.switches:
            self._recalibrate()
        self.model.eval()
        loss_sum, wrong, seen = 0.0, 0, 0
        for indices in self._in_order("test", self.spec.test_batch_size):
            inputs, targets = self.data.test_batch(indices[self.ranks.share(len(indices))])
            mean, output = self._loss(inputs, targets)
            loss_sum += mean.item() * targets.numel()
            wrong += int((output.argmax(-1) != targets).sum())
            seen += targets.numel()
        loss, error, count = map(self.ranks.total, torch.tensor([loss_sum, wrong, seen], dtype=torch.float64))
        return loss / count, 100 * error / count

    def _in_order(self, split: str, size: int) -> Sequence[Tensor]:
        return torch.split(torch.arange(self.data.count(split)), size)

    def _recalibrate(self) -> None:
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over all batches
        self.model.train()
        for i, indices in enumerate(self._in_order("train", self.spec.batch_size)[:_RECALIBRATION]):
            mine = self.ranks.share(len(indices))
            batch = self.data.train_batch(indices, _generator(self.spec.seed, "calibrate", self.at.epoch, i))
            self._loss(*(part[mine] for part in batch))
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum

    def _save(self) -> None:
        tree = self.ranks.gathered({"model": dict(self.model.state_dict()), "optimizer": self.trainer.state()})
        tree["position"] = asdict(self.at)
        tree["observer"] = self.observer.state_dict() if self.observer else None
        if self.ranks.is_first:
            self.folder.save(self.at.epoch * self.steps + self.at.step, tree)
        self._saved = time.monotonic()

    def _report(self) -> None:
        at = self.at
        self.report(
            Progress(
                at.epoch * self.steps + at.step,
                self.spec.epochs * self.steps,
                at.epoch,
                at.loss / at.seen,
                100 * at.wrong / at.seen,
                self.test_error,
            )
        )


def make(spec: Spec, data: Data, ranks: Ranks | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network of a run, as its seed initialises it, and the optimizer."""
    torch.manual_seed(_derived(spec.seed, "weights"))
    model = models.make(spec.model, **{**data.model_options(), **spec.model_options}).to(spec.device)
    if spec.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = (ranks or Ranks()).place(model)
    return model, optimizers.make(spec, model.parameters())


def _rounded(values: Tensor) -> list[float]:
    """Four digits, which is what one sees; a weight without a gradient would get more than any number."""
    return [float(f"{min(value, 1e30):.4g}") for value in values.tolist()]


def _derived(seed: int, *what: object) -> int:
    """A seed for one purpose: the same wherever a run is taken up again, and its own for every use."""
    return int.from_bytes(hashlib.sha256(repr((seed, *what)).encode()).digest()[:7], "big")


def _generator(seed: int, *what: object) -> torch.Generator:
    return torch.Generator().manual_seed(_derived(seed, *what))


# Where and with what a run was made


def _note_environment(folder: RunFolder, data: Data, ranks: Ranks) -> None:
    """Add an entry to the log of starts; refuse to go on with other data."""
    now = environment() | {"data": data.fingerprint(), "processes": ranks.world}
    starts = folder.read("environment.json") or []
    if starts:
        last = starts[-1]
        if last["data"] != now["data"]:
            raise DataError(
                f"{folder.path} was begun with other data ({last['data']}, now {now['data']}). For a text that is "
                "Python's own library: go on with the same Python, or choose another --out."
            )
        last.setdefault("processes", 1)
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
    """The commit of the checkout that this package is run from, if it is; with + where files were changed since."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        here = Path(__file__).parent
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, cwd=here).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
