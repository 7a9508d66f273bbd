"""Regimes of weights as plain data, for torch and JAX alike; neither is imported here."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from adabayes._util.table import aligned, html, shortened

__all__ = ["GOLDEN", "QUANTILES", "Regime", "Regimes"]

QUANTILES = (0.05, 0.5, 0.95)
GOLDEN = (1 + 5**0.5) / 2  # at the crossover, rms(g) = lr / lr_sgd, the gain is lr_sgd over this


@dataclass(frozen=True)
class Regime:
    """Fractions of the weights of one tensor, or of all, on either side of the crossover, and their learning rates."""

    name: str
    weights: int  # number of weights; for a sharded tensor, those of the local shard
    sgd_like: float  # fraction with gradients below lr / lr_sgd, where the gain approaches lr_sgd
    adam_like: float  # fraction with gradients above, where the gain approaches lr / rms(gradient)
    lr_quantiles: tuple[float, ...]  # of the effective learning rate, at QUANTILES
    lr_sgd: float  # the highest learning rate that a weight can get at present

    def scalars(self) -> dict[str, float]:
        """Return everything except the name and the number of weights as a flat dict of floats."""
        rates = {f"lr_{q:.0%}".rstrip("%"): rate for q, rate in zip(QUANTILES, self.lr_quantiles)}
        return {"sgd_like": self.sgd_like, "adam_like": self.adam_like, **rates, "lr_sgd": self.lr_sgd}


@dataclass(frozen=True)
class Regimes:
    """Regimes of each parameter tensor and in total. Prints as a table, with a hint if one rate has no effect."""

    tensors: tuple[Regime, ...]
    total: Regime
    bounded: bool = False  # whether lr_sgd is only a bound, which few directions reach, as in AdaBayes-K

    @classmethod
    def of(cls, tensors: Sequence[Regime], lr_quantiles: tuple[float, ...], bounded: bool = False) -> Regimes:
        """Add the total; ``lr_quantiles`` are those of all weights."""
        weights = sum(row.weights for row in tensors)
        sgd_like, adam_like = (
            sum(getattr(row, kind) * row.weights for row in tensors) / weights for kind in ("sgd_like", "adam_like")
        )
        highest = max(row.lr_sgd for row in tensors)
        return cls(tuple(tensors), Regime("total", weights, sgd_like, adam_like, lr_quantiles, highest), bounded)

    def as_dict(self) -> dict[str, Any]:
        """Return the regimes as plain data, for a log."""
        return asdict(self)

    def scalars(self, prefix: str = "regimes", *, tensors: bool = False) -> dict[str, float]:
        """Return the total as a flat dict of floats, for W&B, MLflow, TensorBoard or another logger.

        Args:
            prefix: the beginning of all names, as in ``"regimes/sgd_like"``.
            tensors: add each parameter tensor, as in ``"regimes/0.weight/sgd_like"``. Characters that a logger may
                refuse become underscores.
        """
        rows = {prefix: self.total}
        if tensors:
            rows |= {f"{prefix}/{re.sub(r'[^A-Za-z0-9_./ -]', '_', row.name)}": row for row in self.tensors}
        return {f"{name}/{key}": value for name, row in rows.items() for key, value in row.scalars().items()}

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield the rows of the table as text: the header, a row for each tensor, and the total."""
        yield ("parameter", "weights", "SGD", "Adam", *(f"lr {q:.0%}" for q in QUANTILES), "lr_sgd")
        for row in (*self.tensors, self.total):
            rates = (f"{rate:.2g}" for rate in (*row.lr_quantiles, row.lr_sgd))
            yield (shortened(row.name), f"{row.weights:,}", f"{row.sgd_like:.0%}", f"{row.adam_like:.0%}", *rates)

    @property
    def hint(self) -> str:
        """Advice if one of the two learning rates has no effect; empty if both have one."""
        if self.total.sgd_like > 0.99:
            usual = "leave it out for 1e5 times lr" if self.bounded else "transformers need 1000 to 3000 times lr"
            return (
                "Nearly all weights move like SGD: lr has no effect. For more of Adam, raise lr_sgd, tenfold or more; "
                f"{usual}."
            )
        if self.total.adam_like > 0.99 and not self.bounded:
            return "Nearly all weights move like Adam: lr_sgd has no effect. For more of SGD, lower it."
        return ""

    def __str__(self) -> str:
        lines = aligned(list(self.cells()))
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *textwrap.wrap(self.hint, 80)])

    def _repr_html_(self) -> str:
        return html(list(self.cells()), [self.hint], totals=1)

    def print(self) -> None:
        """Print the table, in colour where rich is installed."""
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print(self)
            return
        header, *rows, total = self.cells()
        table = Table(
            title="What moves like SGD, what like Adam, and how fast",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            show_footer=True,
        )
        colours = ("", "", "dark_orange", "dodger_blue2", *[""] * (len(QUANTILES) + 1))
        for i, (name, footer, colour) in enumerate(zip(header, total, colours)):
            table.add_column(name, footer, justify="left" if i == 0 else "right", style=colour, footer_style=colour)
        for row in rows:
            table.add_row(*row)
        console = Console()
        console.print(table)
        if self.hint:
            console.print(self.hint)
