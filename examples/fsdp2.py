"""FSDP2: weights and the optimizer's state sharded over processes, saved and loaded as a sharded checkpoint.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--steps 300] [--checkpoint out/fsdp2]

For models that do not fit on one device. AdaBayes-K keeps its state by blocks of matrices, each in one process. Trains
for half of the steps, saves, creates everything anew, loads, and continues, as a job does that was stopped and
restarted. Prints the test error at each stage, and the weights and state that each process holds. Runs on CPUs with
gloo and on GPUs with nccl, with 1, 2, 4, 8, ... processes. Ten seconds on two cores, no download.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from adabayes import AdaBayesK, param_groups

BATCH = 128  # of all processes together


def build(seed: int, device: str) -> tuple[nn.Module, AdaBayesK]:
    """Shard the model first, then create the optimizer, which so has state for the shards of this process alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model.to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, AdaBayesK(param_groups(model, weight_decay=0.01), lr=1e-3)


def train(model: nn.Module, optimizer: AdaBayesK, x: Tensor, y: Tensor, steps: range) -> None:
    """Train. Every process draws the same batch and takes its share; FSDP2 averages the gradients."""
    share = BATCH // dist.get_world_size()
    mine = slice(share * dist.get_rank(), share * (dist.get_rank() + 1))
    title = f"steps {steps.start + 1} to {steps.stop}"
    for step in track(steps, description=title, disable=dist.get_rank() > 0):
        batch = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(step))[mine]
        optimizer.zero_grad()
        loss = cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()


def save(model: nn.Module, optimizer: AdaBayesK, folder: Path) -> None:
    """Save a checkpoint, to which each process writes its shards."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")  # of an earlier run: overwrite it
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder))  # type: ignore[attr-defined]


def load(model: nn.Module, optimizer: AdaBayesK, folder: Path) -> None:
    """Load a checkpoint, of which each process reads its shards. The number of processes may have changed."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(folder))  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


@torch.no_grad()
def report_error(when: str, model: nn.Module, x: Tensor, y: Tensor) -> None:
    wrong = model(x).argmax(1) != y  # in all processes, because a layer's weights are gathered from all
    report(f"{when:<10} test error {100 * wrong.float().mean().item():.2f} %")


def report_memory(model: nn.Module, optimizer: AdaBayesK) -> None:
    def here(tensors: list[Any]) -> int:
        return sum(t.to_local().nbytes for t in tensors if isinstance(t, DTensor))

    entries = [entry for of in optimizer.state.values() for entry in of.values()]
    mine = torch.tensor([here(list(model.parameters())), here(entries)], device=next(model.parameters()).device)
    sizes = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, mine)
    for rank, (weights, state) in enumerate(size.tolist() for size in sizes):
        report(f"process {rank}: {weights / 1e3:,.0f} kB of weights, {state / 1e3:,.0f} kB of state")


def run(steps: int, folder: Path, device: str) -> None:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32, device=device), torch.tensor(labels, device=device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(x) // 5], order[len(x) // 5 :]

    model, optimizer = build(seed=0, device=device)
    train(model, optimizer, x[rest], y[rest], range(steps // 2))
    report_error("saved", model, x[test], y[test])
    save(model, optimizer, folder)

    model, optimizer = build(seed=1, device=device)
    report_error("made anew", model, x[test], y[test])
    load(model, optimizer, folder)
    report_error("loaded", model, x[test], y[test])
    train(model, optimizer, x[rest], y[rest], range(steps // 2, steps))
    report_error("trained on", model, x[test], y[test])
    report_memory(model, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of both halves together (default: 300)")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("out/fsdp2"), help="folder of the checkpoint (default: out/fsdp2)"
    )
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: must be at least 2, one for each half")
    if "LOCAL_RANK" not in os.environ:
        parser.error("the processes are started by torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    if BATCH % int(os.environ["WORLD_SIZE"]):
        parser.error(f"{os.environ['WORLD_SIZE']} processes do not share a batch of {BATCH} evenly; take 1, 2, 4, ...")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    run(args.steps, args.checkpoint, device)
    # gloo's threads let go of the last tensors a moment after they are sent, and abort if Python is ending by then.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
