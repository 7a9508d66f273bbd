"""How much of the time the lab leaves to the network: its batches against a DataLoader's, its loop against a bare one.

    python benchmarks/lab.py [--rounds 5] [--threads 2]

Images are random, of CIFAR's size; the network is ResNet-8 of width 16, the batch 128. What is compared takes turns, in
random order, and medians are told. The DataLoader does what torchvision's RandomCrop, RandomHorizontalFlip and
Normalize do, image by image, with the same tensors in memory and no other process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from adabayes._util.machine import processor
from adabayes.lab import data, protocol
from adabayes.lab.data import Images
from adabayes.lab.run import training
from adabayes.lab.run.folder import RunFolder

BATCH, STEPS = 128, 30


class OneByOne(Dataset[tuple[Tensor, Tensor]]):
    """The usual way."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self.mean, self.std = torch.tensor(images.mean)[:, None, None], torch.tensor(images.std)[:, None, None]
        self.x = images.train_x[:, 4:-4, 4:-4].permute(0, 3, 1, 2).contiguous()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad(self.x[index], (4, 4, 4, 4))
        top, left = random.randrange(9), random.randrange(9)
        image = image[:, top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - self.mean) / self.std, self.images.train_y[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (BATCH * STEPS, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, BATCH * STEPS)
    images = data._images(
        (pixels, labels), (pixels[:100], labels[:100]), 10, (0.49, 0.48, 0.45), (0.2, 0.2, 0.2), 4, True
    )
    mini = protocol.load("mini").narrowed(["cifar10"], None, ["adabayes"], 1, 1)
    spec = mini.runs()[0]

    def whole_batches() -> None:
        for i in range(STEPS):
            images.train_batch(torch.randperm(len(pixels))[:BATCH], torch.Generator().manual_seed(i))

    def one_by_one() -> None:
        for _ in DataLoader(OneByOne(images), BATCH, shuffle=True):
            pass

    ready = [
        images.train_batch(torch.arange(i * BATCH, (i + 1) * BATCH), torch.Generator().manual_seed(i))
        for i in range(STEPS)
    ]

    def bare_loop() -> float:
        model, optimizer = training.make(spec, images)
        model.train()
        started = time.perf_counter()
        for x, y in ready:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - started

    def lab() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder(Path(folder))
            training.train(spec, run, images)
            return float(run.metrics()[0]["train_seconds"])

    def timed(function: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            started = time.perf_counter()
            function()
            return time.perf_counter() - started

        return run

    measured = {
        "batches of the lab": timed(whole_batches),
        "batches of a DataLoader": timed(one_by_one),
        "training by the lab": lab,
        "training by a bare loop": bare_loop,
    }
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    lab()  # warm
    for _ in track(range(args.rounds), "measuring"):
        for name in random.sample(list(measured), len(measured)):
            seconds[name].append(measured[name]())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{processor()}, torch {torch.__version__}, {args.threads} threads")
    for name, value in median.items():
        print(f"{name:<26}{1e3 * value / STEPS:8.2f} ms a batch of {BATCH}, {BATCH * STEPS / value:10,.0f} images/s")
    print(
        f"batches: {median['batches of a DataLoader'] / median['batches of the lab']:.1f} times as fast as a DataLoader"
    )
    overhead = median["training by the lab"] / median["training by a bare loop"] - 1
    print(f"training: {overhead:+.1%} time over a bare loop on images that are augmented already")


if __name__ == "__main__":
    main()
