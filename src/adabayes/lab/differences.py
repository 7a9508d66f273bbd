"""Paired differences over seeds, for the report and the suite.

Optimizers with the same seed start from the same weights and see the same batches, so most of what one seed does to a
loss it does to all of them. The difference to a reference, seed by seed, is therefore known better than either mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["REFERENCE", "Difference", "half_width", "paired", "reference_of"]

REFERENCE = "adamw"  # what others are compared with


@dataclass(frozen=True)
class Difference:
    """Mean difference to the reference over the seeds of both, with a 95 % interval; below zero is lower."""

    mean: float
    low: float
    high: float
    p: float  # two-sided, by Student's paired t-test
    seeds: int

    def text(self, between: str = " ") -> str:
        """Write it for a table: the mean, and the interval behind it or on a line of its own.

        >>> Difference(-0.25, -0.5, 0.001, 0.05, 3).text()
        '-0.25 (-0.5 to +0.001)'
        """
        mean, low, high = (f"{value:+.3g}" for value in (self.mean, self.low, self.high))
        return f"{mean}{between}({low} to {high})"


def reference_of(names: Collection[str]) -> str:
    """Choose what to compare others with: AdamW if it is among them, else the first."""
    return REFERENCE if REFERENCE in names else next(iter(names))


def paired(ours: Mapping[int, float | None], reference: Mapping[int, float | None]) -> Difference | None:
    """Compare the figures of two optimizers, given by seed. None with fewer than two seeds in common.

    >>> paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.25, 1: 2.5, 2: 3.75}).text()
    '-0.5 (-1.12 to +0.121)'
    """
    from scipy import stats

    pairs = ((figure, reference.get(seed)) for seed, figure in ours.items())
    found = [a - b for a, b in pairs if a is not None and b is not None]
    if len(found) < 2:
        return None
    mean, half = statistics.fmean(found), half_width(found)
    error = statistics.stdev(found) / len(found) ** 0.5
    p = float(2 * stats.t.sf(abs(mean) / error, len(found) - 1)) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, len(found))


def half_width(values: Collection[float]) -> float:
    """Return half the width of the 95 % interval of a mean, by Student's t; there must be two values or more."""
    from scipy import stats

    error = statistics.stdev(values) / len(values) ** 0.5
    return float(stats.t.ppf(0.975, len(values) - 1) * error)
