"""AdaBayes in transformers.Trainer: a small Llama learns to write Python, character by character.

    python examples/hf_trainer.py [--how instance|class] [--steps 200] [--out out/hf]

How to give the Trainer an optimizer that it does not know by name: as an instance (``--how instance``), or as a class
with the settings of TrainingArguments, for which it makes the parameter groups itself (``--how class``). Both give the
same model. Prints the Trainer's progress, the shares of weights that moved like SGD and like Adam, and the loss on
held-out modules, in bits per character. The text is the source of Python's standard library: no download. A minute on
two cores.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from adabayes import AdaBayes, param_groups
from adabayes.diagnostics import regimes
from adabayes.integrations.huggingface import global_batch_size, optimizer_cls_and_kwargs

CONTEXT = 64
LR, LR_SGD = 3e-3, 9.0


class Characters(Dataset[dict[str, Tensor]]):
    """ASCII in pieces of a fixed length. The model itself shifts the labels by one."""

    def __init__(self, text: bytes) -> None:
        codes = torch.tensor([code for code in text if code < 128])
        self.pieces = codes[: len(codes) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[i], "labels": self.pieces[i]}


def standard_library() -> tuple[Characters, Characters]:
    """Return some modules for training, and others for the test."""
    modules = [path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    test = modules[::20]
    train = [module for i, module in enumerate(modules) if i % 20]
    return Characters(b"".join(train)), Characters(b"".join(test)[:50_000])


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--how", choices=["instance", "class"], default="instance", help="what the Trainer is given (default: instance)"
    )
    parser.add_argument("--steps", type=int, default=200, help="(default: 200)")
    parser.add_argument("--out", type=Path, default=Path("out/hf"), help="folder for checkpoints (default: out/hf)")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")

    training = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(args.steps / 10),
        learning_rate=LR,
        weight_decay=0.1,
        logging_steps=math.ceil(args.steps / 10),
        save_steps=math.ceil(args.steps / 2),
        save_total_limit=1,
        report_to="none",
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    batch_size = global_batch_size(training)  # of sequences, not tokens
    print(
        f"global batch: {training.train_batch_size} x {training.gradient_accumulation_steps} accumulated "
        f"x {training.world_size} processes = {batch_size} sequences of {CONTEXT} characters"
    )

    set_seed(0)
    model = small_llama()
    given: dict[str, Any]
    if args.how == "instance":
        groups = param_groups(model, training.weight_decay)
        optimizer = AdaBayes(groups, lr=training.learning_rate, lr_sgd=LR_SGD, batch_size=batch_size)
        # None: the scheduler of TrainingArguments. A scheduler of your own goes in its place.
        given = {"optimizers": (optimizer, None)}
    else:  # with the learning rate and the weight decay of TrainingArguments
        options = {"lr_sgd": LR_SGD, "batch_size": batch_size}
        given = {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(training, AdaBayes, **options)}
    train, test = standard_library()
    trainer = Trainer(model, training, train_dataset=train, eval_dataset=test, **given)
    trainer.train()  # trainer.train(resume_from_checkpoint=True) goes on from the newest checkpoint, exactly

    loss = trainer.evaluate()["eval_loss"]
    assert trainer.optimizer is not None
    weights = regimes(trainer.optimizer).total
    print(f"{weights.sgd_like:.0%} of the weights moved like SGD, {weights.adam_like:.0%} like Adam")
    print(f"held-out modules: {loss / math.log(2):.2f} bits per character")


if __name__ == "__main__":
    main()
