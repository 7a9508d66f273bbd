"""Checks of the paper's theory: each claim is simulated, measured, compared with its prediction, and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from adabayes.lab.display import make_table, plain
from adabayes.lab.report import figures, page
from adabayes.lab.run.folder import write_atomically
from adabayes.lab.theory.claims import Check, Topic, TopicMaker
from adabayes.lab.theory.matrix_filter import matrix, rotation
from adabayes.lab.theory.scalar_filter import (
    BATCH,
    LR,
    LR_SGD,
    drift,
    fixed_points,
    gain,
    kalman,
    limits,
    normalisers,
    schedule,
)

__all__ = ["TOPICS", "Check", "Topic", "TopicMaker", "draw", "table", "write", "write_explorer"]

TOPICS: tuple[TopicMaker, ...] = (drift, gain, limits, fixed_points, normalisers, schedule, kalman, matrix, rotation)
_HEADER = ("claim", "measured", "predicted", "within", "")


def table(topics: Sequence[Topic]) -> Table:
    """Make a table of all claims for a terminal."""
    shown = make_table({"claim": "wrap", **dict.fromkeys(_HEADER[1:], "right")}, box=SIMPLE_HEAD)
    for topic in topics:
        shown.add_row(plain(topic.title, "bold"))
        for check in topic.checks:
            *cells, result = map(plain, check.cells())
            result.stylize("green" if check.passed else "bold red")
            shown.add_row(*cells, result)
    return shown


def draw(topic: Topic, out: Path) -> None:
    """Write a topic's figure."""
    with figures.print_style():
        figure = Figure(figsize=(figures.TEXT, 2.7))
        topic.draw(figure)
        figures.save(figure, out / topic.name)


def write(topics: Sequence[Topic], out: Path) -> Path:
    """Write ``theory.md``, which has all claims with their figures, and return its path."""
    lines = ["# The theory, checked", ""]
    for topic in topics:
        lines += [f"## {topic.title}", "", topic.text, "", f"![{topic.title}]({topic.name}.svg)", ""]
        lines += [f"| {' | '.join(_HEADER)} |", "| --- | ---: | ---: | ---: | --- |"]
        lines += [f"| {' | '.join(check.cells())} |" for check in topic.checks] + [""]
    write_atomically(out / "theory.md", "\n".join(lines).encode())
    return out / "theory.md"


def write_explorer(out: Path) -> Path:
    """Write ``explorer.html``, a page with sliders that shows the learning rate of a weight and converts settings."""
    settings = {"lr": LR, "lr_sgd": LR_SGD, "batch_size": BATCH, "momentum": 0.9}
    return page.write("explorer", "AdaBayes explorer", settings, out / "explorer.html")
