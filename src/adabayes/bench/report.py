"""Results of a measurement: as a table, as JSON, as a picture."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adabayes._util.missing_extra import missing_extra

if TYPE_CHECKING:
    from adabayes.bench.measure import Settings

__all__ = ["Report", "Row"]


@dataclass(frozen=True)
class Row:
    """One optimizer on one workload."""

    workload: str
    optimizer: str
    weights: int
    milliseconds: float  # median, or mean where steps differ in length
    low: float  # quartiles
    high: float
    ratio: float  # speed over that of AdamW, torch's fused one or optax's
    state_bytes: float  # per weight
    gigabytes_per_second: float
    of_roof: float | None
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """Results of all optimizers on all workloads."""

    settings: Settings
    machine: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def table(self) -> str:
        rivals = [name for name in self.settings.optimizers[1:] if self.settings.matrix and "AdaBayes" not in name]
        header = ("optimizer", "ms", "quartiles", "x AdamW", *(f"x {name.split('.')[-1]}" for name in rivals))
        header += ("B/weight", "GB/s", "of roof")
        library = f"{self.settings.backend} {self.machine[self.settings.backend]}"
        threads = "1 thread" if self.settings.threads == 1 else f"{self.settings.threads} threads"
        lines = textwrap.wrap(f"{self.machine['processor']}, {library}, {threads}", 80)
        for workload in self.settings.workloads:
            rows = [row for row in self.rows if row.workload == workload]
            times = {row.optimizer: row.milliseconds for row in rows}
            cells = [header] + [
                (
                    row.optimizer,
                    _short(row.milliseconds),
                    f"{_short(row.low)}-{_short(row.high)}",
                    f"{row.ratio:.2f}",
                    *(f"{times[name] / row.milliseconds:.2f}" for name in rivals),
                    f"{row.state_bytes:.0f}",
                    f"{row.gigabytes_per_second:.1f}",
                    "" if row.of_roof is None else f"{row.of_roof:.0%}",
                )
                for row in rows
            ]
            widths = [max(map(len, column)) for column in zip(*cells)]
            lines += ["", f"{workload}: {rows[0].weights:,} weights"]
            lines += [
                "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
                for row in cells
            ]
        return "\n".join(lines)

    def plot(self, path: Path) -> None:
        """Draw the ratios to AdamW, a panel for each workload."""
        try:
            import matplotlib as mpl
        except ImportError as error:
            raise missing_extra("plotting needs matplotlib", "plot") from error
        mpl.use("agg")
        import matplotlib.pyplot as plt

        baseline, *names = self.settings.optimizers
        count = len(self.settings.workloads)
        height = 1.2 + 0.28 * len(names)
        figure, axes = plt.subplots(
            1, count, figsize=(2.6 + 2.2 * count, height), sharey=True, squeeze=False, layout="constrained"
        )
        for ax, workload in zip(axes[0], self.settings.workloads):
            ratios = {row.optimizer: row.ratio for row in self.rows if row.workload == workload}
            colours = ["tab:green" if "AdaBayes" in name else "0.6" for name in names]
            bars = ax.barh(names, [ratios[name] for name in names], color=colours)
            ax.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
            ax.axvline(1, color="tab:blue", linewidth=1)
            ax.set(title=workload, xlabel=f"x as fast as {baseline}", xlim=(0, 1.25 * max([1.0, *ratios.values()])))
        axes[0][0].invert_yaxis()
        figure.savefig(path, dpi=130)


def _short(milliseconds: float) -> str:
    """Return about five characters, to fit a table of 80 columns."""
    return f"{milliseconds:.{2 if milliseconds < 100 else 1 if milliseconds < 1000 else 0}f}"
