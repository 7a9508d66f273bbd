"""``adabayes bench``: times a step."""

from __future__ import annotations

import argparse
from pathlib import Path

from adabayes import bench
from adabayes._util.signals import handled, raise_stopped
from adabayes.bench.workloads import WORKLOADS
from adabayes.cli.parsing import Parser

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser("bench", help="time a step against torch's optimizers", description=bench.__doc__)
    parser.add_argument("--quick", action="store_true", help="small workloads and few repeats: about a minute")
    parser.add_argument(
        "--backend",
        choices=("torch", "jax"),
        default="torch",
        help="library whose optimizers are timed (default: torch)",
    )
    parser.add_argument("--matrix", action="store_true", help="AdaBayes-K and its rivals: a few minutes")
    parser.add_argument("--threads", type=int, help="number of threads, not with --backend jax (default: torch's)")
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help=f"one of {', '.join(WORKLOADS)}; may be repeated"
    )
    parser.add_argument(
        "--optimizer",
        action="append",
        metavar="NAME",
        help="a name from the table; may be repeated; fused AdamW is always included",
    )
    parser.add_argument(
        "--repeats", type=int, help="timed steps of each optimizer (default: 30; 10 with --quick, 40 with --matrix)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios to FILE (needs matplotlib)")
    parser.set_defaults(run=lambda args: _run(parser, args))


def _run(parser: Parser, args: argparse.Namespace) -> None:
    from adabayes.bench import measure

    try:
        settings = measure.Settings.of(
            args.quick, args.threads, args.workload, args.optimizer, args.repeats, args.backend, args.matrix
        )
    except ValueError as error:
        parser.error(str(error))
    except ImportError as error:
        parser.exit(1, f"{error}\n")
    for path in (args.json, args.plot):
        if path and not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.resolve().parent}")
    with handled(raise_stopped):
        report = measure.run(settings)
        print(report.table())
        try:
            if args.json:
                args.json.write_text(report.to_json(), encoding="utf-8")
                print(f"written to {args.json}")
            if args.plot:
                report.plot(args.plot)
                print(f"drawn to {args.plot}")
        except OSError as error:
            parser.exit(1, f"adabayes: {error}\n")
