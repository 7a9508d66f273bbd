"""What one sees of a sweep while it goes on: bars on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from typing_extensions import Self

from adabayes.lab.protocol import Spec
from adabayes.lab.training import Progress

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.text import Text
except ImportError as error:
    raise ImportError("the lab needs rich and a few others: pip install 'adabayes[lab]'") from error

__all__ = ["Display"]

_COLOURS = {"done": "green", "diverged": "yellow", "pruned": "bright_black", "failed": "red", "running": "cyan"}


class Display:
    """Follows the runs of a sweep. A context manager."""

    def __init__(self, runs: int, epochs: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, soft_wrap=not sys.stderr.isatty())
        self.live = self.console.is_terminal
        self.runs, self.finished = runs, 0
        self._started: dict[str, float] = {}
        self._last: dict[str, Progress] = {}
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}"),
            console=self.console,
            disable=not self.live,
            transient=True,
        )
        self._all = self._bars.add_task("all epochs", total=epochs, state="")
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, spec: Spec) -> None:
        self._started[spec.folder] = time.monotonic()
        self._tasks[spec.folder] = self._bars.add_task(str(spec), total=spec.epochs, state="")

    def progressed(self, spec: Spec, progress: Progress) -> None:
        self._last[spec.folder] = progress
        state = f"loss {progress.loss:.3f}, error {progress.error:.1f} %"
        if progress.test_error is not None:
            state += f", test {progress.test_error:.2f} %"
        task = self._tasks.get(spec.folder)
        if task is not None:
            self._bars.update(task, completed=progress.step * spec.epochs // progress.steps, state=state)
            done = sum(t.completed for t in self._bars.tasks if t.id != self._all)
            self._bars.update(self._all, completed=done, state=f"run {self.finished + 1} of {self.runs}")

    def ended(self, spec: Spec, status: str, error: str | None) -> None:
        self.finished += 1
        task = self._tasks.get(spec.folder)
        if task is None:
            task = self._tasks[spec.folder] = self._bars.add_task(str(spec), total=spec.epochs, state="")
        self._bars.update(task, completed=spec.epochs, visible=False)
        seconds = time.monotonic() - self._started.get(spec.folder, time.monotonic())
        last = self._last.get(spec.folder)
        figures = f", train loss {last.loss:.4f}, {seconds:.1f} s" if last else ", was there already"
        self.console.print(
            Text.assemble(
                f"{self.finished:>{len(str(self.runs))}}/{self.runs} {spec}: ",
                (status, _COLOURS.get(status, "")),
                f": {error}" if error else figures,
            )
        )

    def warned(self, message: Warning | str, *_: Any) -> None:
        self.console.print(Text.assemble(("warning: ", "yellow"), str(message)))
