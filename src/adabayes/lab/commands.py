"""The lab's commands, each of which carries out a request (:mod:`adabayes.lab.requests`) from :mod:`adabayes.cli`.

A command writes its results to the disk before it prints anything, because its output may go nowhere.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from typing_extensions import Self

from adabayes._util.signals import Stopped
from adabayes.lab import data, optimizers, protocol, requests
from adabayes.lab import report as reports
from adabayes.lab import suite as suites
from adabayes.lab.data import DataError, download
from adabayes.lab.display import Display, make_table, plain, show, tracked
from adabayes.lab.execute import local, sweep
from adabayes.lab.execute.workers import Workers
from adabayes.lab.protocol import Execution, Protocol, ProtocolError, Spec
from adabayes.lab.report import results
from adabayes.lab.run import distributed
from adabayes.lab.run.distributed import Ranks
from adabayes.lab.run.folder import folder_of
from adabayes.lab.run.training import Watch, step_seconds

__all__ = [
    "Unfinished",
    "data_fetch",
    "data_list",
    "data_verify",
    "dry_run",
    "report",
    "reproduce",
    "runs",
    "suite",
    "theory",
    "train",
    "tune",
]

Executor = Callable[[Sequence[Spec], Path, Display, sweep.Stop, sweep.Options], list[sweep.Outcome]]


class Unfinished(Exception):
    """A command could not do everything. The message has a line for each run without a result."""


def reproduce(request: requests.Reproduce) -> None:
    chosen = _chosen(request.choice)
    if isinstance(request.executor, requests.Local):  # with Ray, the device is the nodes'
        _check_device(request.training.device)
    specs = chosen.runs(_execution(request.training))
    optimizers.check(specs)
    out = _out(request, chosen)
    with _executor(request.executor) as run:
        outcomes, rows = _sweep(chosen, specs, out, run, request.training, request.command)
    page = reports.write(reports.content(chosen, specs, request.command, out), out)
    _show(chosen, rows, out)
    if said := suites.sentence(chosen, specs, out):
        print(said)
    print(f"{page} shows everything; open it in a browser")
    _check(outcomes, request.command)


def dry_run(request: requests.Reproduce) -> None:
    """List the runs of a comparison and estimate their time, without training or writing anything."""
    chosen = _chosen(request.choice)
    specs = chosen.runs(_execution(request.training))
    optimizers.check(specs)
    _dry_run(specs, _out(request, chosen), _of_runs(request.training))


def train(request: requests.Train) -> None:
    chosen = _chosen(request.choice)
    dataset, model = chosen.panel("one run has one data set and one model")
    training = request.training
    _check_device(training.device)
    (optimizer,) = chosen.optimizers.values()
    settings = optimizer.settings_for(model) | request.settings
    if request.settings:
        chosen = replace(chosen, published={})
    optimizer = replace(optimizer, settings=settings, of_models={})
    spec = chosen.spec(dataset, model, optimizer, request.seed, _execution(training))
    optimizers.check([spec])
    out = _out(request, chosen, "-train")

    def run(ranks: Ranks) -> None:
        executor = partial(local.run, ranks=ranks)
        outcomes, rows = _sweep(chosen, [spec], out, executor, training, request.command)
        _show(chosen, rows, out)
        _check(outcomes, request.command)

    if not request.distributed:
        run(Ranks())
        return
    if training.compile:
        raise ProtocolError("--compile does not go with --distributed: leave one of them out")
    with distributed.join(request.distributed, training.device) as ranks:
        if ranks.is_first:
            run(ranks)
        else:
            _follow(spec, out, ranks, training)


def report(request: requests.Report) -> None:
    out = request.out or request.folder
    protocol, specs, command, left_out = results.read(request.folder, _noted(request.folder))
    content = reports.content(protocol, specs, command, request.folder, left_out)
    page = reports.write(content, out)
    print(page)
    if left_out:
        print(
            f"{len(left_out)} of {len(specs) + len(left_out)} runs have other settings and are not shown; see the page"
        )
    if request.figures:
        from adabayes.lab.report import figures

        written = figures.write(content, out / "figures")
        print(f"{len(written)} files in {out / 'figures'}: PDF, SVG and PNG of each figure")


def theory(request: requests.Theory) -> None:
    from adabayes.lab import theory as parts

    out = request.out
    out.mkdir(parents=True, exist_ok=True)
    topics = []
    for make in tracked(parts.TOPICS, "simulating"):
        topics.append(make())
        parts.draw(topics[-1], out)
    text, explorer = parts.write(topics, out), parts.write_explorer(out)
    show(parts.table(topics))
    print(f"{text} has the claims with figures; {explorer} is an interactive page")
    failed = [check for topic in topics for check in topic.checks if not check.passed]
    if failed:
        raise Unfinished("\n".join(f"not as predicted: {check.claim}" for check in failed))


def runs(request: requests.Runs) -> None:
    specs = _noted(request.folder)
    table = make_table({"run": "wrap", "status": "left", "epochs": "right", "test error": "right"})
    rows = results.collect(specs, request.folder)
    for spec, row in zip(specs, rows):
        digits = data.digits_of(data.error_of(spec.dataset))
        error = "" if row.final_test_error is None else f"{row.final_test_error:.{digits}f}"
        table.add_row(*map(plain, (spec, row.status, f"{row.epochs}/{spec.epochs}", error)))
    show(table)
    statuses = [row.status for row in rows]
    console = Console(soft_wrap=True)
    console.print(plain(", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))))
    for spec, row in zip(specs, rows):
        if row.error:
            console.print(plain(f"{spec}: {row.error}"))


def tune(request: requests.Tune) -> None:
    from adabayes.lab import tuning

    training = request.training
    chosen = _chosen(request.choice)
    tuning.check(chosen)
    _check_device(training.device)
    _check_data(chosen.datasets, training.data)
    out = _out(request, chosen, "-tuning")
    trials = request.budget * len(chosen.optimizers)
    stop = sweep.Stop()
    with Display(trials, trials * chosen.epochs) as display, stop.on_signals():
        failures = tuning.tune(
            chosen,
            request.budget,
            out,
            lambda: data.load(chosen.datasets[0], training.data, chosen.data_options),
            display,
            stop,
            training.checkpoint_seconds,
            _execution(training),
            training.threads,
        )
    found = tuning.searches(chosen, out)
    tuned = any(search.best for search in found)
    if tuned:
        tuning.plot(found, out / "tune.png")
        tuning.write_protocol(chosen, request.choice.protocol, found, out / "tuned.toml")
    show(tuning.table(found, data.error_of(chosen.datasets[0])))
    if tuned:
        print(f"{out / 'tune.png'} shows each search. Compare on fresh seeds with:")
        print(f"adabayes reproduce --protocol {shlex.quote(str(out / 'tuned.toml'))}")
    if failures:
        raise Unfinished("\n".join(map(_line, failures)))


def suite(request: requests.Suite) -> None:
    from adabayes.lab.report import suite_figure, suite_page

    for name in request.workloads or ():
        protocol.check_workload(name)
    outcomes: list[sweep.Outcome] = []
    if request.time_steps:
        _time_steps(request)
    if request.records or request.time_steps:
        found = suites.read(request.records or request.out)
    else:
        found, outcomes = _suite(request)
    page = suite_page.write(found, request.out)
    picture = suite_figure.write(found, request.out)[-1]
    for table in suite_page.tables(found):
        show(table)
    print(f"{page} shows everything; open it in a browser. A picture of it: {picture}")
    _check(outcomes, request.command)


def _suite(request: requests.Suite) -> tuple[list[suites.Record], list[sweep.Outcome]]:
    """Do the runs that are not done yet, workload by workload, and write a record of each workload."""
    chosen = [
        protocol.load(f"suite/{name}").narrowed(optimizers=request.optimizers, seeds=request.seeds)
        for name in request.workloads or protocol.WORKLOADS
    ]
    for one in chosen:
        optimizers.check(suites.trials(one, request.budget))
        _check_data(one.datasets, request.data)
    options = sweep.Options(request.data, request.checkpoint_seconds, threads=1)
    stop = sweep.Stop()
    each = {one.name: len(one.optimizers) * (request.budget + len(one.seeds)) for one in chosen}
    found: list[suites.Record] = []
    outcomes: list[sweep.Outcome] = []
    epochs = sum(each[one.name] * one.epochs for one in chosen)
    display = Display(sum(each.values()), epochs)
    with display, stop.on_signals(), _executor(request.executor) as run:
        for one in chosen:
            workload = _Workload(one, request, request.out / suites.name_of(one))
            for specs in workload.rounds():
                display.expect([spec for spec in specs if spec.length < 1])
                outcomes += run(specs, workload.out, display, stop, options)
            workload.time(options)
            found.append(workload.record)
    return found, outcomes


def _time_steps(request: requests.Suite) -> None:
    """Time the steps of all records again, or of some workloads; nothing is trained."""
    folder = request.records or request.out
    records = [r for r in suites.read(folder) if r.name in (request.workloads or protocol.WORKLOADS)]
    for record in records:
        _check_data(protocol.load(f"suite/{record.name}").datasets, request.data)
    for record in tracked(records, "timing"):
        _timed(record, sweep.Options(request.data)).write(folder)


def _timed(record: suites.Record, options: sweep.Options) -> suites.Record:
    """Time a training step with each optimizer, with the settings that won."""
    whole = replace(protocol.load(f"suite/{record.name}"), seeds=(0,))
    specs = suites.finals(whole, record.chosen)
    times = step_seconds(specs, options.load(specs[0])) if specs else {}
    return replace(record, step_seconds={name: float(f"{s:.4g}") for name, s in times.items()})


class _Workload:
    """A workload, its rounds of runs and its record, which is written after each round."""

    def __init__(self, chosen: Protocol, request: requests.Suite, out: Path) -> None:
        self.chosen, self.budget, self.out = chosen, request.budget, out
        self._records = request.out
        path = request.out / f"{suites.name_of(chosen)}.json"
        self._before = suites.Record.read(path) if path.exists() else None
        self._whole = protocol.load(f"suite/{suites.name_of(chosen)}")
        self.out.mkdir(parents=True, exist_ok=True)
        self.record = self._collected()

    def rounds(self) -> Iterator[list[Spec]]:
        """Yield what to run next: trials, then the winners with fresh seeds, then with shorter schedules."""
        yield self._missing(suites.trials(self.chosen, self.budget))
        self.record = self._collected()
        won = {name: settings for name, settings in self.record.chosen.items() if name in self.chosen.optimizers}
        yield self._missing(suites.finals(self.chosen, won))
        self.record = self._collected()
        while specs := suites.shorter(self.chosen, self.record):
            yield specs
            self.record = self._collected()
            if not all(spec.identity in self.record.ended() for spec in specs):
                return  # some failed

    def time(self, options: sweep.Options) -> None:
        """Time a step with each optimizer, unless the record has the times already."""
        if self.record.step_seconds.keys() != self.record.chosen.keys():
            self.record = _timed(self.record, options)
            self.record.write(self._records)

    def _missing(self, specs: Sequence[Spec]) -> list[Spec]:
        known = self._before.ended() if self._before else {}
        return [spec for spec in specs if spec.identity not in known or folder_of(spec, self.out).path.exists()]

    def _collected(self) -> suites.Record:
        error = data.error_of(self.chosen.datasets[0])
        record = suites.collect(self.chosen, self.budget, error, self.out, self._before, self._whole)
        record.write(self._records)
        return record


def data_list(request: requests.DataList) -> None:
    table = make_table({"data set": "left", "status": "left", "where": "wrap"})
    for name in data.NAMES:
        files = data.source(name)
        if files is None:
            table.add_row(name, "embedded", "needs no download")
            continue
        table.add_row(name, *map(plain, _whereabouts(files, request.data)))
    show(table)


def _whereabouts(name: str, folder: Path | None) -> tuple[str, str]:
    """Return whether a data set is there, and where it is or would be."""
    try:
        return "there", str(download.find(name, folder))
    except DataError:
        pass
    try:
        place = download.root_folder(folder) / download.SOURCES[name].folder
    except DataError as error:  # there is no folder to look in
        return "missing", str(error)
    return "missing", f"{place} (adabayes data fetch {name})"


def data_fetch(request: requests.DataFiles) -> None:
    for name in _with_files(request.names):
        with _FileProgress() as progress:
            folder = download.fetch(name, request.data, progress)
        print(f"{name} is in {folder}, checksums right")


def data_verify(request: requests.DataFiles) -> None:
    for name in _with_files(request.names):
        folder = download.find(name, request.data)
        with _FileProgress() as progress:
            download.verify(name, folder, progress)
        print(f"{name} in {folder}: checksums right")


def _with_files(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in download.SOURCES:
            raise DataError(f"{name!r} is not a data set with files; there are {', '.join(download.SOURCES)}")
    return names


class _FileProgress:
    """A bar for each file on a terminal; elsewhere nothing."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)


