"""The two learning rates and their defaults, for torch and JAX alike.

``lr`` is Adam's learning rate, which a schedule changes. ``base_lr`` is its value without the schedule. ``lr_sgd``
belongs to ``base_lr``: a schedule scales both.
"""

from __future__ import annotations

from typing import Any

from adabayes._util.warn import warn

__all__ = [
    "FIXED_POINT_RATIO",
    "LEAST_GAIN",
    "MATRIX_SCALE",
    "MEMORY",
    "PAPER_RATIO",
    "USUAL_LR",
    "WINDOW",
    "batch_size_of",
    "memory_of",
    "newest_weight",
    "ratio_of",
    "warn_if_closed",
    "warn_if_papers",
    "warn_if_swapped",
]

Number = Any  # float, or an array that JAX traces

USUAL_LR = 1e-3  # base_lr if lr is 0 at first, because a schedule will set it
PAPER_RATIO = 100.0  # lr_sgd / lr in the paper
FIXED_POINT_RATIO = 1e5  # lr_sgd / lr elsewhere: large enough that AdaBayes-FP equals AdamW in our evidence
MATRIX_SCALE = 4.0  # how many times as far AdaBayes-K moves matrices as vectors
MEMORY = 100  # number of steps that AdaBayes remembers if batch_size is not given
LEAST_GAIN = 1e-30  # lower bound in a filter with this memory: it multiplies the gain, so 0 would stay 0
WINDOW = 100.0  # largest gradient for which the paper's form is Adam-like if batch_size is not given


def memory_of(batch_size: Number | None, dynamics: str) -> int | None:
    """Return the number of steps that AdaBayes remembers; None if it follows from a batch size, as in the paper."""
    return MEMORY if batch_size is None and dynamics == "exact" else None


def newest_weight(t: Number, memory: Number) -> Number:
    """Return the weight of the newest gradient: 1 / min(t, memory)."""
    return 1 / (min(t, memory) if isinstance(t, (int, float)) else t.clip(max=memory))


def ratio_of(batch_size: Number | None, dynamics: str) -> float:
    """Return the default of ``lr_sgd / lr`` in AdaBayes: the paper's, if the filter is the paper's."""
    return PAPER_RATIO if memory_of(batch_size, dynamics) is None else FIXED_POINT_RATIO


def batch_size_of(batch_size: Number | None, base_lr: Number) -> Number:
    """Return the ``batch_size`` of AdaBayes's filter in the paper's form, which needs one.

    The default depends on the learning rate: the Adam-like window, which ends at gradients of
    ``1 / (batch_size * base_lr)``, then always ends at ``WINDOW``.
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
