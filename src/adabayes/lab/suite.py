"""The suite: several workloads, with the same effort for every optimizer, and its results.

The rules. On each workload every optimizer gets the same number of trials: its own settings first, then the same
quasi-random points of its search space, all with one seed, judged by the validation loss at the end of training. The
settings that win are run with fresh seeds, which give all optimizers the same initial weights and batches. These runs
are tested on held-out training data as they train, and once on the test set, at the end.

The target of a workload is the final validation loss of tuned AdamW, as a mean over seeds. Shorter schedules show how
much training an optimizer needs to reach it: the winners are trained with 0.2 to 0.8 of the steps, and the length that
ends at the target, as a mean over seeds, is read off a line between the shortest one that reaches it and the next
shorter one. Its seconds are its steps times the time of a step, which is measured for all optimizers in turn on a
machine that does nothing else.

"Better" means: the paired difference in final test loss to AdamW, over seeds, is below zero by Student's t-test at 5 %
after Holm's correction for all comparisons of the suite.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adabayes.lab.differences import REFERENCE, Difference, paired
from adabayes.lab.protocol import TRIAL_SEED, WORKLOADS, Protocol, ProtocolError, Spec
from adabayes.lab.run.folder import folder_of, write_atomically

__all__ = [
    "BUDGET",
    "LENGTHS",
    "REFERENCE",
    "Comparison",
    "Final",
    "Reached",
    "Record",
    "Trial",
    "band",
    "best_of",
    "collect",
    "comparisons",
    "final_of",
    "finals",
    "geometric_mean",
    "name_of",
    "profile",
    "reached",
    "read",
    "sentence",
    "shorter",
    "target",
    "trials",
]

BUDGET = 10  # trials of each optimizer
LENGTHS = (0.2, 0.3, 0.4, 0.5, 0.65, 0.8)  # of schedules that are tried for the target, beside whole ones
WITHIN = 1.05  # times the best loss: learning rates up to there are good enough


def name_of(protocol: Protocol) -> str:
    """Return the name of a workload, without the suite's."""
    return protocol.name.removeprefix("suite-")


# Runs


def trials(protocol: Protocol, budget: int) -> list[Spec]:
    """Return all trials of all optimizers, taking turns, so that a search that is stopped early is also fair."""
    from scipy.stats import qmc

    if budget < 1:
        raise ProtocolError(f"--budget {budget}: there must be at least one trial of each optimizer")
    protocol = replace(protocol, test_at_end=False)
    dataset, model = protocol.panel("a workload has one data set and one model")
    # The same points for all that search as many settings; a larger budget begins with the same ones.
    sizes = {len(optimizer.search) for optimizer in protocol.optimizers.values()}
    points = {size: qmc.Halton(size, scramble=True, seed=0).random(budget - 1) for size in sizes}
    found = []
    for i in range(budget):
        for optimizer in protocol.optimizers.values():
            settings = optimizer.settings_for(model)
            if i:
                point = points[len(optimizer.search)][i - 1]
                for share, (key, (low, high)) in zip(point, optimizer.search.items()):
                    settings[key] = float(f"{low * (high / low) ** share:.3g}")
            tried = replace(optimizer, settings=settings, of_models={})
            found.append(protocol.spec(dataset, model, tried, TRIAL_SEED))
    return found


def finals(protocol: Protocol, chosen: Mapping[str, Mapping[str, Any]], length: float = 1.0) -> list[Spec]:
    """Return the runs with the settings chosen for each optimizer, ordered by seed."""
    dataset, model = protocol.panel("a workload has one data set and one model")
    specs = [
        protocol.spec(dataset, model, replace(protocol.optimizers[name], settings=dict(settings), of_models={}), seed)
        for seed in protocol.seeds
        for name, settings in chosen.items()
    ]
    return [replace(spec, length=length) for spec in specs]