# Pieces


def _chosen(choice: requests.Choice) -> Protocol:
    chosen = protocol.load(choice.protocol)
    if choice.validation is not None:
        chosen = replace(chosen, validation=choice.validation, published={})
    return chosen.narrowed(choice.datasets, choice.models, choice.optimizers, choice.seeds, choice.epochs)


def _noted(folder: Path) -> list[Spec]:
    specs = sweep.noted(folder)
    if not specs:
        raise ProtocolError(f"there are no runs in {folder}; name the folder that was --out of reproduce or train")
    return specs


def _out(request: requests.Reproduce | requests.Train | requests.Tune, chosen: Protocol, suffix: str = "") -> Path:
    return request.out or Path("out") / f"{chosen.name}{suffix}"


def _execution(training: requests.Training) -> Execution:
    return Execution(training.device, training.channels_last, training.autocast, training.compile)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ProtocolError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _check_data(names: Iterable[str], folder: Path | None) -> None:
    """Raise if a data set is missing, before anything is started. The message says what to do."""
    for name in names:
        if files := data.source(name):
            download.find(files, folder)


def _sweep(
    chosen: Protocol, specs: list[Spec], out: Path, run: Executor, training: requests.Training, command: str
) -> tuple[list[sweep.Outcome], list[results.Row]]:
    """Do the runs that are not done yet and write the results of all of them."""
    _check_data(dict.fromkeys(spec.dataset for spec in specs), training.data)
    if training.tensorboard:
        print(f"tensorboard --logdir {out / 'runs'} shows the runs while they train", file=sys.stderr)
    stop = sweep.Stop()
    out.mkdir(parents=True, exist_ok=True)
    _write(chosen, specs, out, command)  # so that a report can be made meanwhile
    try:
        with Display(len(specs), sum(spec.epochs for spec in specs)) as display, stop.on_signals():
            outcomes = run(specs, out, display, stop, _of_runs(training))
    except Stopped:
        _write(chosen, specs, out, command)
        raise
    return outcomes, _write(chosen, specs, out, command)


