"""The GPU kernel under Triton's interpreter, on CPU tensors, in separate processes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.common import needs_kernels
from tests.support.marks import has_triton

pytestmark = [has_triton, needs_kernels]
ROOT = Path(__file__).parents[3]


def interpret(*arguments: str) -> str:
    """Run Python with Triton's interpreter, and return its output."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-5000:]
    return process.stdout


def launches_of_tests(*selected: str) -> dict[str, int]:
    """Run tests of the CPU kernel with the GPU kernel instead; return the number of launches of each kind."""
    plugins = ("-p", "no:cacheprovider", "-p", "tests.support.gpu.interpreter")
    output = interpret("-m", "pytest", "-q", *plugins, *selected)
    (line,) = [line for line in output.splitlines() if line.startswith("launches: ")]
    launches: dict[str, int] = ast.literal_eval(line.removeprefix("launches: "))
    return launches


def test_bits_are_those_of_c_for_each_pair_of_dtypes() -> None:
    code = "import json; from adabayes.bench import gpu; print(json.dumps(gpu.bits('interpreter', ['{}'])))"
    output = interpret("-c", code.format("AdaBayes, no batch size"))
    name, well, message = json.loads(output.splitlines()[-1])
    assert well, message
    assert name == "bits"
    assert "6 variants" in message


@pytest.mark.long
def test_bits_are_those_of_c_for_each_variant_and_pair_of_dtypes() -> None:
    _, well, message = json.loads(interpret("-m", "adabayes.bench.gpu").splitlines()[-1])
    assert well, message
    assert "48 variants" in message


def test_steps_follow_memory_scalers_and_layouts() -> None:
    launches = launches_of_tests(
        "tests/kernels/test_plan.py",
        "tests/kernels/test_fused.py",
        "-k",
        "AdaBayesFP and (moves_between or changed_state or scaler or layout or memory_around or several_dtypes)",
    )
    assert launches["device"] > 20
    assert launches["host"] > 20


def test_launches_compute_and_take_steps() -> None:
    launches = launches_of_tests("tests/kernels/test_launch.py", "-k", "fp32 or float32 or bfloat16 or coefficient")
    assert launches["step"] > 20
    assert launches["device"] > 20
    assert launches["host"] > 20


# Without tests of threads or compilers, of hundreds of steps, and of capturable, which the CPU refuses
LONG = {
    "tests/kernels/test_fused.py": "not threads and not instruction_set and not explains_why",
    "tests/kernels/test_launch.py": "",
    "tests/kernels/test_plan.py": "",
    "tests/optim/test_low_precision.py": "not small_decay and not relaxes and not small_steps and not training_with",
    "tests/optim/test_contract.py": "",
    "tests/optim/test_state_dict.py": "",
    "tests/optim/test_schedulers.py": "",
    "tests/optim/test_adabayes_k.py": "kernel or fused",
}


@pytest.mark.long
@pytest.mark.parametrize("file", list(LONG))
def test_all_tests_of_a_file_pass_with_the_gpu_kernel(file: str) -> None:
    launches = launches_of_tests(file, "-k", LONG[file])
    assert launches["device"] + launches["host"] > 0
