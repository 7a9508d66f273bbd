"""The report: a page that opens from disk, in a real browser, and shows what was measured."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from scipy import stats

from adabayes.lab import protocol, report
from adabayes.lab.data import Data
from adabayes.lab.display import Display, show
from adabayes.lab.execute import local, sweep
from adabayes.lab.protocol import Protocol, Spec
from adabayes.lab.report import results
from adabayes.lab.run.folder import RunFolder, folder_of
from adabayes.lab.run.training import Interrupted, Watch, train
from tests.lab.conftest import adabayes, spec_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Protocol, list[Spec], Path]:
    """Run a comparison of optimizers, one of which diverges."""
    out = tmp_path_factory.mktemp("compared")
    path = out / "mine.toml"
    path.write_text(
        "extends = 'quick'\nseeds = 2\nepochs = 2\ncompare = ['sgd', 'adamw', 'adabayes', 'adam']\n"
        "description = 'Mine & <b>yours</b>'\nmodel_options = { width = 4 }\n[optimizers.adam]\nlr = 1e30\n"
    )
    chosen = protocol.load(path)
    specs = chosen.runs()
    with Display(1, 1, Console(quiet=True)) as display:
        local.run(specs, out, display, sweep.Stop())
    results.write(chosen, results.collect(specs, out), [], out, "adabayes reproduce --protocol mine.toml")
    report.write(report.content(chosen, specs, "adabayes reproduce --protocol mine.toml", out), out)
    return chosen, specs, out


def content(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def test_the_page_holds_what_the_runs_logged(compared: tuple[Protocol, list[Spec], Path]) -> None:
    _, specs, out = compared
    page = content(out / "index.html")
    runs = [folder_of(spec, out).metrics() for spec in specs if spec.optimizer == "sgd"]
    curve = page["curves"]["digits-resnet8"]["sgd"]["test_loss"]
    for epoch in range(2):
        values = [run[epoch]["test_loss"] for run in runs]
        assert curve["mean"][epoch] == pytest.approx(sum(values) / 2, rel=1e-4)
        assert curve["error"][epoch] == pytest.approx(abs(values[0] - values[1]) / 2, rel=1e-3)
    assert page["summary"]["digits-resnet8"]["adamw"]["state_bytes"]["mean"] == pytest.approx(8, rel=0.01)
    assert page["problems"][0]["text"].startswith("2 of 8 runs diverged")
    assert page["problems"][0]["runs"] == ["digits resnet8 Adam, seed 0, 1"]
    assert "adam" not in page["curves"]["digits-resnet8"]
    assert [(run["panel"], run["optimizer"]) for run in page["rates"]] == [("digits resnet8", "AdaBayes")]
    assert page["commands"][0] == "adabayes reproduce --protocol mine.toml"


def rows_of(losses: dict[str, list[float | None]]) -> list[results.Row]:
    """Rows of runs with these final losses by seed; None is a run that diverged."""
    return [
        results.Row("poisson", "pinn", name, seed, "diverged", 0)
        if loss is None
        else results.Row(
            "poisson", "pinn", name, seed, "done", 1, 9.0, loss, 10 * loss, loss, milliseconds_per_step=4.0
        )
        for name, of in losses.items()
        for seed, loss in enumerate(of)
    ]


def test_differences_are_paired_over_the_seeds_that_both_have() -> None:
    """Each seed shifts both by a unit, so the means overlap, but the differences do not contain zero."""
    ours, adamw = [0.8, 1.9, 2.7, 9.0], [1.0, 2.0, 3.0]
    found = {s.optimizer: s for s in results.summarise(rows_of({"sgd": [*ours], "adamw": [*adamw, None]}))}
    expected = stats.ttest_rel(ours[:3], adamw)
    interval = expected.confidence_interval(0.95)
    for name, unit in (("final_test_loss", 1), ("final_test_error", 10)):
        difference = found["sgd"].differences[name]
        assert difference.seeds == 3
        assert difference.mean == pytest.approx(-0.2 * unit)
        assert (difference.low, difference.high) == pytest.approx((unit * interval.low, unit * interval.high))
        assert difference.p == pytest.approx(expected.pvalue)
    assert found["adamw"].differences == {}
    assert {s.reference for s in found.values()} == {"adamw"}


def test_differences_are_to_the_first_where_adamw_is_not_there_and_need_two_seeds() -> None:
    found = results.summarise(rows_of({"sgd": [1.0, 2.0], "adam": [1.5, 2.5], "soap": [1.0, None]}))
    assert [s.reference for s in found] == ["sgd"] * 3
    assert [len(s.differences) for s in found] == [0, 4, 0]


def test_tables_with_differences_fit_80_columns() -> None:
    """Losses of the demo's size, whose means and errors take 18 characters each."""
    demo = protocol.load("demo")
    losses = {name: [1.4321e-4 * (i + 1), 1.7e-4, 1.9e-4 * (i + 1)] for i, name in enumerate(demo.optimizers)}
    first, second = results.tables(demo, rows_of({name: [*of] for name, of in losses.items()}))
    screen = Console(file=StringIO(), width=200, color_system=None)
    for table in (first, second):
        show(table, screen)
    assert isinstance(screen.file, StringIO)
    printed = screen.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    assert "±0.00001" in printed
    assert "difference to AdamW with the same seeds" in " ".join(printed.split())
    assert re.search(r"AdaBayes-K +\+0.00333 +\+0.000333 *\n +\(-0.00405 to", printed)


