"""The report: a page about the runs of a folder."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adabayes.lab import data
from adabayes.lab.protocol import Protocol, Spec
from adabayes.lab.report import page, results
from adabayes.lab.run.folder import RunFolder, folder_of

__all__ = ["content", "write"]

# Colours, on light and dark backgrounds, of optimizers without one; colour-blind readers can tell them apart.
_SPARE = [("#1f7a8c", "#7fd6e6"), ("#a23b22", "#ff9d85"), ("#4d6b00", "#b6d957"), ("#5c4a3a", "#cbb49f")]
_SPARE_DASHES = ("longdash", "dashdot", "dot", "dash")
_POINTS = 40_000  # in all learning-rate figures of a page, which has to stay small


def write(content: dict[str, Any], out: Path) -> Path:
    """Write ``index.html`` to ``out`` and return its path."""
    return page.write("report", f"AdaBayes: {content['title']}", content, out / "index.html")


def content(
    protocol: Protocol, specs: Sequence[Spec], command: str, runs: Path, left_out: Sequence[Spec] = ()
) -> dict[str, Any]:
    """Return, as plain data, all that a page or a figure shows of the comparison in the folder ``runs``."""
    rows = results.collect(specs, runs)
    statuses = {row.folder: row.status for row in rows}
    panels = list(dict.fromkeys((spec.dataset, spec.model) for spec in specs))
    names = list(dict.fromkeys(spec.optimizer for spec in specs))
    done = sum(row.status == "done" for row in rows)
    seeds = len({spec.seed for spec in specs})
    summary: dict[str, dict[str, Any]] = {}
    summaries = results.summarise(rows)
    for s in summaries:
        summary.setdefault(_key(s.dataset, s.model), {})[s.optimizer] = asdict(s)
    folders = {spec.folder: folder_of(spec, runs) for spec in specs}
    metrics = {folder: files.metrics() for folder, files in folders.items()}
    return {
        "title": protocol.description or protocol.name,
        "lead": f"Protocol {protocol.name}: {done} of {_counted(len(rows), 'run')} done, {_counted(seeds, 'seed')}, "
        f"{_counted(specs[0].epochs, 'epoch')}; figures are on the {'validation' if protocol.validation else 'test'} "
        "set, mean and standard error over seeds.",
        "problems": _problems(rows, protocol, left_out),
        "panels": [
            {
                "key": _key(dataset, model),
                "title": f"{dataset}, {model}",
                "published": protocol.published.get(dataset, {}).get(model),
                "error": (error := data.error_of(dataset)),
                "digits": data.digits_of(error),
                "loss_digits": results.loss_digits([s for s in summaries if (s.dataset, s.model) == (dataset, model)]),
            }
            for dataset, model in panels
        ],
        "optimizers": _optimizers(names, protocol),
        "presets": _presets(names, protocol),
        "summary": summary,
        "curves": _curves(specs, statuses, metrics),
        "rates": _rates(specs, statuses, folders, protocol),
        "commands": list(dict.fromkeys([command, shlex.join(["adabayes", "report", str(runs)])])),
        "environments": _environments(folders),
    }


def _key(dataset: str, model: str) -> str:
    return f"{dataset}-{model}"


def _optimizers(names: Sequence[str], protocol: Protocol) -> list[dict[str, Any]]:
    found = []
    spare = 0
    for name in names:
        optimizer = protocol.optimizers[name]
        colour, dash = optimizer.colour, optimizer.dash or "solid"
        if colour is None:
            colour, dash = _SPARE[spare % 4], optimizer.dash or _SPARE_DASHES[spare // 4 % 4]
            spare += 1
        found.append(
            {
                "name": name,
                "label": optimizer.label,
                "light": colour[0],
                "dark": colour[1],
                "dash": dash,
                "adaptive": "SGD" not in optimizer.path.rpartition(".")[2],
                "ours": optimizer.path.startswith("adabayes.AdaBayes"),
            }
        )
    return found


def _presets(names: Sequence[str], protocol: Protocol) -> list[dict[str, Any]]:
    """Return the choices of curves that the page offers: all, those of the protocol, and all in training."""
    chosen = {key: (preset.label, preset.optimizers, "test") for key, preset in protocol.presets.items()}
    return [
        {"key": key, "label": label, "split": split, "optimizers": shown}
        for key, (label, members, split) in {
            "all": ("all", names, "test"), **chosen, "train": ("training", names, "train"),
        }.items()
        if (shown := [name for name in names if name in members])
    ]  # fmt: skip


def _problems(rows: Sequence[results.Row], protocol: Protocol, left_out: Sequence[Spec]) -> list[dict[str, Any]]:
    """Return what a reader must know about runs without results, with the names of the runs."""
    found: list[dict[str, Any]] = []
    for status, said in (
        ("failed", "failed"),
        ("diverged", "diverged (the loss was no longer a number) and left out of means and curves"),
        ("missing", "missing"),
        ("interrupted", "not finished"),
        ("running", "still running"),
    ):
        seeds: dict[str, list[str]] = {}
        for row in rows:
            if row.status == status:
                name = f"{row.dataset} {row.model} {protocol.optimizers[row.optimizer].label}"
                seeds.setdefault(name, []).append(f"{row.seed}" + (f" ({row.error})" if row.error else ""))
        if seeds:
            count = sum(map(len, seeds.values()))
            runs = [f"{name}, seed {', '.join(which)}" for name, which in seeds.items()]
            found.append({"text": f"{count} of {_counted(len(rows), 'run')} {said}", "runs": runs})
    if left_out:
        runs = [
            f"{spec} ({spec.epochs} epochs, {spec.schedule['kind']} schedule, "
            f"{', '.join(f'{k} {v}' for k, v in spec.settings.items())})"
            for spec in left_out
        ]
        what = f"{_counted(len(left_out), 'run')} of this folder not shown, because of other settings"
        found.append({"text": what, "runs": runs})
    return found


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _curves(
    specs: Sequence[Spec], statuses: dict[str, str], metrics: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Return means and standard errors over seeds, by epoch, of runs that are done or, while none is, of all."""
    groups: dict[tuple[str, str], list[Spec]] = {}
    for spec in specs:
        if metrics[spec.folder] and statuses[spec.folder] != "diverged":
            groups.setdefault((_key(spec.dataset, spec.model), spec.optimizer), []).append(spec)
    found: dict[str, dict[str, Any]] = {}
    for (panel, optimizer), members in groups.items():
        done = [spec for spec in members if statuses[spec.folder] == "done"]
        runs = [metrics[spec.folder] for spec in done or members]
        epochs = min(map(len, runs))
        curve: dict[str, Any] = {}
        for metric in results.METRICS:
            means = [_mean([rows[e].get(metric) for rows in runs]) for e in range(epochs)]
            errors = [_short(m.error) if m and m.error is not None else None for m in means]
            curve[metric] = {
                "mean": [_short(m.mean) if m else None for m in means],
                "error": errors if any(error is not None for error in errors) else None,
            }
        seconds = [statistics.fmean(rows[e]["train_seconds"] for rows in runs) for e in range(epochs)]
        curve["seconds"] = [_short(sum(seconds[: e + 1])) for e in range(epochs)]
        found.setdefault(panel, {})[optimizer] = curve
    return found


