"""Odd and damaged files: a protocol loads or is refused by name, and the whole files of a run folder are read."""

from __future__ import annotations

import copy
import datetime
import json
import math
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from adabayes.lab import optimizers, protocol, report, schema
from adabayes.lab.execute import sweep
from adabayes.lab.protocol import Protocol, ProtocolError, Spec
from adabayes.lab.report import results
from adabayes.lab.run.folder import folder_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NESTED: Any = []
for _ in range(40):
    NESTED = [NESTED]
PLAIN: list[Any] = [
    True, 0, -1, 3, 1.5, 1e308, 2**63, 10**400, "", "x", "../../../x", "a\0b", "x" * 300, "\u202e", [], [[]], [1, "a"],
    [0.1, 0.2], ["digits", "digits"], {}, {"a": {"b": {"c": [1, 2]}}}, NESTED,
]  # fmt: skip
ODD = [*PLAIN, math.nan, math.inf, datetime.date(2020, 1, 1), datetime.time(1, 2), [datetime.time(1, 2)]]
NAMES = [
    "",
    ".",
    "..",
    "/../../../../escaped/x",
    "a\\b",
    "a:b",
    "a\0b",
    "x" * 101,
    "CON",
    "nul.txt",
    "x.",
    "x ",
    "a\nb",
]

Path_ = tuple[str | int, ...]


def places(tree: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Yield all places in tables and lists; in long lists only the first and the last."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    for key, value in items if isinstance(tree, dict) or len(items) < 3 else (items[0], items[-1]):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def changed(tree: Any, place: Path_, value: Any) -> Any:
    """Return a copy with another value at a place."""
    whole = copy.deepcopy(tree)
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return whole


def renamed(table: dict[str, Any], place: Path_, name: str) -> dict[str, Any]:
    """Return a copy in which the last key of a place is replaced."""
    whole = copy.deepcopy(table)
    inner: Any = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[name] = inner.pop(place[-1])
    return whole


# Protocols


def shipped(name: str) -> dict[str, Any]:
    text = (resources.files("adabayes.lab") / "protocols" / f"{name}.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)
    return table


def load_or_refuse(table: dict[str, Any], folder: Path, construct: bool) -> bool:
    """Return whether a protocol loads; if it does, check that it can be used, and stays within ``--out``."""
    path = folder / "mine.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    try:
        found = protocol.load(path)
        runs = found.runs()
        if construct:
            optimizers.check(runs)
    except ProtocolError:
        return False
    for spec in runs[: len(found.optimizers)]:
        schema.check(protocol.SPEC, json.loads(json.dumps(asdict(spec))))
        assert Path(spec.folder).name == spec.folder
        assert 0 <= protocol.lr_factor(spec.schedule, 0.99) < math.inf
    written = json.loads(json.dumps(asdict(found)))
    schema.check(protocol.PROTOCOL, written)
    assert Protocol.restored(written).optimizers.keys() == found.optimizers.keys()
    assert list(results.tables(found, [row(spec) for spec in runs[:1]]))
    return True


def row(spec: Spec) -> results.Row:
    return results.Row(spec.dataset, spec.model, spec.optimizer, spec.seed, "done", 1, 1.0, 1.0, 1.0, 1.0)


def cases(name: str) -> Iterator[dict[str, Any]]:
    table = shipped(name)
    for place in places(table):
        for value in ODD:
            yield changed(table, place, value)
        if isinstance(place[-1], str):
            for odd in NAMES:
                yield renamed(table, place, odd)


def test_an_odd_protocol_loads_or_is_refused(tmp_path: Path) -> None:
    found = [load_or_refuse(table, tmp_path, construct=False) for table in [*cases("quick"), *cases("mini")][::3]]
    assert len(found) > 400
    assert 0.05 < sum(found) / len(found) < 0.8
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.long
@pytest.mark.parametrize("name", protocol.NAMES)
def test_every_odd_protocol_loads_or_is_refused_and_so_do_its_optimizers(tmp_path: Path, name: str) -> None:
    for table in cases(name):
        load_or_refuse(table, tmp_path, construct=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"x = " + b"[" * 5000, b"epochs = " + b"9" * 5000, b"epochs = 0x" + b"f" * 5000, b"", b"\0", b"\r"],
    ids=["not UTF-8", "nested", "digits", "hexadecimal", "empty", "nul", "return"],
)
def test_a_file_that_is_hardly_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    with pytest.raises(ProtocolError, match=r"mine\.toml"):
        protocol.load(tmp_path / "mine.toml")


@pytest.mark.parametrize("name", ["sub/../mine.toml", "x" * 5000, "a\0b", ".", "/dev/zero"])
def test_a_protocol_that_extends_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({"extends": name}))
    with pytest.raises(ProtocolError, match=r"extends itself|no protocol"):
        protocol.load(tmp_path / "mine.toml")


