"""Which weights of your network move like SGD, and which like Adam? Put your own model into ``training`` and see.

    python examples/diagnose.py [--steps 200]

Reports what looks wrong in the set-up, if anything. Then prints, layer by layer, the learning rates that weights
actually get, and draws the paper's learning-rate figure for this network to out/diagnose.png. Dots on the horizontal
line move like SGD, dots on the diagonal like Adam; they scatter while gradients change faster than the filter can
follow. The network is a small convolutional one on handwritten digits: ten seconds on two cores, no download.
docs/diagnose.md says what to change if you do not like what you see.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

from adabayes import AdaBayes
from adabayes.diagnostics import Observer, check, regimes

BATCH = 64


def training() -> tuple[nn.Module, AdaBayes, Callable[[Tensor, Tensor], Tensor], Iterator[tuple[Tensor, Tensor]]]:
    """Return model, optimizer, loss of a minibatch and minibatches; replace them by your own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    optimizer = AdaBayes(model.parameters(), lr=1e-3, lr_sgd=0.1, batch_size=BATCH)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        pixels, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
        while True:
            for batch in torch.randperm(len(x)).split(BATCH):
                yield x[batch], y[batch]

    return model, optimizer, loss, batches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of training (default: 200)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/diagnose.png"), help="picture (default: out/diagnose.png)"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")

    model, optimizer, loss, batches = training()
    for problem in check(optimizer, model, loss, *next(batches)):
        print(f"Look at this first: {problem}")

    observer = Observer(optimizer, model=model)
    for x, y in track(islice(batches, args.steps), f"{args.steps} steps", total=args.steps):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()

    regimes(optimizer, model).print()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    observer.plot(args.out)
    print(f"Picture: {args.out}")


if __name__ == "__main__":
    main()
