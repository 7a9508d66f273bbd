"""States that versions 0.1 and 0.2 pickled load, and the next step computes what it would have computed then.

AdaBayes-K is the exception: it did not cut matrices into blocks, so its states are refused.

A pickle names the modules of its classes. ``fixtures/state_VERSION.pickle`` holds, for each optimizer, the state after
STEPS steps and the updates of the next step. To write a file again, run this one with that version on the path:
``python test_pickled_states.py VERSION``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adabayes.optax as ours

FIXTURES = Path(__file__).with_name("fixtures")
STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "scale_by_adabayes": {"learning_rate": 1e-3, "lr_sgd": 0.1, "batch_size": 128},
    "scale_by_adabayes_fp": {"learning_rate": 1e-3, "lr_sgd": 0.1},
    "scale_by_adabayes_k": {"learning_rate": 1e-3},
}
CASES = [
    ("0_1", "scale_by_adabayes"),
    ("0_1", "scale_by_adabayes_fp"),
    ("0_2", "scale_by_adabayes"),
    ("0_2", "scale_by_adabayes_fp"),
]


def create(name: str) -> optax.GradientTransformation:
    optimizer: optax.GradientTransformation = getattr(ours, name)(**SETTINGS[name])
    return optimizer


def gradients(step: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(step)
    return {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in (("w", (3, 2)), ("b", 2))}


def write(version: str) -> None:
    records = {}
    for name in (name for saved, name in CASES if saved == version):
        optimizer = create(name)
        state = optimizer.init(gradients(0))
        for step in range(STEPS):
            _, state = optimizer.update(gradients(step), state)
        updates, _ = optimizer.update(gradients(STEPS), state)
        records[name] = jax.tree.map(np.asarray, {"state": state, "updates": updates})
    (FIXTURES / f"state_{version}.pickle").write_bytes(pickle.dumps(records))


@pytest.mark.parametrize(("version", "name"), CASES)
def test_a_pickled_state_loads_and_continues(version: str, name: str) -> None:
    record = pickle.loads((FIXTURES / f"state_{version}.pickle").read_bytes())[name]
    state = jax.tree.map(jnp.asarray, record["state"])
    optimizer = create(name)
    assert type(state) is type(optimizer.init(gradients(0)))
    updates, state = optimizer.update(gradients(STEPS), state)
    for key, expected in record["updates"].items():
        np.testing.assert_allclose(updates[key], expected, rtol=1e-5)  # other machines round differently
    new = optimizer.init(gradients(0))
    structures: list[Any] = [jax.tree.structure(one) for one in (state, new)]
    assert structures[0] == structures[1]


def test_a_pickled_state_without_blocks_is_refused() -> None:
    """Version 0.2 kept the averages of AdaBayes-K in the shapes of the parameters."""
    record = pickle.loads((FIXTURES / "state_0_2.pickle").read_bytes())["scale_by_adabayes_k"]
    state = jax.tree.map(jnp.asarray, record["state"])
    with pytest.raises(ValueError, match=r"This state is from version 0\.2.*init\(\)"):
        create("scale_by_adabayes_k").update(gradients(STEPS), state)


if __name__ == "__main__":
    write(sys.argv[1])