def shorter(protocol: Protocol, record: Record) -> list[Spec]:
    """Return the runs with the schedule that each optimizer is to try next, by bisection; none at the end."""
    found = []
    for name in protocol.optimizers:
        ends = _reaches(record, name)
        if not ends.get(1.0):  # not even the whole schedule reaches the target
            continue
        failed = max((length for length, reaches in ends.items() if not reaches), default=0.0)
        open_ones = [n for n in LENGTHS if failed < n < min(n for n, reaches in ends.items() if reaches)]
        if open_ones:
            found += finals(protocol, {name: record.chosen[name]}, open_ones[len(open_ones) // 2])
    return found


# Records


@dataclass(frozen=True)
class Trial:
    """A trial and its final validation loss, which is None if it diverged or is not done."""

    run: str  # the identity of its specification
    optimizer: str
    settings: dict[str, Any]
    status: str
    loss: float | None


@dataclass(frozen=True)
class Final:
    """A run of the comparison. The curve has a step and a validation loss for each test."""

    run: str  # the identity of its specification
    optimizer: str
    seed: int
    length: float  # of its schedule
    status: str
    loss: float | None  # at the end, on the validation split
    test_loss: float | None
    test_error: float | None
    curve: list[tuple[int, float]]


@dataclass(frozen=True)
class Record:
    """The results of a workload, as in ``evidence/NAME.json``."""

    name: str
    description: str
    error: str  # the name of the error, with its unit
    steps: int
    labels: dict[str, str]
    styles: dict[str, list[str]]  # colours on light and dark backgrounds, and the kind of line
    trials: list[Trial]
    chosen: dict[str, dict[str, Any]]
    finals: list[Final]
    step_seconds: dict[str, float]  # of a training step with each optimizer, on one thread
    environment: dict[str, Any]

    def runs(self, optimizer: str, length: float = 1.0) -> list[Final]:
        """Return the finished runs of an optimizer with a schedule of this length, ordered by seed."""
        found = (r for r in self.finals if (r.optimizer, r.length, r.status) == (optimizer, length, "done"))
        return sorted(found, key=lambda r: r.seed)

    def ended(self) -> dict[str, Trial | Final]:
        """Return all runs that are done or have diverged, by the identities of their specifications."""
        runs: list[Trial | Final] = [*self.trials, *self.finals]
        return {run.run: run for run in runs if run.status in ("done", "diverged")}

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        write_atomically(path, _compact(asdict(self)).encode())
        return path

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            parts: dict[str, Any] = {
                "trials": [Trial(**trial) for trial in content.pop("trials")],
                "finals": [
                    Final(**{**final, "curve": [(int(step), float(loss)) for step, loss in final["curve"]]})
                    for final in content.pop("finals")
                ],
            }
            return cls(**content, **parts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"{path} is not a record of the suite: {error!r}") from error


def read(folder: Path) -> list[Record]:
    """Read all records of a folder, in the order of the suite."""
    found = {path.stem: Record.read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ProtocolError(f"there are no records in {folder}; name the --out of adabayes suite, or evidence")
    return [found[name] for name in sorted(found, key=lambda n: (n not in WORKLOADS, [*WORKLOADS, n].index(n)))]


def best_of(tried: Iterable[Trial]) -> dict[str, dict[str, Any]]:
    """Return each optimizer's settings with the lowest final validation loss; none if all its trials diverged."""
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for trial in tried:
        if trial.loss is not None and trial.loss < best.get(trial.optimizer, (math.inf,))[0]:
            best[trial.optimizer] = trial.loss, trial.settings
    return {name: settings for name, (_, settings) in best.items()}


def collect(
    asked: Protocol, budget: int, error: str, out: Path, before: Record | None = None, whole: Protocol | None = None
) -> Record:
    """Read the runs of a workload that are in ``out``.

    An earlier record adds the runs that it has and ``out`` has not, so it is enough to go on from, on another machine
    too. It also keeps optimizers, trials and seeds that are not asked for now; ``whole`` is the protocol that has them.
    """
    known = before.ended() if before else {}
    kept = {t.run for t in before.trials} | {f.run for f in before.finals} if before else set()
    names = {*asked.optimizers, *(before.labels if before else ())}
    protocol = replace(asked, optimizers={k: o for k, o in (whole or asked).optimizers.items() if k in names})
    counts = Counter(trial.optimizer for trial in before.trials) if before else Counter()

    def belongs(spec: Spec, is_asked: bool) -> bool:
        return (is_asked and spec.optimizer in asked.optimizers) or spec.identity in kept

    first = {spec.identity for spec in trials(protocol, budget)}
    all_trials = trials(protocol, max(budget, *counts.values(), 1))
    tried = [
        _known(spec, known, Trial) or _trial_of(spec, out)
        for spec in all_trials
        if belongs(spec, spec.identity in first)
    ]
    best = best_of(tried)
    chosen = {name: best[name] for name in protocol.optimizers if name in best}
    seeds = dict.fromkeys((*asked.seeds, *sorted(run.seed for run in (before.finals if before else ()))))
    protocol = replace(protocol, seeds=tuple(seeds))
    full = [spec for spec in finals(protocol, chosen) if belongs(spec, spec.seed in asked.seeds)]
    short = [spec for length in LENGTHS for spec in finals(protocol, chosen, length)]
    short = [spec for spec in short if spec.identity in known or folder_of(spec, out).status() in ("done", "diverged")]
    runs = [_known(spec, known, Final) or final_of(spec, out) for spec in (*full, *short)]
    started = next((starts for spec in full if (starts := folder_of(spec, out).read("environment.json"))), None)
    noted = ("adabayes", "torch", "python", "processor", "threads", "commit")
    return Record(
        name=name_of(protocol),
        description=protocol.description,
        error=error,
        steps=max((run.curve[-1][0] for run in runs if run.curve), default=0),
        labels={name: optimizer.label for name, optimizer in protocol.optimizers.items()},
        styles={
            name: [*(optimizer.colour or ("#444444", "#dddddd")), optimizer.dash or "solid"]
            for name, optimizer in protocol.optimizers.items()
        },
        trials=tried,
        chosen=chosen,
        finals=runs,
        step_seconds=before.step_seconds if before else {},
        environment={key: started[-1].get(key) for key in noted} if started else before.environment if before else {},
    )


def _known(spec: Spec, known: Mapping[str, Trial | Final], kind: type[Any]) -> Any:
    found = known.get(spec.identity)
    return found if isinstance(found, kind) else None


def sentence(protocol: Protocol, specs: Sequence[Spec], out: Path) -> str | None:
    """Return a sentence that compares the best optimizer with AdamW on one task; None if that is not possible."""
    if len({(spec.dataset, spec.model) for spec in specs}) > 1:
        return None
    runs = [final_of(spec, out) for spec in specs]
    steps = max((run.curve[-1][0] for run in runs if run.curve), default=0)
    labels = {name: optimizer.label for name, optimizer in protocol.optimizers.items()}
    record = Record(protocol.name, "", "", steps, labels, {}, [], {}, runs, {}, {})
    ends = {
        name: statistics.fmean(losses)
        for name in labels
        if (losses := [run.loss for run in record.runs(name) if run.loss is not None])
    }
    if REFERENCE not in ends or len(ends) < 2:
        return None
    best = min(ends, key=lambda name: ends[name])
    if best == REFERENCE:
        second = min((name for name in ends if name != REFERENCE), key=lambda name: ends[name])
        next_best = f"{labels[second]} is next with {ends[second]:.4g}"
        return f"{labels[best]} ends at the lowest loss, {ends[best]:.4g}; {next_best}."
    said = f"{labels[best]} ends at a loss of {ends[best]:.4g}, {labels[REFERENCE]} at {ends[REFERENCE]:.4g}"
    when = _within(record, best)
    return f"{said}, where {labels[best]} was after {when:.0%} of the steps." if when else f"{said}."


def _trial_of(spec: Spec, out: Path) -> Trial:
    folder = folder_of(spec, out)
    status = folder.status()
    loss = folder.metrics()[-1]["test_loss"] if status == "done" else None
    return Trial(spec.identity, spec.optimizer, spec.settings, status, loss)


def final_of(spec: Spec, out: Path) -> Final:
    """Read a run of the comparison from ``out``."""
    folder = folder_of(spec, out)
    rows = folder.metrics()
    result = folder.read("result.json") or {}
    curve = [(row["step"], row["test_loss"]) for row in folder.metrics("curve.jsonl")]
    steps = 0
    for row in rows:
        steps += row["steps"]
        curve.append((steps, row["test_loss"]))
    status = folder.status()
    return Final(
        spec.identity,
        spec.optimizer,
        spec.seed,
        spec.length,
        status,
        rows[-1]["test_loss"] if status == "done" else None,
        result.get("test_loss"),
        result.get("test_error"),
        [(step, float(f"{loss:.5g}")) for step, loss in sorted(curve)],
    )


def _compact(content: dict[str, Any]) -> str:
    """Return JSON with a line for each trial and run, so that differences between versions are readable."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            entries = ",\n  ".join(json.dumps(entry) for entry in value)
            lines.append(f" {json.dumps(key)}: [\n  {entries}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


# Measures


@dataclass(frozen=True)
class Reached:
    """The training that an optimizer needs to reach the target, as shares of AdamW's; None if it does not."""

    share_of_steps: float | None  # with the schedule that ends there
    share_of_seconds: float | None
    within: float | None  # with a whole schedule: the first test at the target, as a median over seeds


def target(record: Record) -> float | None:
    """Return the final validation loss of tuned AdamW, as a mean over seeds."""
    losses = [run.loss for run in record.runs(REFERENCE) if run.loss is not None]
    return statistics.fmean(losses) if losses else None


def _ends(record: Record, optimizer: str) -> dict[float, float]:
    """Return the mean final loss over seeds for each length of schedule that was tried; inf if a seed diverged."""
    found = {}
    for length in (1.0, *LENGTHS):
        ran = [run for run in record.finals if (run.optimizer, run.length) == (optimizer, length)]
        if ran:
            found[length] = statistics.fmean(math.inf if run.loss is None else run.loss for run in ran)
    return found


def _reaches(record: Record, optimizer: str) -> dict[float, bool]:
    """Return, for each length of schedule that was tried, whether it ends at the target."""
    goal = target(record)
    return {} if goal is None else {length: loss <= goal for length, loss in _ends(record, optimizer).items()}


def _share_of_steps(record: Record, optimizer: str) -> float | None:
    """Return the length of schedule that ends at the target, on a line between the two lengths next to it."""
    goal, ends, reaches = target(record), _ends(record, optimizer), _reaches(record, optimizer)
    above = min((length for length, enough in reaches.items() if enough), default=None)
    if goal is None or above is None:
        return None
    below = max((length for length in ends if length < above), default=None)
    if below is None or math.isinf(ends[below]):
        return above
    return below + (above - below) * (ends[below] - goal) / (ends[below] - ends[above])


def _within(record: Record, optimizer: str) -> float | None:
    goal, runs = target(record), record.runs(optimizer)
    if goal is None or not runs:
        return None
    first = [next((step for step, loss in run.curve if loss <= goal), math.inf) for run in runs]
    steps = statistics.median(first)
    return steps / record.steps if math.isfinite(steps) else None


def reached(record: Record, optimizer: str) -> Reached | None:
    """Return how much training an optimizer needs to reach the target; None if that is not known yet."""
    if not _reaches(record, optimizer):
        return None
    share = _share_of_steps(record, optimizer)
    times = record.step_seconds
    timed = share is not None and optimizer in times and REFERENCE in times
    seconds = share * times[optimizer] / times[REFERENCE] if share is not None and timed else None
    return Reached(share, seconds, _within(record, optimizer))


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean; None if a value is None, because a target that is not reached has no time."""
    if not values or any(value is None for value in values):
        return None
    return math.exp(statistics.fmean(math.log(value) for value in values if value is not None))


def profile(records: Sequence[Record], clock: str) -> dict[str, list[tuple[float, float]]]:
    """Return performance profiles: for each optimizer, points (factor, share of workloads).

    That is the share of workloads on which it reaches the target within that factor of the fastest, by ``steps`` or
    ``seconds``.
    """
    times: dict[str, list[float]] = {}
    for record in records:
        found = {name: reached(record, name) for name in record.labels}
        of = {name: share for name, r in found.items() if r and (share := getattr(r, f"share_of_{clock}")) is not None}
        for name in record.labels:
            times.setdefault(name, []).append(of[name] / min(of.values()) if name in of else math.inf)
    return {
        name: [
            (factor, sum(f <= factor for f in factors) / len(factors))
            for factor in sorted({f for f in factors if math.isfinite(f)})
        ]
        for name, factors in times.items()
    }


def band(record: Record, optimizer: str) -> tuple[float, float] | None:
    """Return the lowest and the highest learning rate of trials within 5 % of the optimizer's best loss."""
    found = [(t.settings["lr"], t.loss) for t in record.trials if t.optimizer == optimizer and t.loss is not None]
    if not found:
        return None
    best = min(loss for _, loss in found)
    good = [lr for lr, loss in found if loss <= best + (WITHIN - 1) * abs(best)]
    return min(good), max(good)


@dataclass(frozen=True)
class Comparison:
    """An optimizer compared with AdamW on a workload: the paired difference in final test loss."""

    workload: str
    optimizer: str
    difference: Difference  # whose p is corrected for all comparisons of the suite

    @property
    def verdict(self) -> str:
        if self.difference.p >= 0.05:
            return "no difference shown"
        return "better" if self.difference.mean < 0 else "worse"


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare every optimizer with AdamW on every workload where both have at least two seeds in common."""
    found: list[Comparison] = []
    for record in records:
        losses = {name: {run.seed: run.test_loss for run in record.runs(name)} for name in (REFERENCE, *record.labels)}
        found += [
            Comparison(record.name, name, difference)
            for name in record.labels
            if name != REFERENCE and (difference := paired(losses[name], losses[REFERENCE]))
        ]
    return _holm(found)


def _holm(found: list[Comparison]) -> list[Comparison]:
    """Apply Holm's correction: multiply the k-th smallest of n by n - k + 1, and let none be below the one before."""
    worst = 0.0
    corrected: dict[tuple[str, str], float] = {}
    for k, one in enumerate(sorted(found, key=lambda c: c.difference.p)):
        worst = max(worst, min(1.0, one.difference.p * (len(found) - k)))
        corrected[one.workload, one.optimizer] = worst
    return [replace(one, difference=replace(one.difference, p=corrected[one.workload, one.optimizer])) for one in found]