def _mean(values: Sequence[float | None]) -> results.Mean | None:
    return results.Mean.of(values) if all(v is not None and math.isfinite(v) for v in values) else None


def _rates(
    specs: Sequence[Spec], statuses: dict[str, str], folders: dict[str, RunFolder], protocol: Protocol
) -> list[dict[str, Any]]:
    """Return the learning-rate figures, one for each panel and optimizer that has any; AdaBayes comes first."""
    logged: dict[tuple[str, str, str], tuple[Spec, list[dict[str, Any]]]] = {}
    for spec in specs:
        key = (spec.dataset, spec.model, spec.optimizer)
        if key in logged or statuses[spec.folder] == "diverged":
            continue
        # At a learning rate of zero there is nothing to show.
        if epochs := [row for row in folders[spec.folder].metrics("rates.jsonl") if row["layers"]]:
            logged[key] = spec, epochs
    found = []
    for spec, epochs in logged.values():
        shown = _thinned(epochs)
        layers = epochs[0]["layers"]
        most = max(1, _POINTS // (len(logged) * len(shown) * len(layers)))  # weights to show of a layer
        found.append(
            {
                "panel": f"{spec.dataset} {spec.model}",
                "optimizer": protocol.optimizers[spec.optimizer].label,
                "layers": layers,
                "start": max(i for i, row in enumerate(shown) if row["lr"] == shown[0]["lr"]),
                "epochs": [
                    {key: row[key] for key in ("epoch", "lr", "lr_sgd")}
                    | {key: [[_short(v, 3) for v in layer[:most]] for layer in row[key]] for key in ("adam", "gain")}
                    for row in shown
                ],
            }
        )
    return sorted(found, key=lambda run: run["optimizer"] != "AdaBayes")


def _thinned(epochs: list[dict[str, Any]], most: int = 12) -> list[dict[str, Any]]:
    """Choose epochs for a slider: all of a short run, else some; always the first, the last, the last before a drop."""
    last = len(epochs) - 1
    if last < 2 * most:
        return epochs
    chosen = {round(i * last / (most - 1)) for i in range(most)}
    chosen.add(max(i for i, row in enumerate(epochs) if row["lr"] == epochs[0]["lr"]))
    return [epochs[i] for i in sorted(chosen)]


def _environments(folders: dict[str, RunFolder]) -> list[str]:
    found: dict[str, int] = {}
    for folder in folders.values():
        for start in (folder.read("environment.json") or [])[-1:]:
            versions = f"torch {start['torch']}, adabayes {start['adabayes']} ({start['commit'] or 'installed'})"
            where = f"{start['processor']}, {start['threads']} threads, {start['system']}"
            text = f"{where}; {versions}, Python {start['python']}"
            found[text] = found.get(text, 0) + 1
    return [f"{_counted(count, 'run')} on {text}" for text, count in found.items()]


def _short(value: float, digits: int = 5) -> float | None:
    """Round to the digits that can be seen, which makes the page smaller; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
