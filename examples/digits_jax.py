"""The same in JAX: an equinox network on handwritten digits, with optax.adamw, AdaBayes and AdaBayes-FP.

    python examples/digits_jax.py [--epochs 20]

Prints the test error of each, and which of AdaBayes's weights moved like SGD, which like Adam. Ten seconds on two
cores, no download.
"""

from __future__ import annotations

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from adabayes.optax import adabayes, adabayes_fp, regimes

BATCH = 64


def optimizers(steps: int) -> dict[str, optax.GradientTransformation]:
    """All with the same schedule. It is one, so AdaBayes is told the rate at which ``lr_sgd`` is SGD's."""
    peak = 1e-2
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    return {
        "optax.adamw": optax.adamw(schedule, weight_decay=0.01),
        "AdaBayes": adabayes(schedule, lr_sgd=1.0, batch_size=BATCH, weight_decay=0.01, base_lr=peak),
        "AdaBayes-FP": adabayes_fp(schedule, lr_sgd=1.0, weight_decay=0.01, base_lr=peak),
    }


def loss_of(model: Any, x: jax.Array, y: jax.Array) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


def train(optimizer: optax.GradientTransformation, x: jax.Array, y: jax.Array, epochs: int) -> tuple[Any, Any]:
    """The trained network, and the state of the optimizer."""
    model = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
        gradient: Any = eqx.filter_grad(loss_of)
        grads = gradient(model, x, y)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for key in jax.random.split(jax.random.key(1), epochs):
        order = jax.random.permutation(key, len(x))
        for i in range(0, len(x) - BATCH + 1, BATCH):
            batch = order[i : i + BATCH]
            model, state = step(model, state, x[batch], y[batch])
    return model, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="(default: 20)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: must be at least 1")

    pixels, labels = load_digits(return_X_y=True)
    x, y = jnp.asarray(pixels / 16, jnp.float32), jnp.asarray(labels)
    order = jax.random.permutation(jax.random.key(2), len(x))
    test, rest = order[: len(x) // 5], order[len(x) // 5 :]
    for name, optimizer in optimizers(steps=args.epochs * (len(rest) // BATCH)).items():
        model, state = train(optimizer, x[rest], y[rest], args.epochs)
        wrong = jax.vmap(model)(x[test]).argmax(-1) != y[test]
        print(f"{name:<12} test error {100 * wrong.mean():.2f} %", flush=True)
        if name == "AdaBayes":
            print(regimes(state))


if __name__ == "__main__":
    main()
