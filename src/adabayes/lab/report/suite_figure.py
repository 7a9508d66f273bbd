"""The figure of the suite for documents: curves of each workload, and the training needed to reach AdamW's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from adabayes.lab import suite
from adabayes.lab.report import suite_page
from adabayes.lab.report.figures import DASHES, TEXT, print_style, save
from adabayes.lab.suite import Record

__all__ = ["draw", "write"]

_COLUMNS = 3


def write(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw ``evidence`` in a folder, as SVG and PNG, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with print_style():
        return save(draw(records), folder / "evidence", ("svg", "png"))


def draw(records: Sequence[Record]) -> Figure:
    """Draw a panel for each workload, and one for all of them."""
    content = suite_page.content(records)
    rows = math.ceil((len(records) + 1) / _COLUMNS)
    figure = Figure(figsize=(TEXT, 1.9 * rows + 0.4))
    *panels, last = figure.subplots(rows, _COLUMNS, squeeze=False).flat[: len(records) + 1]
    for ax in figure.axes[len(records) + 1 :]:
        ax.remove()
    for ax, record, workload in zip(panels, records, content["workloads"]):
        for o in content["optimizers"]:
            if curve := workload["curves"].get(o["name"]):
                width = 1.8 if o["name"] == "adabayes-k" else 0.9
                ax.plot(curve["steps"], curve["loss"], color=o["light"], ls=DASHES[o["dash"]], lw=width)
        if workload["target"] is not None:  # there is none without AdamW
            ax.axhline(workload["target"], color="0.5", lw=0.6, ls=":")
        ax.set(title=workload["name"], yscale="log", ylim=[10**at for at in workload["range"]])
        ax.set_xlim(0, record.steps or 1)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        ax.yaxis.set_minor_formatter(NullFormatter())
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
    last.set_yticks(range(len(content["optimizers"])), [o["label"] for o in content["optimizers"]])
    for label, o in zip(last.get_yticklabels(), content["optimizers"]):
        label.set_color(o["light"])
    last.invert_yaxis()
    return figure