def _follow(spec: Spec, out: Path, ranks: Ranks, training: requests.Training) -> None:
    """Train as one of several processes, of which the first writes and prints."""
    stop = sweep.Stop()
    options = _of_runs(training)
    load = partial(options.load, spec)
    with stop.on_signals():
        outcome = sweep.attempt(spec, folder_of(spec, out), load, Watch(should_stop=stop), options, ranks)
    if outcome.status == "failed":
        raise Unfinished(f"process {ranks.rank}: {outcome.error}")


def _of_runs(training: requests.Training) -> sweep.Options:
    return sweep.Options(training.data, training.checkpoint_seconds, training.tensorboard, training.threads)


@contextmanager
def _executor(executor: requests.Local | requests.Ray) -> Iterator[Executor]:
    """Provide what does runs; processes that it starts live until the end."""
    if isinstance(executor, requests.Local):
        with Workers() as workers:
            yield partial(local.run, jobs=executor.jobs, workers=workers)
    else:
        from adabayes.lab.execute import ray

        yield partial(ray.run, address=executor.address, cpus=executor.cpus, gpus=executor.gpus)


def _write(chosen: Protocol, specs: list[Spec], out: Path, command: str) -> list[results.Row]:
    """Write the results of these runs and of the others in the folder, and return the rows of these."""
    these = {spec.folder for spec in specs}
    rows = results.collect(specs, out)
    others = results.collect([spec for spec in sweep.noted(out) if spec.folder not in these], out)
    results.write(chosen, rows, others, out, command)
    return rows


