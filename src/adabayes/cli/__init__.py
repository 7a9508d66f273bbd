"""The command line.

``--help`` and ``--version`` answer at once, because torch and the lab are imported only when a command runs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence

from adabayes import __version__
from adabayes._util.signals import Stopped, handled
from adabayes.cli import bench, doctor, lab, output
from adabayes.cli.parsing import Parser, add_commands

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        with output.forgiving():
            _run(sys.argv[1:] if arguments is None else arguments)
    finally:
        if arguments is None:  # Python and torch take a while to exit; Ctrl-C must not print a traceback then
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(arguments: Sequence[str]) -> None:
    """Run a command; Ctrl-C and SIGTERM end it with one line."""
    message = "stopped\n"

    def stop_at_once(number: int) -> None:
        # torch is being imported: an exception would surface inside of it, and no work has begun yet.
        os.write(2, message.encode(errors="backslashreplace"))
        os._exit(Stopped(number).code)

    with handled(stop_at_once):
        args = _parser().parse_args(arguments)
        args.command = shlex.join(["adabayes", *arguments])
        if "TORCHELASTIC_RUN_ID" in os.environ:
            args.command = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m {args.command}"
        if getattr(args, "goes_on", False):
            message = f"stopped; nothing is lost. Go on with: {args.command}\n"
        try:
            args.run(args)
        except Stopped as stopped:
            if os.environ.get("RANK", "0") == "0":  # only the first of several processes prints
                sys.stderr.write(message)
            sys.exit(stopped.code)


def _parser() -> Parser:
    parser = Parser(prog="adabayes", description="Compares, times and checks the AdaBayes optimizers.")
    parser.add_argument("--version", action="version", version=f"adabayes {__version__}")
    commands = add_commands(parser)
    doctor.add(commands)
    bench.add(commands)
    lab.add(commands)
    return parser
