"""AdaBayes in JAX: a Flax network on handwritten digits, with optax.adamw, AdaBayes, AdaBayes-FP and AdaBayes-K.

    python examples/jax_flax.py [--epochs 20]

Prints the test error of each, and which weights AdaBayes moved like SGD and which like Adam. Ten seconds on two cores,
no download.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.progress import track
from sklearn.datasets import load_digits

from adabayes.optax import adabayes, adabayes_fp, adabayes_k, regimes

BATCH = 64


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden1 = nnx.Linear(64, 64, rngs=rngs)
        self.hidden2 = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden2(nnx.relu(self.hidden1(x)))))


def optimizers(steps: int) -> dict[str, optax.GradientTransformation]:
    """Return all optimizers, with one schedule. It starts at 0, so AdaBayes needs the ``base_lr`` of ``lr_sgd``."""
    peak = 1e-2
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    return {
        "optax.adamw": optax.adamw(schedule, weight_decay=0.01),
        "AdaBayes": adabayes(schedule, lr_sgd=1.0, batch_size=BATCH, weight_decay=0.01, base_lr=peak),
        "AdaBayes-FP": adabayes_fp(schedule, lr_sgd=1.0, weight_decay=0.01, base_lr=peak),
        "AdaBayes-K": adabayes_k(schedule, weight_decay=0.01),
    }


def train(
    name: str, optimizer: optax.GradientTransformation, x: jax.Array, y: jax.Array, epochs: int
) -> tuple[Network, Any]:
    """Train, and return the network and the state of the optimizer."""
    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    state = optimizer.init(params)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> Any:
        logits = nnx.merge(graph, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for key in track(jax.random.split(jax.random.key(1), epochs), description=name, transient=True):
        order = jax.random.permutation(key, len(x))
        for i in range(0, len(x) - BATCH + 1, BATCH):
            batch = order[i : i + BATCH]
            params, state = step(params, state, x[batch], y[batch])
    return nnx.merge(graph, params), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="epochs (default: 20)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: must be at least 1")

    pixels, labels = load_digits(return_X_y=True)
    x, y = jnp.asarray(pixels / 16, jnp.float32), jnp.asarray(labels)
    order = jax.random.permutation(jax.random.key(2), len(x))
    test, rest = order[: len(x) // 5], order[len(x) // 5 :]
    for name, optimizer in optimizers(steps=args.epochs * (len(rest) // BATCH)).items():
        model, state = train(name, optimizer, x[rest], y[rest], args.epochs)
        wrong = model(x[test]).argmax(-1) != y[test]
        print(f"{name:<12} test error {100 * wrong.mean():.2f} %", flush=True)
        if name == "AdaBayes":
            print(regimes(state))


if __name__ == "__main__":
    main()
