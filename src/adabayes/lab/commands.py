"""What the lab's commands do; :mod:`adabayes.cli` has their options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typing_extensions import Self

from adabayes.lab import data, files, protocol, results, sweep
from adabayes.lab.display import Display, tracked
from adabayes.lab.protocol import Protocol, ProtocolError, Spec
from adabayes.lab.store import folder_of
from adabayes.lab.training import Interrupted


def reproduce(args: argparse.Namespace) -> int:
    chosen = _chosen(args).narrowed(args.dataset, args.model, args.optimizers, args.seeds, args.epochs)
    out = _out(args, chosen)
    specs = chosen.runs(**_options(args))
    if args.dry_run:
        return _dry_run(specs, out, args.data)
    code = _sweep(chosen, specs, out, args)
    if code != 130:
        from adabayes.lab import report as page

        print(f"{page.write(page.content(chosen, specs, args.command, out), out)} shows it all; open it in a browser")
    return code


def train(args: argparse.Namespace) -> int:
    chosen = _chosen(args).narrowed(args.dataset, args.model, [args.optimizer], None, args.epochs)
    if len(chosen.datasets) > 1 or len(chosen.models) > 1:
        raise ProtocolError(
            f"one run has one data set and one model; protocol {chosen.name} has {', '.join(chosen.datasets)} and "
            f"{', '.join(chosen.models)}: choose with --dataset and --model"
        )
    optimizer = chosen.optimizers[args.optimizer]
    settings = optimizer.settings_for(chosen.models[0]) | dict(map(_setting, args.set or ()))
    if args.set:
        chosen = replace(chosen, published={})
    optimizer = replace(optimizer, settings=settings, of_models={})
    spec = chosen.spec(chosen.datasets[0], chosen.models[0], optimizer, args.seed, **_options(args))
    out = _out(args, chosen)
    if not args.distributed:
        return _sweep(chosen, [spec], out, args)
    if args.compile:
        raise ProtocolError("--compile does not go with --distributed: leave one of them out")
    from adabayes.lab import several  # which takes half a second to import

    with several.join(args.distributed, args.device) as args.ranks:
        return _sweep(chosen, [spec], out, args) if args.ranks.is_first else _follow(spec, out, args)


def report(args: argparse.Namespace) -> int:
    from adabayes.lab import report as page

    out = args.out or args.folder
    protocol, specs, command, left_out = results.read(args.folder, _noted(args.folder))
    content = page.content(protocol, specs, command, args.folder, left_out)
    print(page.write(content, out))
    if args.figures:
        from adabayes.lab import figures

        written = figures.write(content, out / "figures")
        print(f"{len(written)} files in {out / 'figures'}: PDF, SVG and PNG of each figure")
    return 0


def theory(args: argparse.Namespace) -> int:
    from adabayes.lab import theory as parts

    args.out.mkdir(parents=True, exist_ok=True)
    topics = []
    for make in tracked(parts.TOPICS, "simulating"):
        topics.append(make())
        parts.draw(topics[-1], args.out)
    Console().print(parts.table(topics))
    print(f"{parts.write(topics, args.out)} has it with figures; {parts.write_explorer(args.out)} is to play with")
    failed = [check for topic in topics for check in topic.checks if not check.passed]
    for check in failed:
        print(f"not as predicted: {check.claim}", file=sys.stderr)
    return 1 if failed else 0


def runs(args: argparse.Namespace) -> int:
    specs = _noted(args.folder)
    table = Table(box=None, pad_edge=False)
    for name in ("run", "status", "epochs", "test error %", "why"):
        table.add_column(name, justify="right" if name in ("epochs", "test error %") else "left")
    rows = results.collect(specs, args.folder)
    for spec, row in zip(specs, rows):
        error = "" if row.final_test_error is None else f"{row.final_test_error:.2f}"
        table.add_row(str(spec), row.status, f"{row.epochs}/{spec.epochs}", error, escape(row.error or ""))
    console = Console()
    console.print(table)
    statuses = [row.status for row in rows]
    console.print(", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)))
    return 0


def tune(args: argparse.Namespace) -> int:
    from adabayes.lab import tuning

    chosen = _chosen(args).narrowed(args.dataset, args.model, args.optimizers, None, args.epochs)
    if args.budget < 1:
        raise ProtocolError(f"--budget {args.budget}: there must be at least one trial of each optimizer")
    tuning.check(chosen)
    _check_data(chosen.datasets, args.data)
    out = args.out or Path("out") / f"{chosen.name}-tuning"
    trials = args.budget * len(chosen.optimizers)
    stop = sweep.Stop()
    stop.on_signals()
    try:
        with Display(trials, trials * chosen.epochs) as display:
            failures = tuning.tune(
                chosen,
                args.budget,
                out,
                lambda: data.load(chosen.datasets[0], args.data),
                display,
                stop,
                **_options(args),
            )
    except (Interrupted, KeyboardInterrupt):
        return _stopped(args)
    found = tuning.searches(chosen, out)
    results.show(tuning.table(found))
    if any(search.best for search in found):
        tuning.plot(found, out / "tune.png")
        tuning.write_protocol(chosen, args.protocol, found, out / "tuned.toml")
        print(f"{out / 'tune.png'} shows each search. Compare on fresh seeds with:")
        print(f"adabayes reproduce --protocol {out / 'tuned.toml'}")
    for outcome in failures:
        print(f"{outcome.status}: {outcome.spec}: {outcome.error}", file=sys.stderr)
    return 1 if failures else 0


def data_list(args: argparse.Namespace) -> int:
    table = Table(box=None, pad_edge=False)
    for name in ("data set", "is", "where"):
        table.add_column(name, overflow="fold")
    for name in data.NAMES:
        if name not in files.SOURCES:
            table.add_row(name, "embedded", "needs no download")
            continue
        try:
            table.add_row(name, "there", str(files.find(name, args.data)))
        except files.DataError:
            folder = (args.data or files.default_folder()) / files.SOURCES[name].folder
            table.add_row(name, "not there", f"{folder} (adabayes data fetch {name})")
    Console().print(table)
    return 0


def data_fetch(args: argparse.Namespace) -> int:
    for name in _with_files(args.names):
        with _FileProgress() as progress:
            folder = files.fetch(name, args.data, progress)
        print(f"{name} is in {folder}, checksums right")
    return 0


def data_verify(args: argparse.Namespace) -> int:
    for name in _with_files(args.names):
        folder = files.find(name, args.data)
        with _FileProgress() as progress:
            files.verify(name, folder, progress)
        print(f"{name} in {folder}: checksums right")
    return 0


def _with_files(names: list[str]) -> list[str]:
    for name in names:
        if name not in files.SOURCES:
            raise files.DataError(
                f"{name!r} is not a data set that comes in files; there are {', '.join(files.SOURCES)}"
            )
    return names


class _FileProgress:
    """A bar for each file; of what is no terminal, nothing."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
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


