"""Several processes on this machine, as torchrun starts them; they talk over the loopback device alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["LOOPBACK", "torchrun"]

# A process that dies of a signal says where.
LOOPBACK = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def torchrun(world: int, module: str, *arguments: Path) -> None:
    """Run a module in ``world`` processes, and fail with their output if one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**LOOPBACK, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
