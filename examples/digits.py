"""Train a small network on handwritten digits with SGD, AdamW, AdaBayes and AdaBayes-FP; print a table, draw a picture.

    python examples/digits.py [--epochs 30] [--seeds 3] [--out out/digits]

Given AdamW's learning rate and SGD's, AdaBayes and AdaBayes-FP reach the same test error as either, within the noise of
seeds. Digits are easy: this shows that things work, not which is better. A second table shows which weights AdaBayes
moved like SGD, and which like Adam. Half a minute on two cores, no download.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adabayes import AdaBayes, AdaBayesFP
from adabayes.diagnostics import Observer, regimes

BATCH = 64
LR, LR_SGD = 1e-2, 1.0  # AdamW's learning rate; SGD's 0.1 with momentum 0.9, which sums: 0.1 / (1 - 0.9)

Params = Iterable[tuple[str, Tensor]]
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR),
    "AdaBayes": lambda params: AdaBayes(params, lr=LR, lr_sgd=LR_SGD, batch_size=BATCH, weight_decay=0.01),
    "AdaBayes-FP": lambda params: AdaBayesFP(params, lr=LR, lr_sgd=LR_SGD, weight_decay=0.01),
}
COLOURS = {"SGD": "tab:orange", "AdamW": "tab:blue", "AdaBayes": "tab:green", "AdaBayes-FP": "tab:purple"}


@dataclass
class Run:
    """The record of one run, epoch by epoch."""

    train_loss: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_error: list[float] = field(default_factory=list)
    step_seconds: float = 0.0


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split off a fifth of the images, chosen by the seed, for the test."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return x[train], y[train], x[test], y[test]


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, seed: int) -> Run:
    train_x, train_y, test_x, test_y = digits(seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    shuffler = torch.Generator().manual_seed(seed)
    run, steps = Run(), 0
    for _ in range(epochs):
        losses = []
        model.train()
        order = torch.randperm(len(train_x), generator=shuffler)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = cross_entropy(model(train_x[batch]), train_y[batch])
            loss.backward()
            started = time.perf_counter()
            optimizer.step()
            run.step_seconds += time.perf_counter() - started
            steps += 1
            losses.append(loss.item())
        scheduler.step()
        model.eval()
        with torch.no_grad():
            output = model(test_x)
        run.train_loss.append(statistics.fmean(losses))
        run.test_loss.append(cross_entropy(output, test_y).item())
        run.test_error.append(100 * (output.argmax(1) != test_y).double().mean().item())
    run.step_seconds /= steps
    return run


def with_error(values: list[float], digits: int) -> str:
    """Return the mean and its standard error over seeds."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def sparkline(values: list[float], low: float, high: float) -> str:
    """Draw values as blocks of eight heights, on the same scale for all."""
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[min(7, max(0, int(8 * (v - low) / (high - low))))] for v in values)


def mean_curve(curves: list[list[float]]) -> list[float]:
    return [statistics.fmean(epoch) for epoch in zip(*curves)]


def table(runs: dict[str, list[Run]]) -> Table:
    grid = Table(title="Digits, test set: mean ± standard error over seeds", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("optimizer", "error %", "test loss", "µs/step", "error by epoch"):
        grid.add_column(name, justify="left" if name in ("optimizer", "error by epoch") else "right", no_wrap=True)
    for name, of_seeds in runs.items():
        errors = mean_curve([run.test_error for run in of_seeds])
        shown = errors[:: -(-len(errors) // 20)]
        grid.add_row(
            name,
            with_error([run.test_error[-1] for run in of_seeds], 2),
            with_error([run.test_loss[-1] for run in of_seeds], 3),
            f"{1e6 * statistics.fmean(run.step_seconds for run in of_seeds):.0f}",
            sparkline(shown, 0, 8),
        )
    return grid


def picture(runs: dict[str, list[Run]], observer: Observer, epoch: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, of_seeds in runs.items():
        epochs = range(1, len(of_seeds[0].train_loss) + 1)
        left.plot(epochs, mean_curve([run.train_loss for run in of_seeds]), color=COLOURS[name], label=name)
        middle.plot(epochs, mean_curve([run.test_error for run in of_seeds]), color=COLOURS[name], label=name)
    left.set(yscale="log", xlabel="epoch", ylabel="train loss", title="Training")
    middle.set(yscale="log", xlabel="epoch", ylabel="test error (%)", title="Testing")
    middle.legend(frameon=False)
    observer.plot(ax=right)
    right.set(title=f"What AdaBayes gives each weight (epoch {epoch})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="epochs of each run (default: 30)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each optimizer (default: 3)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/digits"), help="folder for the picture (default: out/digits)"
    )
    args = parser.parse_args()
    if args.epochs < 1 or args.seeds < 1:
        parser.error(f"--epochs {args.epochs} --seeds {args.seeds}: both must be at least 1")

    console = Console()
    runs: dict[str, list[Run]] = {name: [] for name in OPTIMIZERS}
    plan = [(name, seed) for seed in range(args.seeds) for name in OPTIMIZERS]
    for name, seed in track(plan, description=f"{len(plan)} runs of {args.epochs} epochs", console=console):
        model = network(seed)
        runs[name].append(train(model, OPTIMIZERS[name](model.named_parameters()), args.epochs, seed))
    console.print(table(runs))

    # One more, shorter run: regimes are seen while the learning rate is still high.
    model = network(0)
    optimizer = AdaBayes(model.named_parameters(), lr=LR, lr_sgd=LR_SGD, batch_size=BATCH)
    observer = Observer(optimizer)
    early = min(args.epochs, 3)
    for _ in range(early):
        train(model, optimizer, 1, 0)
        optimizer.param_groups[0]["lr"] = LR
    regimes(optimizer).print()

    picture(runs, observer, early, args.out / "digits.png")
    console.print(f"Picture: {args.out / 'digits.png'}")


if __name__ == "__main__":
    main()
