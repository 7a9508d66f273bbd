"""The commands of the lab: their options, turned into requests for :mod:`adabayes.lab.commands`."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adabayes._util.missing_extra import install_command
from adabayes._util.signals import handled, raise_stopped
from adabayes.cli.parsing import Parser, add_commands, names

if TYPE_CHECKING:
    from adabayes.lab import requests

__all__ = ["add"]


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the commands of the lab, which is imported when one of them runs."""
    _add_reproduce(commands)
    _add_train(commands)
    _add_tune(commands)
    _add_suite(commands)
    _add_report(commands)
    _add_theory(commands)
    _add_runs(commands)
    _add_data(commands)


def _command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    short: str,
    long: str,
    act: Callable[[argparse.Namespace], None],
) -> Parser:
    parser = commands.add_parser(name, help=short, description=long)
    goes_on = act in (_reproduce, _train, _tune, _suite, _data_fetch)  # these resume when given again
    parser.set_defaults(run=lambda args: _run(parser, act, args), goes_on=goes_on)
    return parser


def _run(parser: Parser, act: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run a command, and exit with 1 if it fails or cannot do everything."""
    try:
        commands = importlib.import_module("adabayes.lab.commands")
    except ImportError as error:
        parser.exit(1, f"{error}\nThe lab needs more packages than the core: {install_command('lab')}\n")
    try:
        with handled(raise_stopped):
            act(args)
    except commands.Unfinished as error:
        parser.exit(1, f"{error}\n")
    except (ValueError, OSError, ImportError) as error:  # that the user can fix
        parser.exit(1, f"adabayes: {error}\n")


# Comparisons, runs and searches


def _add_reproduce(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "reproduce",
        "run the paper's comparison, or one of your own",
        """
Trains every optimizer of a protocol with every seed, and prints a table in the form of the paper's, and paired
differences to AdamW.

  adabayes reproduce
      digits, ten optimizers: two minutes, no download
  adabayes reproduce --protocol mini --dataset cifar10
      the paper's protocol, scaled down to a CPU
  adabayes reproduce --protocol paper --device cuda
      the paper's experiment
  adabayes reproduce --protocol anchors/nanogpt-cpu
      a published experiment, to check the lab itself
  adabayes reproduce --protocol mine.toml
      your own: copy one of the package's, or extend it
  adabayes reproduce --executor ray --address auto
      on a Ray cluster

After Ctrl-C, a crash or a full disk, give the same command again: finished runs stay, and the others end with the same
bits as if nothing had happened. Results are in --out: index.html, results.csv, results.json, and a folder for each
run.""",
        _reproduce,
    )
    _add_protocol(parser, "out/PROTOCOL", names, "; separate several by commas")
    _add_optimizers(parser)
    parser.add_argument("--seeds", type=int, metavar="N", help="run seeds 0 to N-1 (default: the protocol's)")
    _add_executor(parser)
    parser.add_argument("--dry-run", action="store_true", help="list the runs and estimate their time; train nothing")
    _add_training(parser)
    _add_tensorboard(parser)


def _reproduce(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    request = requests.Reproduce(
        choice=_choice(args, args.dataset, args.model, args.optimizers, args.seeds),
        training=_training(args, args.tensorboard),
        executor=_executor(args),
        out=args.out,
        command=args.command,
    )
    (commands.dry_run if args.dry_run else commands.reproduce)(request)


def _add_train(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "train",
        "train one optimizer with one seed",
        """
Trains one optimizer with one seed.

  adabayes train --optimizer adabayes
  adabayes train --optimizer adabayes --set lr=0.01 --epochs 5

On several devices, with the same batches and, up to rounding, the same metrics; any number of processes can resume it:

  torchrun --nproc-per-node 2 -m adabayes train \\
      --optimizer adabayes --distributed ddp""",
        _train,
    )
    _add_protocol(parser, "out/PROTOCOL-train")
    parser.add_argument(
        "--optimizer", required=True, metavar="NAME", help="one of the protocol's, for example adabayes or sgd"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the optimizer; can be repeated"
    )
    parser.add_argument("--distributed", choices=("ddp", "fsdp2"), help="train as one of torchrun's processes")
    _add_training(parser)
    _add_tensorboard(parser)


def _train(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.train(
        requests.Train(
            choice=_choice(args, _one(args.dataset), _one(args.model), (args.optimizer,)),
            training=_training(args, args.tensorboard),
            seed=args.seed,
            settings=dict(map(_setting, args.set)),
            distributed=args.distributed,
            out=args.out,
            command=args.command,
        )
    )


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: write it as name=value, like --set lr=0.01")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _add_tune(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "tune",
        "find good settings, with the same effort for every optimizer",
        """
Gives every optimizer of a protocol the same number of trials over its own search space (the protocol's `search`
entries), with Optuna's quasi-random sampler and median pruner. Trials are judged on a tenth of the training data, which
is held out; the test set is not used. Writes tuned.toml, a protocol with the winners, and tune.png, which shows how
sensitive each optimizer is. The same command resumes a search; a larger budget adds trials.

  adabayes tune --budget 8 --optimizers sgd,adamw,adabayes
  adabayes reproduce --protocol out/quick-tuning/tuned.toml""",
        _tune,
    )
    _add_protocol(parser, "out/PROTOCOL-tuning")
    _add_optimizers(parser)
    parser.add_argument("--budget", type=int, required=True, metavar="N", help="trials of each optimizer")
    _add_training(parser)


def _tune(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.tune(
        requests.Tune(
            choice=_choice(args, _one(args.dataset), _one(args.model), args.optimizers),
            training=_training(args),
            budget=args.budget,
            out=args.out,
            command=args.command,
        )
    )


def _add_suite(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "suite",
        "compare optimizers on eight workloads, with equal effort",
        """
Runs the suite. On each workload every optimizer gets the same number of trials, judged by the final validation loss.
The settings that win are run with fresh seeds and tested once on the test set; shorter schedules then show how much
training reaches the loss of tuned AdamW. The result is a page and a picture, with performance profiles and a panel for
each workload. The whole suite takes many hours, so start with a part:

  adabayes suite --workload digits,pinn --jobs 2
  adabayes suite --jobs 2
  adabayes suite --from evidence
      makes the page from existing records, without training
  adabayes suite --from evidence --time-steps
      first times a step of each optimizer again

Each run has one thread. The same command resumes the suite. Some workloads need files (adabayes data fetch cifar10
shakespeare fashion-mnist); Fashion-MNIST is also in Debian's dataset-fashion-mnist. Times are right only if the machine
does nothing else.""",
        _suite,
    )
    parser.add_argument("--workload", type=names, metavar="A,B,...", help="some of the eight workloads (default: all)")
    _add_optimizers(parser)
    parser.add_argument("--budget", type=int, default=10, metavar="N", help="trials of each optimizer (default: 10)")
    parser.add_argument("--seeds", type=int, metavar="N", help="run seeds 0 to N-1 (default: 5)")
    _add_executor(parser)
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="write checkpoints this often (default: 60)",
    )
    parser.add_argument(
        "--from", type=Path, metavar="DIR", dest="records", help="make the page from the records in DIR; train nothing"
    )
    parser.add_argument(
        "--time-steps",
        action="store_true",
        help="time steps again for the records in --from, or --out; train nothing",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/suite"), metavar="DIR", help="where to write (default: out/suite)"
    )
    _add_data_folder(parser)


def _suite(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.suite(
        requests.Suite(
            command=args.command,
            workloads=args.workload,
            optimizers=args.optimizers,
            budget=args.budget,
            seeds=args.seeds,
            executor=_executor(args),
            checkpoint_seconds=args.checkpoint_every,
            data=args.data,
            out=args.out,
            records=args.records,
            time_steps=args.time_steps,
        )
    )


# Results


def _add_report(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "report",
        "make a page from a folder of runs",
        "Writes index.html, a page that needs no network: tables, curves, learning rates of weights, and costs.",
        _report,
    )
    parser.add_argument(
        "folder", type=Path, metavar="RUNS", help="the --out of reproduce or train, for example out/quick"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUNS)")
    parser.add_argument(
        "--figures", action="store_true", help="also write DIR/figures: each as PDF, SVG and PNG, for a two-column page"
    )


def _report(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.report(requests.Report(args.folder, args.out, args.figures))


def _add_theory(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "theory",
        "check the paper's theory by simulation",
        """
Checks each claim of the paper's theory by simulation, in seconds and without data, and compares the measured value with
the predicted one. Writes theory.md, with a figure for each part, and explorer.html, a page with sliders that shows the
learning rate of a weight and converts the settings of AdamW, SGD and the paper. The exit code is 1 if a claim
fails.""",
        _theory,
    )
    parser.add_argument("--out", type=Path, default=Path("out/theory"), metavar="DIR", help="(default: out/theory)")


def _theory(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.theory(requests.Theory(args.out))


def _add_runs(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        "runs",
        "list runs: done, running, missing, failed",
        "Lists the runs of a folder and the status of each.",
        _runs,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of a command, for example out/quick")


def _runs(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.runs(requests.Runs(args.folder))


# Data sets


def _add_data(commands: argparse._SubParsersAction[Parser]) -> None:
    data = commands.add_parser(
        "data", help="list, fetch or verify data sets", description="Manages data sets that have files."
    )
    actions = add_commands(data)
    for name, text, act in (
        ("list", "list the data sets and where they are", _data_list),
        ("fetch", "download, or resume a download; files are opened only if their checksums are right", _data_fetch),
        ("verify", "check all files against the checksums that their authors publish", _data_verify),
    ):
        action = _command(actions, name, text, text.capitalize() + ".", act)
        if name != "list":
            action.add_argument(
                "names", nargs="+", metavar="NAME", help="cifar10, cifar100, fashion-mnist, mnist, shakespeare"
            )
        _add_data_folder(action)


def _data_list(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.data_list(requests.DataList(args.data))


def _data_fetch(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.data_fetch(requests.DataFiles(tuple(args.names), args.data))


def _data_verify(args: argparse.Namespace) -> None:
    from adabayes.lab import commands, requests

    commands.data_verify(requests.DataFiles(tuple(args.names), args.data))


# Options of several commands, and the parts of requests that they become


def _add_protocol(parser: Parser, out: str, kind: Callable[[str], object] = str, several: str = "") -> None:
    parser.add_argument(
        "--protocol",
        default="quick",
        metavar="NAME|FILE",
        help="demo, quick, mini, paper, text, suite/NAME, anchors/NAME, or a TOML file (default: quick)",
    )
    for name in ("--dataset", "--model"):
        parser.add_argument(name, type=kind, metavar="NAME", help=f"instead of the protocol's{several}")
    parser.add_argument("--epochs", type=int, metavar="N", help="(default: the protocol's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where to write (default: {out})")
    _add_data_folder(parser)


def _add_data_folder(parser: Parser) -> None:
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder of data sets (default: $ADABAYES_DATA, or your cache)"
    )


def _add_optimizers(parser: Parser) -> None:
    parser.add_argument("--optimizers", type=names, metavar="A,B,...", help="some of the protocol's (default: all)")


def _add_executor(parser: Parser) -> None:
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of runs at a time, which share the cores (default: 1)"
    )
    parser.add_argument("--executor", choices=("local", "ray"), default="local", help="where to run (default: local)")
    parser.add_argument("--address", metavar="ADDR", help="address of a Ray cluster, or auto (default: start one here)")
    parser.add_argument("--cpus-per-run", type=float, default=1, metavar="N", help="with Ray (default: 1)")
    parser.add_argument("--gpus-per-run", type=float, default=0, metavar="N", help="with Ray (default: 0)")


def _executor(args: argparse.Namespace) -> requests.Local | requests.Ray:
    from adabayes.lab import requests

    if args.executor == "ray":
        return requests.Ray(args.address, args.cpus_per_run, args.gpus_per_run)
    if args.address:
        raise ValueError(f"--address {args.address} is that of a Ray cluster: give --executor ray as well")
    return requests.Local(args.jobs)


def _one(name: str | None) -> tuple[str, ...] | None:
    return None if name is None else (name,)


def _choice(
    args: argparse.Namespace,
    datasets: tuple[str, ...] | None,
    models: tuple[str, ...] | None,
    optimizers: tuple[str, ...] | None,
    seeds: int | None = None,
) -> requests.Choice:
    from adabayes.lab import requests

    return requests.Choice(args.protocol, datasets, models, optimizers, seeds, args.epochs, args.validation)


def _add_training(parser: Parser) -> None:
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, mps, ... (default: cpu)")
    parser.add_argument("--autocast", action="store_true", help="mixed precision, in bfloat16 (slow on most CPUs)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="write checkpoints this often within an epoch, and always at its end (default: 60)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each run on a CPU (default: 1 for a small network, else its share of the cores)",
    )
    parser.add_argument("--no-channels-last", action="store_true", help="keep images in torch's default layout")
    parser.add_argument(
        "--validation", type=float, metavar="SHARE", help="test on this share of the training data, not on the test set"
    )


def _training(args: argparse.Namespace, tensorboard: bool = False) -> requests.Training:
    from adabayes.lab import requests

    return requests.Training(
        device=args.device,
        autocast=args.autocast,
        compile=args.compile,
        channels_last=not args.no_channels_last,
        checkpoint_seconds=args.checkpoint_every,
        tensorboard=tensorboard,
        data=args.data,
        threads=args.threads,
    )


def _add_tensorboard(parser: Parser) -> None:
    parser.add_argument("--tensorboard", action="store_true", help="write events for tensorboard --logdir OUT/runs")
