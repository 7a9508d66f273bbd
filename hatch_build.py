"""Builds the fused kernels into the wheel, if there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/adabayes/kernels/cpu")
LIBRARY = "_fused.dll" if sys.platform == "win32" else "_fused.so"
# -fno-math-errno lets square roots be vectors.
FLAGS = "-O3 -std=c11 -fno-math-errno -fno-trapping-math -fvisibility=hidden"
# Without contraction, results are the same on every machine. Matrix products are twice as fast with it.
CONTRACTION = {"fused.c": "off", "matrix.c": "fast", "threads.c": "off"}


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        if version == "editable":
            target = root / KERNELS / LIBRARY
        else:
            self._folder = tempfile.TemporaryDirectory()
            target = Path(self._folder.name) / LIBRARY
        target.unlink(missing_ok=True)
        problem = compile_kernels(root / KERNELS, target)
        if problem:
            self.app.display_warning(f"adabayes: no fused kernels, only the slower forms: {problem}")
            return
        if version != "editable":
            build_data["force_include"][str(target)] = f"adabayes/kernels/cpu/{LIBRARY}"
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # for any Python 3 and any torch


def compile_kernels(folder: Path, target: Path) -> str | None:
    """Compile the library; return an error message, or None."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    compiler = next((found for name in compilers if (found := shutil.which(name))), None)
    if compiler is None:
        return f"there is no C compiler ({', '.join(compilers)})"
    flags = FLAGS.split() + ([] if sys.platform == "win32" else ["-fPIC", "-pthread"])
    flags += [flag for name in ("CFLAGS", "ARCHFLAGS") for flag in os.environ.get(name, "").split()]
    with tempfile.TemporaryDirectory() as objects:
        commands, built = [], [str(Path(objects) / f"{name}.o") for name in CONTRACTION]
        for (name, contraction), to in zip(CONTRACTION.items(), built):
            commands.append([compiler, *flags, f"-ffp-contract={contraction}", "-c", "-o", to, str(folder / name)])
        commands.append([compiler, *flags, "-shared", "-o", str(target), *built, "-lm"])
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{' '.join(command)} failed:\n{done.stderr}"
    return None
