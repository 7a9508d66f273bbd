"""Results: a row for each run, means and differences over seeds, and tables in the form of the paper's."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from adabayes.lab import data, schema
from adabayes.lab import protocol as protocols
from adabayes.lab.differences import Difference, paired, reference_of
from adabayes.lab.display import fitting, make_table, plain
from adabayes.lab.protocol import PROTOCOL, OptimizerSpec, Protocol, Spec
from adabayes.lab.run.folder import RunFolder, folder_of, read_json, write_atomically

__all__ = ["METRICS", "Mean", "Row", "Summary", "collect", "loss_digits", "read", "summarise", "tables", "write"]


_FORMULA = ("=", "+", "-", "@", "\t", "\n")
METRICS = ("test_error", "test_loss", "train_error", "train_loss")
SHOWN = ("best_test_error", "best_test_loss", "final_test_error", "final_test_loss")  # in tables


@dataclass(frozen=True)
class Row:
    """The results of a run.

    Errors are those of its task, usually in percent. The best ones are over epochs, separately for error and loss. None
    stands for a missing figure.
    """

    dataset: str
    model: str
    optimizer: str
    seed: int
    status: str
    epochs: int  # completed
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
    state_bytes: float | None = None  # of the optimizer, per weight
    folder: str = ""
    error: str | None = None


def collect(specs: Sequence[Spec], out: Path) -> list[Row]:
    """Read the rows of runs from their folders."""
    return [_row(spec, folder_of(spec, out)) for spec in specs]


def _row(spec: Spec, folder: RunFolder) -> Row:
    metrics = folder.metrics()
    failed = folder.read("failed.json")
    status = folder.status()
    figures: dict[str, Any] = {}
    for name in METRICS if metrics else ():
        values = [v if (v := row.get(name)) is not None and math.isfinite(v) else None for row in metrics]
        figures[f"best_{name}"] = min((v for v in values if v is not None), default=None)
        figures[f"final_{name}"] = values[-1]
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
        milliseconds_per_step=1e3 * statistics.median(per_step) if per_step else None,  # some epochs may be slow
        state_bytes=metrics[-1]["state_bytes"] if metrics else None,
        folder=spec.folder,
        error=failed["error"] if failed and status == "failed" else None,
    )


@dataclass(frozen=True)
class Mean:
    """A mean over the seeds of finished runs, with its standard error."""

    mean: float
    error: float | None  # None with one seed

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Mean | None:
        found = [value for value in values if value is not None]
        if not found:
            return None
        return cls(statistics.fmean(found), statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None)

    def text(self, digits: int, between: str = " ") -> str:
        return f"{self.mean:.{digits}f}" + ("" if self.error is None else f"{between}±{self.error:.{digits}f}")


@dataclass(frozen=True)
class Summary:
    """The results of an optimizer on a data set and a model, over seeds."""

    dataset: str
    model: str
    optimizer: str
    runs: dict[str, int]  # their number by status
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
    reference: str  # the optimizer that the differences are to
    differences: dict[str, Difference]  # of the figures above that have one


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Summarise runs over seeds, with paired differences to AdamW or, where it is not there, the first optimizer."""
    panels: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        panels.setdefault((row.dataset, row.model), {}).setdefault(row.optimizer, []).append(row)
    return [
        _summary((*panel, name), group, reference, of[reference])
        for panel, of in panels.items()
        for reference in [reference_of(of)]
        for name, group in of.items()
    ]


_MEANS = (*(f"{when}_{name}" for when in ("best", "final") for name in METRICS), "milliseconds_per_step", "state_bytes")


def _summary(key: tuple[str, str, str], rows: list[Row], reference: str, of_reference: list[Row]) -> Summary:
    def figures(name: str, rows: list[Row]) -> dict[int, float | None]:
        return {row.seed: getattr(row, name) for row in rows if row.status == "done"}

    statuses = [row.status for row in rows]
    means: dict[str, Any] = {name: Mean.of(list(figures(name, rows).values())) for name in _MEANS}
    found = {name: paired(figures(name, rows), figures(name, of_reference)) for name in SHOWN if key[-1] != reference}
    return Summary(
        *key,
        runs={status: statuses.count(status) for status in dict.fromkeys(statuses)},
        **means,
        reference=reference,
        differences={name: difference for name, difference in found.items() if difference},
    )


def tables(protocol: Protocol, rows: Sequence[Row]) -> list[Table]:
    """Make the tables of each data set and model: errors and losses, then paired differences if there are seeds."""
    summaries = summarise(rows)
    found = []
    for dataset, model in dict.fromkeys((s.dataset, s.model) for s in summaries):
        published = protocol.published.get(dataset, {}).get(model, {})
        of_these = [s for s in summaries if (s.dataset, s.model) == (dataset, model)]
        title, error = f"{dataset}, {model}", data.error_of(dataset)
        found.append(fitting(partial(_table, title, error, of_these, protocol, published)))
        if any(s.differences for s in of_these):
            found.append(fitting(partial(_differences, title, error, of_these, protocol)))
    return found