def _chosen(args: argparse.Namespace) -> Protocol:
    chosen = protocol.load(args.protocol)
    if getattr(args, "validation", None) is None:
        return chosen
    return replace(chosen, validation=args.validation, published={})


def _noted(folder: Path) -> list[Spec]:
    specs = sweep.noted(folder)
    if not specs:
        raise ProtocolError(f"there are no runs in {folder}; give what was --out of reproduce or train")
    return specs


def _out(args: argparse.Namespace, chosen: Protocol) -> Path:
    return args.out or Path("out") / chosen.name


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of a Spec."""
    options = {
        "device": args.device,
        "autocast": args.autocast,
        "compile": args.compile,
        "channels_last": not args.no_channels_last,
    }
    if args.executor == "ray" or args.dry_run:
        return options  # the device is that of the nodes, or is not needed
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ProtocolError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    return options


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ProtocolError(f"--set {text}: write it as name=value, like --set lr=0.01")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _check_data(names: Iterable[str], folder: Path | None) -> None:
    """Say what to do if a data set is not there, before anything is begun."""
    for name in names:
        if name in files.SOURCES:
            files.find(name, folder)


def _sweep(chosen: Protocol, specs: list[Spec], out: Path, args: argparse.Namespace) -> int:
    _check_data(dict.fromkeys(spec.dataset for spec in specs), args.data)
    if args.tensorboard:
        print(f"tensorboard --logdir {out / 'runs'} shows the runs as they go", file=sys.stderr)
    run = _executor(args)
    stop = sweep.Stop()
    stop.on_signals()
    out.mkdir(parents=True, exist_ok=True)
    _write(chosen, specs, out, args)  # so that a report can be made meanwhile
    try:
        with Display(len(specs), sum(spec.epochs for spec in specs)) as display:
            outcomes = run(specs, out, display, stop, _of_runs(args))
    except (Interrupted, KeyboardInterrupt):
        _write(chosen, specs, out, args)
        return _stopped(args)
    for table in results.tables(chosen, _write(chosen, specs, out, args)):
        results.show(table)
    print(f"{out / 'results.csv'}, {out / 'results.json'}; the runs are in {out / 'runs'}")
    others = [outcome for outcome in outcomes if outcome.status in ("failed", "running")]
    for outcome in others:
        print(f"{outcome.status}: {outcome.spec}: {outcome.error}", file=sys.stderr)
    if others:
        print(f"{len(others)} of {len(specs)} runs have no result. Try again with: {args.command}", file=sys.stderr)
    return 1 if others else 0


def _follow(spec: Spec, out: Path, args: argparse.Namespace) -> int:
    """Train as one of several processes, of which the first writes and shows."""
    stop = sweep.Stop()
    stop.on_signals()
    options = _of_runs(args)
    load = partial(options.load, spec.dataset)
    try:
        outcome = sweep.attempt(spec, folder_of(spec, out), load, stop, args.ranks, **options.of_training)
    except Interrupted:
        return 130
    if outcome.status == "failed":
        print(f"process {args.ranks.rank}: {outcome.error}", file=sys.stderr)
        return 1
    return 0


def _of_runs(args: argparse.Namespace) -> sweep.Options:
    return sweep.Options(args.data, args.checkpoint_every, args.tensorboard)


def _executor(args: argparse.Namespace) -> Callable[..., list[sweep.Outcome]]:
    """What runs the runs."""
    if args.jobs < 1:
        raise ProtocolError(f"--jobs {args.jobs}: there must be at least one run at a time")
    if args.executor == "local":
        if args.address:
            raise ProtocolError(f"--address {args.address} is that of a Ray cluster: give --executor ray as well")
        return partial(sweep.run, jobs=args.jobs, ranks=args.ranks)
    if args.cpus_per_run <= 0 or args.gpus_per_run < 0:
        raise ProtocolError(
            f"--cpus-per-run {args.cpus_per_run:g} must be above 0, --gpus-per-run {args.gpus_per_run:g} at least 0"
        )
    from adabayes.lab import cluster

    return partial(cluster.run, address=args.address, cpus=args.cpus_per_run, gpus=args.gpus_per_run)


def _write(chosen: Protocol, specs: list[Spec], out: Path, args: argparse.Namespace) -> list[results.Row]:
    """Write what came out of these runs, beside others of the folder; the rows of these."""
    these = {spec.folder for spec in specs}
    rows = results.collect(specs, out)
    others = results.collect([spec for spec in sweep.noted(out) if spec.folder not in these], out)
    results.write(chosen, rows, others, out, args.command)
    return rows


def _stopped(args: argparse.Namespace) -> int:
    print(f"stopped; nothing is lost. Go on with: {args.command}", file=sys.stderr)
    return 130


def _dry_run(specs: list[Spec], out: Path, data_folder: Path | None) -> int:
    left = []
    for spec in specs:
        status = folder_of(spec, out).status()
        settings = ", ".join(f"{key} {value}" for key, value in spec.settings.items())
        print(f"{spec}: {status}; {spec.epochs} epochs; {settings}")
        if status not in ("done", "diverged"):
            left.append(spec)
    print(f"{len(specs)} runs, of which {len(left)} are to be done, in {out / 'runs'}")
    if left:
        try:
            seconds = sweep.estimate(left, out, data_folder)
        except (files.DataError, RuntimeError, AssertionError) as error:  # no data, or no such device
            print(f"how long that takes cannot be measured here: {str(error).splitlines()[0]}")
        else:
            print(f"about {_duration(seconds)} on this machine, one run after the other (from a few measured steps)")
    return 0


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
