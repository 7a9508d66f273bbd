"""A small GPT learns to write Python, character by character, from the source of the standard library.

    python examples/char_gpt.py [--steps 600] [--lr 0.004]

AdamW and AdaBayes-K on a transformer, one line apart: decay for matrices only, linear warm-up and cosine, accumulated
gradients, clipping. Prints the test loss in nats per character (log 128 = 4.85 for a
guess) of both as it falls, and what the second network writes at the end. Two minutes on two cores, no download.
"""

from __future__ import annotations

import argparse
import math

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from adabayes import AdaBayesK, param_groups
from adabayes.lab.data import Data, load
from adabayes.lab.models import CharTransformer

MICRO_BATCH, ACCUMULATION = 4, 2  # windows of 128 characters at a time, and how many times before a step


def warmup_cosine(step: int, steps: int) -> float:
    warmup = steps / 10
    return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def test_loss(model: nn.Module, data: Data) -> float:
    """Return the loss on every eighth window, which is accurate enough and quick."""
    model.eval()
    return loss_of(model, *data.test_batch(torch.arange(0, data.count("test"), 8))).item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, steps: int) -> dict[int, float]:
    """Train, and return the test loss after every tenth of the steps."""
    scheduler = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    random = torch.Generator().manual_seed(0)
    losses = {}
    with Progress() as progress:
        bar = progress.add_task("", total=steps)
        for step in range(1, steps + 1):
            model.train()
            optimizer.zero_grad()
            for _ in range(ACCUMULATION):
                windows = torch.randint(data.count("train"), (MICRO_BATCH,), generator=random)
                loss = loss_of(model, *data.train_batch(windows, random)) / ACCUMULATION
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            name = type(optimizer).__name__
            progress.update(bar, advance=1, description=f"{name:<9} loss {ACCUMULATION * loss.item():.2f}")
            if step % max(1, steps // 10) == 0 or step == steps:
                losses[step] = test_loss(model, data)
    return losses


@torch.no_grad()
def write(model: nn.Module, start: str, length: int, context: int) -> str:
    """Continue a text, drawing each character from the network's prediction, slightly sharpened."""
    model.eval()
    random = torch.Generator().manual_seed(3)
    text = torch.tensor([list(start.encode("ascii"))])
    for _ in range(length):
        expected = (model(text[:, -context:])[:, -1] / 0.8).softmax(-1)
        text = torch.cat([text, torch.multinomial(expected, 1, generator=random)], 1)
    return bytes(text[0].tolist()).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps of each run (default: 600)")
    parser.add_argument(
        "--lr",
        type=float,
        default=4e-3,
        help="learning rate of both (default: 0.004)",
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")

    data = load("stdlib")
    options = data.model_options()
    losses: dict[str, dict[int, float]] = {}
    for optimizer_class in (torch.optim.AdamW, AdaBayesK):  # the one line
        torch.manual_seed(0)
        model = CharTransformer(**options, layers=2)
        optimizer = optimizer_class(param_groups(model, weight_decay=0.05), lr=args.lr)
        losses[optimizer_class.__name__] = train(model, optimizer, data, args.steps)
    print(f"\n{'step':>5}" + "".join(f"{name:>12}" for name in losses))
    for step in losses["AdamW"]:
        print(f"{step:>5}" + "".join(f"{of[step]:>12.3f}" for of in losses.values()))
    print()
    print(write(model, "    def __init__(self, ", length=400, context=options["context"]))


if __name__ == "__main__":
    main()
