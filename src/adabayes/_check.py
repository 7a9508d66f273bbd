"""A look at a training set-up for the mistakes that people make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from adabayes.optim._rates import TwoRateOptimizer, two_rates

__all__ = ["check"]


def check(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    loss: Callable[..., Tensor],
    *batch: Any,
    accumulate: int = 1,
) -> list[str]:
    """What looks wrong in a training set-up, each in a sentence or two; an empty list if nothing does.

    It looks at whether the optimizer has the model's parameters, at ``batch_size`` and ``reduction`` against a real
    minibatch, and at precision. The loss is worked out twice, without gradients; the model, its buffers and the random
    generators are left as they were. With several processes, call it in each.

    Args:
        optimizer: an AdaBayes or AdaBayesFP.
        model: whose parameters it trains.
        loss: from what is in ``batch`` to a scalar, as the training loop has it.
        batch: a minibatch as this process gets it: tensors, or dicts and lists of them, whose first dimension counts
            examples.
        accumulate: minibatches whose gradients are added up for one step.

    Examples:
        >>> from adabayes import AdaBayes
        >>> model = nn.Linear(3, 2)
        >>> optimizer = AdaBayes(model.parameters(), batch_size=32)
        >>> def loss(x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="sum")
        >>> check(optimizer, model, loss, torch.randn(32, 3), torch.zeros(32, dtype=torch.long))
        ['The loss is summed: twice the examples make it 2.0 times as large. Say reduction="sum", or average it.']
    """
    optimizer = two_rates(optimizer)
    groups = optimizer.param_groups
    return [
        *_foreign(groups, model),
        *_imprecise(optimizer, model),
        *_mismatched(groups, model, loss, batch, accumulate),
    ]


def _foreign(groups: list[dict[str, Any]], model: nn.Module) -> Iterator[str]:
    """Parameters that are trained in vain, or not at all."""
    known = {id(p) for group in groups for p in group["params"]}
    named = {id(p): name for name, p in model.named_parameters()}
    strange = len(known - named.keys())
    if strange:
        yield (
            f"{strange} of {len(known)} parameters of the optimizer are not the model's. Was it made before they were "
            "replaced (fully_shard, a new head, a conversion)? Make the optimizer last."
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if missing:
        yield f"{len(missing)} parameters of the model are not in the optimizer and stay as they are: {_few(missing)}."


def _imprecise(optimizer: TwoRateOptimizer, model: nn.Module) -> Iterator[str]:
    """Precision that is lost on the way."""
    names = {p: name for name, p in model.named_parameters()}
    converted, coarse = [], []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer._own_state.get(p)
            if state and state["exp_avg"].dtype != optimizer._state_dtype(p, group):
                converted.append(f"{names.get(p, 'a parameter')} ({state['exp_avg'].dtype} for {p.dtype})")
            if p.dtype == torch.bfloat16 and not group["stochastic_rounding"]:
                coarse.append(p)
    if converted:
        yield (
            f"State is not of the precision that parameters have: {_few(converted)}. They were converted after the "
            "first step; make the optimizer after model.to(dtype), or load its own state dict, which converts it."
        )
    if coarse:
        yield (
            f"{len(coarse)} parameters are bfloat16, where steps below 1/256 of a weight are lost. Say "
            "stochastic_rounding=True, or keep parameters in float32 and use autocast."
        )


def _mismatched(
    groups: list[dict[str, Any]], model: nn.Module, loss: Callable[..., Tensor], batch: Any, accumulate: int
) -> Iterator[str]:
    """``batch_size`` and ``reduction`` that are not those of the minibatch."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise ValueError("check(optimizer, model, loss, *batch): there is no tensor in batch")
    size = len(tensors[0])
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    seen = size * processes * accumulate
    of = [f"{size} examples"]
    of += [f"{processes} processes"] if processes > 1 else []
    of += [f"{accumulate} accumulated"] if accumulate > 1 else []
    for given in sorted({group["batch_size"] for group in groups if group["batch_size"] is not None}):
        if not 0.5 < given / seen < 2:
            yield (
                f"batch_size={given:g}, but a step sees {' x '.join(of)}. It is that of a whole step, over all devices "
                f"and accumulated minibatches: give batch_size={seen}."
            )

    once, twice = _losses(model, loss, batch)
    ratio = twice / once if once else 1.0
    for given in sorted({group["reduction"] for group in groups}):
        if given == "mean" and ratio > 1.5:
            yield (
                f"The loss is summed: twice the examples make it {ratio:.1f} times as large. "
                'Say reduction="sum", or average it.'
            )
        if given == "sum" and ratio < 1.5:
            yield (
                f'reduction="sum", but twice the examples make the loss {ratio:.1f} times as large: it is averaged. '
                'Say reduction="mean".'
            )


@torch.no_grad()
def _losses(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> tuple[float, float]:
    """The loss of a minibatch, and of the same with every example twice."""
    doubled = tree_map(lambda x: torch.cat([x, x]) if isinstance(x, Tensor) and x.dim() > 0 else x, batch)
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            return loss(*batch).item(), loss(*doubled).item()
    finally:
        for buffer, value in kept:  # BatchNorm's statistics
            buffer.copy_(value)


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