def _show(chosen: Protocol, rows: list[results.Row], out: Path) -> None:
    for table in results.tables(chosen, rows):
        show(table)
    print(f"{out / 'results.csv'}, {out / 'results.json'}; the runs are in {out / 'runs'}")


def _check(outcomes: list[sweep.Outcome], command: str) -> None:
    """Raise if a run has no result."""
    others = [outcome for outcome in outcomes if outcome.status in ("failed", "running")]
    if others:
        lines = map(_line, others)
        again = f"{len(others)} of {len(outcomes)} runs have no result. To try again: {command}"
        raise Unfinished("\n".join([*lines, again]))


def _line(outcome: sweep.Outcome) -> str:
    return plain(f"{outcome.status}: {outcome.spec}: {outcome.error}").plain


def _dry_run(specs: list[Spec], out: Path, options: sweep.Options) -> None:
    left = []
    for spec in specs:
        status = folder_of(spec, out).status()
        settings = ", ".join(f"{key} {value}" for key, value in spec.settings.items())
        print(f"{spec}: {status}; {spec.epochs} epochs; {settings}")
        if status not in ("done", "diverged"):
            left.append(spec)
    print(f"{len(specs)} runs, {len(left)} of them still to do, in {out / 'runs'}")
    if left:
        try:
            seconds = sweep.estimate(left, out, options)
        except (DataError, RuntimeError, AssertionError) as error:  # no data, or no such device
            print(f"their time cannot be estimated here: {str(error).splitlines()[0]}")
        else:
            print(f"about {_duration(seconds)} on this machine, one run after the other (estimated from a few steps)")


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
