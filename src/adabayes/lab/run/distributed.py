"""The processes that train one run together. Most often there is one; torchrun starts more, for DDP or FSDP2.

Every process draws the same batch and takes its share, so a run gives the same result as in one process, up to the
order in which numbers are summed; BatchNorm's statistics are those of the whole batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

# What takes half a second to import, and is needed by several processes alone, is imported where it is used.

__all__ = ["Ranks", "join"]


class Ranks:
    """One process: what the others have to add to it is nothing."""

    world, rank, kind = 1, 0, "alone"

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Of a batch of so many, those that are for this process."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def place(self, model: nn.Module) -> nn.Module:
        """What is done to a model before its optimizer is made."""
        return model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """What is called in place of the model."""
        return model

    def total(self, value: Tensor) -> float:
        """The sum over all processes."""
        return float(value.item())

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, if it is set anywhere."""
        return flags

    def wait(self) -> None:
        """Until all are here."""

    def gathered(self, tree: Any) -> Any:
        """State in whole tensors, which any number of processes can go on from."""
        return tree

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        model.load_state_dict(weights)

    def scattered(self, state: Any, optimizer: torch.optim.Optimizer) -> Any:
        """An optimizer's state dict, as this process holds it: sharded, and laid out in memory, as the weights are."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        entries = {
            i: {name: self._like(params[i], e) for name, e in of.items()} if isinstance(of, dict) else of
            for i, of in state["state"].items()  # in which IVON keeps numbers of its own as well
        }
        return {**state, "state": entries}

    def _like(self, p: Tensor, entry: Any) -> Any:
        if not isinstance(entry, Tensor) or entry.shape != p.shape:
            return entry
        return torch.empty_like(p, dtype=entry.dtype).copy_(entry)


@contextmanager
def join(kind: str, device: str) -> Iterator[Ranks]:
    """Join the others that torchrun has started, and leave them at the end."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ValueError(
            f"--distributed {kind}: the processes are started by torchrun, like\n"
            f"  torchrun --nproc-per-node 2 -m adabayes train --distributed {kind} ..."
        )
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--distributed {kind} --device {device}: give cpu or cuda; each process takes its own GPU")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(iter(rendezvous("env://")))
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        # A prefix of its own for each start, or what is found in the agent's store may be addresses of the dead. Of
        # several agents, each counts for itself; there, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes new stores.
        store = PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    try:
        yield _Several(kind)
    finally:
        # gloo's threads let go of what was sent last a moment later, and abort if Python is ending by then.
        time.sleep(0.5)
        dist.destroy_process_group()


class _Several(Ranks):
    def __init__(self, kind: str) -> None:
        self.world, self.rank, self.kind = dist.get_world_size(), dist.get_rank(), kind
        self._device = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def place(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.__class__ = _BatchNormOfAll
        if self.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            model = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # all that it takes
            device = next(model.parameters()).device.type
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device, (self.world,)))
        return model

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        return DistributedDataParallel(model) if self.kind == "ddp" else model

    def total(self, value: Tensor) -> float:
        summed = value.detach().double().to(self._device, copy=True)
        dist.all_reduce(summed)
        return float(summed.item())

    def any(self, *flags: bool) -> tuple[bool, ...]:
        found = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in found.tolist())

    def wait(self) -> None:
        dist.barrier()

    def _like(self, p: Tensor, entry: Any) -> Any:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(p, DTensor) and isinstance(entry, Tensor) and entry.shape == p.shape:
            return distribute_tensor(entry.to(p.device).contiguous(), p.device_mesh, p.placements)
        return super()._like(p, entry)

    def gathered(self, tree: Any) -> Any:
        from torch.distributed.tensor import DTensor

        if isinstance(tree, DTensor):
            return tree.full_tensor()
        if isinstance(tree, dict):
            return {key: self.gathered(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.gathered(value) for value in tree)
        return tree

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, cast(dict[str, Any], weights), options=options)


class _Sum(torch.autograd.Function):
    """Over all processes; so is the gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _sum(x: Tensor) -> Any:
    return _Sum.apply(x)  # type: ignore[no-untyped-call]


class _BatchNormOfAll(_BatchNorm):
    """BatchNorm over the batch of all processes, on any device (torch's own is for GPUs alone)."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        pass

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._normalised(x.float()).to(x.dtype)

    def _normalised(self, x: Tensor) -> Tensor:
        over = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = x.new_tensor([x.numel() // x.size(1)])
        summed = _sum(torch.cat([x.sum(over), count]))
        seen = summed[-1]
        mean = summed[:-1] / seen
        centred = x - mean.view(shape)
        variance = _sum(centred.square().sum(over)) / seen
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked += 1
            rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), rate)
            self.running_var.lerp_(variance.detach() * seen / (seen - 1), rate)
        normal: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        return torch.addcmul(self.bias.view(shape), normal, self.weight.view(shape)) if self.affine else normal
