"""A process that does runs for another: ``python -m adabayes.lab.execute.worker``.

It reads requests from standard input, a line of JSON each, until that ends. The folder of a request has the
specification of the run. Progress and outcome are lines of JSON on standard output.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from adabayes._util.signals import Stopped
from adabayes.lab.execute import sweep
from adabayes.lab.run.folder import RunFolder
from adabayes.lab.run.training import Watch


def main() -> None:
    told, sys.stdout = sys.stdout, sys.stderr  # an optimizer that prints must not come between
    load: sweep.Loader | None = None
    stop = sweep.Stop()

    def tell(content: dict[str, Any]) -> None:
        try:
            print(json.dumps(content), file=told, flush=True)
        except BrokenPipeError:  # the process that asked is gone
            stop.requested = True

    warnings.simplefilter("always", UserWarning)
    warnings.showwarning = lambda message, *_: tell({"warning": str(message)})
    for line in sys.stdin:
        request = json.loads(line)
        given = request["options"]
        folder = given["data_folder"]
        options = sweep.Options(**{**given, "data_folder": None if folder is None else Path(folder)})
        if load is None or load.options != options:
            load = sweep.Loader(options)
        torch.set_num_threads(request["share"])
        try:
            with stop.on_signals():
                outcome = _attempt(RunFolder(Path(request["folder"])), load, Watch(lambda p: tell(asdict(p)), stop))
        except Stopped as stopped:
            sys.exit(stopped.code)
        tell({"status": outcome.status, "error": outcome.error})


def _attempt(folder: RunFolder, load: sweep.Loader, watch: Watch) -> sweep.Outcome:
    spec = folder.spec()
    assert spec is not None
    return sweep.attempt(spec, folder, lambda: load(spec), watch, load.options)


if __name__ == "__main__":
    main()
