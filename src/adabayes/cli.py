"""The command line.

``--help`` and ``--version`` answer at once: torch and the lab are imported when a command runs, not before.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adabayes import __version__, bench
from adabayes.bench.workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    args.command = shlex.join(["adabayes", *(sys.argv[1:] if arguments is None else arguments)])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        args.command = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m {args.command}"
    args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="adabayes", description="Tools for optimizers between SGD and AdamW.")
    parser.add_argument("--version", action="version", version=f"adabayes {__version__}")
    commands = _add_commands(parser)

    doctor = commands.add_parser(
        "doctor",
        help="check the installation",
        description="Prints versions, whether the fused kernels are there, which instructions they use, and which "
        "extras are installed.",
    )
    doctor.set_defaults(run=lambda args: print(diagnosis()))

    command = commands.add_parser(
        "bench",
        help="time a step against torch's optimizers",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--quick", action="store_true", help="small workloads and few repeats: about a minute")
    command.add_argument("--backend", choices=("torch", "jax"), default="torch", help="(default: torch)")
    command.add_argument("--matrix", action="store_true", help="AdaBayes-K and its rivals: some minutes")
    command.add_argument("--threads", type=int, help="(default: torch's)")
    command.add_argument(
        "--workload", action="append", metavar="NAME", help=f"one of {', '.join(WORKLOADS)}; may be repeated"
    )
    command.add_argument(
        "--optimizer",
        action="append",
        metavar="NAME",
        help="a name from the table; may be repeated; fused AdamW is always there",
    )
    command.add_argument("--repeats", type=int, help="timed steps of each optimizer (default: 30; with --quick 10)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    command.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios to FILE (needs matplotlib)")
    command.set_defaults(run=lambda args: run_bench(command, args))

    _add_lab(commands)
    return parser


def _add_commands(parser: argparse.ArgumentParser) -> Any:
    """Let a parser have commands; without one, it prints its help."""
    parser.set_defaults(run=lambda args: parser.print_help())
    return parser.add_subparsers(title="commands")


_EXTRAS = {"plot": "matplotlib", "lab": "optuna", "jax": "optax", "ray": "ray", "tensorboard": "tensorboard"}


def diagnosis() -> str:
    """Describe the installation, a line for each part."""
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
    there = {extra: importlib.util.find_spec(package) is not None for extra, package in _EXTRAS.items()}
    lines["extras"] = ", ".join(f"{extra} {'yes' if found else 'no'}" for extra, found in there.items())
    if not all(there.values()):
        lines["extras"] += "  (pip install '.[NAME]' in the folder of AdaBayes)"
    return "\n".join(f"{name:<13} {value}" for name, value in lines.items())


def run_bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
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
    try:
        report = measure.run(settings)
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was written")
    print(report.table())
    if args.json:
        args.json.write_text(report.to_json(), encoding="utf-8")
        print(f"written to {args.json}")
    if args.plot:
        report.plot(args.plot)
        print(f"drawn to {args.plot}")


# The lab


def _add_lab(commands: Any) -> None:
    """Add the commands of the lab, which is imported when one of them runs."""
    reproduce = _command(
        commands,
        "reproduce",
        "run the paper's comparison, or one of your own",
        """Trains every optimizer of a protocol with every seed, and prints a table in the form of the paper's.

  adabayes reproduce                                    digits, ten optimizers: two minutes, no download
  adabayes reproduce --protocol mini --dataset cifar10  the paper's protocol at the size of a CPU
  adabayes reproduce --protocol paper --device cuda     the paper's
  adabayes reproduce --protocol mine.toml               your own: copy one of the package's, or extend it
  adabayes reproduce --executor ray --address auto      spread over a Ray cluster

Give the same command again to go on after Ctrl-C, a crash or a full disk: what is done stays done, and the rest ends as
if nothing had happened, bit for bit. Results are in --out: results.csv, results.json, and a folder for each run.""",
    )
    _add_protocol(reproduce)
    reproduce.add_argument("--optimizers", type=_names, metavar="A,B,...", help="some of the protocol's (default: all)")
    reproduce.add_argument("--seeds", type=int, metavar="N", help="run seeds 0 to N-1 (default: the protocol's)")
    reproduce.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time; the cores are shared out (default: 1)"
    )
    reproduce.add_argument(
        "--executor", choices=("local", "ray"), default="local", help="where runs go (default: local)"
    )
    reproduce.add_argument(
        "--address", metavar="ADDR", help="address of a Ray cluster, or auto (default: start one here)"
    )
    reproduce.add_argument("--cpus-per-run", type=float, default=1, metavar="N", help="with ray (default: 1)")
    reproduce.add_argument("--gpus-per-run", type=float, default=0, metavar="N", help="with ray (default: 0)")
    reproduce.add_argument(
        "--dry-run", action="store_true", help="list the runs and estimate their time; train nothing"
    )
    reproduce.set_defaults(ranks=None)
    _add_training(reproduce)
    _add_tensorboard(reproduce)

    train = _command(
        commands,
        "train",
        "train one optimizer with one seed",
        """Trains one optimizer with one seed.

  adabayes train --optimizer adabayes
  adabayes train --optimizer adabayes --set lr=0.01 --set lr_sgd=1.0 --epochs 5

