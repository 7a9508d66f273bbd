"""JAX stays with the tests of JAX: all others can be run without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

COLLECT = """
import sys

import pytest

# Without what only takes time here: doctests, assertions that explain themselves.
quick = ["-o", "addopts=", "--assert=plain", "-p", "no:cacheprovider"]
assert pytest.main(["--collect-only", "-qq", *quick, *sys.argv[1:]]) == 0
assert {"tests.conftest", "tests.optim.test_parity", "tests.lab.test_training"} <= set(sys.modules)
print("imported:", {"chex", "flax", "jax", "optax"} & set(sys.modules))
"""


def test_jax_is_imported_by_its_own_tests_alone() -> None:
    # The integrations are left out, too: their frameworks take as long to import as all the rest.
    frameworks = ("integrations/test_integrations.py", "integrations/test_integration_helpers.py")
    left_out = [f"--ignore={TESTS / name}" for name in ("optax", *frameworks)]
    command = [sys.executable, "-c", COLLECT, str(TESTS), *left_out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "imported: set()"
