"""Finds common mistakes in a training set-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from adabayes.optim.extend import TwoRateOptimizer, unwrap

__all__ = ["check"]


def check(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    loss: Callable[..., Tensor],
    *batch: Any,
    accumulate: int = 1,
    processes: int | None = None,
) -> list[str]:
    """List the mistakes in a training set-up, each as one or two sentences; the list is empty if there are none.

    It checks whether the optimizer has the model's parameters, whether ``batch_size`` and ``reduction`` fit a real
    minibatch, and whether precision is lost. It computes the loss twice, without gradients and dropout, the second time
    with every example twice: this distinguishes sums from means, unless the loss compares examples with one another.
    It does not change the model, its buffers or the random generators. With several processes, call it in each.

    Args:
        optimizer: one with two learning rates, such as :class:`~adabayes.AdaBayesK`.
        model: the model that it trains.
        loss: takes ``batch`` and returns a tensor of one element, as in the training loop.
        batch: a minibatch as this process gets it: tensors, or dicts and lists of them, whose first dimension counts
            examples.
        accumulate: number of minibatches whose gradients are accumulated for one step.
        processes: number of processes with their own minibatch, by default all of them. Give it if some processes
            share a minibatch, as in tensor parallelism.

    Examples:
        >>> from adabayes import AdaBayes
        >>> model = nn.Linear(3, 2)
        >>> optimizer = AdaBayes(model.parameters(), batch_size=32)
        >>> def loss(x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="sum")
        >>> check(optimizer, model, loss, torch.randn(32, 3), torch.zeros(32, dtype=torch.long))
        ['The loss is summed: twice the examples make it twice as large. Set reduction="sum", or average it.']
    """
    optimizer = unwrap(optimizer)
    if processes is None:
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return [
        *_foreign(optimizer.param_groups, model),
        *_imprecise(optimizer, model),
        *_miscounted(optimizer.param_groups, batch, processes, accumulate),
        *_misreduced(optimizer.param_groups, *_losses(model, loss, batch)),
    ]


def _foreign(groups: list[dict[str, Any]], model: nn.Module) -> Iterator[str]:
    """Find parameters that the model does not use, or that are not trained."""
    known = {p for group in groups for p in group["params"]}
    foreign = len(known - set(model.parameters()))
    if foreign:
        yield (
            f"{foreign} of {len(known)} parameters of the optimizer are not the model's. Was it made before they were "
            "replaced (fully_shard, a new head, a conversion)? Make the optimizer last."
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p not in known]
    if missing:
        yield f"{len(missing)} parameters of the model are not in the optimizer and stay as they are: {_few(missing)}."


def _imprecise(optimizer: TwoRateOptimizer, model: nn.Module) -> Iterator[str]:
    """Find parameters and state that lose precision."""
    names = {p: name for name, p in model.named_parameters()}
    converted, coarse = [], []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.has_state(p):
                dtype = optimizer.state[p]["exp_avg"].dtype
                if dtype != optimizer.state_dtype_of(p, group):
                    converted.append(f"{names.get(p, 'a parameter')} ({dtype} for {p.dtype})")
            if p.dtype == torch.bfloat16 and not group["stochastic_rounding"]:
                coarse.append(p)
    if converted:
        yield (
            f"State has another precision than its parameters: {_few(converted)}. They were converted after the "
            "first step: make the optimizer after model.to(dtype), or load its own state dict, which converts it."
        )
    if coarse:
        yield (
            f"{len(coarse)} parameters are bfloat16, where steps below 1/256 of a weight are lost. Set "
            "stochastic_rounding=True, or keep parameters in float32 and use autocast."
        )


def _miscounted(groups: list[dict[str, Any]], batch: Any, processes: int, accumulate: int) -> Iterator[str]:
    """Find a ``batch_size`` that differs from the number of examples in a step."""
    tensors = [x for x in _leaves(batch) if isinstance(x, Tensor) and x.dim() > 0]
    if not tensors:
        raise ValueError("check(optimizer, model, loss, *batch): there is no tensor in batch")
    size = len(tensors[0])
    seen = size * processes * accumulate
    factors = [f"{size} examples"]
    factors += [f"{processes} processes"] if processes > 1 else []
    factors += [f"{accumulate} accumulated"] if accumulate > 1 else []
    for given in sorted({group["batch_size"] for group in groups if group["batch_size"] is not None}):
        if not 0.5 < given / seen < 2:
            yield (
                f"batch_size={given:g}, but a step sees {' x '.join(factors)}. Count all examples of a step, "
                f"over all devices and accumulated minibatches: give batch_size={seen}."
            )


def _misreduced(groups: list[dict[str, Any]], once: float, twice: float) -> Iterator[str]:
    """Find a wrong ``reduction``, from the loss of a minibatch and its loss with every example twice."""
    if not math.isfinite(once):
        yield f"The loss of this minibatch is {once}."
    reductions = {group["reduction"] for group in groups}
    if "mean" in reductions and once and 1.9 < twice / once < 2.1:
        yield 'The loss is summed: twice the examples make it twice as large. Set reduction="sum", or average it.'
    if "sum" in reductions and once and 0.95 < twice / once < 1.05:
        yield 'The loss is averaged: twice the examples leave it as it is. Set reduction="mean".'


@torch.no_grad()
def _losses(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> tuple[float, float]:
    """Return the loss of a minibatch, and its loss with every example twice."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    dropouts = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.training]
    try:
        for module in dropouts:
            module.training = False
        with torch.random.fork_rng({p.device for p in model.parameters() if p.is_cuda}):
            return _as_float(loss(*batch)), _as_float(loss(*_doubled(batch)))
    finally:
        for module in dropouts:
            module.training = True
        for owner, own in buffers:
            owner._buffers.update(own)
        for buffer, value in values:  # BatchNorm's statistics
            buffer.copy_(value)


def _as_float(loss: Any) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(
            f"check(optimizer, model, loss, *batch): loss has to return a tensor of one element, not {what}"
        )
    return loss.item()


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for entry in batch:
            yield from _leaves(entry)
    else:
        yield batch


def _doubled(batch: Any) -> Any:
    """Repeat each example; mappings, including those of Hugging Face's tokenizers, become dicts."""
    if isinstance(batch, Mapping):
        return {key: _doubled(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        entries = [_doubled(entry) for entry in batch]
        return entries if isinstance(batch, list) else tuple(entries)
    return torch.cat([batch, batch]) if isinstance(batch, Tensor) and batch.dim() > 0 else batch


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
