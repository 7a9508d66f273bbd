"""The kernel for GPUs under Triton's interpreter, on tensors of the CPU: in processes of their own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adabayes import kernels
from tests.marks import has_triton

pytestmark = [
    has_triton,
    pytest.mark.skipif(kernels.unavailable() is not None, reason=f"no kernels: {kernels.unavailable()}"),
]
ROOT = Path(__file__).parent.parent.parent


def interpreted(*arguments: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def through_the_kernel(*selected: str) -> dict[str, int]:
    """Run tests of the CPU's kernel with that for GPUs in its place; return how often each took a step."""
    said = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.interpreter", *selected)
    (line,) = [line for line in said.splitlines() if line.startswith("steps: ")]
    steps: dict[str, int] = ast.literal_eval(line.removeprefix("steps: "))
    return steps


def test_bits_are_those_of_c_for_each_pair_of_types() -> None:
    code = "import json; from adabayes.bench import gpu; found = gpu.bits('interpreter', ['AdaBayes, no batch size']); "
    code += "print(json.dumps(found))"
    name, well, said = json.loads(interpreted("-c", code).splitlines()[-1])
    assert well, said
    assert name == "bits"
    assert "6 variants" in said


@pytest.mark.long
def test_bits_are_those_of_c_for_each_variant_and_pair_of_types() -> None:
    _, well, said = json.loads(interpreted("-m", "adabayes.bench.gpu").splitlines()[-1])
    assert well, said
    assert "48 variants" in said


def test_steps_follow_memory_scalers_and_layouts() -> None:
    steps = through_the_kernel(
        "tests/test_fused.py",
        "-k",
        "AdaBayesFP and (moves_between or scaler or layout or memory_around or trusted_again or several_dtypes)",
    )
    assert steps["device"] > 20
    assert steps["host"] > 20


# Not what is about threads or compilers, nor hundreds of steps; not where the CPU refuses capturable
LONG = {
    "tests/test_fused.py": "not threads and not instruction_set and not says_why",
    "tests/test_low_precision.py": "not small_decay and not relaxes and not small_steps and not training_with",
    "tests/test_contract.py": "",
    "tests/test_state_dict.py": "",
    "tests/test_schedulers.py": "",
    "tests/test_matrix_filter.py": "kernel or fused",
}


@pytest.mark.long
@pytest.mark.parametrize("file", list(LONG))
def test_whole_files_pass_through_the_kernel(file: str) -> None:
    steps = through_the_kernel(file, "-k", LONG[file])
    assert steps["device"] + steps["host"] > 0
