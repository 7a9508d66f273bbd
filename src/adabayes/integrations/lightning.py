"""For the Trainer of Lightning: regimes in its logs."""

from __future__ import annotations

from typing import Any

from adabayes._util.missing_extra import missing_extra

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing_extra("this module needs lightning", "lightning") from error

from adabayes.integrations._scalars import scalars_of
from adabayes.optim.extend import unwrap

__all__ = ["RegimesCallback"]


class RegimesCallback(Callback):
    """Logs regimes every ``log_every_n_steps`` steps, to all of the Trainer's loggers.

    With several optimizers, names contain their indices: ``regimes/0/sgd_like``, ``regimes/1/sgd_like``.

    Args:
        tensors: also log each parameter tensor, not only the total.
    """

    def __init__(self, tensors: bool = False) -> None:
        self._tensors = tensors
        self._logged = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse optimizers that have no regimes."""
        for optimizer in trainer.optimizers:
            unwrap(optimizer)
        self._logged = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log if this minibatch has ended a step that must be logged."""
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._logged or not every or step % every:
            return
        self._logged = step
        several = len(trainer.optimizers) > 1
        for i, optimizer in enumerate(map(unwrap, trainer.optimizers)):
            prefix = f"regimes/{i}" if several else "regimes"
            if trainer.loggers and (scalars := scalars_of(optimizer, pl_module, prefix, tensors=self._tensors)):
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=step)
