"""``adabayes doctor``: checks the installation."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import sys
import textwrap

from adabayes import __version__
from adabayes._util.missing_extra import install_command
from adabayes.cli.parsing import Parser

__all__ = ["add", "diagnosis", "extras"]

_INDENT = 14 * " "
# A package that an extra needs in every version of Python: "rich>=13; extra == 'lab'"
_NEED = re.compile(
    r"(?P<name>[\w.-]+)[^;]*; *(?:\(?sys_platform == .linux.\)? and )?extra == ['\"](?P<extra>[\w.-]+)['\"]"
)


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Prints versions, whether the fused kernels were built, which instructions they use, and which "
        "extras are installed. With --gpu, checks the fused step on the GPU: its bits against the CPU's, a step's time "
        "against torch's AdamW, a CUDA graph and a GradScaler; without a GPU, what needs none. That takes a minute or "
        "two.",
    )
    parser.add_argument("--gpu", action="store_true", help="check the fused step on the GPU, and print what to report")
    parser.set_defaults(run=lambda args: _check_gpu() if args.gpu else print(diagnosis()))


def _check_gpu() -> None:
    """Check the fused step on a GPU, and print the results; exit with 1 if a check fails."""
    import torch

    from adabayes.bench import gpu

    results = list(gpu.findings())
    report = gpu.report(results)
    print(f"Please paste this into an issue:\n\n```\n{report}\n```" if torch.cuda.is_available() else report)
    if any(result.well is False for result in results):
        sys.exit(1)


def diagnosis() -> str:
    """Describe the installation, one aspect per line."""
    import torch

    from adabayes import kernels

    missing = kernels.unavailable()
    lines = {
        "adabayes": __version__,
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "kernels": f"not there: {missing}" if missing else f"loaded, {kernels.LIBRARY}",
    }
    if not missing:
        lines["instructions"] = kernels.instruction_set()
        lines["threads from"] = kernels.thread_source()
    known = extras()
    lines["extras"] = _wrapped([name for name, installed in known.items() if installed]) if known else "not known"
    if others := [name for name, installed in known.items() if not installed]:
        lines["not installed"] = f"{_wrapped(others)}\n{_INDENT}({install_command('NAME')})"
    return "\n".join(f"{name:<13} {value}" for name, value in lines.items())


def _wrapped(names: list[str]) -> str:
    return textwrap.fill(", ".join(names) or "none", 80, initial_indent=_INDENT, subsequent_indent=_INDENT).strip()


def extras() -> dict[str, bool]:
    """Return the extras that the package declares, and whether all packages of each extra are installed."""
    try:
        package = importlib.metadata.distribution("adabayes")
    except importlib.metadata.PackageNotFoundError:  # imported from its source
        return {}
    needs = [need for line in package.requires or () if (need := _NEED.fullmatch(line))]
    lacking = {need["extra"] for need in needs if not _is_installed(need["name"])}
    return {extra: extra not in lacking for extra in package.metadata.get_all("Provides-Extra") or ()}


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
