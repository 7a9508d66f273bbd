"""How much longer a whole training step takes with AdaBayes-K than with fused AdamW.

    python benchmarks/training_step.py [--threads 2] [--steps 20] [--windows 64]

The lab's character transformer (0.8 M weights), windows of 128 characters. Each optimizer has a network of its own;
they take their steps in turn, in random order. The mean over the steps counts, in which each basis is refreshed twice,
as from step 128 on; before, AdaBayes-K refreshes them more often.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from adabayes import AdaBayesFP, AdaBayesK
from adabayes._util.machine import processor
from adabayes.bench.torch_steps import skip_beginning
from adabayes.lab.data import load
from adabayes.lab.models import CharTransformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument("--windows", type=int, default=64, help="in a minibatch (default: 64)")
    args = parser.parse_args()
    if min(args.threads, args.steps, args.windows) < 1:
        parser.error("all must be at least 1")
    torch.set_num_threads(args.threads)

    data = load("stdlib")
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "AdaBayes-FP": AdaBayesFP,
        "AdaBayes-K": AdaBayesK,
    }
    models = {name: CharTransformer(**data.model_options()) for name in makers}
    optimizers = {name: make(models[name].parameters()) for name, make in makers.items()}
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    order = list(makers)
    for step in range(args.steps + 2):  # two to warm up
        windows = torch.randint(data.count("train"), (args.windows,), generator=generator)
        x, y = data.train_batch(windows, generator)
        random.Random(step).shuffle(order)
        for name in order:
            started = time.perf_counter()
            optimizers[name].zero_grad()
            cross_entropy(models[name](x).flatten(0, 1), y.flatten()).backward()
            optimizers[name].step()
            if step == 0 and isinstance(optimizer := optimizers[name], AdaBayesK):
                skip_beginning(optimizer)
            seconds[name].append(time.perf_counter() - started)

    weights = sum(p.numel() for p in models["AdamW fused"].parameters())
    print(f"{processor()}, torch {torch.__version__}, threads {args.threads}, {weights:,} weights")
    means = {name: statistics.fmean(times[2:]) for name, times in seconds.items()}
    for name, mean in means.items():
        print(f"{name:<12} {1e3 * mean:7.1f} ms a step, {mean / means['AdamW fused']:.3f} of AdamW's")


if __name__ == "__main__":
    main()
