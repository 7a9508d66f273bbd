"""The processes that train one run together. Most often there is one; torchrun starts more, for DDP or FSDP2.

Every process draws the same batch and takes its share, so a run gives the same result as in one process, up to the
order in which numbers are summed; BatchNorm's statistics are those of the whole batch.

What to do next is decided by the first process and told to the others: they could find different files where a network
file system lags behind.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from adabayes.lab.run import shards
from adabayes.lab.run.folder import RunFolder, load_tree, save_tree
from adabayes.optim.adabayes_k import AdaBayesK
from adabayes.optim.extend import StatefulOptimizer

# Modules that take half a second to import, and that several processes alone need, are imported where they are used.

__all__ = ["Ranks", "join"]

T = TypeVar("T")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


class Ranks:
    """One process, which has nothing to share."""

    world, rank, kind = 1, 0, "alone"

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return which examples of a batch of this size are for this process."""
        return slice(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def place(self, model: nn.Module) -> nn.Module:
        """Prepare a model, before its optimizer is made."""
        return model

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer."""

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        """Return what is called in place of the model."""
        return model

    def agreed(self, find: Callable[[], T]) -> T:
        """Return what the first process finds; no other looks for it."""
        return find()

    def total(self, value: Tensor) -> float:
        """Return the sum over all processes."""
        return float(value.item())

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process."""
        return flags

    def wait(self) -> None:
        """Wait until all processes are here."""

    def whole_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights as whole tensors; in the first process, at least."""
        return dict(model.state_dict())

    def save(self, folder: RunFolder, number: int, tree: Any) -> None:
        """Write a checkpoint, from which any number of processes can go on."""
        folder.save(number, tree)

    def restore(self, folder: RunFolder, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Return the newest checkpoint that is whole, or None; in tensors that this model and optimizer can load."""
        return folder.load()

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        model.load_state_dict(weights)

    def scattered(self, state: Any, optimizer: torch.optim.Optimizer) -> Any:
        """Return an optimizer's state dict with entries sharded, and laid out in memory, as the weights are."""
        params = _params(optimizer)
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
    if kind == "fsdp2" and not shards.can_be_read_alone():
        raise ValueError(f"--distributed fsdp2 needs a later torch than {torch.__version__}: install 2.13, or give ddp")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, world = next(iter(rendezvous("env://")))
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        # Each start has a prefix of its own, or addresses of dead processes may be found in the agent's store. Several
        # agents count their starts separately; for them, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes new stores.
        store = PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    try:
        yield _Sharded(kind) if kind == "fsdp2" else _Several(kind)
    finally:
        # gloo's threads release what was sent last a moment later, and abort if Python is ending by then.
        time.sleep(0.5)
        dist.destroy_process_group()


class _Several(Ranks):
    """One of several processes, each of which has the whole model."""

    def __init__(self, kind: str) -> None:
        self.world, self.rank, self.kind = dist.get_world_size(), dist.get_rank(), kind
        self._device = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def place(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.__class__ = _BatchNormOfAll
        return model

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, AdaBayesK):
            optimizer.share_refreshes(dist.group.WORLD)

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        return DistributedDataParallel(model)

    def agreed(self, find: Callable[[], T]) -> T:
        found: list[Any] = [find() if self.is_first else None]
        dist.broadcast_object_list(found)
        return cast(T, found[0])

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

    def save(self, folder: RunFolder, number: int, tree: Any) -> None:
        if self.is_first:
            folder.save(number, tree)

    def restore(self, folder: RunFolder, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        records = folder.records() if self.is_first else iter(())
        while (chosen := self.agreed(lambda: next(records, None))) is not None:
            number, record = chosen
            tree, error = None, None
            try:
                tree = self._read(folder, number, record, model, optimizer)
            except _UNREADABLE as unreadable:
                error = unreadable
            if not self.any(error is not None)[0]:
                return tree
            if self.is_first:
                folder.note_damage(number, error or ValueError("another process cannot read it"))
        return None

    def _read(
        self, folder: RunFolder, number: int, record: Any, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Any:
        """Read a checkpoint that the first process has chosen."""
        tensors = folder.tensors(number, record, wait=not self.is_first)
        return load_tree(json.loads(record["content"]), tensors)


class _Sharded(_Several):
    """One of several processes, each of which has a shard of the model, by FSDP2."""

    def place(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        model = super().place(model)
        model = model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # FSDP2 takes no other
        device = next(model.parameters()).device.type
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh(device, (self.world,)))
        return model

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave it as it is: blocks have owners already."""

    def wrap(self, model: nn.Module) -> Callable[..., Tensor]:
        return model

    def whole_weights(self, model: nn.Module) -> dict[str, Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(dict[str, Tensor], get_model_state_dict(model, options=options))

    def save(self, folder: RunFolder, number: int, tree: Any) -> None:
        """Write a checkpoint of which each process writes its shards; it counts when all of them are written."""
        tensors: dict[str, Tensor] = {}
        content = save_tree(tree, tensors)
        path = self.agreed(lambda: folder.new_shards(number))
        files: list[Any] = [None] * self.world
        dist.all_gather_object(files, shards.write(path, tensors, self.rank))
        if self.is_first:
            folder.save_shards(number, content, path, {name: x for part in files for name, x in part.items()})

    def _read(
        self, folder: RunFolder, number: int, record: Any, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Any:
        if "shards" not in record:  # of one process, or of DDP
            return super()._read(folder, number, record, model, optimizer)
        path, error = folder.path / record["shards"], None
        try:
            names = sorted(record["files"])[self.rank :: self.world]  # each file is checked by one process
            shards.check(path, record["files"], names, wait=not self.is_first)
        except _UNREADABLE as unreadable:
            error = unreadable
        if self.any(error is not None)[0]:
            raise error or ValueError("another process cannot read it")
        content = json.loads(record["content"])
        tensors = _places(load_tree(content, _References()), shards.contents(path), model, optimizer)
        shards.read(path, tensors)
        return load_tree(content, tensors)

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.tensor import DTensor

        whole = not any(isinstance(x, DTensor) for x in weights.values())
        set_model_state_dict(model, cast(dict[str, Any], weights), options=StateDictOptions(full_state_dict=whole))

    def _like(self, p: Tensor, entry: Any) -> Any:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(entry, DTensor):
            return entry
        if isinstance(p, DTensor) and isinstance(entry, Tensor) and entry.shape == p.shape:
            return distribute_tensor(entry.to(p.device).contiguous(), p.device_mesh, p.placements)
        return super()._like(p, entry)


class _Reference(str):
    """The name of a tensor, in a tree."""


class _References(dict[str, Any]):
    """Has a reference for each name."""

    def __missing__(self, name: str) -> _Reference:
        return _Reference(name)


def _places(
    tree: Any,
    contents: dict[str, tuple[torch.Size, torch.dtype]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Tensor]:
    """Return tensors, by their names in a checkpoint, to read it into: sharded as this process will hold them."""
    places = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in contents.items()}
    weights = model.state_dict()
    places |= {name: weights[key] for key, name in tree["model"].items()}
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for i, entries in tree["optimizer"]["state_dict"]["state"].items():
        p = _params(optimizer)[i]
        made: dict[str, Tensor] = {}
        if isinstance(optimizer, StatefulOptimizer):
            optimizer._make_state(p, made, groups[p])
        for key, name in entries.items():
            if key in made:
                places[name] = made[key]
            elif isinstance(name, _Reference) and contents[name][0] == p.shape:
                places[name] = torch.empty_like(p, dtype=contents[name][1])
    return places


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Sum(torch.autograd.Function):
    """Sums over all processes; the gradient, too."""

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
