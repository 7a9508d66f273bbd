"""The suite: equal effort, targets, profiles and tests, and a small one run from beginning to end."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from adabayes.cli import main
from adabayes.lab import protocol, suite
from adabayes.lab.differences import Difference
from adabayes.lab.protocol import Protocol, ProtocolError
from adabayes.lab.report import suite_figure, suite_page
from adabayes.lab.run.folder import folder_of
from adabayes.lab.suite import Final, Record, Trial
from tests.support.marks import has_muon

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("adamw", "fast", "never")


def final(optimizer: str, seed: int, curve: list[tuple[int, float]], test_loss: float, length: float = 1.0) -> Final:
    run = f"{optimizer}-{seed}-{length}"
    return Final(run, optimizer, seed, length, "done", curve[-1][1], test_loss, 10 * test_loss, curve)


def record(name: str = "one", slow: float = 1.0) -> Record:
    """Make a record: AdamW ends at 2, "fast" at 1.5, at 2 with half of the steps, and above with 0.4 of them."""
    runs = []
    for seed in range(3):
        runs.append(final("adamw", seed, [(50, 3.0), (100, 2.0 + 0.1 * (seed - 1))], 2.0 + 0.1 * seed))
        runs.append(final("fast", seed, [(25, 2.4), (75, 1.9), (100, 1.5)], 1.5 + 0.1 * seed + 0.001 * seed**2))
        runs.append(final("fast", seed, [(25, 2.3), (50, 1.9 + 0.1 * seed)], 1.9, 0.5))
        runs.append(final("fast", seed, [(25, 2.3), (40, 1.91 + 0.1 * seed)], 1.9, 0.4))
        runs.append(final("never", seed, [(50, 3.0), (100, 2.5)], 2.5 - 0.1 * seed))
    trials = [
        Trial(f"trial {lr}", "adamw", {"lr": lr}, "done", loss)
        for lr, loss in ((1e-4, 3.0), (1e-3, 2.0), (3e-3, 2.09), (1e-2, 2.2))
    ]
    trials += [Trial("trial", "fast", {"lr": 1.0}, "diverged", None)]
    labels = {name: name for name in NAMES}
    styles = {name: ["#000000", "#ffffff", "solid"] for name in NAMES}
    chosen = {n: {"lr": 1e-3} for n in NAMES}
    times = {"adamw": 0.25, "fast": 0.25 * slow, "never": 0.5}
    return Record(name, "a test", "error %", 100, labels, styles, trials, chosen, runs, times, {})


def workload(name: str = "digits") -> Protocol:
    return protocol.load(f"suite/{name}")


def test_there_are_eight_workloads_with_eight_rivals_each() -> None:
    assert len(protocol.WORKLOADS) == 8
    for name in protocol.WORKLOADS:
        found = workload(name)
        assert list(found.optimizers) == [
            "sgd", "adamw", "schedule-free", "muon", "soap", "adabayes", "adabayes-fp", "adabayes-k",
        ]  # fmt: skip
        assert len(found.seeds) >= 5
        assert found.validation > 0
        assert found.test_at_end


def test_every_optimizer_gets_as_many_trials_over_ranges_of_equal_width() -> None:
    found = workload()
    specs = suite.trials(found, 10)
    assert len(specs) == 10 * len(found.optimizers)
    assert len({spec.identity for spec in specs}) == len(specs)
    assert {spec.seed for spec in specs}.isdisjoint(found.seeds)
    assert not any(spec.test_at_end for spec in specs)  # nothing is tuned on the test set
    shares = {}
    for name, optimizer in found.optimizers.items():
        own, *others = [spec.settings for spec in specs if spec.optimizer == name]
        assert own == optimizer.settings
        widths = {key: high / low for key, (low, high) in optimizer.search.items()}
        assert widths == pytest.approx({"lr": 300, "weight_decay": 1000}, rel=0.02)
        shares[name] = [
            [math.log(s[key] / low) / math.log(high / low) for key, (low, high) in optimizer.search.items()]
            for s in others
        ]
        assert all(0 <= share <= 1 for point in shares[name] for share in point)
    first = shares.pop("sgd")
    for points in shares.values():  # the same points, up to three digits
        assert [share for point in points for share in point] == pytest.approx(
            [share for point in first for share in point], abs=2e-3
        )


def test_a_larger_budget_adds_trials() -> None:
    few, many = (suite.trials(workload(), budget) for budget in (3, 6))
    assert many[: len(few)] == few
    with pytest.raises(ProtocolError, match="--budget 0"):
        suite.trials(workload(), 0)


def test_the_target_is_adamws_mean_loss_at_the_end() -> None:
    assert suite.target(record()) == pytest.approx(2.0)


def test_time_to_target_is_that_of_the_schedule_that_ends_there() -> None:
    assert suite.reached(record(slow=3.0), "fast") == suite.Reached(0.5, 1.5, 0.75)
    assert suite.reached(record(), "never") == suite.Reached(None, None, None)
    assert suite.reached(record(), "adamw") == suite.Reached(1.0, 1.0, 1.0)
    lost = record()
    lost.finals[2] = replace(lost.finals[2], status="diverged", loss=None)  # with half of the steps
    assert suite.reached(lost, "fast") == suite.Reached(1.0, 1.0, 0.75)


def test_the_schedule_that_ends_at_the_target_is_on_a_line_between_those_next_to_it() -> None:
    """Expected by hand: at 2.2 with 0.5 of the steps and 1.9 with 0.8, the line is at 2.0 after 0.7."""
    runs = [final("adamw", 0, [(100, 2.0)], 2.0)]
    runs += [final("fast", 0, [(1, loss)], loss, at) for at, loss in ((1.0, 1.5), (0.8, 1.9), (0.5, 2.2), (0.3, 9.0))]
    found = suite.reached(replace(record(slow=2.0), finals=runs), "fast")
    assert found is not None
    assert found.share_of_steps == pytest.approx(0.7)
    assert found.share_of_seconds == pytest.approx(1.4)


def test_schedules_are_shortened_by_halving_what_is_open() -> None:
    """Expected by hand: the whole, then the middle of 0.2 to 0.8, then above it if it fails, else below."""
    found = replace(workload().narrowed(optimizers=["adamw"]), seeds=(0, 1))
    target = [final("adamw", seed, [(10, 2.0)], 2.0) for seed in (0, 1)]
    empty = replace(record(), chosen={"adamw": {"lr": 1e-3}}, finals=target)
    for reaches, expected in (
        (0.2, [0.5, 0.3, 0.2]),
        (0.4, [0.5, 0.3, 0.4]),
        (0.65, [0.5, 0.8, 0.65]),
        (1.0, [0.5, 0.8]),
    ):
        now, tried = empty, []
        while specs := suite.shorter(found, now):
            assert [spec.seed for spec in specs] == [0, 1]
            (length,) = {spec.length for spec in specs}
            tried.append(length)
            loss = 2.0 if length >= reaches else 2.1
            now = replace(now, finals=now.finals + [final("adamw", seed, [(9, loss)], 2.0, length) for seed in (0, 1)])
        assert tried == expected
        reached = suite.reached(now, "adamw")
        assert reached is not None
        assert reached.share_of_steps == reaches


def test_profiles_count_workloads_within_a_factor_of_the_fastest() -> None:
    found = suite.profile([record(), record("two", slow=4.0)], "seconds")
    # Shares of AdamW's seconds: fast 0.5 and 2, AdamW 1 and 1.
    assert found["fast"] == [(1.0, 0.5), (2.0, 1.0)]
    assert found["adamw"] == [(1.0, 0.5), (2.0, 1.0)]
    assert found["never"] == []


def test_the_band_holds_learning_rates_within_five_percent() -> None:
    assert suite.band(record(), "adamw") == (1e-3, 3e-3)
    assert suite.band(record(), "fast") is None


def test_geometric_means_need_every_value() -> None:
    assert suite.geometric_mean([0.25, 1.0]) == pytest.approx(0.5)
    assert suite.geometric_mean([0.25, None]) is None


def test_differences_are_paired_over_seeds_and_corrected() -> None:
    records = [record(), record("two")]
    found = suite.comparisons(records)
    assert [(c.workload, c.optimizer) for c in found] == [
        ("one", "fast"), ("one", "never"), ("two", "fast"), ("two", "never"),
    ]  # fmt: skip
    for one in found[:2]:
        ours = [run.test_loss for run in records[0].runs(one.optimizer)]
        theirs = [run.test_loss for run in records[0].runs("adamw")]
        p = stats.ttest_rel(ours, theirs).pvalue
        low, high = stats.ttest_rel(ours, theirs).confidence_interval()
        assert (one.difference.low, one.difference.high) == pytest.approx((low, high))
        assert one.difference.p >= p
    assert found[0].verdict == "better"
    assert found[1].verdict == "no difference shown"  # three seeds, a spread as large as the difference


def test_holms_correction() -> None:
    made = [suite.Comparison("w", str(i), Difference(0, 0, 0, p, 5)) for i, p in enumerate((0.01, 0.04, 0.03, 0.005))]
    assert [c.difference.p for c in suite._holm(made)] == pytest.approx([0.03, 0.06, 0.06, 0.02])  # as in Holm's paper


def test_records_are_kept_whole(tmp_path: Path) -> None:
    path = record().write(tmp_path)
    assert Record.read(path) == record()
    for content in ("", "[]", "{}", path.read_text().replace('"curve"', '"curves"'), path.read_text()[:-90]):
        path.write_text(content)
        with pytest.raises(ProtocolError, match="is not a record of the suite"):
            Record.read(path)


def test_winners_have_the_lowest_validation_loss_at_the_end(tmp_path: Path) -> None:
    found = workload().narrowed(optimizers=["sgd", "adamw"])
    assert suite.best_of(record().trials) == {"adamw": {"lr": 1e-3}}
    assert suite.collect(found, 2, "error %", tmp_path).chosen == {}
    finals = suite.finals(replace(found, seeds=(0, 1)), {"adamw": {"lr": 0.5}})
    assert [(spec.optimizer, spec.seed, spec.settings, spec.test_at_end) for spec in finals] == [
        ("adamw", 0, {"lr": 0.5}, True), ("adamw", 1, {"lr": 0.5}, True),
    ]  # fmt: skip


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make workloads short: one epoch of a narrow network."""
    load = protocol.load
    monkeypatch.setattr(
        protocol, "load", lambda name: replace(load(name), epochs=1, batch_size=256, model_options={"width": 4})
    )


