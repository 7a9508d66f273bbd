"""The number of threads that a run computes with.

A small network gains little from a second thread while the machine is idle, and loses much when it is busy, because
threads wait for one another. So it gets one. What is small depends on the run alone and not on the machine or its load:
a run that is interrupted, or a sweep that is, goes on with the same number and ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode

from adabayes.lab import models
from adabayes.lab.data import Data
from adabayes.lab.protocol import Spec
from adabayes.lab.run.folder import RunFolder

__all__ = ["SMALL", "choose", "operations", "using"]

SMALL = 1e9  # floating-point operations of a training step: about 20 ms on one core


def choose(spec: Spec, folder: RunFolder, data: Data, given: int | None) -> int:
    """Return the number of threads of a run.

    That is the number that was given; else that of its last start; else 1 if it is small; else the number that this
    process has.
    """
    if given is not None:
        return given
    if starts := folder.read("environment.json"):
        return int(starts[-1]["threads"])
    return 1 if operations(spec, data) < SMALL else torch.get_num_threads()


def operations(spec: Spec, data: Data) -> float:
    """Count the floating-point operations of a training step, without computing them.

    Those of the forward pass, three times, because the backward pass takes about twice as many. Only products of
    matrices and convolutions count.
    """
    indices = torch.arange(min(spec.batch_size, data.count("train")))
    inputs, _ = data.train_batch(indices, torch.Generator())
    with torch.device("meta"):
        network = models.make(spec.model, **{**data.model_options(), **spec.model_options})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(inputs.to("meta"))
    return 3.0 * float(counter.get_total_flops())


@contextmanager
def using(count: int) -> Iterator[None]:
    """Compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
