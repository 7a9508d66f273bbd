"""Workloads: the parameters of real networks, and many small tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MATRIX", "QUICK", "WORKLOADS", "Shapes", "Workload"]

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Workload:
    """Parameters to take steps with."""

    shapes: Callable[[], Shapes]
    saved: bool = False  # state_dict() has been called on the optimizer, so other code may hold its state

    @property
    def weights(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes())


def _small() -> Shapes:
    sizes = random.Random(0)
    return [(sizes.randint(64, 4096),) for _ in range(1000)]


def _resnet34() -> Shapes:
    shapes: Shapes = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for blocks, channels in zip((3, 4, 6, 3), (64, 128, 256, 512)):
        for block in range(blocks):
            shapes += [
                (channels, width, 3, 3),
                (channels,),
                (channels,),
                (channels, channels, 3, 3),
                (channels,),
                (channels,),
            ]
            if block == 0 and width != channels:
                shapes += [(channels, width, 1, 1), (channels,), (channels,)]
            width = channels
    return [*shapes, (10, 512), (10,)]


def _densenet121() -> Shapes:
    shapes: Shapes = [(64, 3, 3, 3)]
    width = 64
    for blocks in (6, 12, 24, 16):
        for _ in range(blocks):
            shapes += [(width,), (width,), (128, width, 1, 1), (128,), (128,), (32, 128, 3, 3)]
            width += 32
        if blocks != 16:
            shapes += [(width,), (width,), (width // 2, width, 1, 1)]
            width //= 2
    return [*shapes, (width,), (width,), (10, width), (10,)]


def _gpt2() -> Shapes:
    wide = 768
    shapes: Shapes = [(50257, wide), (1024, wide)]
    for _ in range(12):
        shapes += [(wide,), (wide,), (wide, 3 * wide), (3 * wide,), (wide, wide), (wide,)]
        shapes += [(wide,), (wide,), (wide, 4 * wide), (4 * wide,), (4 * wide, wide), (wide,)]
    return [*shapes, (wide,), (wide,)]


def _transformer() -> Shapes:
    wide, layers, words = 128, 4, 128
    shapes: Shapes = [(words, wide), (128, wide)]
    for _ in range(layers):
        shapes += [(wide,), (wide,), (3 * wide, wide), (3 * wide,), (wide, wide), (wide,)]
        shapes += [(wide,), (wide,), (4 * wide, wide), (4 * wide,), (wide, 4 * wide), (wide,)]
    return [*shapes, (wide,), (wide,), (words, wide)]


def _resnet20() -> Shapes:
    shapes: Shapes = [(16, 3, 3, 3), (16,), (16,)]
    width = 16
    for channels in (16, 32, 64):
        for _ in range(3):
            shapes += [(channels, width, 3, 3), (channels,), (channels,)]
            shapes += [(channels, channels, 3, 3), (channels,), (channels,)]
            width = channels
    return [*shapes, (10, 64), (10,)]


def _vit_small() -> Shapes:
    """Return six of the twelve blocks of ViT-S/16."""
    wide = 384
    shapes: Shapes = []
    for _ in range(6):
        shapes += [(wide,), (wide,), (3 * wide, wide), (3 * wide,), (wide, wide), (wide,)]
        shapes += [(wide,), (wide,), (4 * wide, wide), (4 * wide,), (wide, 4 * wide), (wide,)]
    return shapes


WORKLOADS = {
    "tiny": Workload(lambda: [(10,)] * 1000),
    "small": Workload(_small),
    "small-saved": Workload(_small, saved=True),
    "densenet121": Workload(_densenet121),
    "resnet34": Workload(_resnet34),
    "one50m": Workload(lambda: [(50_000_000,)]),
    "gpt2": Workload(_gpt2),
    "transformer": Workload(_transformer),
    "resnet20": Workload(_resnet20),
    "vit-s": Workload(_vit_small),
}
MATRIX = ("transformer", "resnet20", "vit-s", "gpt2")
QUICK = ("tiny", "small", "small-saved", "densenet121", "resnet34")