@has_muon
@pytest.mark.usefixtures("short", "signals")
def test_a_suite_from_beginning_to_end_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "suite"
    asked = ["suite", "--workload", "digits", "--optimizers", "adamw,muon,adabayes-k", "--budget", "2", "--seeds", "2"]
    main([*asked, "--out", str(out)])
    found = Record.read(out / "digits.json")
    runs = 3 * (2 + 2) + sum(run.length < 1 for run in found.finals)
    assert capsys.readouterr().err.count(": done, ") == runs > 12
    assert found.step_seconds.keys() == {"adamw", "muon", "adabayes-k"}
    assert {trial.status for trial in found.trials} == {"done"}
    for name in ("adamw", "muon", "adabayes-k"):
        best = min((t for t in found.trials if t.optimizer == name), key=lambda t: t.loss or math.inf)
        assert found.chosen[name] == best.settings
        assert [run.seed for run in found.runs(name)] == [0, 1]
        for run in found.runs(name):
            assert run.test_loss != run.loss  # another split
            assert run.curve[-1][1] == pytest.approx(run.loss, rel=1e-4)
            assert [step for step, _ in run.curve] == [3, 6]
    for run in found.finals:
        assert run.curve[-1][0] == round(6 * run.length)
    main([*asked, "--out", str(out)])
    assert capsys.readouterr().err.count("was done already") == 3 * (2 + 2)
    assert Record.read(out / "digits.json") == found

    elsewhere = tmp_path / "elsewhere"  # a record is enough to go on from
    elsewhere.mkdir()
    (elsewhere / "digits.json").write_bytes((out / "digits.json").read_bytes())
    main([*asked, "--out", str(elsewhere)])
    assert "done" not in capsys.readouterr().err
    assert Record.read(elsewhere / "digits.json") == found
    main([*asked[:-3], "3", "--seeds", "2", "--out", str(elsewhere)])  # one more trial of each
    assert capsys.readouterr().err.count("done, ") >= 3

    main([*asked[:3], "--optimizers", "sgd", *asked[5:], "--out", str(out)])  # one more optimizer; the others are kept
    more = Record.read(out / "digits.json")
    assert set(more.chosen) == {"sgd", "adamw", "muon", "adabayes-k"} == set(more.step_seconds)
    assert [run for run in more.finals if run.optimizer != "sgd"] == found.finals

    fewer = ["suite", "--workload", "digits", "--optimizers", "adamw", "--budget", "1", "--seeds", "1"]
    main([*fewer, "--out", str(out)])  # what the record has beyond that is kept
    assert Record.read(out / "digits.json") == more
    capsys.readouterr()

    guessed = replace(more, step_seconds=dict.fromkeys(more.step_seconds, 1e9))
    guessed.write(out)
    main(["suite", "--time-steps", "--out", str(out)])
    again = Record.read(out / "digits.json")
    assert replace(again, step_seconds=guessed.step_seconds) == guessed  # nothing else has changed
    assert again.step_seconds.keys() == more.step_seconds.keys()
    assert all(0 < seconds < 60 for seconds in again.step_seconds.values())
    assert "done" not in capsys.readouterr().err  # nothing is trained

    main(["suite", "--from", str(out), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "AdaBayes-K" in page
    main(["suite", "--from", str(out), "--out", str(tmp_path / "again")])
    assert (tmp_path / "again" / "index.html").read_text(encoding="utf-8") == page


def test_a_record_keeps_runs_that_are_not_requested_and_has_no_others(tmp_path: Path) -> None:
    """The record has three trials and seeds of AdamW; then SGD is requested, with two trials and other seeds."""
    whole = workload().narrowed(optimizers=["sgd", "adamw"])
    asked = replace(whole.narrowed(optimizers=["sgd"]), seeds=(0, 3))
    adamw = replace(whole.narrowed(optimizers=["adamw"]), seeds=(0, 1, 2))
    tried = [
        Trial(spec.identity, "adamw", spec.settings, "done", 1.0 + i) for i, spec in enumerate(suite.trials(adamw, 3))
    ]
    chosen = {"adamw": tried[0].settings}
    ran = [
        replace(final("adamw", spec.seed, [(9, 2.0)], 2.0), run=spec.identity) for spec in suite.finals(adamw, chosen)
    ]
    before = replace(record("digits"), labels={"adamw": "AdamW"}, styles={}, trials=tried, chosen=chosen, finals=ran)
    found = suite.collect(asked, 2, "error %", tmp_path, before, whole)
    assert [t for t in found.trials if t.optimizer == "adamw"] == tried
    assert [(t.optimizer, t.status) for t in found.trials if t.optimizer == "sgd"] == [("sgd", "missing")] * 2
    assert found.finals == ran
    assert suite.reached(found, "adamw") == suite.Reached(1.0, 1.0, 1.0)


@pytest.mark.usefixtures("signals")
def test_bad_requests_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, message in (
        (["--workload", "digit"], "unknown workload 'digit'; there are digits, .*Did you mean digits"),
        (["--workload", "digit", "--time-steps"], "unknown workload 'digit'"),
        (["--budget", "0"], "--budget 0: there must be at least one trial"),
        (["--from", str(tmp_path)], "there are no records in"),
        (["--optimizers", "adamv"], "unknown optimizer 'adamv'.*Did you mean adamw"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["suite", *asked, "--out", str(tmp_path / "out")])
        assert ended.value.code == 1
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_the_page_shows_the_records(tmp_path: Path, browser: Browser) -> None:
    page = suite_page.write([record(), record("two", slow=4.0)], tmp_path)
    view = browser.new_page(viewport={"width": 1300, "height": 900})
    errors: list[str] = []
    view.on("pageerror", lambda error: errors.append(str(error)))
    view.goto(page.as_uri())
    assert view.locator("#times tbody tr").count() == 3
    cells = view.locator("#times tr[data-optimizer=fast] td").all_text_contents()
    assert cells == ["fast", "0.50", "0.50", "0.50"]
    view.get_by_role("button", name="seconds").first.click()
    cells = view.locator("#times tr[data-optimizer=fast] td").all_text_contents()
    assert cells == ["fast", "0.50", "2.00", "1.00"]
    assert view.locator("#times tr[data-optimizer=never] td").all_text_contents() == ["never", "-", "-", "-"]
    view.get_by_role("button", name="difference to AdamW").click()
    cell = view.locator("#ends tr[data-optimizer=fast] td").all_text_contents()[1]
    (compared, *_) = suite.comparisons([record()])
    assert (
        cell == f"{compared.difference.mean:.3g}{compared.difference.low:.3g} to {compared.difference.high:.3g}better"
    )
    assert view.locator(".plot .main-svg").count() >= 4
    assert not errors
    view.close()


def test_a_comparison_is_summed_up_in_a_sentence(tmp_path: Path) -> None:
    chosen = replace(workload().narrowed(optimizers=["adamw", "adabayes-k"]), seeds=(0,), validation=0.0)
    specs = chosen.runs()
    assert suite.sentence(chosen, specs, tmp_path) is None  # nothing is done yet
    losses = {"adamw": (3.0, 2.0), "adabayes-k": (1.9, 1.5)}

    def write() -> None:
        for spec in specs:
            folder = folder_of(spec, tmp_path)
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / "metrics.jsonl").unlink(missing_ok=True)
            for epoch, loss in enumerate(losses[spec.optimizer]):
                costs = {"steps": 10, "state_bytes": 8.0, "train_seconds": 2.0, "test_seconds": 1.0}
                folder.log({"epoch": epoch, "test_loss": loss, "test_error": 1.0, **costs})
            folder.write("result.json", {"status": "done"})

    write()
    assert suite.sentence(chosen, specs, tmp_path) == (
        "AdaBayes-K ends at a loss of 1.5, AdamW at 2, where AdaBayes-K was after 50% of the steps."
    )
    losses["adamw"] = (1.2, 1.1)
    write()
    assert suite.sentence(chosen, specs, tmp_path) == (
        "AdamW ends at the lowest loss, 1.1; AdaBayes-K is next with 1.5."
    )


def test_labels_are_not_taken_for_markup() -> None:
    odd = replace(record(), labels={**record().labels, "fast": "[bold]x[/x]"})
    for table in suite_page.tables([odd]):
        console = Console(record=True, file=io.StringIO())
        console.print(table)
        assert "[bold]x[/x]" in console.export_text()


def test_the_figure_has_a_panel_for_each_workload_and_a_row_for_each_optimizer(tmp_path: Path) -> None:
    figure = suite_figure.draw([record(), record("two")])
    *panels, last = figure.axes
    assert [ax.get_title() for ax in panels] == ["one", "two"]
    assert all(len(ax.lines) == len(NAMES) + 1 for ax in panels)  # and the target
    assert [label.get_text() for label in last.get_yticklabels()] == list(NAMES)
    points = [np.asarray(line.get_xydata()).tolist() for line in last.lines]
    assert points == [[[1.0, 0.0], [1.0, 0.0]], [[0.5, 1.0], [0.5, 1.0]], []]
    without = replace(record(), finals=[run for run in record().finals if run.optimizer != "adamw"])
    assert len(suite_figure.draw([without]).axes) == 2
    files = suite_figure.write([record()], tmp_path)
    assert [file.name for file in files] == ["summary.svg", "summary.png", "evidence.svg", "evidence.png"]
    assert all(file.stat().st_size > 1000 for file in files)


def test_the_summary_has_the_curves_of_two_workloads_and_the_profile_of_all() -> None:
    records = [record("one"), record("text"), record("two")]
    *panels, last = suite_figure.draw_summary(records).axes
    assert [ax.get_title() for ax in panels] == ["text", "one"]
    assert last.get_title() == "3 workloads"
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in last.lines}
    assert drawn == {
        "adamw": [[1.0, 0.0], [2.0, 1.0], [4.0, 1.0]],  # twice the steps of the fastest, on all of them
        "fast": [[1.0, 0.0], [1.0, 1.0], [4.0, 1.0]],
        "never": [[1.0, 0.0], [4.0, 0.0]],
    }