def test_the_command_makes_the_page_again_also_of_copied_runs(
    compared: tuple[Protocol, list[Spec], Path], tmp_path: Path
) -> None:
    _, specs, out = compared
    done = adabayes("report", out, "--out", tmp_path / "again", "--figures")
    assert done.returncode == 0, done.stderr
    figures = {path.name for path in (tmp_path / "again" / "figures").iterdir()}
    assert {"curves-all.pdf", "curves-train.svg", "learning-rates.png"} <= figures
    assert "curves-bounds-sgd.pdf" in figures
    assert not [path for path in (tmp_path / "again" / "figures").iterdir() if path.stat().st_size < 5000]
    assert content(tmp_path / "again" / "index.html")["summary"] == content(out / "index.html")["summary"]
    shutil.copytree(out / "runs", tmp_path / "copied" / "runs")
    assert adabayes("report", tmp_path / "copied").returncode == 0
    assert len(content(tmp_path / "copied" / "index.html")["optimizers"]) == 4
    assert "there are no runs" in adabayes("report", tmp_path).stderr
    assert len(specs) == 8


def test_rates_go_on_after_an_interruption(digits: Data, tmp_path: Path) -> None:
    for name in ("adabayes", "adabayes-fp"):
        spec = spec_of(name)
        whole, stopped = RunFolder(tmp_path / name), RunFolder(tmp_path / f"{name}-stopped")
        train(spec, whole, digits)
        stops = iter([False] * 15 + [True])
        with pytest.raises(Interrupted):
            train(spec, stopped, digits, watch=Watch(should_stop=partial(next, stops)))
        train(spec, stopped, digits)
        assert stopped.metrics("rates.jsonl") == whole.metrics("rates.jsonl")
        assert len(whole.metrics("rates.jsonl")) == 2


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Protocol, list[Spec], Path]:
    """Write the files of runs as large as the paper's experiment, with five seeds."""
    out = tmp_path_factory.mktemp("generated")
    paper = protocol.load("paper").narrowed(seeds=5)
    specs = paper.runs()
    for i, spec in enumerate(specs):
        folder = folder_of(spec, out)
        folder.path.mkdir(parents=True)
        folder.write("spec.json", asdict(spec))
        folder.write("result.json", {"status": "done"})
        rows = [
            {
                "epoch": e, "lr": 0.1, "steps": 391, "state_bytes": 8.0, "train_seconds": 20.0, "test_seconds": 2.0,
                "train_loss": 2 / (e + 1), "train_error": 80 / (e + 1) + i / 90,
                "test_loss": 2 / (e + 1) + 0.1, "test_error": 80 / (e + 1) + 5 + i / 90,
            }
            for e in range(200)
        ]  # fmt: skip
        (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if spec.optimizer.startswith("adabayes") and spec.seed == 0:
            layers = [f"layer{i}.weight" for i in range(110 if spec.model == "resnet34" else 362)]
            adam = [[0.01234 * (j + 1) for j in range(10)] for _ in layers]
            rates = [
                {
                    "epoch": e,
                    "lr": 1e-3 if e < 150 else 1e-4,
                    "lr_sgd": 0.1,
                    "layers": layers,
                    "adam": adam,
                    "gain": adam,
                }
                for e in range(200)
            ]
            (folder.path / "rates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rates))
    return paper, specs, out


def test_the_papers_experiment_makes_a_page_of_six_megabytes_at_most(
    generated: tuple[Protocol, list[Spec], Path],
) -> None:
    paper, specs, out = generated
    page = report.write(report.content(paper, specs, "adabayes reproduce --protocol paper", out), out)
    assert page.stat().st_size < 6_000_000
    held = content(page)
    assert len(held["panels"]) == 4
    assert len(held["rates"]) == 8
    assert held["rates"][0]["optimizer"] == "AdaBayes"
    assert held["rates"][0]["epochs"][held["rates"][0]["start"]]["epoch"] == 149  # the last before the drop
    assert held["panels"][0]["published"]["sgd"] == [5.17, 0.174]
    assert "http" not in re.sub(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def status(out: Path, spec: Spec, status: str, epochs: int) -> None:
    """Make a generated run look as if it had ended differently."""
    folder = folder_of(spec, out)
    rows = (folder.path / "metrics.jsonl").read_text().splitlines()[:epochs]
    (folder.path / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    folder.remove("result.json")
    if status == "diverged":
        folder.write("result.json", {"status": "diverged"})


def test_curves_are_those_of_runs_that_are_done(generated: tuple[Protocol, list[Spec], Path], tmp_path: Path) -> None:
    paper, specs, out = generated
    specs = [spec for spec in specs if spec.dataset == "cifar10" and spec.model == "resnet34"]
    for spec in specs:
        shutil.copytree(folder_of(spec, out).path, folder_of(spec, tmp_path).path)
    sgd = [s for s in specs if (s.dataset, s.model, s.optimizer) == ("cifar10", "resnet34", "sgd")]
    status(tmp_path, sgd[0], "interrupted", 3)
    status(tmp_path, sgd[1], "diverged", 2)
    adam = [s for s in specs if (s.dataset, s.model, s.optimizer) == ("cifar10", "resnet34", "adam")]
    for spec in adam:
        status(tmp_path, spec, "interrupted", 1)
    rates = next(s for s in specs if s.optimizer == "adabayes")
    path = folder_of(rates, tmp_path).path / "rates.jsonl"
    path.write_text(path.read_text().replace("0.01234", "NaN"))
    held = report.content(paper, specs, "", tmp_path)
    curves = held["curves"]["cifar10-resnet34"]
    assert len(curves["sgd"]["test_loss"]["mean"]) == 200
    rows = [folder_of(spec, tmp_path).metrics()[199]["test_error"] for spec in sgd[2:]]
    assert curves["sgd"]["test_error"]["mean"][199] == pytest.approx(sum(rows) / 3, rel=1e-4)
    assert len(curves["adam"]["test_loss"]["mean"]) == 1
    (broken_off,) = (problem["runs"] for problem in held["problems"] if problem["text"].endswith("not finished"))
    assert "cifar10 resnet34 SGD, seed 0" in broken_off
    report.write(held, tmp_path)


def test_a_report_takes_all_runs_of_a_folder_that_can_be_compared(
    compared: tuple[Protocol, list[Spec], Path], tmp_path: Path
) -> None:
    _, specs, out = compared
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    sgd = next(spec for spec in specs if spec.optimizer == "sgd")

    def copied(**changes: Any) -> None:
        other = replace(sgd, **changes)
        shutil.copytree(folder_of(sgd, out).path, folder_of(other, tmp_path).path)
        folder_of(other, tmp_path).write("spec.json", asdict(other))

    copied(seed=7)  # one more seed
    copied(settings={"lr": 0.5})  # other settings, which are no seed
    copied(epochs=9, optimizer="adagrad")  # another task
    copied(optimizer="new")
    for known in (True, False):
        protocol_, kept, _, left_out = results.read(tmp_path, sweep.noted(tmp_path))
        assert [spec.seed for spec in kept if spec.optimizer == "sgd"] == [0, 1, 7]
        assert {spec.optimizer for spec in kept} == {"sgd", "adamw", "adabayes", "adam", "new"}
        assert len(left_out) == 2
        assert protocol_.optimizers["adabayes"].label == ("AdaBayes" if known else "adabayes")
        done = adabayes("report", tmp_path)
        assert done.returncode == 0
        assert "2 of 12 runs have other settings and are not shown; see the page\n" in done.stdout
        last = content(tmp_path / "index.html")["problems"][-1]
        assert "2 runs of this folder not shown" in last["text"]
        assert len(last["runs"]) == 2
        (tmp_path / "results.json").unlink(missing_ok=True)
    (tmp_path / "results.json").write_text("{}")
    done = adabayes("report", tmp_path)
    assert done.returncode == 0
    assert "not of this version" in done.stderr


@pytest.mark.parametrize(
    "schedule", ["kind = 'step'\nat = [0.5]\nfactor = 0.0", "kind = 'cosine'\nwarmup = 0.5"], ids=["zero", "warmup"]
)
def test_odd_runs_have_a_page_too(tmp_path: Path, browser: Browser, schedule: str) -> None:
    """Test one step per epoch, a learning rate of zero, unknown optimizers, and names that look like markup."""
    path = tmp_path / "odd.toml"
    path.write_text(
        "extends = 'quick'\nseeds = 1\nepochs = 2\nbatch_size = 2000\nmodel_options = { width = 4 }\n"
        "compare = ['adabayes', 'mine', 'yours']\n"
        "[optimizers.mine]\nlabel = 'A|B_&% $x_{$ <b>'\nclass = 'torch.optim.SGD'\nlr = 0.1\n"
        "[optimizers.yours]\nlabel = 'Ýours'\nclass = 'torch.optim.RMSprop'\n"
        f"[schedule]\n{schedule}\n"
    )
    done = adabayes("reproduce", "--protocol", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    done = adabayes("report", tmp_path / "out", "--figures")
    assert done.returncode == 0, done.stderr
    page, errors = opened(browser, tmp_path / "out")
    assert "A|B_&% $x_{$ <b>" in page.inner_text("#results")
    assert "A\\|B_&% $x_{$ <b>" in page.evaluate("copied('markdown')")
    assert "A|B\\_\\&\\% \\$x\\_\\{\\$ <b>" in page.evaluate("copied('latex')")
    styles = page.evaluate("data.optimizers.map((o) => o.light + o.dash)")
    assert len(set(styles)) == 3
    assert errors == []


# In the browser


def opened(browser: Browser, out: Path, width: int = 1200, scheme: Any = "light") -> tuple[Page, list[str]]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((out / "index.html").as_uri())
    page.wait_for_selector("#curves .js-plotly-plot .scatterlayer .trace", state="attached")
    return page, errors


def shown(page: Page) -> set[str]:
    names = page.evaluate("document.querySelector('#curves .js-plotly-plot').data.map(t => t.name)")
    return {name for name in names if not name.endswith("band")}


def test_the_page_opens_from_disk_and_its_controls_work(
    browser: Browser, compared: tuple[Protocol, list[Spec], Path]
) -> None:
    page, errors = opened(browser, compared[2])
    assert page.inner_text("h1") == "Mine & <b>yours</b>"
    assert "diverged" in page.inner_text("#problems")
    assert shown(page) == {"SGD", "AdamW", "AdaBayes"}
    rows = results.collect(compared[1], compared[2])
    (sgd,) = (s for s in results.summarise(rows) if s.optimizer == "sgd")
    written = [sgd.differences[f"final_test_{name}"].text() for name in ("error", "loss")]
    told = page.locator("#results tr[data-optimizer=sgd] .difference").all_inner_texts()
    assert [[float(n) for n in re.findall(r"[-+][\d.e-]+", text)] for text in told] == [
        [float(n) for n in re.findall(r"[-+][\d.e-]+", text)] for text in written
    ]
    assert page.locator("#results tr[data-optimizer=adamw] .difference").count() == 0
    page.click("button[data-value=baselines]")
    assert shown(page) == {"SGD", "AdaBayes"}
    page.click("#legend button[data-optimizer=sgd]")
    assert shown(page) == {"AdaBayes"}
    page.click("button[data-value=train] >> nth=0")
    assert "train" in page.evaluate("document.querySelector('#curves .js-plotly-plot').layout.yaxis.title.text")
    page.click("#logy")
    assert page.evaluate("document.querySelector('#curves .js-plotly-plot').layout.yaxis.type") == "linear"

    def first_column() -> list[str]:
        return page.locator("#results tbody td:first-child").all_inner_texts()

    page.click("#results th button >> nth=1")
    up = first_column()
    page.click("#results th button >> nth=1")
    assert first_column() == [*[n for n in reversed(up) if n != "Adam"], "Adam"]  # which has no figure
    page.focus("#results th button >> nth=0")
    page.keyboard.press("Enter")
    assert first_column() == ["AdaBayes", "Adam", "AdamW", "SGD"]
    page.keyboard.press("Enter")  # what was pressed keeps the focus
    assert first_column() == ["SGD", "AdamW", "Adam", "AdaBayes"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-markdown")
    page.click("#copy-markdown")
    page.wait_for_function("document.getElementById('copy-markdown').textContent === 'copied'")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[1].startswith("| --- | ---: |")
    assert len(copied) == 6
    page.wait_for_function("document.getElementById('copy-markdown').textContent === 'copy as Markdown'")
    assert "\\toprule" in page.evaluate("copied('latex')")
    slider = page.locator("#rates-slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#rates-epoch") == "epoch 1"
    assert errors == []


def test_a_long_list_of_runs_is_folded_away(
    browser: Browser, compared: tuple[Protocol, list[Spec], Path], tmp_path: Path
) -> None:
    chosen, specs, out = compared
    left_out = [replace(specs[0], optimizer=f"<i>{i}", settings={"lr": 0.5}) for i in range(27)]
    report.write(report.content(chosen, specs, "", out, left_out), tmp_path)
    page, errors = opened(browser, tmp_path)
    problems = page.locator("#problems")
    assert "2 of 8 runs diverged" in problems.inner_text()
    assert "Adam, seed 0, 1." in problems.inner_text()  # a short one is not
    assert "27 runs of this folder not shown" in problems.inner_text()
    assert not problems.locator("li").first.is_visible()
    problems.locator("summary").focus()
    page.keyboard.press("Enter")
    assert problems.locator("li").count() == 27
    assert "digits resnet8 <i>0 seed 0 (2 epochs, step schedule, lr 0.5)" in problems.inner_text()
    assert errors == []


def test_each_preset_shows_the_papers_curves(
    browser: Browser, generated: tuple[Protocol, list[Spec], Path], tmp_path: Path
) -> None:
    paper, specs, out = generated
    report.write(report.content(paper, specs, "", out), tmp_path)
    page, errors = opened(browser, tmp_path)
    ours = {"AdaBayes", "AdaBayes-FP"}
    everything = {paper.optimizers[name].label for name in paper.optimizers}
    for key, expected in {
        "all": everything,
        "baselines": {"SGD", "Adam", "AdaGrad", "AMSGrad"} | ours,
        "adamw": {"Adam", "AdamW", "AdaBayes-FP"},
        "bounds": {"AdaBound", "AMSBound"} | ours,
        "bounds-sgd": {"AdaBound", "AMSBound", "SGD"},
        "train": everything,
    }.items():
        page.focus(f"#curve-bar button[data-value={key}] >> nth=0")
        page.keyboard.press("Space")
        assert shown(page) == expected
        title = page.evaluate("document.querySelector('#curves .js-plotly-plot').layout.yaxis.title.text")
        assert title.startswith("train" if key == "train" else "test")
    started = time.monotonic()
    for key in ("all", "bounds", "all", "bounds"):
        page.click(f"#curve-bar button[data-value={key}] >> nth=0")
    assert time.monotonic() - started < 4  # four panels drawn anew, four times
    assert errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_legible_and_fits_a_phone(
    browser: Browser, compared: tuple[Protocol, list[Spec], Path], scheme: str
) -> None:
    page, errors = opened(browser, compared[2], 400, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    fore, back = ([int(n) for n in re.findall(r"\d+", colour)[:3]] for colour in colours)
    assert contrast(fore, back) > 7  # what WCAG asks for at its highest level
    for line in page.evaluate("data.optimizers.map((o) => colour(o))"):  # and for graphics
        assert contrast([int(line[i : i + 2], 16) for i in (1, 3, 5)], back) > 3
    labels = page.evaluate("getComputedStyle(document.querySelector('#curves .xtick text')).fill")
    assert contrast([int(n) for n in re.findall(r"\d+", labels)[:3]], back) > 7
    assert errors == []


def contrast(one: list[int], other: list[int]) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: list[int]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_schedules_are_the_same_except_for_optimizers_that_have_their_own() -> None:
    quick = protocol.load("quick").narrowed(optimizers=["sgd", "adamw", "adam"], seeds=3)
    step, cosine = quick.schedule, {"kind": "cosine", "warmup": 0.1}

    def runs(name: str, schedule: dict[str, Any], count: int) -> list[Spec]:
        return [replace(spec, schedule=schedule) for spec in quick.runs() if spec.optimizer == name][:count]

    def kinds(specs: list[Spec], compared: set[str]) -> set[tuple[str, str]]:
        return {(spec.optimizer, spec.schedule["kind"]) for spec in results._comparable(specs, compared)}

    # Of copied runs nobody has said which belong together: the schedule of most, and those that have no run under it.
    specs = [*runs("sgd", step, 3), *runs("sgd", cosine, 1), *runs("adamw", step, 1), *runs("adamw", cosine, 2)]
    specs += runs("adam", cosine, 1)
    assert kinds(specs, set()) == {("sgd", "step"), ("adamw", "step"), ("adam", "cosine")}
    # What was compared stays: AdamW with a schedule of its own.
    compared = {spec.folder for spec in [*runs("sgd", step, 3), *runs("adamw", cosine, 2)]}
    assert kinds(specs, compared) == {("sgd", "step"), ("adamw", "cosine"), ("adam", "cosine")}
