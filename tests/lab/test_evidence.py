"""The records in evidence/: they are complete, belong to the present protocols, and can be reproduced."""

from __future__ import annotations

import statistics
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from adabayes.lab import data, protocol, suite
from adabayes.lab.report import suite_page
from adabayes.lab.run.folder import folder_of
from adabayes.lab.run.training import train

ROOT = Path(__file__).parents[2]
RECORDS = suite.read(ROOT / "evidence")


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


def cells(document: str, row: str) -> list[str]:
    """Return the cells of the row of a document's table that begins like this, without the first one."""
    (line,) = (line for line in (ROOT / document).read_text().splitlines() if line.startswith(f"| {row}"))
    return [cell.strip() for cell in line.strip("| ").split("|")[1:]]


def shows(cell: str, value: float | None) -> bool:
    """Tell whether a cell shows a number, rounded to the digits that it has; a dash shows that there is none."""
    if value is None or cell == "-":
        return value is None and cell == "-"
    shown = Decimal(cell.strip("*"))
    return abs(shown - Decimal(value)) <= Decimal(1).scaleb(int(shown.as_tuple().exponent)) * Decimal("0.501")


def shares(record: suite.Record, name: str) -> tuple[float | None, float | None]:
    found = suite.reached(record, name)
    return (found.share_of_steps, found.share_of_seconds) if found else (None, None)


def test_the_table_of_all_optimizers_is_that_of_the_records() -> None:
    text = (ROOT / "docs/evidence.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| steps / seconds")]
    names = list(RECORDS[0].labels)
    for record, line in zip(RECORDS, table, strict=True):
        losses = {name: mean_test_loss(record, name) for name in names}
        for name, loss, share in zip(names, cells("docs/evidence.md", f"`{record.name}`, test"), line.split("|")[2:]):
            assert shows(loss, losses[name]), (record.name, name, losses[name])
            assert loss.startswith("**") == (losses[name] == min(losses.values()))
            for shown, value in zip(share.replace(" - ", " - / - ").split("/"), shares(record, name), strict=True):
                assert shows(shown.strip(), value), (record.name, name, value)
    for name, share in zip(names, cells("docs/evidence.md", "geometric mean")):
        for shown, column in zip(share.replace("-", "- / -").split("/"), zip(*(shares(r, name) for r in RECORDS))):
            assert shows(shown.strip(), suite.geometric_mean(column)), (name, column)


def test_the_readme_has_the_figures_of_the_records() -> None:
    better = {(c.workload, c.optimizer) for c in suite.comparisons(RECORDS) if c.verdict == "better"}
    for record in RECORDS:
        adamw, ours, steps, seconds = cells("README.md", f"`{record.name}`")
        assert shows(adamw, mean_test_loss(record, "adamw"))
        assert shows(ours, mean_test_loss(record, "adabayes-k"))
        assert ours.startswith("**") == ((record.name, "adabayes-k") in better)
        assert shows(steps, shares(record, "adabayes-k")[0])
        assert shows(seconds, shares(record, "adabayes-k")[1])
    means = [suite.geometric_mean(column) for column in zip(*(shares(r, "adabayes-k") for r in RECORDS))]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert " and ".join(f"{mean:.2f} of the {clock}" for mean, clock in zip(means, ("steps", "seconds"))) in text


def mean_test_loss(record: suite.Record, name: str) -> float:
    return statistics.fmean(run.test_loss for run in record.runs(name) if run.test_loss is not None)


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
