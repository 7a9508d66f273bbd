"""The report: a page that opens from disk, in a real browser, and shows what was measured."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from adabayes.lab import protocol, report, results, sweep
from adabayes.lab.data import Data
from adabayes.lab.display import Display
from adabayes.lab.protocol import Protocol, Spec
from adabayes.lab.store import RunFolder
from adabayes.lab.training import Interrupted, train
from tests.lab.conftest import adabayes, spec_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Protocol, list[Spec], Path]:
    """A real comparison of three optimizers, of which one diverges."""
    out = tmp_path_factory.mktemp("compared")
    path = out / "mine.toml"
    path.write_text(
        "extends = 'quick'\nseeds = 2\nepochs = 2\ncompare = ['sgd', 'adamw', 'adabayes', 'adam']\n"
        "description = 'Mine & <b>yours</b>'\nmodel_options = { width = 4 }\n[optimizers.adam]\nlr = 1e30\n"
    )
    chosen = protocol.load(path)
    specs = chosen.runs()
    with Display(1, 1, Console(quiet=True)) as display:
        sweep.run(specs, out, display, sweep.Stop())
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
    runs = [sweep.folder_of(spec, out).metrics() for spec in specs if spec.optimizer == "sgd"]
    curve = page["curves"]["digits-resnet8"]["sgd"]["test_loss"]
    for epoch in range(2):
        values = [run[epoch]["test_loss"] for run in runs]
        assert curve["mean"][epoch] == pytest.approx(sum(values) / 2, rel=1e-4)
        assert curve["error"][epoch] == pytest.approx(abs(values[0] - values[1]) / 2, rel=1e-3)
    assert page["summary"]["digits-resnet8"]["adamw"]["state_bytes"]["mean"] == pytest.approx(8, rel=0.01)
    assert "2 of 8 runs diverged" in page["problems"][0]
    assert "adam" not in page["curves"]["digits-resnet8"]
    assert [run["title"] for run in page["rates"]] == ["digits resnet8 adabayes seed 0"]
    assert page["commands"][0] == "adabayes reproduce --protocol mine.toml"


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
            train(spec, stopped, digits, should_stop=lambda stops=stops: next(stops))
        train(spec, stopped, digits)
        assert stopped.metrics("rates.jsonl") == whole.metrics("rates.jsonl")
        assert len(whole.metrics("rates.jsonl")) == 2


def generated(out: Path) -> tuple[Protocol, list[Spec]]:
    """Runs of the size of the paper's experiment with five seeds: files as a run would leave them."""
    paper = protocol.load("paper").narrowed(seeds=5)
    specs = paper.runs()
    for i, spec in enumerate(specs):
        folder = sweep.folder_of(spec, out)
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
    return paper, specs


def test_the_papers_experiment_makes_a_page_of_six_megabytes_at_most(tmp_path: Path) -> None:
    paper, specs = generated(tmp_path)
    started = time.monotonic()
    page = report.write(report.content(paper, specs, "adabayes reproduce --protocol paper", tmp_path), tmp_path)
    assert time.monotonic() - started < 20
    assert page.stat().st_size < 6_000_000
    held = content(page)
    assert len(held["panels"]) == 4
    assert held["panels"][0]["published"]["sgd"] == [5.17, 0.174]
    assert "http" not in re.sub(r"<script>.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


# In the browser


def opened(browser: Browser, out: Path, width: int = 1200, scheme: Any = "light") -> tuple[Page, list[str]]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((out / "index.html").as_uri())
    page.wait_for_selector("#curves .js-plotly-plot .scatterlayer .trace")
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
    assert [n for n in first_column() if n != "Adam"] == [n for n in reversed(up) if n != "Adam"]
    page.focus("#results th button >> nth=0")
    page.keyboard.press("Enter")
    assert first_column() == sorted(first_column())
    page.keyboard.press("Enter")  # what was pressed keeps the focus
    assert first_column() == sorted(first_column(), reverse=True)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-markdown")
    page.wait_for_function("document.getElementById('copy-markdown').textContent === 'copied'")
    copied = page.evaluate("copied('markdown')").splitlines()
    assert copied[1].startswith("| --- | ---: |")
    assert len(copied) == 6
    assert "\\toprule" in page.evaluate("copied('latex')")
    slider = page.locator("#rates-slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#rates-epoch") == "epoch 1"
    assert errors == []


def test_each_preset_shows_the_papers_curves(browser: Browser, tmp_path: Path) -> None:
    paper, specs = generated(tmp_path)
    report.write(report.content(paper, specs, "", tmp_path), tmp_path)
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
    lighter, darker = sorted((luminance(fore), luminance(back)), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) > 7  # what WCAG asks for at its highest level
    assert errors == []


def luminance(colour: list[int]) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
