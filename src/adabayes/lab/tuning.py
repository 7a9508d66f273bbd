"""Fair tuning: the same number of trials for every optimizer, over its own search space, judged on validation data."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adabayes._util.missing_extra import missing_extra
from adabayes.lab import compatibility, optimizers, schema
from adabayes.lab import protocol as protocols
from adabayes.lab.data import Data, digits_of
from adabayes.lab.display import Display, make_table, plain
from adabayes.lab.execute import sweep
from adabayes.lab.protocol import TRIAL_SEED, Execution, OptimizerSpec, Protocol, ProtocolError
from adabayes.lab.run.folder import exclusive, folder_of, write_atomically
from adabayes.lab.run.training import CHECKPOINT_SECONDS, Watch

try:
    import optuna
    import tomli_w
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, TrialState

    from adabayes.lab import journal
except ImportError as error:
    raise missing_extra("tuning needs Optuna and tomli-w", "lab") from error

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Search", "check", "plot", "searches", "table", "tune", "write_protocol"]

VALIDATION = 0.1  # share of the training data, unless the protocol has one
WORST = 100.0  # percent: the error of a run that diverges
_JOURNAL = "tune.journal"


@dataclass(frozen=True)
class Search:
    """The trials of one optimizer, in order."""

    optimizer: OptimizerSpec
    trials: tuple[FrozenTrial, ...]

    @property
    def finished(self) -> list[FrozenTrial]:
        """The trials that count against the budget. Those that failed or were interrupted are run again."""
        return [t for t in self.trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]

    @property
    def best(self) -> FrozenTrial | None:
        complete = [t for t in self.trials if t.state == TrialState.COMPLETE]
        return min(complete, key=lambda t: t.value if t.value is not None else math.inf, default=None)


def tune(
    protocol: Protocol,
    budget: int,
    out: Path,
    load: Callable[[], Data],
    display: Display,
    stop: sweep.Stop,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    execution: Execution = Execution(),  # noqa: B008  (frozen)
    threads: int | None = None,
) -> list[sweep.Outcome]:
    """Give every optimizer ``budget`` trials, the first with the protocol's own settings, and return those that failed.

    Trials that are done count. After a failure, an optimizer gets no more trials for now.
    """
    check(protocol)
    out.mkdir(parents=True, exist_ok=True)
    failures: dict[str, sweep.Outcome] = {}
    with exclusive(out / ".lock", f"another process is tuning in {out}; it was left alone"):
        sweep.remove_leftovers(out)
        journal.mend(out / _JOURNAL, display.warned)
        whole = load()
        storage = _storage(out)
        studies = {name: _study(storage, protocol, optimizer) for name, optimizer in protocol.optimizers.items()}
        points = {name: _points(protocol, optimizer) for name, optimizer in protocol.optimizers.items()}
        display.finished = sum(len(search.finished) for search in searches(protocol, out))
        for i in range(budget):  # taking turns, so that a search that is stopped early is also fair
            for name, optimizer in protocol.optimizers.items():
                if name not in failures and len(Search(optimizer, tuple(studies[name].trials)).finished) <= i:
                    outcome = _trial(
                        studies[name],
                        points[name],
                        protocol,
                        optimizer,
                        out,
                        whole,
                        display,
                        stop,
                        sweep.Options(checkpoint_seconds=checkpoint_seconds, threads=threads),
                        execution,
                    )
                    if outcome.status not in ("done", "diverged", "pruned"):
                        failures[name] = outcome
    return list(failures.values())


def check(protocol: Protocol) -> None:
    """Raise if a protocol cannot be tuned."""
    protocol.panel("tuning is for one data set and one model at a time")
    model = protocol.models[0]
    for optimizer in protocol.optimizers.values():
        if not optimizer.search:
            raise ProtocolError(
                f"[optimizers.{optimizer.name}] has no search; add a line like search = {{ lr = [1e-4, 1e-1] }}"
            )
        own = optimizer.settings_for(model)
        for key, (low, high) in optimizer.search.items():
            value = own.get(key, low)
            if not (schema.is_number(value) and low <= value <= high):
                raise ProtocolError(
                    f"[optimizers.{optimizer.name}] has {key} = {value}, which is outside its search range, {low} to "
                    f"{high}; widen the range, or remove {key} from the search"
                )
        tried = replace(optimizer, settings={key: low for key, (low, _) in optimizer.search.items()} | own)
        optimizers.check([protocol.spec(protocol.datasets[0], model, tried, TRIAL_SEED)])


def searches(protocol: Protocol, out: Path) -> list[Search]:
    """Return the searches of all optimizers, as far as they have got."""
    storage = _storage(out)

    def trials(name: str) -> list[FrozenTrial]:
        try:
            return storage.get_all_trials(storage.get_study_id_from_name(name))
        except KeyError:  # none yet
            return []

    return [Search(o, tuple(trials(_study_name(protocol, o)))) for o in protocol.optimizers.values()]


def _held_out(protocol: Protocol) -> Protocol:
    return replace(protocol, validation=protocol.validation or VALIDATION)


def _storage(out: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return journal.read(out / _JOURNAL)


def _study_name(protocol: Protocol, optimizer: OptimizerSpec) -> str:
    """Return a name that has all settings the trials share, so that others are not taken for these."""
    model = protocol.models[0]
    fixed = {key: value for key, value in optimizer.settings_for(model).items() if key not in optimizer.search}
    common = replace(optimizer, settings=fixed, of_models={})
    one = _held_out(protocol).spec(protocol.datasets[0], model, common, TRIAL_SEED)
    return f"{one.folder} {json.dumps(optimizer.search, sort_keys=True)}"


def _study(storage: JournalStorage, protocol: Protocol, optimizer: OptimizerSpec) -> optuna.Study:
    """Return the study to add trials to."""
    study = optuna.create_study(
        study_name=_study_name(protocol, optimizer),
        storage=storage,
        sampler=optuna.samplers.RandomSampler(seed=0),  # not used: see _points
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=max(1, protocol.epochs // 4)),
        direction="minimize",
        load_if_exists=True,
    )
    for trial in study.trials:
        if trial.state == TrialState.RUNNING:  # in a process that was stopped
            study.tell(trial.number, state=TrialState.FAIL)
    return study


def _points(protocol: Protocol, optimizer: OptimizerSpec) -> Iterator[dict[str, float]]:
    """Yield the settings to try: as given, then quasi-random ones, which do not depend on any result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # since 2021
        sampler = optuna.samplers.QMCSampler(scramble=True, seed=0, warn_independent_sampling=False)
    study = optuna.create_study(sampler=sampler)
    own = optimizer.settings_for(protocol.models[0])
    study.enqueue_trial({key: float(own[key]) for key in optimizer.search if key in own})
    while True:
        trial = study.ask(_space(optimizer))
        yield trial.params
        study.tell(trial, 0.0)


