"""The page of the suite, and its tables for a terminal."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from adabayes.lab import suite
from adabayes.lab.differences import REFERENCE, half_width
from adabayes.lab.display import make_table, plain
from adabayes.lab.report import page
from adabayes.lab.suite import Final, Record

__all__ = ["content", "tables", "write"]

OURS = "adabayes"  # our optimizers' names begin with it
_CLOCKS = ("steps", "seconds")


def write(records: Sequence[Record], out: Path) -> Path:
    """Write ``index.html`` to ``out`` and return its path."""
    return page.write("suite", "AdaBayes: the evidence", content(records), out / "index.html")


def content(records: Sequence[Record]) -> dict[str, Any]:
    """Return all that the page shows, as plain data."""
    compared = {(c.workload, c.optimizer): c for c in suite.comparisons(records)}
    profiles = {clock: suite.profile(records, clock) for clock in _CLOCKS}
    factors = [factor for of in profiles.values() for points in of.values() for factor, _ in points]
    labels = {name: label for record in records for name, label in record.labels.items()}
    styles = {name: style for record in records for name, style in record.styles.items()}
    seeds = sorted({len(record.runs(name)) for record in records for name in record.chosen} or {0})
    environments = {_environment(record) for record in records}
    return {
        "title": f"{len(records)} workloads, {len(labels)} optimizers",
        "lead": _lead(records),
        "problems": _problems(records),
        "optimizers": [
            {
                "name": name,
                "label": label,
                "ours": name.startswith(OURS),
                **dict(zip(("light", "dark", "dash"), styles[name])),
            }
            for name, label in labels.items()
        ],
        "profiles": profiles,
        "widest": max(2.0, 1.15 * max(factors, default=1.0)),
        "means": {
            clock: {name: m for name in labels if (m := _mean_share(records, name, clock)) is not None}
            for clock in (*_CLOCKS, "within")
        },
        "test": f"Student's paired t-test, Holm's correction for {len(compared)} comparisons, 5 %.",
        "workloads": [_workload(record, compared) for record in records],
        "made": [
            f"Every optimizer had the same number of trials on every workload ({_counts(records)}), and "
            f"{' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} fresh seeds with the settings that won.",
            *sorted(environments),
        ],
        "commands": ["adabayes suite"],
    }


def _lead(records: Sequence[Record]) -> str:
    shares = {clock: _mean_share(records, "adabayes-k", clock) for clock in _CLOCKS}
    if None in shares.values():
        return "Each optimizer tuned with the same effort, then run with fresh seeds."
    return (
        f"AdaBayes-K reaches the loss of tuned AdamW in {shares['steps']:.2f} of its steps and {shares['seconds']:.2f} "
        f"of its seconds, in the geometric mean over {len(records)} workloads."
    )


def _mean_share(records: Sequence[Record], name: str, clock: str) -> float | None:
    found = [suite.reached(record, name) for record in records]
    attribute = clock if clock == "within" else f"share_of_{clock}"
    return suite.geometric_mean([getattr(r, attribute) if r else None for r in found])


def _problems(records: Sequence[Record]) -> list[str]:
    """Return which runs are missing, and which diverged with the settings that won."""
    found = []
    for record in records:
        statuses = [trial.status for trial in record.trials] + [run.status for run in record.finals]
        missing = [status for status in statuses if status not in ("done", "diverged")]
        if missing:
            found.append(f"{record.name}: {len(missing)} of {len(statuses)} runs are not done.")
        lost = [run.optimizer for run in record.finals if run.status == "diverged" and run.length == 1]
        found += [
            f"{record.name}: {record.labels[o]} diverged with {lost.count(o)} seeds." for o in dict.fromkeys(lost)
        ]
    return found


def _counts(records: Sequence[Record]) -> str:
    counts = {sum(t.optimizer == name for t in record.trials) for record in records for name in record.labels}
    return " or ".join(map(str, sorted(counts)))


def _environment(record: Record) -> str:
    e = record.environment
    made = f"torch {e.get('torch')}, adabayes {e.get('adabayes')}"
    return f"{e.get('processor')}, {e.get('threads')} thread(s) for each run; {made}"


def _workload(record: Record, compared: dict[tuple[str, str], suite.Comparison]) -> dict[str, Any]:
    curves = {
        name: _curve(runs, record.step_seconds.get(name)) for name in record.labels if (runs := record.runs(name))
    }
    lowest = min((min(curve["loss"]) for curve in curves.values()), default=1.0)
    highest = statistics.median(curve["loss"][0] for curve in curves.values()) if curves else 1.0
    return {
        "name": record.name,
        "description": record.description,
        "error": record.error,
        "target": suite.target(record),
        "reached": {name: vars(r) for name in record.labels if (r := suite.reached(record, name))},
        "ends": {name: _end(record, name, compared.get((record.name, name))) for name in record.labels},
        "curves": curves,
        # Losses far above the end are cut off.
        "range": [
            math.log10(max(lowest, 1e-12)) - 0.03,
            math.log10(max(highest, lowest, 1e-12)) + 0.03,
        ],
        "bands": {name: b for name in record.labels if (b := _band(record, name))},
    }


def _curve(runs: Sequence[Final], step_seconds: float | None) -> dict[str, list[float]]:
    """Return means over seeds, for each test."""
    length = min(len(run.curve) for run in runs)
    points = [[run.curve[i] for run in runs] for i in range(length)]
    steps = [float(at[0][0]) for at in points]
    return {
        "steps": steps,
        "seconds": [float(f"{step * (step_seconds or 0):.4g}") for step in steps],
        "loss": [float(f"{statistics.fmean(loss for _, loss in at):.5g}") for at in points],
    }


def _end(record: Record, name: str, compared: suite.Comparison | None) -> dict[str, Any]:
    runs = record.runs(name)
    found: dict[str, Any] = {
        "loss": _interval([run.test_loss for run in runs]),
        "error": _interval([run.test_error for run in runs]),
    }
    if compared:
        found["difference"] = {**asdict(compared.difference), "verdict": compared.verdict}
    return found


def _interval(values: Sequence[float | None]) -> dict[str, float | None] | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    return {"mean": statistics.fmean(found), "half": half_width(found) if len(found) > 1 else None}


def _band(record: Record, name: str) -> dict[str, float] | None:
    limits = suite.band(record, name)
    return {"lr": record.chosen[name]["lr"], "factor": limits[1] / limits[0]} if limits else None


def tables(records: Sequence[Record]) -> list[Table]:
    """Make tables of steps and seconds to AdamW's loss for a terminal."""
    return [_table(records, clock) for clock in _CLOCKS]


def _table(records: Sequence[Record], clock: str) -> Table:
    labels = {name: label for record in records for name, label in record.labels.items() if name != REFERENCE}
    narrow = (re.sub("(?<=-)|(?<=Ada(?=B))| ", "\n", label) for label in labels.values())  # to fit 80 columns
    heads = list(map(escape, narrow))
    grid = make_table(
        {"workload": "left", **dict.fromkeys(heads, "right")},
        f"{clock.capitalize()} to the loss of tuned AdamW, as a share of its own",
        SIMPLE_HEAD,
    )
    for record in records:
        found = [suite.reached(record, name) for name in labels]
        grid.add_row(plain(record.name), *(_share(getattr(r, f"share_of_{clock}") if r else None) for r in found))
    grid.add_row("geometric mean", *(_share(_mean_share(records, name, clock)) for name in labels))
    return grid


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
