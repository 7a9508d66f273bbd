"""Prints what AdaBayes-K costs at scale, as tables: ``python -m adabayes.diagnostics.scale``.

Everything is calculated by :func:`adabayes.diagnostics.matrix_memory_plan` from the shapes of the networks, with the
optimizer's defaults and fp32 weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from adabayes.diagnostics.memory import matrix_memory_plan

__all__ = ["NETWORKS", "Network", "cost_per_device", "cost_per_weight", "gpt2", "llama"]

DEVICES = (8, 64, 1024)
TOKENS = (2_048, 65_536)  # per step

Shapes = list[tuple[int, ...]]


class Network(NamedTuple):
    """A network, and how it is trained."""

    name: str
    shapes: Shapes
    tokens: float  # of a usual step
    max_size: int = 16384

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.shapes))


def gpt2() -> Shapes:
    """Return the shapes of GPT-2's parameters; input and output share the vocabulary."""
    layer = [(2304, 768), (768, 768), (3072, 768), (768, 3072), (2304,), (3072,), *[(768,)] * 6]
    return [(50257, 768), (1024, 768), *12 * layer, (768,), (768,)]


def llama(layers: int, width: int, keys: int, inner: int) -> Shapes:
    """Return the shapes of Llama's parameters."""
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(32000, width), *layers * layer, (width,), (32000, width)]


NETWORKS = [
    Network("GPT-2, 124 M", gpt2(), 0.5e6),
    Network("Llama, 1.1 B", llama(22, 2048, 256, 5632), 2e6),
    Network("Llama, 7 B", llama(32, 4096, 4096, 11008), 4e6),
    Network("Llama, 70 B", llama(80, 8192, 1024, 28672), 4e6),
    Network("Llama, 70 B, `max_size=32768`", llama(80, 8192, 1024, 28672), 4e6, 32768),
]


def cost_per_weight(networks: Sequence[Network] = tuple(NETWORKS)) -> str:
    """Return a table of the bytes of state for each weight, and of arithmetic relative to training.

    Training takes 6 operations for each weight and token.
    """
    rows = [["network", "bytes of state per weight", "with `share_bases`", *(f"{n:,} tokens" for n in TOKENS)]]
    for network in networks:
        plain, shared = (
            matrix_memory_plan(network.shapes, max_size=network.max_size, share_bases=share) for share in (False, True)
        )
        work = plain.rotations + plain.refreshes
        fractions = (work / (6 * network.weights * tokens) for tokens in TOKENS)
        state = (f"{plan.state / network.weights:.1f}" for plan in (plain, shared))
        rows.append([network.name, *state, *(f"{100 * fraction:.2g} %" for fraction in fractions)])
    return _table(rows)


def cost_per_device(networks: Sequence[Network] = tuple(NETWORKS)) -> str:
    """Return a table of memory, traffic and operations of the device that has most of it, under FSDP2."""
    rows = [
        [
            "network",
            "devices",
            "parameters + gradients + state, GB",
            "sent, MB",
            "rotations + refreshes, GFLOP",
            "costliest step, GFLOP",
            "largest piece, GFLOP",
            "of forward and backward",
        ]
    ]
    for network in networks:
        for devices in DEVICES:
            plan = matrix_memory_plan(network.shapes, max_size=network.max_size, devices=devices)
            training = 6 * network.weights * network.tokens / devices
            memory = (plan.parameters, plan.gradients, plan.state)
            rows.append(
                [
                    network.name,
                    f"{devices:,}",
                    " + ".join(f"{part / 1e9:.2f}" for part in memory),
                    f"{plan.sent / 1e6:.0f}",
                    f"{plan.rotations / 1e9:.1f} + {plan.refreshes / 1e9:.1f}",
                    f"{plan.peak / 1e9:.1f}",
                    f"{plan.largest / 1e9:.2f}",
                    f"{100 * (plan.rotations + plan.refreshes) / training:.3f} %",
                ]
            )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, of which the first is the header, as Markdown."""
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([header, "|" + " --- |" * len(rows[0]), *body])


if __name__ == "__main__":
    print(f"{cost_per_weight()}\n\n{cost_per_device()}")
