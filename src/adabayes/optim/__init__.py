"""Optimizers for PyTorch."""

from adabayes.optim.adabayes import AdaBayes
from adabayes.optim.adabayes_fp import AdaBayesFP
from adabayes.optim.adabayes_k import AdaBayesK
from adabayes.optim.adabound import AdaBound
from adabayes.optim.param_groups import param_groups

__all__ = ["TWO_RATE_OPTIMIZERS", "AdaBayes", "AdaBayesFP", "AdaBayesK", "AdaBound", "param_groups"]

TWO_RATE_OPTIMIZERS = (AdaBayes, AdaBayesFP, AdaBayesK)  # ours; AdaBound is a baseline
