"""Fair tuning: as many trials for every optimizer, over its own search space, judged on a validation split."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adabayes.lab import protocol as protocols
from adabayes.lab import sweep
from adabayes.lab.data import Data
from adabayes.lab.display import Display
from adabayes.lab.protocol import OptimizerSpec, Protocol, ProtocolError
from adabayes.lab.store import exclusive, folder_of, write_atomically

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise ImportError("tuning needs optuna: pip install '.[lab]' in the folder of AdaBayes") from error

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Search", "check", "plot", "searches", "table", "tune", "write_protocol"]

VALIDATION = 0.1  # of the training data, where the protocol does not say
SEED = 1_000_003  # of the trials, so that those of the comparison are fresh
WORST = 100.0  # percent: what a run that diverges is worth


@dataclass(frozen=True)
class Search:
    """What is known of one optimizer: its trials in order."""

    optimizer: OptimizerSpec
    trials: tuple[FrozenTrial, ...]

    @property
    def finished(self) -> list[FrozenTrial]:
        """Those that count against the budget: not those that failed or were broken off, which are run again."""
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
    **options: Any,
) -> list[sweep.Outcome]:
    """Give every optimizer ``budget`` trials, the first with the protocol's own settings; goes on where it was.

    Options are those of a Spec. What failed is returned: after a failure, an optimizer gets no more trials for now.
    """
    check(protocol)
    out.mkdir(parents=True, exist_ok=True)
    failures: dict[str, sweep.Outcome] = {}
    with exclusive(out / ".lock", f"another process is tuning in {out}; it was left alone"):
        whole = load()
        studies = {name: _study(protocol, optimizer, out) for name, optimizer in protocol.optimizers.items()}
        display.finished = sum(len(search.finished) for search in searches(protocol, out))
        for i in range(budget):  # in turn, so that a search that is stopped early is fair as well
            for name, optimizer in protocol.optimizers.items():
                if name not in failures and len(Search(optimizer, tuple(studies[name].trials)).finished) <= i:
                    outcome = _trial(studies[name], protocol, optimizer, out, whole, display, stop, options)
                    if outcome.status not in ("done", "diverged", "pruned"):
                        failures[name] = outcome
    return list(failures.values())


def check(protocol: Protocol) -> None:
    """Raise if a protocol cannot be tuned."""
    if len(protocol.datasets) > 1 or len(protocol.models) > 1:
        raise ProtocolError(
            f"tuning is for one data set and one model at a time; protocol {protocol.name} has "
            f"{', '.join(protocol.datasets)} and {', '.join(protocol.models)}: choose with --dataset and --model"
        )
    for optimizer in protocol.optimizers.values():
        if not optimizer.search:
            raise ProtocolError(
                f"[optimizers.{optimizer.name}] has nothing to search; add a line like search = {{ lr = [1e-4, 1e-1] }}"
            )
        own = optimizer.settings_for(protocol.models[0])
        for key, (low, high) in optimizer.search.items():
            if not low <= own.get(key, low) <= high:
                raise ProtocolError(
                    f"[optimizers.{optimizer.name}] has {key} = {own[key]}, which is outside of its search, {low} to "
                    f"{high}; widen it, or leave {key} out of it"
                )


def searches(protocol: Protocol, out: Path) -> list[Search]:
    """What is known so far."""
    return [Search(o, tuple(_open(protocol, o, out).trials)) for o in protocol.optimizers.values()]


def _held_out(protocol: Protocol) -> Protocol:
    return replace(protocol, validation=protocol.validation or VALIDATION)


def _open(protocol: Protocol, optimizer: OptimizerSpec, out: Path) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Its name says all that the trials have in common, so that those of another setting are not taken for these.
    model = protocol.models[0]
    fixed = {key: value for key, value in optimizer.settings_for(model).items() if key not in optimizer.search}
    common = replace(optimizer, settings=fixed, of_models={})
    one = _held_out(protocol).spec(protocol.datasets[0], model, common, SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # since 2021
        sampler = optuna.samplers.QMCSampler(scramble=True, seed=0, warn_independent_sampling=False)
    return optuna.create_study(
        study_name=f"{one.folder} {json.dumps(optimizer.search, sort_keys=True)}",
        storage=JournalStorage(JournalFileBackend(str(out / "tune.journal"))),
        sampler=sampler,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=max(1, protocol.epochs // 4)),
        direction="minimize",
        load_if_exists=True,
    )


def _study(protocol: Protocol, optimizer: OptimizerSpec, out: Path) -> optuna.Study:
    """The study to add trials to: first those that are owed."""
    study = _open(protocol, optimizer, out)
    if not study.trials:
        own = optimizer.settings_for(protocol.models[0])
        study.enqueue_trial({key: float(own[key]) for key in optimizer.search if key in own})
    settled = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.WAITING)
    known = [t.params or t.system_attrs.get("fixed_params") for t in study.trials if t.state in settled]
    for trial in study.trials:
        if trial.state == TrialState.RUNNING:  # in a process that was stopped
            study.tell(trial.number, state=TrialState.FAIL)
        if trial.state not in settled and trial.params not in known:
            study.enqueue_trial(trial.params)
            known.append(trial.params)
    return study


def _trial(
    study: optuna.Study,
    protocol: Protocol,
    optimizer: OptimizerSpec,
    out: Path,
    whole: Data,
    display: Display,
    stop: sweep.Stop,
    options: dict[str, Any],
) -> sweep.Outcome:
    space: dict[str, optuna.distributions.BaseDistribution] = {
        key: optuna.distributions.FloatDistribution(*limits, log=True) for key, limits in optimizer.search.items()
    }
    trial = study.ask(space)
    settings = {**optimizer.settings_for(protocol.models[0]), **trial.params}
    tried = replace(optimizer, settings=settings, of_models={})
    spec = _held_out(protocol).spec(protocol.datasets[0], protocol.models[0], tried, SEED, **options)

    def is_hopeless(row: dict[str, Any]) -> bool:
        trial.report(row["test_error"], row["epoch"])
        return trial.should_prune()

    display.started(spec)
    folder = folder_of(spec, out)
    outcome = sweep.attempt(
        spec, folder, lambda: whole, stop, report=lambda p: display.progressed(spec, p), is_hopeless=is_hopeless
    )
    display.ended(spec, outcome)
    if outcome.status == "done":
        study.tell(trial, folder.metrics()[-1]["test_error"])
    elif outcome.status == "diverged":
        study.tell(trial, WORST)
    else:
        study.tell(trial, state=TrialState.PRUNED if outcome.status == "pruned" else TrialState.FAIL)
    return outcome


# What came out


def table(found: list[Search]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    grid = Table(title="Validation error %, at the end of training", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("optimizer", "trials", "pruned", "as given", "best", "with"):
        grid.add_column(name, justify="left" if name in ("optimizer", "with") else "right")
    for search in found:
        first = search.finished[0].value if search.finished else None
        best = search.best
        grid.add_row(
            escape(search.optimizer.label),
            str(len(search.finished)),
            str(sum(t.state == TrialState.PRUNED for t in search.finished)),
            "" if first is None else f"{first:.2f}",
            "" if best is None else f"{best.value:.2f}",
            "" if best is None else ", ".join(f"{key} {value:.2g}" for key, value in best.params.items()),
        )
    return grid


def write_protocol(protocol: Protocol, source: str | Path, found: list[Search], path: Path) -> None:
    """A protocol with the winners, for ``reproduce``, whose seeds are fresh."""
    extends = str(source) if str(source) in protocols.NAMES else os.path.relpath(source, path.parent)
    lines = [
        "# Written by adabayes tune: the best settings that it found for each optimizer.",
        f"description = {json.dumps(f'{protocol.name}, tuned')}",
        f"extends = {json.dumps(extends)}",
        f"datasets = {json.dumps(protocol.datasets)}",
        f"models = {json.dumps(protocol.models)}",
        f"epochs = {protocol.epochs}",
        f"compare = {json.dumps([s.optimizer.name for s in found if s.best])}",
    ]
    for search in found:
        if search.best:
            settings = {**search.optimizer.settings_for(protocol.models[0]), **search.best.params}
            lines += ["", f"[optimizers.{search.optimizer.name}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
            lines += ["models = {}", f"# validation error {search.best.value:.3f} %, of {len(search.finished)} trials"]
    write_atomically(path, "\n".join([*lines, ""]).encode())


def plot(found: list[Search], path: Path) -> None:
    """Validation error over each setting: how sensitive an optimizer is, and whether the range was wide enough."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install '.[lab]' in the folder of AdaBayes") from error
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
    figure.suptitle("Validation error (%) of each trial; the line is the best")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _last(trial: FrozenTrial) -> float:
    return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else math.nan
