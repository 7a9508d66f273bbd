"""Parsers of arguments: help that fits the terminal, and a suggestion for a word that is misspelt."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

__all__ = ["Parser", "add_commands", "names"]


class _Help(argparse.HelpFormatter):
    """Fills the paragraphs of a description, and leaves those that begin with a space, which are examples, alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in parts)


class Parser(argparse.ArgumentParser):
    """A parser of which commands are parsers of the same kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if close := difflib.get_close_matches(str(value), map(str, action.choices or ()), 1):
                error.message += f"; did you mean {close[0]}?"
            raise


def add_commands(parser: Parser) -> argparse._SubParsersAction[Parser]:
    """Let a parser have commands; without one, it prints its help."""
    parser.set_defaults(run=lambda args: parser.print_help())
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def names(text: str) -> tuple[str, ...]:
    """Split a list with commas."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise argparse.ArgumentTypeError("there is no name in it; give some, A,B,..., or leave the option out")
    return found