def _space(optimizer: OptimizerSpec) -> dict[str, optuna.distributions.BaseDistribution]:
    return {key: optuna.distributions.FloatDistribution(*limits, log=True) for key, limits in optimizer.search.items()}


def _trial(
    study: optuna.Study,
    points: Iterator[dict[str, float]],
    protocol: Protocol,
    optimizer: OptimizerSpec,
    out: Path,
    whole: Data,
    display: Display,
    stop: sweep.Stop,
    options: sweep.Options,
    execution: Execution,
) -> sweep.Outcome:
    if not study.get_trials(states=[TrialState.WAITING]):  # after a kill there may be one
        tried = [trial.params for trial in Search(optimizer, tuple(study.trials)).finished]
        study.enqueue_trial(next(point for point in points if point not in tried))
    trial = study.ask(_space(optimizer))
    settings = {**optimizer.settings_for(protocol.models[0]), **trial.params}
    changed = replace(optimizer, settings=settings, of_models={})
    spec = _held_out(protocol).spec(protocol.datasets[0], protocol.models[0], changed, TRIAL_SEED, execution)

    def is_hopeless(row: dict[str, Any]) -> bool:
        trial.report(row["test_error"], row["epoch"])
        return trial.should_prune()

    display.started(spec)
    folder = folder_of(spec, out)
    watch = Watch(lambda progress: display.progressed(spec, progress), stop, is_hopeless)
    outcome = sweep.attempt(spec, folder, lambda: whole, watch, options)
    display.ended(spec, outcome)
    if not outcome.is_new:  # it ended just before a kill
        for row in folder.metrics():
            is_hopeless(row)
    if outcome.status == "done":
        study.tell(trial, folder.metrics()[-1]["test_error"])
    elif outcome.status == "diverged":
        study.tell(trial, WORST)
    else:
        study.tell(trial, state=TrialState.PRUNED if outcome.status == "pruned" else TrialState.FAIL)
    return outcome


