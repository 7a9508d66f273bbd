"""Optax's own tests, which it installs, with ours in the place of its adamw.

They are read from where optax is installed, so that what is checked is what its version checks. Only their tables of
optimizers are replaced.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adabayes.optax as ours

NAMES = ("adabayes", "adabayes_fp", "adabayes_k")
ALIASES = {"_OPTIMIZERS_UNDER_TEST": "({'opt_name': 'adamw', 'opt_kwargs': {'learning_rate': 0.1}},)"}
CONTRIBUTED = {
    "_MAIN_OPTIMIZERS_UNDER_TEST": "[{'opt_name': 'adamw', 'opt_kwargs': {'learning_rate': 1e-2}}]",
    "_BASE_OPTIMIZERS": "[{'opt_name': 'adamw', 'opt_kwargs': {'learning_rate': 1.0}}]",
}
# State stays in fp32 where parameters are bf16, unless mu_dtype says otherwise: the averages would stand still.
BY_DECISION = {"params_dtype='bfloat16', state_dtype=None"}
# AdaBayes-K rotates the real and imaginary parts of a complex vector as a matrix. Its averages are real, and its steps
# are matrix_scale times as large, which is too large for the learning rate of optax's test on Rosenbrock's function.
BY_DECISION_IN_MATRICES = {
    "params_dtype='complex64', state_dtype='complex64'",
    "params_dtype='complex64', state_dtype=None",
    "target=<function _setup_rosenbrock",
}


def borrowed(module: str, tables: dict[str, str]) -> types.ModuleType:
    """Return one of optax's test modules, with other tables."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).exists():
        pytest.skip(f"this optax comes without {module}")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    replaced = 0
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        name = getattr(node.targets[0], "id", "")
        if name in tables and name not in ast.unparse(node.value):  # not where it is only made a tuple
            node.value = ast.parse(tables[name], mode="eval").body
            replaced += 1
    assert replaced == len(tables)
    found = types.ModuleType(f"borrowed_{module.rpartition('.')[2]}")
    sys.modules[found.__name__] = found
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), found.__dict__)
    return found


def failures(cases: type[unittest.TestCase], name: str) -> tuple[int, list[str]]:
    """Run the tests whose names or arguments contain ``name``; return how many there are, and what failed."""
    result = unittest.TestResult()
    tests = [test for test in unittest.defaultTestLoader.loadTestsFromTestCase(cases) if name in str(test)]
    for test in tests:
        test.run(result)
    return len(tests), [f"{test}: {trace}" for test, trace in (*result.failures, *result.errors)]


@pytest.fixture
def in_place_of_adamw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optax._src.alias, "adamw", getattr(ours, request.param))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("in_place_of_adamw", NAMES, indirect=True)
def test_what_optax_asks_of_adamw(in_place_of_adamw: None) -> None:
    module: Any = borrowed("optax._src.alias_test", ALIASES)
    count, failed = failures(module.AliasTest, "'adamw'")
    assert count >= 32
    rotates = optax._src.alias.adamw is ours.adabayes_k
    decisions = BY_DECISION | BY_DECISION_IN_MATRICES if rotates else BY_DECISION
    assert len(failed) == len(decisions), "\n".join(failed)
    assert all(any(decision in test for test in failed) for decision in decisions)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("in_place_of_adamw", NAMES, indirect=True)
def test_what_optax_asks_of_contributions_and_of_what_mechanize_wraps(in_place_of_adamw: None) -> None:
    module: Any = borrowed("optax.contrib._common_test", CONTRIBUTED)
    count, failed = failures(module.ContribTest, "'adamw'")
    assert count >= 12
    assert not failed, "\n".join(failed)


@pytest.mark.long
def test_what_optax_asks_of_shardings() -> None:
    """On 8 devices. Optax compares versions of JAX as strings, and so takes 0.10 for older than 0.7: it is told 0.9."""
    script = f"""
import jax, optax
import adabayes.optax as ours
from tests.optax.test_optax_suite import borrowed, failures
jax.__version__ = "0.9.0"
table = ", ".join(f"'{{name}}': ours.{{name}}(1.0)" for name in {NAMES})
tables = {{"OPTIMIZERS": "{{" + table.replace("ours", "__import__('adabayes.optax').optax") + "}}"}}
module = borrowed("optax._src.sharding_test", tables)
count, failed = failures(module.ShardingTest, "adabayes")
assert count == 9, count
assert not failed, "\\n".join(failed)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr


# Wrappers that optax tests with sgd alone


@pytest.mark.parametrize("name", ["adamw", *NAMES])
@pytest.mark.parametrize("wrapper", ["schedule_free", "lookahead", "sam"])
def test_wrappers_minimise(name: str, wrapper: str) -> None:
    make = optax.adamw if name == "adamw" else getattr(ours, name)
    target = {"v": jnp.array([1.0, -1.0]), "w": jnp.array([[1.0, -1.0], [0.5, 2.0]])}
    params: Any = jax.tree.map(jnp.zeros_like, target)
    optimizer: Any
    if wrapper == "schedule_free":
        optimizer = optax.contrib.schedule_free(make(1e-2, b1=0.0), 1e-2)
    elif wrapper == "sam":
        adversary = optax.chain(optax.contrib.normalize(), optax.sgd(1e-3))
        optimizer = optax.contrib.sam(make(1e-2), adversary, sync_period=2)
    else:
        optimizer = optax.lookahead(make(1e-2), sync_period=5, slow_step_size=0.5)
        params = optax.LookaheadParams.init_synced(params)

    def step(carry: Any, noise: Any) -> Any:  # without which a gradient may vanish, and sam divide it by its norm
        params, state = carry
        grads = jax.tree.map(lambda p, t: 2 * (p - t) + noise, getattr(params, "fast", params), target)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    noises = 1e-2 * jax.random.normal(jax.random.key(0), (2000,))
    (params, state), _ = jax.lax.scan(step, (params, optimizer.init(params)), noises)
    if wrapper == "schedule_free":
        params = optax.contrib.schedule_free_eval_params(state, params)
    for name, value in getattr(params, "slow", params).items():
        np.testing.assert_allclose(value, target[name], atol=0.1)  # a fixed learning rate keeps it from settling