def _table(
    title: str,
    error: str,
    summaries: list[Summary],
    protocol: Protocol,
    published: dict[str, Sequence[float | None]],
    between: str,
) -> Table:
    seeds = max(sum(s.runs.values()) for s in summaries)
    over = f", mean ± standard error of {seeds} seeds" if seeds > 1 else ""
    on = "validation" if protocol.validation else "test"
    error_lines = error.replace(" error", "\nerror")  # a long name in lines, so that the table fits a terminal
    above = "\n" * error_lines.count("\n")
    headers = [f"best\n{error_lines}", f"{above}best\nloss", f"final\n{error_lines}", f"{above}final\nloss"]
    headers.append(f"{above}\nms/step")
    table = make_table(
        {"optimizer": "wrap", **dict.fromkeys(headers, "right")}, f"{title}: on the {on} set{over}", SIMPLE_HEAD
    )
    best = {name: min((m.mean for s in summaries if (m := getattr(s, name))), default=None) for name in SHOWN}
    for s in summaries:
        cells = []
        given = dict(zip(("best_test_error", "best_test_loss"), published.get(s.optimizer, ())))
        for name in SHOWN:
            mean: Mean | None = getattr(s, name)
            digits = data.digits_of(error) if "error" in name else loss_digits(summaries)
            style = "bold" if mean and mean.mean == best[name] else ""
            cell = Text("" if mean is None else mean.text(digits, between), style)
            if (figure := given.get(name)) is not None:
                cell.append(f"\n{figure:.{digits}f}", "not bold dim")
            cells.append(cell)
        cells.append(Text(f"{s.milliseconds_per_step.mean:.1f}" if s.milliseconds_per_step else ""))
        label = plain(protocol.optimizers[s.optimizer].label)
        others = [f"{count} {status}" if seeds > 1 else status for status, count in s.runs.items() if status != "done"]
        if others:
            label += plain(f" ({', '.join(others)})", "yellow")
        if given:
            lines = "\n\n" if between == "\n" and seeds > 1 else "\n"
            label += plain(f"{lines}published", "dim")
        table.add_row(label, *cells)
    return table


def _differences(title: str, error: str, summaries: list[Summary], protocol: Protocol, between: str) -> Table:
    names = {"final_test_error": f"final {error}", "final_test_loss": "final loss"}
    reference = protocol.optimizers[summaries[0].reference].label
    table = make_table(
        {"optimizer": "wrap", **dict.fromkeys(names.values(), "right")},
        f"{title}: difference to {reference} with the same seeds, 95 % interval",
        SIMPLE_HEAD,
    )
    for s in summaries:
        if s.optimizer != s.reference:
            found = [s.differences.get(name) for name in names]
            label = plain(protocol.optimizers[s.optimizer].label)
            table.add_row(label, *(Text(d.text(between) if d else "") for d in found))
    return table


def loss_digits(summaries: Sequence[Summary]) -> int:
    """Return how many decimals to show of losses: those that the smallest of them needs."""
    losses = [m.mean for s in summaries for m in (s.best_test_loss, s.final_test_loss) if m and m.mean > 0]
    return min(6, max(3, 1 - math.floor(math.log10(min(losses, default=1.0)))))


def write(protocol: Protocol, rows: Sequence[Row], others: Sequence[Row], out: Path, command: str) -> None:
    """Write ``results.csv``, a row for each run of the folder, and ``results.json``, with the means of ``rows``."""
    of_all = [asdict(row) for row in [*rows, *others]]
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in of_all)
    write_atomically(out / "results.csv", text.getvalue().encode(errors="backslashreplace"))
    content = {
        "command": command,
        "protocol": asdict(protocol),
        "compared": [row.folder for row in rows],
        "summary": [asdict(summary) for summary in summarise(rows)],
        "runs": of_all,
    }
    write_atomically(out / "results.json", json.dumps(content, indent=1).encode())


def _cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")  # the csv module always quotes \n
    return f"'{text}" if text.startswith(_FORMULA) else text


def read(out: Path, specs: Sequence[Spec]) -> tuple[Protocol, list[Spec], str, list[Spec]]:
    """Return the protocol, the runs to compare, the command that made them, and runs that cannot be compared.

    The protocol is that of the last command that wrote results. If runs were copied together, it is derived from them.
    """
    protocol, compared, command = _written(out) or (None, set(), shlex.join(["adabayes", "report", str(out)]))
    kept = _comparable(specs, compared)
    optimizers = dict(protocol.optimizers) if protocol else {}
    for spec in kept:
        name = spec.optimizer
        optimizers.setdefault(name, _styled(OptimizerSpec(name, name, spec.optimizer_class, spec.settings)))
    first = kept[0]
    named = protocol or Protocol(
        out.resolve().name, "", (), (), (), first.epochs, first.batch_size, first.test_batch_size, {},
        presets=_usual().presets,
    )  # fmt: skip
    return replace(named, optimizers=optimizers), kept, command, [spec for spec in specs if spec not in kept]


_RESULTS = schema.table(
    {"protocol": PROTOCOL, "compared": schema.listed(schema.TEXT), "command": schema.TEXT}, others=schema.ANYTHING
)


def _written(out: Path) -> tuple[Protocol, set[str], str] | None:
    content = read_json(out / "results.json", _RESULTS)
    if content is None:
        return None
    protocol = Protocol.restored(content["protocol"])
    if "presets" not in content["protocol"]:  # of a version whose protocols had no presets and colours
        styled = {name: _styled(optimizer) for name, optimizer in protocol.optimizers.items()}
        protocol = replace(protocol, optimizers=styled, presets=_usual().presets)
    return protocol, set(content["compared"]), content["command"]


@cache
def _usual() -> Protocol:
    """Return a protocol to take colours and presets from if no other is known."""
    return protocols.load("quick")


def _styled(optimizer: OptimizerSpec) -> OptimizerSpec:
    usual = _usual().optimizers.get(optimizer.name, optimizer)
    return replace(optimizer, colour=usual.colour, dash=usual.dash)


def _comparable(specs: Sequence[Spec], compared: set[str]) -> list[Spec]:
    """Choose runs that can be compared: in a panel the same task, and for an optimizer only the seed differs.

    If there is a choice, take the runs that were compared before, or the largest group. Schedules are also the same,
    except for optimizers that have no run with the others' schedule, or were compared with their own.
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
