"""A process of its own for one run, when several go on at a time: ``python -m adabayes.lab.execute.worker FOLDER``.

The folder has the specification. Progress and the outcome are told in lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from adabayes._signals import Stopped
from adabayes.lab.execute import sweep
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--checkpoint-every", type=float, required=True)
    parser.add_argument("--tensorboard", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    told, sys.stdout = sys.stdout, sys.stderr  # what an optimizer prints is not for us
    folder = RunFolder(args.folder)
    spec = folder.spec()
    assert spec is not None
    options = sweep.Options(args.data, args.checkpoint_every, args.tensorboard)
    stop = sweep.Stop()

    def tell(content: dict[str, Any]) -> None:
        try:
            print(json.dumps(content), file=told, flush=True)
        except BrokenPipeError:  # whoever started this is gone
            stop.requested = True

    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_: tell({"warning": str(message)})

    try:
        with stop.on_signals():
            outcome = sweep.attempt(
                spec,
                folder,
                lambda: options.load(spec),
                Watch(lambda progress: tell(asdict(progress)), stop),
                options,
            )
    except Stopped as stopped:
        sys.exit(stopped.code)
    tell({"status": outcome.status, "error": outcome.error})


if __name__ == "__main__":
    main()
