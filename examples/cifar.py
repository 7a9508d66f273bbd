"""CIFAR-10 and a small ResNet, in the usual loop: parameter groups, OneCycleLR, clipping, averaged weights.

    adabayes data fetch cifar10
    python examples/cifar.py [--optimizer adabayes|adabayes-fp|adamw|sgd] [--epochs 1] [--images 50000] [--data DIR]

Shows what changes in a training loop of your own: one line, which creates the optimizer. Prints the test error of the
weights and of their moving average: 43 % after one epoch, which takes a good minute on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adabayes import AdaBayes, AdaBayesFP, param_groups
from adabayes.lab import models
from adabayes.lab.data import Data, DataError, load

BATCH = 64
# SGD's 0.1 with momentum 0.9 is 1.0 for AdaBayes, which averages gradients where torch's SGD sums them. Its penalty of
# 5e-4 shrinks weights by 5e-4 a step, as a decay of 0.05 does at lr 0.01.
LR, LR_SGD, DECAY = 0.01, 1.0, 0.05

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adabayes": lambda model: AdaBayes(param_groups(model, DECAY), lr=LR, lr_sgd=LR_SGD, batch_size=BATCH),
    "adabayes-fp": lambda model: AdaBayesFP(param_groups(model, DECAY), lr=LR, lr_sgd=LR_SGD),
    "adamw": lambda model: torch.optim.AdamW(param_groups(model, DECAY), lr=LR),
    "sgd": lambda model: torch.optim.SGD(param_groups(model, 5e-4), lr=0.1, momentum=0.9),
}


@torch.no_grad()
def test_error(model: nn.Module, data: Data) -> float:
    model.eval()
    wrong = 0.0
    for indices in torch.split(torch.arange(data.count("test")), 1000):
        x, y = data.test_batch(indices)
        wrong += (model(x).argmax(1) != y).sum().item()
    return 100 * wrong / data.count("test")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, images: int, epochs: int) -> AveragedModel:
    """Train the model in place, and return its moving average."""
    steps = epochs * -(-images // BATCH)
    peaks: Any = [group["lr"] for group in optimizer.param_groups]
    scheduler = OneCycleLR(optimizer, peaks, total_steps=steps)
    # Averages over the last twentieth of training: a longer memory would still hold weights of the first half. The
    # buffers are BatchNorm's statistics, which belong to the weights and are averaged with them.
    decay = 1 - 1 / (1 + steps / 20)
    average = get_ema_multi_avg_fn(decay)
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    random = torch.Generator().manual_seed(0)
    with Progress() as progress:
        bar = progress.add_task("", total=steps)
        for epoch in range(epochs):
            model.train()
            for indices in torch.split(torch.randperm(images, generator=random), BATCH):
                x, y = data.train_batch(indices, random)
                loss = cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                averaged.update_parameters(model)
                progress.update(bar, advance=1, description=f"epoch {epoch + 1}, loss {loss.item():.2f}")
    return averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adabayes", help="optimizer (default: adabayes)")
    parser.add_argument("--epochs", type=int, default=1, help="epochs (default: 1)")
    parser.add_argument("--images", type=int, help="number of images to train on (default: all)")
    parser.add_argument("--data", type=Path, help="folder with the data set (default: where `data fetch` puts it)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: must be at least 1")
    try:
        data = load("cifar10", args.data)
    except DataError as error:
        parser.exit(1, f"{error}\n")
    images = data.count("train") if args.images is None else args.images
    if not 1 <= images <= data.count("train"):
        parser.error(f"--images {images}: must be from 1 to {data.count('train')}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = data.to(device)
    torch.manual_seed(0)
    model = models.make("resnet8", width=16).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    averaged = train(model, OPTIMIZERS[args.optimizer](model), data, images, args.epochs)
    raw, smooth = test_error(model, data), test_error(averaged, data)
    print(f"{args.optimizer:<12} test error {raw:.2f} %, averaged {smooth:.2f} %")


if __name__ == "__main__":
    main()
