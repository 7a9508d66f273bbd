"""Shows which weights of a network move like SGD, which like Adam, and at what learning rates.

>>> import torch
>>> from adabayes import AdaBayes
>>> w = torch.zeros(4)
>>> optimizer = AdaBayes([("w", w)], lr=1e-3, lr_sgd=0.1)
>>> w.grad = torch.tensor([0.0, 1e-3, 0.1, 1.0])  # the crossover is at lr / lr_sgd = 0.01
>>> optimizer.step()
>>> regimes(optimizer).total.sgd_like
0.5
"""

from adabayes._util.regimes import QUANTILES, Regime, Regimes
from adabayes.diagnostics.check import check
from adabayes.diagnostics.correlations import Correlation, Correlations
from adabayes.diagnostics.memory import MemoryPlan, matrix_memory_plan, memory_plan
from adabayes.diagnostics.observer import Observer, Points, draw_rates
from adabayes.diagnostics.regimes import regimes

__all__ = [
    "QUANTILES",
    "Correlation",
    "Correlations",
    "MemoryPlan",
    "Observer",
    "Points",
    "Regime",
    "Regimes",
    "check",
    "draw_rates",
    "matrix_memory_plan",
    "memory_plan",
    "regimes",
]
