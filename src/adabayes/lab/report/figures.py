"""The report's figures for print, arranged as in the paper and as wide as a column or a two-column page."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adabayes._util.missing_extra import missing_extra
from adabayes.diagnostics import Points, draw_rates
from adabayes.lab.display import tracked
from adabayes.lab.run.files import write_atomically

try:
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter
except ImportError as error:
    raise missing_extra("figures are drawn with matplotlib", "lab") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLUMN", "DASHES", "TEXT", "print_style", "save", "write"]

COLUMN, TEXT = 3.4, 7.0  # inches: the width of a column, and of both
_FORMATS = ("pdf", "svg", "png")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.1,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "pdf.fonttype": 42,  # fonts that journals accept
    "svg.hashsalt": "adabayes",  # the same file each time
    "figure.constrained_layout.use": True,
}


def write(content: dict[str, Any], out: Path) -> list[Path]:
    """Draw the content of :func:`adabayes.lab.report.content` and return the files."""
    out.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[], Figure]] = {
        f"curves-{preset['key']}": partial(_curves, content, preset) for preset in content["presets"]
    }
    if content["rates"]:
        drawings["learning-rates"] = partial(_rates, content["rates"])
    with print_style():
        return [file for name, draw in tracked(drawings.items(), "drawing") for file in save(draw(), out / name)]


@contextmanager
def print_style() -> Iterator[None]:
    with mpl.rc_context(_STYLE):
        yield


def save(figure: Figure, path: Path, formats: Sequence[str] = _FORMATS) -> list[Path]:
    """Write a figure in these formats and return the files. Their bytes are the same each time."""
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is done
    files = [path.with_name(f"{path.name}.{suffix}") for suffix in formats]
    for file, kind in zip(files, formats):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, dpi=300, metadata=undated[kind])
        write_atomically(file, drawn.getvalue())
    return files


def _curves(content: dict[str, Any], preset: dict[str, Any]) -> Figure:
    """Draw losses above errors, with a column for each data set and network, as in the paper; at most four."""
    panels = content["panels"]
    shown = [o for o in content["optimizers"] if o["name"] in preset["optimizers"]]
    columns = min(len(panels), 4)
    blocks = -(-len(panels) // columns)
    figure = Figure(figsize=(COLUMN if columns == 1 else TEXT, 0.55 + 3.2 * blocks))
    grid = figure.subplots(2 * blocks, columns, squeeze=False)
    for ax in grid.flat:
        ax.set_visible(False)
    for (i, panel), (row, metric) in product(enumerate(panels), enumerate(("loss", "error"))):
        ax = grid[2 * (i // columns) + row, i % columns]
        ax.set_visible(True)
        _panel(ax, content["curves"].get(panel["key"], {}), shown, f"{preset['split']}_{metric}")
        if row == 0:
            ax.set_title(_plain(panel["title"]))
        else:
            ax.set_xlabel("epoch")
        if i % columns == 0 or (metric == "error" and panel["error"] != panels[i - 1]["error"]):
            ax.set_ylabel(f"{preset['split']} {panel['error'] if metric == 'error' else metric}")
    handles = [Line2D([], [], label=_plain(o["label"]), **_line(o)) for o in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if columns == 1 else 5)
    return figure


def _panel(ax: Axes, curves: dict[str, Any], shown: Iterable[dict[str, Any]], metric: str) -> None:
    for o in shown:
        if o["name"] not in curves:
            continue
        curve = curves[o["name"]][metric]
        mean = np.array(curve["mean"], float)
        epochs = np.arange(1, len(mean) + 1)
        mean = np.where(mean > 0, mean, np.nan)  # the axis is logarithmic
        ax.plot(epochs, mean, marker="o" if len(mean) == 1 else None, markersize=3, **_line(o))
        if curve["error"]:
            error = np.array(curve["error"], float)
            low = np.maximum(mean - error, mean / 50)
            ax.fill_between(epochs, low, mean + error, color=o["light"], alpha=0.15, linewidth=0)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def _tensor(values: Sequence[float | None]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, float))


def _plain(text: str) -> str:
    """Escape what matplotlib takes for mathematics."""
    return text.replace("$", r"\$")


def _line(optimizer: dict[str, Any]) -> dict[str, Any]:
    width = 1.5 if optimizer["ours"] else 1.0
    return {"color": optimizer["light"], "linestyle": DASHES[optimizer["dash"]], "linewidth": width}


def _rates(runs: Sequence[dict[str, Any]]) -> Figure:
    """Draw the paper's learning-rate figure, at the last epoch of each run before its learning rate changes."""
    columns = min(len(runs), 4)
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(COLUMN if columns == 1 else TEXT, 0.4 + (2.6 if columns <= 2 else 2.0) * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    for ax in grid.flat[len(runs) :]:
        ax.set_visible(False)
    for ax, run in zip(grid.flat, runs):
        last = run["epochs"][run["start"]]
        points = [
            Points(name, _tensor(adam), _tensor(gain), last["lr"], last["lr_sgd"])
            for name, adam, gain in zip(run["layers"], last["adam"], last["gain"])
        ]
        draw_rates(points, ax)
        ax.set_title(f"{run['panel']}\n{_plain(run['optimizer'])}, epoch {last['epoch'] + 1}")
        ax.set_xlabel("lr / rms(g)")
    for ax in grid[:, 0]:
        ax.set_ylabel("effective learning rate")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if columns == 1 else 5)
    return figure
