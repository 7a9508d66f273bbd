"""The two learning rates and their defaults, for torch and JAX alike.

``lr`` is Adam's learning rate, which a schedule changes. ``base_lr`` is its value without the schedule. ``lr_sgd``
belongs to ``base_lr``: a schedule scales both.
"""

from __future__ import annotations

from typing import Any

from adabayes._warn import warn

__all__ = [
    "LEAST_GAIN",
    "MEMORY",
    "RATIO",
    "SETTLED_RATIO",
    "USUAL_LR",
    "WINDOW",
    "batch_size_of",
    "memory_of",
    "ratio_of",
    "share_of",
    "warn_if_closed",
    "warn_if_papers",
    "warn_if_swapped",
]

Number = Any  # float, or an array that JAX traces

USUAL_LR = 1e-3  # the base of a learning rate that is 0, because a schedule will set it
RATIO = 100.0  # lr_sgd / lr in the paper
SETTLED_RATIO = 1e5  # unless the paper's filter is asked for: by the evidence, no difference to AdamW at the same lr
MEMORY = 100  # steps that AdaBayes remembers, where batch_size is not given
LEAST_GAIN = 1e-30  # from which such a filter goes on: it multiplies its gain, and would not recover from 0
WINDOW = 100.0  # gradient up to which the paper's form of AdaBayes is Adam-like, where batch_size is not given


def memory_of(batch_size: Number | None, dynamics: str) -> int | None:
    """Return the steps that AdaBayes remembers; None if that follows from a batch size, as in the paper."""
    return MEMORY if batch_size is None and dynamics == "exact" else None


def share_of(t: Number, memory: Number) -> Number:
    """Return the share that the newest gradient has in what is remembered after t steps: at first, these are all."""
    return 1 / (min(t, memory) if isinstance(t, (int, float)) else t.clip(max=memory))


def ratio_of(batch_size: Number | None, dynamics: str) -> float:
    """Return ``lr_sgd / lr`` of an AdaBayes that is given no ``lr_sgd``: the paper's, if its filter is asked for."""
    return RATIO if memory_of(batch_size, dynamics) is None else SETTLED_RATIO


def batch_size_of(batch_size: Number | None, base_lr: Number) -> Number:
    """Return the ``batch_size`` of AdaBayes's filter in the paper's form, which needs one.

    If it is not known, it is chosen so that the Adam-like window, which ends at ``1 / (batch_size * base_lr)``, is open
    to gradients of ``WINDOW``, whatever the learning rate.
    """
    return 1 / (WINDOW * base_lr) if batch_size is None else batch_size


# Settings that are permitted, but rarely intended


def warn_if_swapped(lr: float, lr_sgd: float) -> None:
    """Warn if the two learning rates seem to be swapped."""
    if lr_sgd < lr:
        warn(
            f"lr_sgd={lr_sgd:g} is below lr={lr:g}: hardly any weight will move like Adam. "
            "Have the two been swapped? lr is Adam's learning rate, lr_sgd is SGD's, at least 100 times larger; "
            "leave it out for the usual ratio."
        )


def warn_if_papers(lr: float, weight_decay: float) -> None:
    """Warn if weight decay seems to be in the paper's units."""
    if 0 < weight_decay < 1e-4 and lr > 0:
        warn(
            f"weight_decay={weight_decay:g} takes {lr * weight_decay:.1g} of each weight in a step, next to nothing: "
            "as in AdamW, a step multiplies weights by 1 - lr * weight_decay. If this is the paper's lambda, or "
            f"weight_drift of its author's code, give lambda / lr, here {weight_decay / lr:.3g}."
        )


def warn_if_closed(lr: float, lr_sgd: float, batch_size: float | None) -> None:
    """Warn if AdaBayes is Adam-like for hardly any gradients."""
    if batch_size is not None and lr <= lr_sgd < 10 * batch_size * lr * lr:
        warn(
            f"batch_size={batch_size:g} at lr={lr:g} leaves AdaBayes no room to be like Adam, which it is for "
            f"gradients from lr / lr_sgd = {lr / lr_sgd:.2g} to 1 / (batch_size * lr) = {1 / (batch_size * lr):.2g}; "
            "larger ones get less and less. Leave batch_size out, lower it, or take AdaBayes-FP, which needs none."
        )