# Results


def table(found: list[Search], error: str) -> Table:
    from rich.box import SIMPLE_HEAD

    digits = digits_of(error)
    grid = make_table(
        {"optimizer": "wrap", **dict.fromkeys(("trials", "pruned", "as given", "best"), "right"), "with": "wrap"},
        f"Validation {error}, at the end of training",
        SIMPLE_HEAD,
    )
    for search in found:
        first = search.finished[0].value if search.finished else None
        best = search.best
        grid.add_row(
            plain(search.optimizer.label),
            str(len(search.finished)),
            str(sum(t.state == TrialState.PRUNED for t in search.finished)),
            "" if first is None else f"{first:.{digits}f}",
            "" if best is None else f"{best.value:.{digits}f}",
            plain("" if best is None else ", ".join(f"{key} {value:.2g}" for key, value in best.params.items())),
        )
    return grid


def write_protocol(protocol: Protocol, source: str | Path, found: list[Search], path: Path) -> None:
    """Write a protocol with the winners for ``reproduce``, which uses fresh seeds."""
    winners = [(search, search.best) for search in found if search.best]
    lines = ["# Written by adabayes tune: the best settings that it found for each optimizer. Validation errors:"]
    for search, best in winners:
        lines.append(f"# {search.optimizer.name} {best.value:.4g}, of {len(search.finished)} trials")
    model = protocol.models[0]

    def settings(optimizer: OptimizerSpec) -> dict[str, Any]:
        return compatibility.complete_settings(optimizer.path, optimizer.settings_for(model))

    content = {
        "description": f"{protocol.name}, tuned",
        "extends": str(source) if str(source) in protocols.NAMES else os.path.relpath(source, path.parent),
        "datasets": protocol.datasets,
        "models": protocol.models,
        "epochs": protocol.epochs,
        "compare": [search.optimizer.name for search, _ in winners],
        "optimizers": {
            search.optimizer.name: {**settings(search.optimizer), **best.params, "models": {}}
            for search, best in winners
        },
    }
    write_atomically(path, "\n".join([*lines, "", tomli_w.dumps(content)]).encode())


def plot(found: list[Search], path: Path) -> None:
    """Plot the validation error over each setting: how sensitive it is, and whether the range was wide enough."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise missing_extra("plotting needs matplotlib", "lab") from error
    mpl.use("agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(key for search in found for key in search.optimizer.search))
    figure, axes = plt.subplots(
        len(found),
        len(names),
        figsize=(3.2 * len(names) + 1, 1.7 * len(found) + 0.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for search, row in zip(found, axes):
        row[0].set_ylabel(search.optimizer.label)
        for name, ax in zip(names, row):
            if name not in search.optimizer.search:
                ax.axis("off")
                continue
            ax.set(xscale="log", xlim=search.optimizer.search[name])
            ax.set_yscale("symlog", linthresh=0.1)  # an error may be 0
            for state, colour, label in (
                (TrialState.PRUNED, "0.75", "pruned, at its last epoch"),
                (TrialState.COMPLETE, "tab:green", "complete"),
            ):
                trials = [t for t in search.finished if t.state == state and name in t.params]
                errors = [t.value if state == TrialState.COMPLETE else _last(t) for t in trials]
                ax.scatter([t.params[name] for t in trials], errors, s=18, color=colour, label=label, clip_on=False)
            if search.best:
                ax.axvline(search.best.params[name], color="tab:green", linewidth=0.8)
    for name, ax in zip(names, axes[0]):
        ax.set_title(name)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle("Validation error of each trial; the line is the best")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    write_atomically(path, picture.getvalue())


def _last(trial: FrozenTrial) -> float:
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else math.nan
