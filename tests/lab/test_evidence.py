"""The records in evidence/: they are complete, belong to the present protocols, and can be reproduced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from adabayes.lab import data, protocol, suite
from adabayes.lab.report import suite_page
from adabayes.lab.run.folder import folder_of
from adabayes.lab.run.training import train

FOLDER = Path(__file__).parents[2] / "evidence"
RECORDS = suite.read(FOLDER)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.name))
def test_records_are_whole_and_of_the_present_protocols(record: suite.Record) -> None:
    found = protocol.load(f"suite/{record.name}")
    asked = suite.trials(found, suite.BUDGET)
    assert [(t.optimizer, t.settings) for t in record.trials] == [(spec.optimizer, spec.settings) for spec in asked]
    assert {(run.optimizer, run.seed) for run in record.finals if run.length == 1} == {
        (name, seed) for name in record.chosen for seed in found.seeds
    }
    assert not suite.shorter(found, record)
    assert record.step_seconds.keys() == record.chosen.keys()
    assert {trial.status for trial in record.trials} | {run.status for run in record.finals} <= {"done", "diverged"}
    assert record.error == data.error_of(found.datasets[0])


def test_tables_of_all_workloads_fit_80_columns() -> None:
    records = [replace(RECORDS[0], name=name) for name in protocol.WORKLOADS]
    for table in suite_page.tables(records):
        assert Console().measure(table, options=Console().options.update(max_width=200)).maximum <= 80


def test_the_demo_has_the_settings_that_won() -> None:
    demo = protocol.load("demo")
    (record,) = (
        r for r in RECORDS if r.name == demo.datasets[0] or protocol.load(f"suite/{r.name}").datasets == demo.datasets
    )
    for name, optimizer in demo.optimizers.items():
        assert optimizer.settings == record.chosen[name]


def test_a_run_gives_the_recorded_figures_again(tmp_path: Path) -> None:
    """The first test agrees to a thousandth. Processors round differently, which grows, so the end agrees less."""
    (record,) = (r for r in RECORDS if r.name == "digits")
    (recorded,) = (run for run in record.runs("sgd") if run.seed == 0)
    found = replace(protocol.load("suite/digits"), seeds=(0,))
    (spec,) = suite.finals(found, {"sgd": record.chosen["sgd"]})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(spec, folder_of(spec, tmp_path), data.load("digits"))
    finally:
        torch.set_num_threads(threads)
    again = suite.final_of(spec, tmp_path)
    assert again.curve[0][0] == recorded.curve[0][0]
    assert again.curve[0][1] == pytest.approx(recorded.curve[0][1], rel=1e-3)
    assert again.test_loss == pytest.approx(recorded.test_loss, rel=0.3)
