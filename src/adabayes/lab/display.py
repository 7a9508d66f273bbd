"""What one sees of a sweep while it goes on: bars on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Self

from adabayes.lab.protocol import Spec
from adabayes.lab.training import Progress

try:
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
    from rich.text import Text
except ImportError as error:
    raise ImportError("the lab needs rich and a few others: pip install '.[lab]' in the folder of AdaBayes") from error

if TYPE_CHECKING:
    from adabayes.lab.sweep import Outcome

__all__ = ["Display", "tracked"]

T = TypeVar("T")

_COLOURS = {"done": "green", "diverged": "yellow", "pruned": "bright_black", "failed": "red", "running": "cyan"}


class Display:
    """Follows the runs of a sweep. A context manager."""

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
        self._task = self._all.add_task("", total=epochs)
        self._each = Bars(TextColumn("{task.description}"), TextColumn("{task.fields[state]}"))
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

    def started(self, spec: Spec) -> None:
        self._started[spec.folder] = time.monotonic()
        self._rows[spec.folder] = self._each.add_task(str(spec), total=None, state="")
        self._count()

    def progressed(self, spec: Spec, progress: Progress) -> None:
        self._last[spec.folder] = progress
        state = f"{progress.epoch + 1}/{spec.epochs} loss {progress.loss:.3f} error {progress.error:.1f}%"
        if progress.test_error is not None:
            state += f" test {progress.test_error:.1f}%"
        self._each.update(self._rows[spec.folder], state=state)
        self._done[spec.folder] = spec.epochs * progress.step / progress.steps
        self._count()

    def ended(self, spec: Spec, outcome: Outcome) -> None:
        self.finished += 1
        self._done[spec.folder] = spec.epochs
        if spec.folder in self._rows:
            self._each.remove_task(self._rows.pop(spec.folder))
        self._count()
        figures = ", was there already"
        if outcome.is_new:
            last = self._last.get(spec.folder)
            loss = f", train loss {last.loss:.4f}" if last else ""
            now = time.monotonic()
            figures = f"{loss}, {now - self._started.get(spec.folder, now):.1f} s"
        self.console.print(
            Text.assemble(
                f"{self.finished:>{len(str(self.runs))}}/{self.runs} {spec}: ",
                (outcome.status, _COLOURS.get(outcome.status, "")),
                f": {outcome.error}" if outcome.error else figures,
            )
        )

    def _count(self) -> None:
        running = min(self.finished + 1, self.runs)
        self._all.update(self._task, description=f"run {running} of {self.runs}", completed=sum(self._done.values()))

    def warned(self, message: Warning | str, *_: Any) -> None:
        self.console.print(Text.assemble(("warning: ", "yellow"), str(message)))


def tracked(items: Collection[T], what: str) -> Iterator[T]:
    """The items, with a bar on the terminal, if there is one, that is gone at the end."""
    console = Console(stderr=True)
    yield from track(items, what, console=console, transient=True, disable=not console.is_terminal)
