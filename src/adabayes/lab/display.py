"""Output on a terminal: the progress of a sweep, and tables that fit."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import Self

from adabayes._util.missing_extra import missing_extra
from adabayes.lab import data
from adabayes.lab.protocol import Spec
from adabayes.lab.run.training import Progress

try:
    from rich.box import Box
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        track,
    )
    from rich.progress import Progress as Bars
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise missing_extra("the lab needs more packages", "lab") from error

if TYPE_CHECKING:
    from adabayes.lab.execute.sweep import Outcome

__all__ = ["Display", "fitting", "make_table", "plain", "show", "tracked"]

T = TypeVar("T")

_COLOURS = {"done": "green", "diverged": "yellow", "pruned": "bright_black", "failed": "red", "running": "cyan"}


class Display:
    """Shows the progress of a sweep, as bars on a terminal and as lines elsewhere. A context manager."""

    def __init__(self, runs: int, epochs: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, soft_wrap=not sys.stderr.isatty())
        self.live = self.console.is_terminal
        self.runs, self.finished = runs, 0
        self._started: dict[str, float] = {}
        self._last: dict[str, Progress] = {}
        self._all = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("epochs,"),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._epochs: float = epochs
        self._task = self._all.add_task("", total=epochs)
        self._each = Bars(TextColumn("{task.fields[name]}", markup=False), TextColumn("{task.fields[state]}"))
        self._rows: dict[str, TaskID] = {}
        self._done: dict[str, float] = {}  # epochs of each run
        self._screen = Live(Group(self._each, self._all), console=self.console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.live:
            self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.stop()

    def expect(self, specs: Collection[Spec]) -> None:
        """Add runs to those that are still to do."""
        self.runs += len(specs)
        self._epochs += sum(spec.epochs * spec.length for spec in specs)
        self._all.update(self._task, total=math.ceil(self._epochs))

    def started(self, spec: Spec) -> None:
        self._started[spec.folder] = time.monotonic()
        self._rows[spec.folder] = self._each.add_task("", total=None, name=plain(spec).plain, state="")
        self._count()

    def progressed(self, spec: Spec, progress: Progress) -> None:
        self._last[spec.folder] = progress
        error = data.error_of(spec.dataset)
        digits = data.digits_of(error) - 1
        state = f"{progress.epoch + 1}/{spec.epochs} loss {progress.loss:.4g} {error} {progress.error:.{digits}f}"
        if progress.test_error is not None:
            state += f" test {progress.test_error:.{digits}f}"
        self._each.update(self._rows[spec.folder], state=state)
        self._done[spec.folder] = spec.epochs * spec.length * progress.step / progress.steps
        self._count()

    def ended(self, spec: Spec, outcome: Outcome) -> None:
        self.finished += 1
        self._done[spec.folder] = spec.epochs * spec.length
        if spec.folder in self._rows:
            self._each.remove_task(self._rows.pop(spec.folder))
        self._count()
        figures = ", was done already"
        if outcome.is_new:
            last = self._last.get(spec.folder)
            loss = f", train loss {last.loss:.4f}" if last else ""
            now = time.monotonic()
            figures = f"{loss}, {now - self._started.get(spec.folder, now):.1f} s"
        self.console.print(
            Text.assemble(
                f"{self.finished:>{len(str(self.runs))}}/{self.runs} ",
                plain(f"{spec}: "),
                plain(outcome.status, _COLOURS.get(outcome.status, "")),
                plain(f": {outcome.error}" if outcome.error else figures),
            )
        )

    def _count(self) -> None:
        running = min(self.finished + 1, self.runs)
        self._all.update(self._task, description=f"run {running} of {self.runs}", completed=sum(self._done.values()))

    def warned(self, message: Warning | str, *_: Any) -> None:
        self.console.print(Text.assemble(("warning: ", "yellow"), plain(message)))


def tracked(items: Collection[T], what: str) -> Iterator[T]:
    """Yield the items. On a terminal, a bar shows how far that is, and disappears at the end."""
    console = Console(stderr=True)
    yield from track(items, what, console=console, transient=True, disable=not console.is_terminal)


# Tables

_USUAL = 80  # columns of a terminal
_WIDEST = 1000  # columns to measure an unwrapped table in
_NARROWEST = 12  # columns that a cell can be wrapped to


def plain(text: object, style: str = "") -> Text:
    """Return a text without markup and without control characters."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text)), style)


def make_table(
    columns: Mapping[str, Literal["left", "right", "wrap"]], title: str | None = None, box: Box | None = None
) -> Table:
    """Make a table. Only columns of the kind ``wrap`` are broken into lines."""
    heading = None if title is None else plain(title, "italic")
    table = Table(title=heading, box=box, pad_edge=False, padding=(0, 1 if box else 2, 0, 0))
    for header, kind in columns.items():
        justify: Literal["left", "right"] = "right" if kind == "right" else "left"
        table.add_column(header, justify=justify, no_wrap=kind != "wrap", overflow="fold")
    return table


def fitting(make: Callable[[str], Table]) -> Table:
    """Make a table that fits 80 columns. ``make`` gets what separates the parts of a cell: a space, or a new line."""
    table = make(" ")
    return table if _needed(table, Console(width=_USUAL)) <= _USUAL else make("\n")


def show(table: Table, console: Console | None = None) -> None:
    """Print a table no wider than the terminal, or than 80 columns without one, unless its figures need more."""
    console = console or Console()
    console.width = max(console.width, _needed(table, console))
    console.print(table)


def _needed(table: Table, console: Console) -> int:
    """Return the smallest width of a table, whose columns of the kind ``wrap`` can be narrow."""
    wide = console.options.update(max_width=_WIDEST)
    needed = console.measure(table, options=wide).maximum
    for column in table.columns:
        if not column.no_wrap:
            width = max(console.measure(cell, options=wide).maximum for cell in (column.header, *column.cells))
            needed -= max(0, width - _NARROWEST)
    return needed
