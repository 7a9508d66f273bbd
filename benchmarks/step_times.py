"""Time a training step of the suite's workloads with AdamW, Muon and AdaBayes-K, by rule 5 of docs/evidence.md.

    python benchmarks/step_times.py [--workload digits,pinn]

It uses the settings of the records in evidence/. It needs the data sets. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from adabayes.lab import data, protocol
from adabayes.lab.run.training import step_seconds
from adabayes.lab.suite import REFERENCE, Record, finals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", default=",".join(protocol.WORKLOADS), help="comma-separated names of workloads (default: all)"
    )
    for name in parser.parse_args().workload.split(","):
        record = Record.read(Path("evidence") / f"{name}.json")
        chosen = {optimizer: record.chosen[optimizer] for optimizer in (REFERENCE, "muon", "adabayes-k")}
        specs = finals(replace(protocol.load(f"suite/{name}"), seeds=(0,)), chosen)
        seconds = step_seconds(specs, data.load(specs[0].dataset, None, specs[0].data_options))
        ratios = ", ".join(f"{key} {value / seconds[REFERENCE]:.2f}" for key, value in seconds.items())
        print(f"{name}: {1e3 * seconds[REFERENCE]:.2f} ms; times AdamW's: {ratios}", flush=True)


if __name__ == "__main__":
    main()
