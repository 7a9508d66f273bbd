"""The figures of the suite for documents: curves of workloads, and the training needed to reach AdamW's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from adabayes.lab import suite
from adabayes.lab.report import suite_page
from adabayes.lab.report.figures import DASHES, TEXT, print_style, save
from adabayes.lab.suite import Record

__all__ = ["draw", "draw_summary", "write"]

_COLUMNS = 3
_IN_SUMMARY = ("text", "cifar10-mini")  # a transformer and a convolutional network


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw ``summary`` and ``evidence`` in a folder, as SVG and PNG, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"summary": draw_summary, "evidence": draw}
    with print_style():
        return [file for name, make in figures.items() for file in save(make(records), folder / name, ("svg", "png"))]


def draw_summary(records: Sequence[Record]) -> Figure:
    """Draw the curves of two workloads and the performance profile of all of them."""
    content = suite_page.content(records)
    found = list(zip(records, content["workloads"]))
    chosen = sorted(found, key=lambda pair: pair[0].name not in _IN_SUMMARY)[:2]
    figure = Figure(figsize=(TEXT, 2.3))
    *panels, last = figure.subplots(1, len(chosen) + 1)
    for ax, (record, workload) in zip(panels, chosen):
        _draw_curves(ax, record, workload, content["optimizers"])
        ax.set_xlabel("steps")
    panels[0].set_ylabel("validation loss")
    largest = 4.0
    for o in content["optimizers"]:
        points = [(1.0, 0.0), *content["profiles"]["steps"].get(o["name"], [])]
        factors, shares = zip(*points, (largest, points[-1][1]))
        last.step(factors, shares, where="post", color=o["light"], ls=DASHES[o["dash"]], lw=_width(o), label=o["label"])
    last.set(title=f"{len(records)} workloads", xlabel="steps to AdamW's loss / the fewest", xscale="log")
    last.set(xlim=(1, largest), ylim=(0, 1.03), ylabel="share of workloads")
    last.set_xticks([1, 2, 4], ["1", "2", "4"])
    last.xaxis.set_minor_formatter(NullFormatter())
    handles = last.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=8, fontsize=7, handlelength=1.6, columnspacing=1.2)
    return figure


def draw(records: Sequence[Record]) -> Figure:
    """Draw a panel for each workload, and one for all of them."""
    content = suite_page.content(records)
    rows = math.ceil((len(records) + 1) / _COLUMNS)
    figure = Figure(figsize=(TEXT, 1.9 * rows + 0.4))
    *panels, last = figure.subplots(rows, _COLUMNS, squeeze=False).flat[: len(records) + 1]
    for ax in figure.axes[len(records) + 1 :]:
        ax.remove()
    for ax, record, workload in zip(panels, records, content["workloads"]):
        _draw_curves(ax, record, workload, content["optimizers"])
    for ax in panels[-_COLUMNS:]:
        ax.set_xlabel("steps")
    for ax in panels[::_COLUMNS]:
        ax.set_ylabel("validation loss")
    for place, o in enumerate(content["optimizers"]):
        shares = [r.share_of_steps for record in records if (r := suite.reached(record, o["name"]))]
        known = [share for share in shares if share is not None]
        last.plot(known, [place] * len(known), "o", color=o["light"], ms=4, alpha=0.8, mec="none")
        missing = len(shares) - len(known)
        if missing:
            last.text(1.06, place, f"{missing} not", fontsize=6, va="center", color=o["light"])
    last.set(title="training to AdamW's loss", xlabel="share of the steps", xlim=(0, 1.25))
    last.set_ylim(len(content["optimizers"]) - 0.5, -0.5)  # the first one on top
    last.set_yticks(range(len(content["optimizers"])), [o["label"] for o in content["optimizers"]])
    for label, o in zip(last.get_yticklabels(), content["optimizers"]):
        label.set_color(o["light"])
    return figure


def _draw_curves(ax: Axes, record: Record, workload: dict[str, Any], optimizers: Sequence[dict[str, Any]]) -> None:
    for o in optimizers:
        if curve := workload["curves"].get(o["name"]):
            ax.plot(curve["steps"], curve["loss"], color=o["light"], ls=DASHES[o["dash"]], lw=_width(o))
    if workload["target"] is not None:  # there is none without AdamW
        ax.axhline(workload["target"], color="0.5", lw=0.6, ls=":")
    ax.set(title=workload["name"], yscale="log", ylim=[10**at for at in workload["range"]])
    ax.set_xlim(0, record.steps or 1)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _width(optimizer: dict[str, Any]) -> float:
    return 1.8 if optimizer["name"] == "adabayes-k" else 0.9