# Run folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with all files of runs, for two optimizers and seeds, of which one run has failed."""
    out = tmp_path_factory.mktemp("runs")
    chosen = protocol.load("quick").narrowed(optimizers=["sgd", "adabayes"], seeds=2, epochs=2)
    chosen = replace(chosen, published={"digits": {"resnet8": {"sgd": [1.0, 0.1]}}})
    specs = chosen.runs()
    for spec in specs:
        folder = folder_of(spec, out)
        folder.path.mkdir(parents=True)
        folder.write("spec.json", asdict(spec))
        start: dict[str, Any] = dict.fromkeys(("adabayes", "torch", "python", "system", "processor", "data"), "x")
        folder.write("environment.json", [{**start, "threads": 2, "commit": None, "processes": 1}])
        if (spec.optimizer, spec.seed) == ("sgd", 1):
            folder.fail("it broke", "Traceback")
        else:
            folder.write("result.json", {"status": "done", "epoch": 1})
        for epoch in range(2):
            costs = {"steps": 23, "state_bytes": 8.0, "train_seconds": 2.0, "test_seconds": 1.0}
            folder.log({"epoch": epoch, "lr": 0.1, **costs, **dict.fromkeys(results.METRICS, 1.5 + spec.seed)})
            rates = {"epoch": epoch, "lr": 0.1, "lr_sgd": 1.0, "layers": ["a"], "adam": [[0.5]], "gain": [[0.25]]}
            folder.log(rates, "rates.jsonl")
    sweep.prepare(specs, out, tensorboard=False)
    results.write(chosen, results.collect(specs, out), [], out, "adabayes reproduce")
    return out


def files(out: Path) -> list[Path]:
    """Return one file of each kind."""
    found = {path.name: path for path in sorted(out.rglob("*.json*"))}
    wanted = {"spec", "environment", "result", "failed", "metrics", "rates", "sweep", "results"}
    assert {path.stem for path in found.values()} == wanted
    return list(found.values())


def damages(path: Path, odd: list[Any]) -> Iterator[bytes]:
    """Return a file as it may be after an accident, or if someone has forged it."""
    text = path.read_bytes()
    yield from (
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b"3",
        b"NaN",
        b'"x"',
        b"[" * 100_000,
        b"\0" * 50,
        text[:-9],
        text * 2,
    )
    lines = path.suffix == ".jsonl"
    tree: Any = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)

    def dumped(tree: Any) -> bytes:
        return b"".join(json.dumps(row).encode() + b"\n" for row in tree) if lines else json.dumps(tree).encode()

    for place in places(tree):
        if place[0] in ("runs", "summary"):  # of results.json, for others to read
            continue
        for value in odd:
            yield dumped(changed(tree, place, value))
        without = copy.deepcopy(tree)
        inner = without
        for key in place[:-1]:
            inner = inner[key]
        del inner[place[-1]]
        yield dumped(without)


def look_at(out: Path) -> set[str]:
    """Return all that is read from a folder, and the files named in warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        specs = sweep.noted(out)
        assert all(folder_of(spec, out).path.parent == out / "runs" for spec in specs)
        if specs:
            [folder_of(spec, out).status() for spec in specs]
            chosen, kept, command, left_out = results.read(out, specs)
            content = report.content(chosen, kept, command, out, left_out)
            json.dumps(content, allow_nan=False)
            assert results.tables(chosen, results.collect(kept, out))
    for warning in warned:
        assert "it is left out" in str(warning.message)
    return {path.name for path in out.rglob("*.json*") for w in warned if path.name in str(w.message)}


def attack(runs: Path, tmp_path: Path, odd: list[Any], step: int) -> int:
    out = tmp_path / "out"
    shutil.copytree(runs, out)
    assert look_at(out) == set()
    count = 0
    for path in files(runs):
        damaged = out / path.relative_to(runs)
        for i, content in enumerate(damages(path, odd)):
            if i >= 12 and i % step:
                continue
            damaged.write_bytes(content)
            warned = look_at(out)
            assert warned <= {path.name}, content
            assert i >= 11 or warned or path.suffix == ".jsonl" or content == b"[]", content
            count += 1
        shutil.copy(path, damaged)
    return count


def test_a_damaged_file_of_a_run_is_named_and_left_out(runs: Path, tmp_path: Path) -> None:
    assert attack(runs, tmp_path, PLAIN, 83) > 120


@pytest.mark.long
def test_every_damaged_file_of_a_run_is_named_and_left_out(runs: Path, tmp_path: Path) -> None:
    assert attack(runs, tmp_path, [*PLAIN, None, math.nan, math.inf, -math.inf, 1e99, {"kind": "x"}], 3) > 1000


def test_an_old_results_file_has_the_colours_and_presets_that_it_had(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(runs, out)
    content = json.loads((out / "results.json").read_text())
    del content["protocol"]["presets"]
    for optimizer in content["protocol"]["optimizers"].values():
        del optimizer["colour"], optimizer["dash"]
    pages = []
    for text in (None, json.dumps(content)):
        if text:
            (out / "results.json").write_text(text)
        chosen, kept, command, _ = results.read(out, sweep.noted(out))
        pages.append(report.content(chosen, kept, command, out))
    assert pages[0] == pages[1]
    assert {o["name"]: o["light"] for o in pages[0]["optimizers"]} == {"sgd": "#3b3f46", "adabayes": "#117733"}
    assert [p["key"] for p in pages[0]["presets"]] == ["all", "baselines", "bounds", "bounds-sgd", "train"]
