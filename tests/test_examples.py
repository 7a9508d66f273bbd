"""The examples, run as a user runs them but for less long: they learn, and refuse nonsense."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # One thread: small networks wait for a second one more than they gain, and torchrun warns unless it is told.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)


def output(*arguments: str | Path) -> str:
    """What is printed, if all goes well and there are no warnings."""
    done = python(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def errors(printed: str) -> dict[str, float]:
    """Test errors by what is said to have them."""
    found = re.findall(r"^(\S.*?) +test error ([0-9.]+) %", printed, re.MULTILINE)
    return {name: float(error) for name, error in found}


def test_quickstart_learns() -> None:
    printed = output(EXAMPLES / "quickstart.py")
    found = re.fullmatch(r"test error ([0-9.]+) %\n", printed)
    assert found, printed
    assert float(found[1]) < 5


def test_digits_trains_prints_and_draws(tmp_path: Path) -> None:
    printed = output(EXAMPLES / "digits.py", "--epochs", "2", "--seeds", "1", "--out", tmp_path)
    for name in ("SGD", "AdamW", "AdaBayes", "AdaBayes-FP", "8.weight"):
        assert re.search(rf"^ *{re.escape(name)} ", printed, re.MULTILINE), printed
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_jax_flax_learns_and_tells_regimes() -> None:
    printed = output(EXAMPLES / "jax_flax.py", "--epochs", "8")
    found = errors(printed)
    assert list(found) == ["optax.adamw", "AdaBayes", "AdaBayes-FP"]
    assert max(found.values()) < 10, found
    assert re.search(r"^hidden1\.kernel", printed, re.MULTILINE), printed


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("digits", ["--epochs", "0"], "--epochs 0 --seeds 3: both must be at least 1"),
        ("jax_flax", ["--epochs", "0"], "--epochs 0: must be at least 1"),
    ],
)
def test_nonsense_is_refused(example: str, arguments: list[str], message: str) -> None:
    done = python(EXAMPLES / f"{example}.py", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
