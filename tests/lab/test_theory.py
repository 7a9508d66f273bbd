"""The theory: every claim holds, a claim can fail, and the explorer computes what the package does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from adabayes import AdaBayes, filtering, matrix_filtering
from adabayes.lab import theory
from adabayes.lab.theory import matrix_filter as theory_matrix
from adabayes.lab.theory import scalar_filter
from tests.lab.conftest import adabayes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.mark.parametrize("topic", theory.TOPICS, ids=lambda topic: topic.__name__)
def test_every_claim_holds(topic: theory.TopicMaker) -> None:
    made = topic()
    assert len(made.checks) >= 3
    for check in made.checks:
        assert check.passed, check
        assert check.within < max(abs(check.predicted), 0.051)  # tight enough to tell


def test_a_claim_that_does_not_hold_fails() -> None:
    assert theory.Check("", 1.0, 1.0, 0.0).passed
    assert not theory.Check("", 1.1, 1.0, 0.05).passed
    assert not theory.Check("", math.nan, 1.0, 0.05).passed


def test_claims_fail_when_the_mathematics_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "update", lambda prior, curvature: prior / (1 + 1.1 * prior * curvature))
    assert not all(check.passed for check in scalar_filter.kalman().checks)
    assert not all(check.passed for check in scalar_filter.fixed_points().checks)


def failed(topic: theory.Topic) -> list[int]:
    return [i for i, check in enumerate(topic.checks) if not check.passed]


def test_claims_about_the_matrix_fail_when_its_closed_form_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fixed_point", "exact_fixed_point"):
        right = getattr(matrix_filtering, name)
        monkeypatch.setattr(matrix_filtering, name, lambda *args, right=right: 1.03 * right(*args))
    # Where the filter settles, its errors, and the limits; not what is measured without a closed form.
    assert failed(theory_matrix.matrix()) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_claims_about_the_matrix_fail_when_its_filter_or_basis_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = matrix_filtering.update
    monkeypatch.setattr(matrix_filtering, "update", lambda prior, H: right(prior, 1.1 * H))
    monkeypatch.setattr(theory_matrix, "eigenvectors", lambda x: np.eye(len(x)))
    found = failed(theory_matrix.matrix())
    assert {0, 1, 7, 9, 10, 11, 12} <= set(found)
    assert not {2, 4, 5, 6, 8} & set(found)  # these are about the closed form alone


def test_claims_about_rotations_fail_in_other_bases_and_for_other_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    adam, sgd = theory_matrix.OPTIMIZERS["Adam"], theory_matrix.OPTIMIZERS["SGD"]
    monkeypatch.setattr(theory_matrix, "OPTIMIZERS", {"SGD": adam, "Adam": sgd, "AdaBayes-K": adam})
    monkeypatch.setattr(theory_matrix, "eigenvectors", lambda x: np.eye(len(x)))
    right = theory_matrix._learned_by_sgd
    monkeypatch.setattr(theory_matrix, "_learned_by_sgd", lambda *args: 1.03 * right(*args))
    assert failed(theory_matrix.rotation()) == [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("theory")
    done = adabayes("theory", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "FAIL" not in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    return out


def test_the_command_writes_text_figures_and_the_explorer(written: Path) -> None:
    text = (written / "theory.md").read_text(encoding="utf-8")
    for topic in theory.TOPICS:
        name = topic.__name__.replace("_", "-")
        assert f"({name}.svg)" in text
        for suffix in ("pdf", "png", "svg"):
            assert (written / f"{name}.{suffix}").stat().st_size > 5000
    assert text.count("| pass |") == text.count("\n| ") - 2 * len(theory.TOPICS)


# In the browser


@pytest.fixture
def explorer(browser: Browser, written: Path) -> Page:
    page = browser.new_context(viewport={"width": 1100, "height": 900}).new_page()
    page.on("pageerror", lambda error: pytest.fail(str(error)))
    page.goto((written / "explorer.html").as_uri())
    page.wait_for_selector("#gain .scatterlayer .trace")
    return page


@pytest.mark.parametrize(("lr", "lr_sgd", "batch"), [(1e-3, 0.1, 128), (0.02, 0.5, 4096), (1e-4, 10.0, 8)])
def test_the_explorer_calculates_as_the_filter_does(explorer: Page, lr: float, lr_sgd: float, batch: int) -> None:
    dynamics = filtering.ornstein_uhlenbeck(filtering.drift(lr, lr_sgd, batch), lr_sgd)
    for g in (1e-6, 1e-3, 0.1, 1.0, 50.0):
        made = f"filter({{ lr: {lr}, lr_sgd: {lr_sgd}, batch_size: {batch} }})"
        settled, steps = explorer.evaluate(f"[{made}.settled({g}), {made}.time({g})]")
        h = filtering.curvature(g, batch)
        expected = filtering.exact_fixed_point(h, dynamics)
        assert settled == pytest.approx(expected, rel=1e-6)
        prior = filtering.predict(expected, dynamics)
        # The slope of a step of the filter at its fixed point, by differences.
        small = 1e-6 * expected
        ahead = filtering.update(filtering.predict(expected + small, dynamics), h) - filtering.update(prior, h)
        if 1e-6 < ahead / small < 1 - 1e-6:  # else rounding is all that is left
            assert steps == pytest.approx(-1 / math.log(ahead / small), rel=1e-3)
        assert explorer.evaluate(f"fixedPoint({g * g}, {lr}, {lr_sgd})") == pytest.approx(
            filtering.fixed_point(g * g, lr, lr_sgd)
        )


def test_the_explorer_converts_what_people_have(explorer: Page) -> None:
    assert explorer.inner_text("#code").startswith("AdaBayes(model.parameters(), lr=0.001, lr_sgd=0.1, batch_size=128")
    explorer.click("button[data-value=sgd]")
    code = explorer.inner_text("#code")
    assert code == "AdaBayes(model.parameters(), lr=0.01, lr_sgd=1, batch_size=128, beta1=0.9, weight_decay=0.05)"
    # The same decay of weights as SGD's coupled one, once its momentum is full.
    model = torch.nn.Linear(1, 1)
    group = eval(code, {"AdaBayes": AdaBayes, "model": model}).param_groups[0]
    assert group["lr"] * group["weight_decay"] == pytest.approx(0.1 / (1 - 0.9) * 5e-4)
    explorer.click("button[data-value=paper]")
    assert "lr=0.001, lr_sgd=0.1, batch_size=128, beta1=0.9, weight_decay=0.05)" in explorer.inner_text("#code")
    explorer.fill("#from-eta", "0.01")
    assert "lr=0.01, lr_sgd=0.1" in explorer.inner_text("#code")
    explorer.fill("#from-eta", "-3")  # nothing that an optimizer would not take
    assert "lr=0.01, lr_sgd=0.1" in explorer.inner_text("#code")
    assert "eta must be a number from" in explorer.inner_text("#warning")
    explorer.fill("#lr", "0.0012345")
    assert "lr=0.0012345, lr_sgd=0.1" in explorer.inner_text("#code")
    explorer.fill("#batch_size", "1234")
    assert "batch_size=1234, " in explorer.inner_text("#code")
    explorer.click("button[data-value=sgd]")
    explorer.fill("#from-momentum", "0.5")
    explorer.click("button[data-value=adamw]")
    assert "beta1=0.9, " in explorer.inner_text("#code")


def test_the_explorers_sliders_work_by_keyboard(explorer: Page) -> None:
    crossover = "document.querySelector('#gain').data.find((t) => t.name.startsWith('crossover')).x[0]"
    assert explorer.evaluate(crossover) == pytest.approx(0.01)
    explorer.focus("#lr-slider")
    for _ in range(50):
        explorer.keyboard.press("ArrowRight")
    assert explorer.evaluate(crossover) == pytest.approx(0.01 * 10**0.5, rel=0.01)
    assert float(explorer.input_value("#lr")) == pytest.approx(1e-3 * 10**0.5, rel=0.01)
    explorer.fill("#batch_size", "6000")
    assert "There is no Adam regime" not in explorer.inner_text("#warning")
    explorer.fill("#lr", "0.5")
    assert "There is no Adam regime" in explorer.inner_text("#warning")
    explorer.set_viewport_size({"width": 400, "height": 800})
    explorer.wait_for_function("document.documentElement.scrollWidth <= 400")
