"""Gradients that leave most of a basis undetermined, and gradients that come late or are missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["KINDS", "draw_gradient"]

KINDS = ("full", "rank_one", "zero_rows", "late", "missing")


def draw_gradient(
    kind: str, shape: Sequence[int], t: int, index: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor | None:
    """Draw the gradient of a parameter at step ``t``, from 0; None if the parameter has none.

    Args:
        kind: ``"full"``: independent entries; ``"rank_one"``: an outer product; ``"zero_rows"``: only each third row
            ever gets a gradient; ``"late"``: parameters get their first gradients at different steps; ``"missing"``:
            one gradient in three is missing.
        shape: the shape of the parameter.
        t: the step.
        index: the index of the parameter.
        generator: the random generator.
        dtype: the dtype of the gradient.
    """
    entries = torch.randn(tuple(shape), generator=generator, dtype=dtype)
    is_present = torch.rand((), generator=generator) > 1 / 3
    if (kind == "late" and t < index) or (kind == "missing" and not is_present):
        return None
    if kind == "rank_one" and len(shape) > 1:
        matrix = entries.reshape(shape[0], math.prod(shape[1:]))
        return torch.outer(matrix[:, 0], matrix[0]).reshape(tuple(shape))
    if kind == "zero_rows" and len(shape) > 1:
        entries[torch.arange(shape[0]) % 3 != 0] = 0
    return entries
