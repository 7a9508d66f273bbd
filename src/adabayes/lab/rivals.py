"""Keep the import path of Muon that protocols and records of runs name: ``adabayes.lab.rivals.MuonAdamW``."""

from __future__ import annotations

from adabayes.bench.muon import MuonAdamW

__all__ = ["MuonAdamW"]