On several devices, with the same batches and the same metrics but for rounding, resumed by any number of processes:

  torchrun --nproc-per-node 2 -m adabayes train --optimizer adabayes --distributed ddp""",
    )
    _add_protocol(train)
    train.add_argument("--optimizer", required=True, metavar="NAME", help="one of the protocol's, like adabayes or sgd")
    train.set_defaults(jobs=1, executor="local", address=None, ranks=None, dry_run=False)
    train.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    train.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="a setting of the optimizer; may be repeated"
    )
    train.add_argument("--distributed", choices=("ddp", "fsdp2"), help="as one of the processes of torchrun")
    _add_training(train)
    _add_tensorboard(train)

    tune = _command(
        commands,
        "tune",
        "find good settings, with the same effort for every optimizer",
        """Gives every optimizer of a protocol the same number of trials over its own search space (the protocol's
`search` entries), with Optuna's quasi-random sampler and median pruner, judged on a tenth of the training data that is
held out; the test set is not touched. Writes tuned.toml, a protocol with the winners, and tune.png, which shows how
sensitive each optimizer is. The same command goes on where it was stopped; a larger budget adds trials.

  adabayes tune --budget 8 --optimizers sgd,adamw,adabayes
  adabayes reproduce --protocol out/quick-tuning/tuned.toml""",
    )
    _add_protocol(tune)
    tune.add_argument("--optimizers", type=_names, metavar="A,B,...", help="some of the protocol's (default: all)")
    tune.add_argument("--budget", type=int, required=True, metavar="N", help="trials of each optimizer")
    tune.set_defaults(executor="local", dry_run=False)
    _add_training(tune)

    report = _command(
        commands,
        "report",
        "make a page from a folder of runs",
        "Writes index.html, a page that needs no network: the table, curves, learning rates of weights, and costs.",
    )
    report.add_argument(
        "folder", type=Path, metavar="RUNS", help="the folder that reproduce or train wrote to, like out/quick"
    )
    report.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUNS)")
    report.add_argument(
        "--figures", action="store_true", help="also write DIR/figures: each as PDF, SVG and PNG, for a two-column page"
    )

    theory = _command(
        commands,
        "theory",
        "check the paper's theory by simulation",
        """Checks each claim of the paper's theory by simulation, in seconds and without data: the measured value
against the predicted one. Writes theory.md with a figure for each part, and explorer.html, a page with sliders that
shows what learning rate a weight gets and converts the settings of AdamW, SGD and the paper. The exit code is 1 if a
claim fails.""",
    )
    theory.add_argument("--out", type=Path, default=Path("out/theory"), metavar="DIR", help="(default: out/theory)")

    runs = _command(
        commands,
        "runs",
        "list runs: done, running, missing, failed",
        "Lists the runs of a folder, and how each stands.",
    )
    runs.add_argument("folder", type=Path, metavar="DIR", help="the folder that was written to, like out/quick")

    data = commands.add_parser(
        "data", help="list, fetch or verify data sets", description="Manages data sets that come in files."
    )
    actions = _add_commands(data)
    for name, text in (
        ("list", "list the data sets, and where they are"),
        ("fetch", "download, or resume a download; no file is opened before its checksum is right"),
        ("verify", "check all files against the checksums that the authors publish"),
    ):
        action = _command(actions, name, text, text.capitalize() + ".", f"data_{name}")
        if name != "list":
            action.add_argument("names", nargs="+", metavar="NAME", help="cifar10, cifar100, fashion-mnist, mnist")
        _add_data(action)


def _command(commands: Any, name: str, short: str, long: str, function: str | None = None) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=short, description=long, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=lambda args: _run_lab(parser, function or name, args))
    return parser


def _run_lab(parser: argparse.ArgumentParser, function: str, args: argparse.Namespace) -> None:
    try:
        act: Callable[[argparse.Namespace], int] = getattr(importlib.import_module("adabayes.lab.commands"), function)
    except ImportError as error:
        parser.exit(
            1,
            f"{error}\nThe lab needs more than the optimizers do: pip install '.[lab]' in the folder of AdaBayes\n",
        )
    try:
        code = act(args)
    except (ValueError, OSError, ImportError) as error:  # that the user can fix
        parser.exit(1, f"adabayes: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped\n")
    sys.exit(code)


def _add_protocol(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--protocol",
        default="quick",
        metavar="NAME|FILE",
        help="quick, mini, paper, text, or a TOML file (default: quick)",
    )
    parser.add_argument(
        "--dataset", type=_names, metavar="NAME", help="in place of the protocol's; several with commas"
    )
    parser.add_argument("--model", type=_names, metavar="NAME", help="in place of the protocol's; several with commas")
    parser.add_argument("--epochs", type=int, metavar="N", help="(default: the protocol's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: out/PROTOCOL)")
    _add_data(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of data sets (default: $ADABAYES_DATA, or the user's cache)"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, mps, ... (default: cpu)")
    parser.add_argument("--autocast", action="store_true", help="mixed precision, in bfloat16 (slow on most CPUs)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="within an epoch; there is always one at its end (default: 60)",
    )
    parser.add_argument("--no-channels-last", action="store_true", help="keep images in torch's usual layout")
    parser.add_argument(
        "--validation", type=float, metavar="SHARE", help="test on this share of the training data, not on the test set"
    )


def _add_tensorboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensorboard", action="store_true", help="write events during runs, for tensorboard --logdir OUT/runs"
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
