"""The command line.

``--help`` and ``--version`` answer at once: torch and the lab are imported when a command runs, not before.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence

from adabayes import __version__
from adabayes._signals import Stopped, handled
from adabayes.cli import bench, doctor, lab, output
from adabayes.cli.parsing import Parser, add_commands

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        with output.forgiving():
            _run(sys.argv[1:] if arguments is None else arguments)
    finally:
        if arguments is None:  # Python and torch take a while to end; Ctrl-C is no reason for a traceback there
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(arguments: Sequence[str]) -> None:
    """Run a command; Ctrl-C and SIGTERM end it with one line."""
    said = "stopped\n"

    def stop_at_once(number: int) -> None:
        # Torch is being imported: an exception would come up in the midst of it, and nothing has begun yet.
        os.write(2, said.encode(errors="backslashreplace"))
        os._exit(Stopped(number).code)

    with handled(stop_at_once):
        args = _parser().parse_args(arguments)
        args.command = shlex.join(["adabayes", *arguments])
        if "TORCHELASTIC_RUN_ID" in os.environ:
            args.command = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m {args.command}"
        if getattr(args, "goes_on", False):
            said = f"stopped; nothing is lost. Go on with: {args.command}\n"
        try:
            args.run(args)
        except Stopped as stopped:
            if os.environ.get("RANK", "0") == "0":  # of several processes, the first tells
                sys.stderr.write(said)
            sys.exit(stopped.code)


def _parser() -> Parser:
    parser = Parser(prog="adabayes", description="Compares, times and checks the AdaBayes optimizers.")
    parser.add_argument("--version", action="version", version=f"adabayes {__version__}")
    commands = add_commands(parser)
    doctor.add(commands)
    bench.add(commands)
    lab.add(commands)
    return parser
