"""Compare values of ``matrix_scale`` and settings of AdaBayes-K on the suite, relative to the records in evidence/.

    python benchmarks/matrix_scale.py swap        # tuned AdamW's settings, matrix_scale 3, 4 and 5, three seeds
    python benchmarks/matrix_scale.py one         # one setting for all workloads, three seeds
    python benchmarks/matrix_scale.py before      # the settings and seeds of the records, with matrix_scale 1

Each prints validation losses at the end of training, as means over seeds, and their ratios to a record: AdamW's for
the first two, AdaBayes-K's for the last. Runs are kept in out/matrix_scale, and resume.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from adabayes.lab.protocol import WORKLOADS, load
from adabayes.lab.suite import Final, Record, final_of, geometric_mean

OUT = Path("out/matrix_scale")
Settings = dict[str, Mapping[str, Any]]  # the settings of AdaBayes-K, by a name


def candidates(study: str, record: Record) -> Settings:
    """Return the settings that a study compares on a workload."""
    if study == "before":
        return {"record": {**record.chosen["adabayes-k"], "matrix_scale": 1.0}}
    if study == "swap":
        swapped = {name: record.chosen["adamw"][name] for name in ("lr", "weight_decay")}
        return {f"scale-{scale}": {**swapped, "matrix_scale": float(scale)} for scale in (3, 4, 5)}
    return {f"lr-{lr:g}": {"lr": lr, "weight_decay": 0.1, "matrix_scale": 4.0} for lr in (0.002, 0.003, 0.005)}


def train(study: str, record: Record, seeds: int) -> dict[str, list[float]]:
    """Train with each of the settings; return the final validation losses of all seeds, from 0."""
    folder = OUT / study / record.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{study}.toml"
    optimizers = {
        name: {"class": "adabayes.AdaBayesK", "label": name, **settings}
        for name, settings in candidates(study, record).items()
    }
    protocol = {"extends": f"suite/{record.name}", "compare": list(optimizers), "seeds": seeds}
    file.write_text(tomli_w.dumps({**protocol, "optimizers": optimizers}), encoding="utf-8")
    command = ["-m", "adabayes", "reproduce", "--protocol", str(file), "--out", str(folder), "--threads", "1"]
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    losses: dict[str, list[float]] = {}
    for spec in load(file).runs():  # ordered by seed
        losses.setdefault(spec.optimizer, []).append(loss_of(final_of(spec, folder)))
    return losses


def recorded_losses(record: Record, optimizer: str, seeds: int) -> list[float]:
    """Return an optimizer's final validation losses in a record, of the same seeds."""
    runs = [run for run in record.finals if (run.optimizer, run.length) == (optimizer, 1.0)]
    losses = {run.seed: loss_of(run) for run in runs}
    if missing := set(range(seeds)) - set(losses):
        raise SystemExit(f"the record of {record.name} has no run of {optimizer} with seed {min(missing)}")
    return [losses[seed] for seed in range(seeds)]


def loss_of(run: Final) -> float:
    """Return the final validation loss of a run; infinity if it has none, because it diverged."""
    return float("inf") if run.loss is None else run.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("swap", "one", "before"))
    parser.add_argument("--seeds", type=int, help="default: 3, and for before 5")
    parser.add_argument(
        "--workload", default=",".join(WORKLOADS), help="comma-separated names of workloads (default: all)"
    )
    args = parser.parse_args()
    seeds = args.seeds or (5 if args.study == "before" else 3)
    reference = "adabayes-k" if args.study == "before" else "adamw"
    ratios: dict[str, list[float | None]] = {}
    for name in args.workload.split(","):
        record = Record.read(Path("evidence") / f"{name}.json")
        reference_loss = statistics.fmean(recorded_losses(record, reference, seeds))
        print(f"{name}: {reference} {reference_loss:.5g}", flush=True)
        if math.isinf(reference_loss):
            continue  # there are no ratios to a run that diverged
        for settings, losses in train(args.study, record, seeds).items():
            mean = statistics.fmean(losses)
            ratios.setdefault(settings, []).append(mean / reference_loss)
            print(f"  {settings:24s} {mean:.5g}  ratio {mean / reference_loss:.3f}  {json.dumps(losses)}", flush=True)
    print("ratios over workloads: geometric mean, largest")
    for settings, values in ratios.items():
        largest = max(value for value in values if value is not None)
        print(f"  {settings:24s} {geometric_mean(values):.4f}  {largest:.3f}", flush=True)


if __name__ == "__main__":
    main()
