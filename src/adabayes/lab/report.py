"""A folder of runs as a page that one can look at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adabayes.lab import page, results
from adabayes.lab.protocol import Protocol, Spec
from adabayes.lab.store import RunFolder, folder_of

__all__ = ["content", "write"]

# One colour and one kind of line for each optimizer, everywhere; for the colour-blind too, on light and on dark.
_STYLES = {
    "sgd": ("#3b3f46", "#d5d8dd", "solid"),
    "adam": ("#cc6677", "#ee8fa0", "dash"),
    "adagrad": ("#8a7a12", "#ddcc77", "dot"),
    "amsgrad": ("#882255", "#e07ab5", "dashdot"),
    "adabound": ("#b35900", "#f2a65a", "dash"),
    "amsbound": ("#6b5b95", "#b8a9e0", "dot"),
    "adamw": ("#0072b2", "#7cc4f5", "solid"),
    "adabayes-fp": ("#aa4499", "#e796dc", "dashdot"),
    "adabayes": ("#117733", "#6fd69c", "solid"),
}
_SPARE = [("#1f7a8c", "#7fd6e6"), ("#a23b22", "#ff9d85"), ("#4d6b00", "#b6d957"), ("#5c4a3a", "#cbb49f")]
_OURS = ("adabayes", "adabayes-fp")
_BOUNDS = ("adabound", "amsbound")
# The paper's main figure, and those of its appendix.
_PRESETS = (
    ("all", "all", None, "test"),
    ("baselines", "standard baselines", ("sgd", "adam", "adagrad", "amsgrad", *_OURS), "test"),
    ("adamw", "Adam, AdamW, FP", ("adam", "adamw", "adabayes-fp"), "test"),
    ("bounds", "ours and bounds", (*_BOUNDS, *_OURS), "test"),
    ("bounds-sgd", "bounds and SGD", (*_BOUNDS, "sgd"), "test"),
    ("train", "training", None, "train"),
)


def write(content: dict[str, Any], out: Path) -> Path:
    """Write ``index.html`` to ``out``; where it is."""
    return page.write("report", f"AdaBayes: {content['title']}", content, out / "index.html")


def content(protocol: Protocol, specs: Sequence[Spec], command: str, runs: Path) -> dict[str, Any]:
    """All that a page or a figure shows of what ``command`` compared in the folder ``runs``, as plain data."""
    rows = results.collect(specs, runs)
    panels = list(dict.fromkeys((spec.dataset, spec.model) for spec in specs))
    names = list(dict.fromkeys(spec.optimizer for spec in specs))
    done = sum(row.status == "done" for row in rows)
    seeds = len({spec.seed for spec in specs})
    summary: dict[str, dict[str, Any]] = {}
    for s in results.summarise(rows):
        summary.setdefault(_key(s.dataset, s.model), {})[s.optimizer] = asdict(s)
    folders = {spec.folder: folder_of(spec, runs) for spec in specs}
    metrics = {folder: files.metrics() for folder, files in folders.items()}
    return {
        "title": protocol.description or protocol.name,
        "lead": f"Protocol {protocol.name}: {done} of {len(rows)} runs are done, {seeds} seeds, "
        f"{specs[0].epochs} epochs; figures are on the {'validation' if protocol.validation else 'test'} set, mean and "
        "standard error over seeds.",
        "problems": _problems(rows),
        "panels": [
            {
                "key": _key(dataset, model),
                "title": f"{dataset}, {model}",
                "published": protocol.published.get(dataset, {}).get(model),
            }
            for dataset, model in panels
        ],
        "optimizers": [_optimizer(name, i, protocol) for i, name in enumerate(names)],
        "presets": [
            {"key": key, "label": label, "split": split, "optimizers": shown}
            for key, label, members, split in _PRESETS
            if (shown := [name for name in names if members is None or name in members])
        ],
        "summary": summary,
        "curves": _curves(specs, metrics),
        "rates": _rates(specs, folders),
        "commands": [command, f"adabayes report {runs}"],
        "environments": _environments(folders),
    }


def _key(dataset: str, model: str) -> str:
    return f"{dataset}-{model}"


def _optimizer(name: str, number: int, protocol: Protocol) -> dict[str, Any]:
    light, dark, dash = _STYLES.get(name, (*_SPARE[number % len(_SPARE)], "longdash"))
    path = protocol.optimizers[name].path
    return {
        "name": name,
        "label": protocol.optimizers[name].label,
        "light": light,
        "dark": dark,
        "dash": dash,
        "adaptive": path != "torch.optim.SGD",
        "ours": path.startswith("adabayes.AdaBayes"),
    }


def _problems(rows: Sequence[results.Row]) -> list[str]:
    found = []
    for status, said in (
        ("failed", "failed"),
        ("diverged", "diverged: the loss was no longer a number. They are left out of means and curves"),
        ("missing", "are missing"),
        ("interrupted", "are not complete"),
        ("running", "are still running"),
    ):
        these = [row for row in rows if row.status == status]
        if these:
            runs = ", ".join(
                f"{row.dataset} {row.model} {row.optimizer} seed {row.seed}" + (f" ({row.error})" if row.error else "")
                for row in these
            )
            found.append(f"{len(these)} of {len(rows)} runs {said}: {runs}.")
    return found


def _curves(specs: Sequence[Spec], metrics: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Mean and standard error over seeds, epoch by epoch, of runs that have not diverged."""
    groups: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for spec in specs:
        rows = metrics[spec.folder]
        if rows and all(math.isfinite(row[metric]) for row in rows for metric in results.METRICS):
            groups.setdefault((_key(spec.dataset, spec.model), spec.optimizer), []).append(rows)
    found: dict[str, dict[str, Any]] = {}
    for (panel, optimizer), runs in groups.items():
        epochs = min(map(len, runs))
        curve: dict[str, Any] = {}
        for metric in results.METRICS:
            means = [results.Mean.of([rows[e][metric] for rows in runs]) for e in range(epochs)]
            curve[metric] = {
                "mean": [_short(m.mean) for m in means if m],
                "error": [_short(m.error) for m in means if m and m.error is not None] or None,
            }
        seconds = [statistics.fmean(rows[e]["train_seconds"] for rows in runs) for e in range(epochs)]
        curve["seconds"] = [_short(sum(seconds[: e + 1])) for e in range(epochs)]
        found.setdefault(panel, {})[optimizer] = curve
    return found


