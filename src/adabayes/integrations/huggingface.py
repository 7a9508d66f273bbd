"""For the Trainer of transformers: an optimizer from its arguments, and regimes in its logs."""

from __future__ import annotations

from typing import Any

import torch

from adabayes._util.missing_extra import missing_extra

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing_extra("this module needs transformers", "hf") from error

from adabayes.integrations._scalars import scalars_of
from adabayes.optim import AdaBayesK
from adabayes.optim.extend import unwrap

__all__ = ["RegimesCallback", "global_batch_size", "optimizer_cls_and_kwargs"]


def optimizer_cls_and_kwargs(
    args: TrainingArguments, cls: type[torch.optim.Optimizer] = AdaBayesK, **options: Any
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the value of the Trainer's argument of the same name, with the settings of ``args``.

    ``lr`` is ``learning_rate``. For the paper's form of AdaBayes, give ``batch_size`` as well: see
    :func:`global_batch_size`. The Trainer itself makes two parameter groups, one with ``weight_decay``, and one without
    for biases and norms. The betas of ``args`` are not used, because their defaults are AdamW's.

    Args:
        args: the arguments of the Trainer.
        cls: the optimizer.
        options: further arguments of the optimizer. They override those from ``args``.

    Examples:
        >>> args = TrainingArguments("out", learning_rate=1e-3, use_cpu=True)
        >>> optimizer_cls_and_kwargs(args, lr_sgd=1.0)
        (<class 'adabayes.optim.adabayes_k.AdaBayesK'>, {'lr': 0.001, 'lr_sgd': 1.0})
    """
    return cls, {"lr": args.learning_rate, **options}


def global_batch_size(args: TrainingArguments) -> int:
    """Return the number of examples in a step: examples per device, times devices, times accumulated minibatches.

    Processes that share a minibatch, as in tensor parallelism, count once.
    """
    layout = getattr(args, "parallelism_config", None)
    processes = args.world_size // (layout.non_data_parallel_size if layout else 1)
    return int(args.train_batch_size * args.gradient_accumulation_steps * processes)


class RegimesCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Logs regimes every ``logging_steps`` steps, to all of the Trainer's loggers: W&B, MLflow, TensorBoard.

    Args:
        trainer: the Trainer. Add the callback with ``trainer.add_callback(RegimesCallback(trainer))``.
        tensors: also log each parameter tensor, not only the total.
    """

    def __init__(self, trainer: Trainer, tensors: bool = False) -> None:
        self._trainer = trainer
        self._tensors = tensors

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Refuse optimizers that have no regimes."""
        unwrap(now["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **now: Any) -> None:
        """Log if the Trainer is about to log."""
        if control.should_log and state.is_world_process_zero:
            if scalars := scalars_of(unwrap(now["optimizer"]), now["model"], tensors=self._tensors):
                self._trainer.log(scalars)
            control.should_log = True  # logging clears it, and the Trainer's own log is still to come
