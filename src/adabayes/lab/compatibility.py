"""Reads runs and searches that earlier versions of the lab have begun.

Each function says which version wrote what; nothing else in the lab knows about earlier versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adabayes.rates import MATRIX_SCALE

__all__ = [
    "complete_position",
    "complete_settings",
    "complete_start",
    "complete_tuned",
    "fields_to_hash",
    "is_tuned_file",
    "remove_optuna_locks",
    "settings_to_store",
]  # fmt: skip

_NEW_SPEC_FIELDS = {"data_options": {}, "tests_per_epoch": 1, "test_at_end": False, "length": 1.0}


def fields_to_hash(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's specification that its identity is the hash of.

    Version 0.1 did not have the fields of ``_NEW_SPEC_FIELDS``. They count only if they differ from their defaults, so
    that runs of version 0.1 keep their folders. A ``matrix_scale`` of 1 does not count, so that runs of version 0.2 do.
    """
    defaults = _NEW_SPEC_FIELDS.items()
    settings = _without_scale_of_1(spec["optimizer_class"], spec["settings"])
    return {name: value for name, value in (spec | {"settings": settings}).items() if (name, value) not in defaults}


# The scale of AdaBayes-K's matrices
#
# Version 0.2 had no ``matrix_scale``: it moved matrices as far as vectors. So in specifications and records, a missing
# ``matrix_scale`` means 1, and later versions store every other value. In a protocol that a user writes, it means the
# optimizer's default, as any missing setting does.


def settings_to_store(optimizer_class: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the settings of a protocol to those of a specification: add a default scale, and leave out one of 1."""
    if not _is_adabayes_k(optimizer_class):
        return settings
    return _without_scale_of_1(optimizer_class, {"matrix_scale": MATRIX_SCALE, **settings})


def complete_settings(optimizer_class: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Add the scale of 1 that a specification does not store."""
    return {"matrix_scale": 1.0, **settings} if _is_adabayes_k(optimizer_class) else settings


def is_tuned_file(text: bytes) -> bool:
    """Tell whether ``adabayes tune`` wrote this protocol, by the first line, which is the same in all versions."""
    return text.startswith(b"# Written by adabayes tune")


def complete_tuned(entry: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Add the scale for which ``adabayes tune`` of version 0.2 tuned an optimizer, which was 1.

    Later versions write the scale into their file.

    Args:
        entry: the optimizer's entry in the file, merged with that of the protocol that the file extends.
        written: the entry in the file alone.
    """
    was_tuned_for_1 = _is_adabayes_k(entry.get("class", "")) and "matrix_scale" not in written
    return {**entry, "matrix_scale": 1.0} if was_tuned_for_1 else entry


def _without_scale_of_1(optimizer_class: str, settings: dict[str, Any]) -> dict[str, Any]:
    is_redundant = _is_adabayes_k(optimizer_class) and settings.get("matrix_scale") == 1
    return {name: value for name, value in settings.items() if not (is_redundant and name == "matrix_scale")}


def _is_adabayes_k(optimizer_class: str) -> bool:
    """Tell whether an import path is one of AdaBayes-K's, without importing it."""
    return optimizer_class.startswith("adabayes.") and optimizer_class.endswith(".AdaBayesK")


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
