"""Building and shipping: real wheels, in fresh environments, with a compiler and without.

Python runs with -I there, so that PYTHONPATH cannot put this source in place of the wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from adabayes import __version__

ROOT = Path(__file__).parent.parent

STEPS = """
import torch, adabayes
from adabayes import AdaBayes, AdaBayesFP, kernels
print(adabayes.__file__)
for cls in (AdaBayes, AdaBayesFP):
    w = torch.ones(5)
    optimizer = cls([w], fused={fused})
    w.grad = torch.ones(5)
    optimizer.step()
    assert (w < 1).all()
    assert bool(optimizer._fused) == {kernels}
"""


def build(source: Path, out: Path, **environment: str) -> list[Path]:
    """An sdist, and from that a wheel, in environments that hold the build backend and nothing else."""
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment; torch is lent from this one, and nothing else of it is installed there."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    interpreter = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = subprocess.run(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "lent.pth").write_text(str(Path(torch.__file__).parent.parent))
    return interpreter


def install_and_run(python: Path, wheel: Path, script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    options = ["--quiet", "--no-deps", "--force-reinstall", "--no-index"]
    subprocess.run([python, "-m", "pip", "install", *options, wheel], check=True, cwd=cwd)
    return subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, cwd=cwd, check=False)


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_wheel_has_the_kernels_for_any_python_and_takes_fused_steps(python: Path, tmp_path: Path) -> None:
    sdist, wheel = sorted(build(ROOT, tmp_path / "dist"), key=lambda path: path.suffix)
    assert sdist.name == f"adabayes-{__version__}.tar.gz"
    assert wheel.name.startswith(f"adabayes-{__version__}-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert any(name.startswith("adabayes/kernels/_fused.") for name in zipfile.ZipFile(wheel).namelist())
    done = install_and_run(python, wheel, STEPS.format(fused=True, kernels=True), tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(python.parent.parent) in done.stdout
    doctor = subprocess.run(
        [python, "-I", "-m", "adabayes", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "loaded" in doctor.stdout


def test_without_a_compiler_everything_else_works(python: Path, tmp_path: Path) -> None:
    _, wheel = sorted(build(ROOT, tmp_path / "dist", CC="no-such-compiler"), key=lambda path: path.suffix)
    assert wheel.name.endswith("-py3-none-any.whl")
    done = install_and_run(python, wheel, STEPS.format(fused=None, kernels=False), tmp_path)
    assert done.returncode == 0, done.stderr
    done = install_and_run(python, wheel, STEPS.format(fused=True, kernels=True), tmp_path)
    assert done.returncode != 0
    assert "install a C compiler (gcc or clang) and then adabayes again" in done.stderr
    doctor = subprocess.run(
        [python, "-I", "-m", "adabayes", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "not there: the kernels were not built" in doctor.stdout
