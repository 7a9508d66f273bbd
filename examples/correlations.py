"""Will AdaBayes-K help? Watches the gradients of a small GPT while AdamW trains it.

    python examples/correlations.py [--steps 100]

AdaBayes-K uses the correlations between the entries of a gradient, which Adam ignores. Prints how much of their
covariance lies off the diagonal, layer by layer, and draws it to out/correlations.png. Put your own network and data
into ``main`` and ``train``. Ten seconds on two cores, no download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adabayes.diagnostics import Correlations
from adabayes.lab.data import Data, load
from adabayes.lab.models import CharTransformer


def train(model: nn.Module, data: Data, steps: int) -> Correlations:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = Correlations(model)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, y = data.train_batch(torch.randint(data.count("train"), (8,), generator=random), random)
        optimizer.zero_grad()
        cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        watch.see()  # gradients are ready; it changes nothing
        optimizer.step()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps to watch (default: 100)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/correlations.png"), help="picture (default: out/correlations.png)"
    )
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: must be at least 2")

    data = load("stdlib")
    torch.manual_seed(0)
    model = CharTransformer(**data.model_options(), layers=2)
    watch = train(model, data, args.steps)
    print(watch.table())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    watch.plot(args.out)
    print(f"Picture: {args.out}")


if __name__ == "__main__":
    main()
