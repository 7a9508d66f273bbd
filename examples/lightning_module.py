"""AdaBayes in Lightning: handwritten digits, one cycle of the learning rate, stopped halfway and resumed.

    python examples/lightning_module.py [--epochs 20] [--out out/lightning]

Where the optimizer and its scheduler go in Lightning, with clipped and accumulated gradients and a checkpoint of each
epoch. A second Trainer resumes from the middle checkpoint, as after a crash, and ends with the same weights. Prints
Lightning's progress, both test errors, and whether the weights are the same. Under a minute on two cores, no download.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from adabayes import AdaBayes, param_groups

BATCH, ACCUMULATE = 32, 2
LR, LR_SGD = 1e-2, 1.0  # AdamW's learning rate; SGD's 0.1 with momentum 0.9, which sums: 0.1 / (1 - 0.9)

Examples = DataLoader[tuple[Tensor, ...]]


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test error", (self.net(x).argmax(1) != y).double().mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = AdaBayes(
            param_groups(self.net, weight_decay=0.01),
            lr=LR,  # the peak of the cycle: there, lr_sgd is what it says
            lr_sgd=LR_SGD,
            batch_size=BATCH * self.trainer.accumulate_grad_batches * self.trainer.world_size,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def digits() -> tuple[Examples, Examples]:
    """Return digits for training, and a fifth of them for the test."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    train, test = TensorDataset(x[360:], y[360:]), TensorDataset(x[:360], y[:360])
    # Shuffles by the number of the epoch, which Lightning sets: a resumed run sees the same batches as a whole one.
    shuffler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train, num_replicas=1, rank=0)
    return DataLoader(train, BATCH, sampler=shuffler, drop_last=True), DataLoader(test, len(test))


def trainer(epochs: int, out: Path) -> L.Trainer:
    return L.Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(out, "{epoch}", save_top_k=-1, enable_version_counter=False)],
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs (default: 20)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/lightning"), help="folder for checkpoints (default: out/lightning)"
    )
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error(f"--epochs {args.epochs}: must be at least 2, to be resumed in between")
    # Lightning's warnings about itself, and about workers, for which digits are too few
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for known in (".*LeafSpec", ".*does not have many workers", "Checkpoint directory .* exists"):
        warnings.filterwarnings("ignore", message=known)

    train, test = digits()
    L.seed_everything(0, verbose=False)
    whole = Digits()
    first = trainer(args.epochs, args.out)
    first.fit(whole, train)
    first.test(whole, test, verbose=False)

    resumed = Digits()
    second = trainer(args.epochs, args.out)
    half = args.out / f"epoch={args.epochs // 2 - 1}.ckpt"
    second.fit(resumed, train, ckpt_path=half)
    second.test(resumed, test, verbose=False)

    same = all(torch.equal(p, q) for p, q in zip(whole.state_dict().values(), resumed.state_dict().values()))
    for name, done in (("whole", first), ("resumed", second)):
        print(f"{name:8} test error {100 * done.callback_metrics['test error'].item():.2f} %")
    print(f"resumed from {half}: {'the same weights, bit for bit' if same else 'other weights'}")


if __name__ == "__main__":
    main()
