"""What came out: a row for each run, means over seeds, and a table in the form of the paper's."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adabayes.lab.protocol import OptimizerSpec, Protocol, Spec
from adabayes.lab.store import RunFolder, folder_of, read_json, write_atomically

__all__ = ["METRICS", "Mean", "Row", "Summary", "collect", "read", "show", "summarise", "tables", "write"]


METRICS = ("test_error", "test_loss", "train_error", "train_loss")


@dataclass(frozen=True)
class Row:
    """A run. Errors are in percent; the best are over epochs, each for itself; None is a figure that is not there."""

    dataset: str
    model: str
    optimizer: str
    seed: int
    status: str
    epochs: int  # that are complete
    best_test_error: float | None = None
    best_test_loss: float | None = None
    final_test_error: float | None = None
    final_test_loss: float | None = None
    best_train_error: float | None = None
    best_train_loss: float | None = None
    final_train_error: float | None = None
    final_train_loss: float | None = None
    seconds: float = 0.0  # of training
    test_seconds: float = 0.0
    milliseconds_per_step: float | None = None
    state_bytes: float | None = None  # of the optimizer, a weight
    folder: str = ""
    error: str | None = None


def collect(specs: Sequence[Spec], out: Path) -> list[Row]:
    """The rows of runs, from their folders."""
    return [_row(spec, folder_of(spec, out)) for spec in specs]


def _row(spec: Spec, folder: RunFolder) -> Row:
    metrics = folder.metrics()
    failed = folder.read("failed.json")
    status = folder.status()
    figures: dict[str, Any] = {}
    for name in METRICS if metrics else ():
        values = [row[name] for row in metrics]
        finite = [value for value in values if math.isfinite(value)]
        figures[f"best_{name}"] = min(finite, default=None)
        figures[f"final_{name}"] = values[-1] if math.isfinite(values[-1]) else None
    seconds = sum(row["train_seconds"] for row in metrics)
    per_step = [row["train_seconds"] / row["steps"] for row in metrics if row["steps"]]
    return Row(
        spec.dataset,
        spec.model,
        spec.optimizer,
        spec.seed,
        status,
        len(metrics),
        **figures,
        seconds=seconds,
        test_seconds=sum(row["test_seconds"] for row in metrics),
        milliseconds_per_step=1e3 * statistics.median(per_step) if per_step else None,  # others may have slowed some
        state_bytes=metrics[-1]["state_bytes"] if metrics else None,
        folder=spec.folder,
        error=failed["error"] if failed and status == "failed" else None,
    )


@dataclass(frozen=True)
class Mean:
    """Over the seeds of those runs that are done, with its standard error."""

    mean: float
    error: float | None  # None of a single one

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Mean | None:
        found = [value for value in values if value is not None]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None)

    def text(self, digits: int) -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.error is None else f" ±{self.error:.{digits}f}")


@dataclass(frozen=True)
class Summary:
    """An optimizer on a data set and a model, over seeds."""

    dataset: str
    model: str
    optimizer: str
    runs: dict[str, int]  # how many are in which status
    best_test_error: Mean | None
    best_test_loss: Mean | None
    final_test_error: Mean | None
    final_test_loss: Mean | None
    best_train_error: Mean | None
    best_train_loss: Mean | None
    final_train_error: Mean | None
    final_train_loss: Mean | None
    milliseconds_per_step: Mean | None
    state_bytes: Mean | None


def summarise(rows: Sequence[Row]) -> list[Summary]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.dataset, row.model, row.optimizer), []).append(row)
    return [_summary(key, group) for key, group in groups.items()]


def _summary(key: tuple[str, str, str], rows: list[Row]) -> Summary:
    done = [row for row in rows if row.status == "done"]
    statuses = [row.status for row in rows]
    names = [f.name for f in fields(Summary)][4:]
    means: dict[str, Any] = {name: Mean.of([getattr(row, name) for row in done]) for name in names}
    return Summary(*key, runs={status: statuses.count(status) for status in dict.fromkeys(statuses)}, **means)


def tables(protocol: Protocol, rows: Sequence[Row]) -> list[Table]:
    """One for each data set and model: errors and losses, and the paper's own where the protocol is the paper's."""
    summaries = summarise(rows)
    found = []
    for dataset, model in dict.fromkeys((s.dataset, s.model) for s in summaries):
        published = protocol.published.get(dataset, {}).get(model, {})
        of_these = [s for s in summaries if (s.dataset, s.model) == (dataset, model)]
        found.append(_table(f"{dataset}, {model}", of_these, protocol, published))
    return found


def _table(title: str, summaries: list[Summary], protocol: Protocol, published: dict[str, Sequence[float]]) -> Table:
    seeds = max(sum(s.runs.values()) for s in summaries)
    over = f", mean ± standard error of {seeds} seeds" if seeds > 1 else ""
    on = "validation" if protocol.validation else "test"
    table = Table(title=f"{title}: on the {on} set{over}", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("optimizer", no_wrap=True)
    headers = ["best\nerror %", "best\nloss", "final\nerror %", "final\nloss", "\nms/step"]
    for header in headers + (["paper\nerror %", "paper\nloss"] if published else []):
        table.add_column(header, justify="right", no_wrap=True)
    columns = ("best_test_error", "best_test_loss", "final_test_error", "final_test_loss")
    best = {name: min((m.mean for s in summaries if (m := getattr(s, name))), default=None) for name in columns}
    for s in summaries:
        cells = []
        for name in columns:
            mean: Mean | None = getattr(s, name)
            text = "" if mean is None else mean.text(2 if "error" in name else 3)
            cells.append(f"[bold]{text}[/]" if mean and mean.mean == best[name] else text)
        cells.append(f"{s.milliseconds_per_step.mean:.1f}" if s.milliseconds_per_step else "")
        label = escape(protocol.optimizers[s.optimizer].label)
        others = [f"{count} {status}" if seeds > 1 else status for status, count in s.runs.items() if status != "done"]
        if others:
            label += f" [yellow]({', '.join(others)})[/]"
        if published:
            error, loss = published.get(s.optimizer, (math.nan, math.nan))
            cells += [f"{error:.2f}", f"{loss:.3f}"]
        table.add_row(label, *cells)
    return table


def show(table: Table) -> None:
    """Print a table whole, also where it is wider than the terminal, or there is none."""
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=200)).maximum
    Console(width=max(console.width, needed)).print(table)


def write(protocol: Protocol, rows: Sequence[Row], others: Sequence[Row], out: Path, command: str) -> None:
    """``results.csv``, a row for each run, these and others of the folder; ``results.json``, with means of these."""
    of_all = [asdict(row) for row in [*rows, *others]]
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(of_all)
    write_atomically(out / "results.csv", text.getvalue().encode())
    content = {
        "command": command,
        "protocol": asdict(protocol),
        "compared": [row.folder for row in rows],
        "summary": [asdict(summary) for summary in summarise(rows)],
        "runs": of_all,
    }
    write_atomically(out / "results.json", json.dumps(content, indent=1).encode())


def read(out: Path, specs: Sequence[Spec]) -> tuple[Protocol, list[Spec], str, list[Spec]]:
    """What there is to compare among the runs of a folder, by which command it was made, and what had to be left out.

    The protocol is that of the last command, if one has left its results; where runs were copied together, it is
    worked out from them.
    """
    protocol, compared, command = _written(out) or (None, set(), shlex.join(["adabayes", "report", str(out)]))
    kept = _comparable(specs, compared)
    optimizers = dict(protocol.optimizers) if protocol else {}
    for spec in kept:
        optimizers.setdefault(
            spec.optimizer, OptimizerSpec(spec.optimizer, spec.optimizer, spec.optimizer_class, spec.settings)
        )
    first = kept[0]
    named = protocol or Protocol(
        out.resolve().name, "", (), (), (), first.epochs, first.batch_size, first.test_batch_size, {}
    )
    return replace(named, optimizers=optimizers), kept, command, [spec for spec in specs if spec not in kept]


def _written(out: Path) -> tuple[Protocol, set[str], str] | None:
    content = read_json(out / "results.json")
    if content is None:
        return None
    try:
        protocol = Protocol(**content["protocol"])
        optimizers = {name: OptimizerSpec(**entry) for name, entry in content["protocol"]["optimizers"].items()}
        return replace(protocol, optimizers=optimizers), set(content["compared"]), content["command"]
    except (KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{out / 'results.json'} is not of this version of adabayes ({error!r})", stacklevel=2)
        return None


def _comparable(specs: Sequence[Spec], compared: set[str]) -> list[Spec]:
    """Those that differ in seed alone from one another, for each panel and optimizer; and the same task for a panel.

    Where there are several to choose from, that which was compared before, or has most runs. Schedules are the same
    too, but for optimizers that have no run under that of the others, or were compared with one of their own.
    """

    def grouped(members: Sequence[Spec], key: Callable[[Spec], Any]) -> list[list[Spec]]:
        groups: dict[str, list[Spec]] = {}
        for spec in members:
            groups.setdefault(repr(key(spec)), []).append(spec)
        return list(groups.values())

    def chosen(members: Sequence[Spec], key: Callable[[Spec], Any]) -> list[Spec]:
        return max(grouped(members, key), key=lambda group: (sum(s.folder in compared for s in group), len(group)))

    def task(spec: Spec) -> Spec:
        return replace(spec, seed=0, optimizer="", optimizer_class="", settings={}, schedule={})

    kept = []
    for panel in grouped(specs, lambda spec: (spec.dataset, spec.model)):
        same_task = chosen(panel, task)
        schedule = chosen(same_task, lambda spec: spec.schedule)[0].schedule
        for same_name in grouped(same_task, lambda spec: spec.optimizer):
            usual = [spec for spec in same_name if spec.schedule == schedule]
            settled = any(spec.folder in compared for spec in same_name)
            kept += chosen(same_name if settled or not usual else usual, lambda spec: replace(spec, seed=0))
    return kept
