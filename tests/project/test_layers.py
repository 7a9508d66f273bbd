"""Layers import only from layers to their left, and private modules of ``optim`` stay private."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import adabayes

PACKAGE = Path(adabayes.__file__).parent
MATHEMATICS = ("_util", "_blocks", "filtering", "eigenbasis", "matrix_filtering", "rates", "reference")
LAYERS = [
    MATHEMATICS,
    ("kernels",),
    ("optim", "optax"),
    ("diagnostics",),
    ("integrations",),
    ("bench",),
    ("lab",),
    ("cli",),
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
OPTIM = [("_engine",), ("_matrix",), ("adabayes_fp",), ("adabayes", "adabayes_k", "adabound"), ("extend",)]
LEVELS_IN_OPTIM = {name: level for level, names in enumerate(OPTIM) for name in names}


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of everything that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(folder: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of modules directly below a package: the importing and the imported one."""
    for path in sorted(folder.rglob("*.py")):
        importer = path.relative_to(folder).parts[0].removesuffix(".py")
        for name in imports(path):
            if name.startswith(f"{prefix}."):
                yield importer, name.removeprefix(f"{prefix}.").split(".")[0]


def test_layers_import_only_from_the_left() -> None:
    optimizers = {name: "optim" for name in adabayes.__all__ if name != "__version__"}
    for importer, name in edges(PACKAGE, "adabayes"):
        imported = optimizers.get(name, name)
        if importer in LEVELS and imported != "__version__" and imported != importer:
            left, right = LEVELS[imported], LEVELS[importer]
            same_layer = left == right and imported in MATHEMATICS
            assert left < right or same_layer, f"{importer} imports {imported}"


def test_the_engine_knows_no_optimizer() -> None:
    for importer, imported in edges(PACKAGE / "optim", "adabayes.optim"):
        if importer in LEVELS_IN_OPTIM and imported != importer:
            assert LEVELS_IN_OPTIM[imported] < LEVELS_IN_OPTIM[importer], f"optim/{importer} imports {imported}"


def test_private_modules_of_optim_are_imported_only_there() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "optim" not in path.relative_to(PACKAGE).parts:
            private = [name for name in imports(path) if name.startswith("adabayes.optim._")]
            assert not private, f"{path.name} imports {private}"


def test_every_package_has_a_layer() -> None:
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__", "__main__"} == set(LEVELS)


@pytest.mark.parametrize("folder", ["optax", "_blocks"])
def test_jax_needs_no_torch(folder: str) -> None:
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        assert not [name for name in imports(path) if name.split(".")[0] == "torch"], path
