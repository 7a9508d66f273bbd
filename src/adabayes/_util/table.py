"""Tables, as plain text and as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["aligned", "html", "shortened"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row; align the first column left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows]


def html(rows: Sequence[Sequence[str]], notes: Sequence[str] = (), totals: int = 0) -> str:
    """Return a table for a notebook, with the first row as its head and the last ``totals`` rows as its foot."""
    body = len(rows) - totals

    def part(tag: str, cell: str, lines: Sequence[Sequence[str]]) -> str:
        aligned = (
            "".join(
                f'<{cell} style="text-align: {"right" if i else "left"}">{escape(text)}</{cell}>'
                for i, text in enumerate(line)
            )
            for line in lines
        )
        return f"<{tag}>{''.join(f'<tr>{line}</tr>' for line in aligned)}</{tag}>" if lines else ""

    table = part("thead", "th", rows[:1]) + part("tbody", "td", rows[1:body]) + part("tfoot", "th", rows[body:])
    return f"<table>{table}</table>" + "".join(f"<p>{escape(note)}</p>" for note in notes if note)


def shortened(name: str, width: int = 20) -> str:
    """Shorten a name that is longer than ``width`` to its end."""
    return name if len(name) <= width else "…" + name[-width + 1 :]
