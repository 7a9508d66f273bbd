"""Claims of the theory by topic: measurements, predictions and a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

__all__ = ["Check", "Floats", "Topic", "TopicMaker", "relative", "worst"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """A claim: a measured value, the value that the theory predicts, and the largest difference allowed."""

    claim: str
    measured: float
    predicted: float
    within: float

    @property
    def passed(self) -> bool:
        return abs(self.measured - self.predicted) <= self.within

    def cells(self) -> tuple[str, ...]:
        numbers = (f"{value:.5g}" for value in (self.measured, self.predicted))
        return (self.claim, *numbers, f"{self.within:.1g}", "pass" if self.passed else "FAIL")


@dataclass(frozen=True)
class Topic:
    """A part of the theory: its claims and a figure."""

    name: str
    title: str
    text: str
    checks: tuple[Check, ...]
    draw: Callable[[Figure], None]


TopicMaker = Callable[[], Topic]


def relative(claim: str, measured: Any, predicted: Any, within: float) -> Check:
    """Make a claim whose tolerance is a fraction of the prediction."""
    return Check(claim, float(measured), float(predicted), within * abs(float(predicted)))


def worst(values: Any, expected: Any) -> float:
    """Return the largest relative difference."""
    return float(np.max(np.abs(values / expected - 1)))
