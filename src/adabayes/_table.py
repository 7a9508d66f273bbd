"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned", "shortened"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows]


def shortened(name: str, width: int = 20) -> str:
    """Return the end of a name that is longer than ``width``."""
    return name if len(name) <= width else "…" + name[-width + 1 :]
