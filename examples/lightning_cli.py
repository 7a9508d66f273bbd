"""AdaBayes-K in Lightning's CLI: the optimizer, its schedule and the log of its regimes come from a YAML file.

    python examples/lightning_cli.py fit --config examples/configs/lightning.yaml [--optimizer.init_args.lr 0.01]

With LightningCLI, the module needs no ``configure_optimizers``. Prints Lightning's progress and, at the end, the
training loss and the share of directions that move like Adam, read from the CSV log. Ten seconds on two cores, no
download.
"""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 128) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        pixels, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
        return DataLoader(data, self.batch_size, shuffle=True, drop_last=True)


def main() -> None:
    # Lightning's warnings about itself, and about workers, for which digits are too few
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for known in (".*LeafSpec", ".*does not have many workers", "Experiment logs directory .* exists"):
        warnings.filterwarnings("ignore", message=known)
    cli = LightningCLI(Digits, DigitsData, save_config_kwargs={"overwrite": True})
    folder = cli.trainer.log_dir
    assert folder is not None
    rows = list(csv.DictReader((Path(folder) / "metrics.csv").read_text().splitlines()))
    for name in ("loss", "regimes/adam_like"):
        print(f"{name}: {[float(row[name]) for row in rows if row[name]][-1]:.3g}")


if __name__ == "__main__":
    main()
