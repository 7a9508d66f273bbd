"""Building and shipping: real wheels, in fresh environments, with a compiler and without.

Python runs with -I there, so that PYTHONPATH cannot put this source in place of the wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from adabayes import __version__

ROOT = Path(__file__).parents[2]

SMOKE = ROOT / "tests" / "workers" / "smoke.py"
COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")

# No index, and nobody at the other end of a connection
OFFLINE = {"PIP_NO_INDEX": "1", "http_proxy": "http://localhost:9", "https_proxy": "http://localhost:9"}


def build(source: Path, out: Path) -> list[Path]:
    """Build an sdist, and from it a wheel, in environments that contain only the build backend."""
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(out.iterdir())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a fresh environment that borrows torch from this one, and nothing else."""
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


def build_offline(kind: str, source: Path, out: Path, **environment: str) -> Path:
    """Build an sdist or a wheel with the backend that is installed here."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out), str(source)]
    env = {**os.environ, **OFFLINE, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


def install_and_run(python: Path, wheel: Path, *command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    options = ["--quiet", "--no-deps", "--force-reinstall", "--no-index"]
    subprocess.run([python, "-m", "pip", "install", *options, wheel], check=True, cwd=cwd)
    return subprocess.run([python, "-I", *command], capture_output=True, text=True, cwd=cwd, check=False)


@COMPILER
def test_wheel_has_the_kernels_for_any_python_and_takes_fused_steps(python: Path, tmp_path: Path) -> None:
    sdist, wheel = sorted(build(ROOT, tmp_path / "dist"), key=lambda path: path.suffix)
    assert sdist.name == f"adabayes-{__version__}.tar.gz"
    assert wheel.name.startswith(f"adabayes-{__version__}-")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert any(name.startswith("adabayes/kernels/cpu/_fused.") for name in zipfile.ZipFile(wheel).namelist())
    done = install_and_run(python, wheel, SMOKE, "--kernels", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{__version__} {python.parent.parent}")
    doctor = subprocess.run(
        [python, "-I", "-m", "adabayes", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "loaded" in doctor.stdout


def test_an_sdist_becomes_a_wheel_without_a_compiler_or_a_network_and_all_but_the_kernels_works(
    python: Path, tmp_path: Path
) -> None:
    sdist = build_offline("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    wheel = build_offline("wheel", source, tmp_path / "wheel", CC="no-such-compiler")
    assert wheel.name == f"adabayes-{__version__}-py3-none-any.whl"
    done = install_and_run(python, wheel, SMOKE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked = "import torch, adabayes; adabayes.AdaBayes([torch.ones(2)], fused=True)"
    done = install_and_run(python, wheel, "-c", asked, cwd=tmp_path)
    assert "install a C compiler (gcc or clang) and then adabayes again" in done.stderr
    doctor = subprocess.run(
        [python, "-I", "-m", "adabayes", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "not there: the kernels were not built" in doctor.stdout


@COMPILER
def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    """From another folder, at another time, in another order of files."""
    copies = [tmp_path / "here", tmp_path / "somewhere" / "else"]
    for copy in copies:
        for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "_fused.*"))
    os.utime(copies[1] / "README.md", (1e9, 1e9))
    for kind in ("sdist", "wheel"):
        built = [build_offline(kind, copy, copy / f"{kind}s", SOURCE_DATE_EPOCH="1700000000") for copy in copies]
        assert built[0].name == built[1].name
        assert built[0].read_bytes() == built[1].read_bytes()


def test_the_changelog_knows_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert __version__ in headings[:2]  # below what is not released yet, if there is any


def test_the_release_workflow_builds_tests_and_publishes_what_is_here() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    (tagged,) = (command for command in commands if "GITHUB_REF_NAME" in command)
    for version, code in ((__version__, 0), ("0.0.0", 1)):
        env = {**os.environ, "GITHUB_REF_NAME": f"v{version}"}
        assert subprocess.run(["bash", "-c", tagged], env=env, cwd=ROOT, check=False).returncode == code
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'test-command = "python -I {{project}}/{SMOKE.relative_to(ROOT).as_posix()} --kernels"' in settings
