"""Writes runs for TensorBoard while they train: ``tensorboard --logdir OUT/runs``.

Events are in the run's folder and contain nothing that its logs do not. They are written anew from the logs when a run
begins, resumes or is already done, so curves have neither gaps nor duplicates after an interruption.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adabayes._util.missing_extra import missing_extra
from adabayes.lab.run.files import room_for
from adabayes.lab.run.folder import RunFolder

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise missing_extra("--tensorboard needs one more package", "tensorboard") from error

__all__ = ["Events", "catch_up"]

_FILES = "events.out.tfevents.*"
_SCALARS = {
    "error/test": "test_error",
    "error/train": "train_error",
    "loss/test": "test_loss",
    "loss/train": "train_loss",
    "learning rate": "lr",
    "regime/SGD-like": "sgd_like",
    "regime/Adam-like": "adam_like",
}


class Events:
    """Writes a run's events, beginning with those of its first ``epochs`` (None: all that are logged)."""

    def __init__(self, folder: RunFolder, epochs: int | None = None) -> None:
        self._path = folder.path
        for old in folder.path.glob(_FILES):
            old.unlink()
        with room_for(self._path):
            self._writer = SummaryWriter(str(folder.path))
        rates = {row["epoch"]: row for row in folder.metrics("rates.jsonl")}
        for row in folder.metrics()[:epochs]:
            self.write(row, rates.get(row["epoch"]))

    def write(self, row: dict[str, Any], rates: dict[str, Any] | None) -> None:
        """Write an epoch: its row of metrics, and the gains of sampled weights, if there are any."""
        epoch = row["epoch"] + 1
        gains = [math.log10(gain) for layer in (rates or {}).get("gain", ()) for gain in layer if gain > 0]
        with room_for(self._path):
            for tag, key in _SCALARS.items():
                if row.get(key) is not None:
                    self._writer.add_scalar(tag, row[key], epoch)
            if gains:
                self._writer.add_histogram("log10 of gain", np.array(gains), epoch)
            self._writer.flush()

    def close(self) -> None:
        with room_for(self._path):
            self._writer.close()


def catch_up(folder: RunFolder) -> None:
    """Write the events of a run that is done, unless it has them."""
    if not list(folder.path.glob(_FILES)):
        Events(folder).close()
