"""The command line: ``adabayes doctor`` and ``adabayes bench``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from adabayes import __version__, bench, kernels


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="adabayes", description="Optimizers between SGD and AdamW: tools.")
    parser.add_argument("--version", action="version", version=f"adabayes {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)

    doctor = commands.add_parser(
        "doctor",
        help="is everything in place?",
        description="Prints versions, and whether the fused kernels are there and with which instructions they run.",
    )
    doctor.set_defaults(run=lambda args: print(diagnosis()))

    command = commands.add_parser(
        "bench",
        help="time a step against torch's optimizers",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--quick", action="store_true", help="small workloads and few repeats: under a minute")
    command.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    command.add_argument(
        "--workload", action="append", metavar="NAME", help=f"of {', '.join(bench.WORKLOADS)}; may be repeated"
    )
    command.add_argument(
        "--optimizer",
        action="append",
        metavar="NAME",
        help="as the table names them; may be repeated; fused AdamW is always there",
    )
    command.add_argument("--repeats", type=int, help="timed steps of each optimizer (default: 30; with --quick 10)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios to FILE (needs matplotlib)")
    command.set_defaults(run=lambda args: run_bench(command, args))

    args = parser.parse_args(arguments)
    args.run(args)


def diagnosis() -> str:
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
    return "\n".join(f"{name:<13} {value}" for name, value in lines.items())


def run_bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    try:
        settings = bench.Settings.of(args.quick, args.threads, args.workload, args.optimizer, args.repeats)
    except ValueError as error:
        parser.error(str(error))
    for path in (args.json, args.plot):
        if path and not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.resolve().parent}")
    try:
        report = bench.run(settings)
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was written")
    print(report.table())
    if args.json:
        args.json.write_text(report.to_json(), encoding="utf-8")
        print(f"written to {args.json}")
    if args.plot:
        report.plot(args.plot)
        print(f"drawn to {args.plot}")
