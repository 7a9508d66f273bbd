"""Compare AdaBayes-K in several processes with its reference. torchrun starts this module.

Every process compares the weights after the last step, and raises an error if they differ.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from adabayes import AdaBayesK
from adabayes.kernels.cpu import library as kernels
from tests.support.block_reference import Shape, draw_problem, reference_path, tolerance

# Shards with different numbers of rows; blocks that lie in two shards; sides above max_size; vectors
SHAPES: list[Shape] = [(4, 4), (7, 7), (8, 12), (3, 4), (8, 20), (20, 3), (4, 1, 2, 2), (3,)]
STEPS = 48
FUSED = None if kernels.unavailable() else True
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows, one parameter at a time": (Shard(0), {"fused": False, "foreach": False}),
    "rows, fused": (Shard(0), {"fused": FUSED, "learn_every": 4, "refresh": 3}),
    "columns": (Shard(1), {"fused": False, "learn_every": 1, "refresh": 1, "cautious": False, "weight_decay": 0.1}),
    "replicated DTensors": (Replicate(), {"centred": True}),
    "refreshes split across processes": (None, {}),
}
FORM_OPTIONS = ("foreach", "fused")  # options that the reference does not have


def compare(placement: Any, options: dict[str, Any]) -> None:
    """Train and compare with the reference. Without a placement, parameters are tensors, as under DDP."""
    problem = draw_problem(SHAPES, steps=STEPS)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(x: Any) -> Tensor:
        tensor = torch.tensor(x)
        if placement is None:
            return tensor
        fits = not isinstance(placement, Shard) or placement.dim < tensor.dim()
        return distribute_tensor(tensor, mesh, [placement if fits else Replicate()])

    weights = [place(x) for x in problem.start]
    optimizer = AdaBayesK(
        weights,
        lr=problem.lrs[0],
        lr_sgd=problem.lr_sgd,
        block_size=problem.block_size,
        max_size=problem.max_size,
        process_group=dist.group.WORLD if placement is None else None,
        **options,
    )
    for lr, gradients in zip(problem.lrs, problem.gradients):
        optimizer.param_groups[0]["lr"] = lr
        for w, gradient in zip(weights, gradients):
            w.grad = place(gradient)
        optimizer.step()
    path = reference_path(problem, **{name: x for name, x in options.items() if name not in FORM_OPTIONS})
    for w, expected in zip(weights, path[-1], strict=True):
        full = w.full_tensor() if isinstance(w, DTensor) else w
        message = f"parameter of shape {expected.shape}"
        np.testing.assert_allclose(full.numpy(), expected, rtol=0, atol=tolerance(problem), err_msg=message)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name, (placement, options) in CASES.items():
        try:
            compare(placement, options)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    dist.barrier()
    time.sleep(0.5)  # gloo's threads release the last buffers a moment later, and abort if Python has ended by then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
