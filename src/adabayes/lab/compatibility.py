"""Reads runs and searches that earlier versions of the lab have begun.

Each function says which version wrote what; nothing else in the lab knows about earlier versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["complete_position", "complete_start", "fields_to_hash", "remove_optuna_locks"]

_NEW_SPEC_FIELDS = {"data_options": {}, "tests_per_epoch": 1, "test_at_end": False, "length": 1.0}


def fields_to_hash(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's specification that its identity is the hash of.

    Version 0.1 did not have the fields of ``_NEW_SPEC_FIELDS``. They count only if they differ from their defaults, so
    that runs of version 0.1 keep their folders.
    """
    defaults = _NEW_SPEC_FIELDS.items()
    return {name: value for name, value in spec.items() if (name, value) not in defaults}


def complete_position(position: dict[str, Any]) -> dict[str, Any]:
    """Return the position of a checkpoint in today's form.

    Version 0.1 counted wrong answers, as ``wrong``. Later versions have the sums of any task's errors, ``errors``.
    """
    rest = dict(position)
    if "wrong" in rest:
        rest["errors"] = [rest.pop("wrong")]
    return rest


def complete_start(start: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of ``environment.json`` with the number of processes.

    Version 0.1 did not write the number at first, because a run always had one process.
    """
    return {"processes": 1, **start}


def remove_optuna_locks(journal: Path) -> None:
    """Remove the lock files beside a journal of Optuna's.

    Version 0.1 let Optuna lock the journal, and a killed process left the lock behind. Later versions lock the folder.
    """
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink(missing_ok=True)
