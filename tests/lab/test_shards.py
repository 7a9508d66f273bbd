"""Sharded checkpoints in the folder of a run: what is kept, what is left out, and who decides."""

from __future__ import annotations

import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from adabayes.lab.run import shards
from adabayes.lab.run.distributed import _Several
from adabayes.lab.run.files import DiskFull
from adabayes.lab.run.folder import RunFolder, save_tree
from tests.support.marks import has_fsdp2

pytestmark = has_fsdp2


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path, one_process: None) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.path.mkdir()
    return found


def save(folder: RunFolder, number: int) -> Path:
    """Write a sharded checkpoint, with its number in a tensor."""
    tensors: dict[str, Any] = {}
    content = save_tree({"number": torch.tensor(number), "more": [torch.ones(3, 2), 1]}, tensors)
    path = folder.new_shards(number)
    folder.save_shards(number, content, path, shards.write(path, tensors, rank=0))
    return path


def loaded(folder: RunFolder) -> int:
    tree: Any = folder.load()
    assert torch.equal(tree["more"][0], torch.ones(3, 2))
    return int(tree["number"])


def test_one_process_reads_them_whole(folder: RunFolder) -> None:
    save(folder, 1)
    assert loaded(folder) == 1


def test_the_newest_two_are_kept(folder: RunFolder) -> None:
    paths = [save(folder, number) for number in (1, 2, 3)]
    assert [path.exists() for path in paths] == [False, True, True]
    again = save(folder, 3)  # as when a run stops where it went on from
    assert sorted(folder.path.glob("*.shards")) == sorted([paths[1], again])
    folder.save(3, {"number": torch.tensor(30), "more": [torch.ones(3, 2), 1]})  # by one process
    assert list(folder.path.glob("*.shards")) == [paths[1]]
    assert loaded(folder) == 30
    folder.finish({}, {"status": "done"})
    assert not list(folder.path.glob("checkpoint-*"))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_one_is_named_and_the_one_before_it_used(folder: RunFolder, file: str, damage: str) -> None:
    save(folder, 1)
    path = save(folder, 2) / file
    content = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.warns(UserWarning, match=r"checkpoint-2\.json is damaged"):
        assert loaded(folder) == 1


def test_shards_that_a_kill_has_left_without_their_json_are_removed(folder: RunFolder) -> None:
    """They count when all of them are there; JSON is written last."""
    save(folder, 1)
    shards.write(folder.new_shards(2), {"0": torch.ones(2)}, rank=0)
    assert loaded(folder) == 1
    with folder.lock():
        assert len(list(folder.path.glob("*.shards"))) == 1


def test_an_error_of_a_file_is_raised_as_it_is(folder: RunFolder) -> None:
    path = folder.new_shards(1)
    (path / "__0_0.distcp").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        shards.write(path, {"0": torch.ones(2)}, rank=0)


def test_a_full_disk_is_a_clear_error(folder: RunFolder) -> None:
    """The system refuses to write files above a size that the shards exceed, as it would on a full disk."""
    save(folder, 1)
    handler, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(DiskFull, match=r"no room to write .*\.shards.*Nothing is lost"):
            shards.write(folder.new_shards(2), {"0": torch.ones(100_000)}, rank=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert loaded(folder) == 1


# Two processes


def decide(rank: int, place: Path) -> None:
    """Go on from a checkpoint that the second process does not see until a moment later."""
    dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=2)
    seen = RunFolder(place / ("there" if rank == 0 else "here"))
    if rank == 0:
        seen.path.mkdir()
        seen.save(1, {"number": 1})
        seen.save(2, {"number": 2})
        shutil.copytree(seen.path, place / "here", ignore=shutil.ignore_patterns("checkpoint-2.*"))
    dist.barrier()
    if rank == 1:
        late = threading.Timer(1.0, shutil.copytree, (place / "there", place / "here"), {"dirs_exist_ok": True})
        late.start()
        assert seen.checkpoints() == [1]
    model = nn.Linear(2, 2)
    assert _Several("ddp").restore(seen, model, torch.optim.SGD(model.parameters())) == {"number": 2}
    if rank == 0:
        (seen.path / "checkpoint-2.safetensors").unlink()
    dist.barrier()
    found = _Several("ddp").restore(seen, model, torch.optim.SGD(model.parameters()))
    assert found == {"number": 1}  # which both can read
    time.sleep(0.5)  # for gloo's threads
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_first_process_decides_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that lags behind does not split them."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(decide, (tmp_path,), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
