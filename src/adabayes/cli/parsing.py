"""Argument parsers whose help fits the terminal, and whose errors suggest the right spelling."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

__all__ = ["Parser", "add_commands", "names"]


class _Help(argparse.HelpFormatter):
    """Wraps the paragraphs of a description, except examples, which begin with a space."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(p if p.startswith(" ") else fill(p, width, indent) for p in paragraphs)


class Parser(argparse.ArgumentParser):
    """A parser whose subcommands share its class."""

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
    """Add subcommands to a parser; without a subcommand, the parser prints its help."""
    parser.set_defaults(run=lambda args: parser.print_help())
    return parser.add_subparsers(title="commands", metavar="COMMAND")


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names."""
    given = tuple(name.strip() for name in text.split(",") if name.strip())
    if not given:
        raise argparse.ArgumentTypeError("there is no name in it; give some, A,B,..., or leave the option out")
    return given
