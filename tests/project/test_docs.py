"""What the documents show runs as it stands there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
import torch

from adabayes.diagnostics import memory_plan
from adabayes.lab import protocol

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

matplotlib.use("agg")


@pytest.mark.filterwarnings(  # Lightning about torch's, and, where there are more than two cores, about ours
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The 'train_dataloader' does not have many workers",
)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_documents_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a document, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # what earlier tests have compiled counts against the compiler's limit
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), document.name, "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_protocols_in_documents_can_be_loaded(document: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in blocks:
        (tmp_path / "protocol.toml").write_text(block, encoding="utf-8")
        assert protocol.load(tmp_path / "protocol.toml").runs()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https:)([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}, which does not exist"


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {path.stem for path in DOCUMENTS if path.parent.name == "docs"} < set(pages)
    for name, page in pages.items():
        assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//', page), name
    assert "<math" in pages["api"]
    for object_ in ("adabayes.AdaBayes", "adabayes.optax.adabayes", "adabayes.filtering.predict"):
        assert f'id="{object_}"' in pages["api"]


def test_the_optimizer_that_is_added_is_the_one_of_the_tests() -> None:
    """Line by line, but for types and comments."""
    page = (ROOT / "docs" / "adding.md").read_text("utf-8")
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    shown, tested = (
        {type(node).__name__ + getattr(node, "name", ""): node for node in ast.walk(ast.parse(code))}
        for code in (blocks, (ROOT / "tests" / "support" / "whitened.py").read_text("utf-8"))
    )
    for name in ("FunctionDefdirection", "FunctionDefcoefficients", "FunctionDefouter", "FunctionDefrows_of"):
        bodies = [[ast.unparse(line) for line in nodes[name].body] for nodes in (shown, tested)]  # type: ignore[attr-defined]
        assert bodies[0] == bodies[1], name


def test_the_table_of_what_fits_is_what_is_calculated() -> None:
    rows = re.findall(
        r"^\| (\d+) B \| (\w+) \| (.*) \|$", (ROOT / "docs" / "cluster.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) == 6
    for billions, state, printed in rows:
        low = torch.bfloat16 if state == "bf16" else None
        cells = []
        for devices in (8, 64, 512):
            plan = memory_plan(float(billions) * 1e9, devices, state_dtype=low)
            cells.append(" + ".join(f"{part / 1e9:.2f}" for part in (plan.parameters, plan.gradients, plan.state)))
            cells += [f"{1e3 * plan.seconds(bandwidth):.2f}" for bandwidth in (2.039e12, 3.35e12)]
        assert printed == " | ".join(cells)


def test_importing_adabayes_imports_torch_and_nothing_else_of_the_extras() -> None:
    script = (
        "import sys, torch; before = set(sys.modules); import adabayes;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "assert new <= {'adabayes', 'torch'}, new"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