def _rates(specs: Sequence[Spec], folders: dict[str, RunFolder]) -> list[dict[str, Any]]:
    """The learning-rate figure of the first seed of each panel, for those that have one."""
    found = []
    seen = set()
    for spec in specs:
        key = (spec.dataset, spec.model, spec.optimizer)
        if key in seen:
            continue
        epochs = folders[spec.folder].metrics("rates.jsonl")
        if not epochs:
            continue
        seen.add(key)
        found.append({"title": str(spec), "layers": epochs[0]["layers"], "epochs": _thinned(epochs)})
    return found


def _thinned(epochs: list[dict[str, Any]], most: int = 24) -> list[dict[str, Any]]:
    """Enough epochs for a slider: all of a short run, the first and the last always."""
    last = len(epochs) - 1
    chosen = sorted({round(i * last / (most - 1)) for i in range(most)}) if last >= most else range(last + 1)
    return [{key: epochs[i][key] for key in ("epoch", "lr", "lr_sgd", "adam", "gain")} for i in chosen]


def _environments(folders: dict[str, RunFolder]) -> list[str]:
    found: dict[str, int] = {}
    for folder in folders.values():
        for start in (folder.read("environment.json") or [])[-1:]:
            versions = f"torch {start['torch']}, adabayes {start['adabayes']} ({start['commit'] or 'installed'})"
            where = f"{start['processor']}, {start['threads']} threads, {start['system']}"
            text = f"{where}; {versions}, Python {start['python']}"
            found[text] = found.get(text, 0) + 1
    return [f"{count} runs on {text}" for text, count in found.items()]


def _short(value: float) -> float:
    """Five digits: a curve does not show more, and the page is smaller."""
    return float(f"{value:.5g}")
