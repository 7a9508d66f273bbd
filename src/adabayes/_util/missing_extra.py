"""The error for a package that is not installed, which names the extra to install."""

from __future__ import annotations

__all__ = ["install_command", "missing_extra"]


def missing_extra(reason: str, extra: str) -> ImportError:
    """Return the error to raise; ``reason`` names what needs which package.

    Examples:
        >>> missing_extra("plotting needs matplotlib", "plot")
        ImportError("plotting needs matplotlib: pip install '.[plot]' in the folder of AdaBayes")
    """
    return ImportError(f"{reason}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra, and where to run it."""
    return f"pip install '.[{extra}]' in the folder of AdaBayes"
