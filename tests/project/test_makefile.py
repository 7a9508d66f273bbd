"""The Makefile, where it touches the system."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def browser(folder: Path, *commands: str) -> str:
    """Run ``make browser`` where there are only these commands."""
    for name in commands:
        (folder / name).symlink_to(shutil.which(name) or "")
    make = [shutil.which("make") or "make", "--no-print-directory", "-C", str(ROOT), "browser"]
    done = subprocess.run(make, env={"PATH": str(folder)}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_system_package_is_announced_before_it_is_installed_and_what_is_skipped_is_named(tmp_path: Path) -> None:
    said = browser(tmp_path, "sh", "id", "touch")
    assert "cannot be installed" in said
    assert "tests/lab/test_report.py" in said
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\necho apt-get says much\ntouch {tmp_path}/called\n")
    (tmp_path / "apt-get").chmod(0o755)
    said = browser(tmp_path)
    if os.geteuid() == 0:
        assert said.startswith("There is no Chromium, which the tests of pages need: apt-get installs")
        assert "much" not in said
    assert (tmp_path / "called").exists() == (os.geteuid() == 0)
    assert ("skipped" in said) == (os.geteuid() != 0)
    (tmp_path / "chromium").symlink_to(tmp_path / "apt-get")
    assert browser(tmp_path) == f"{tmp_path / 'chromium'}\n"
