"""Optimizers for PyTorch."""

from adabayes.optim._groups import param_groups
from adabayes.optim.adabayes import AdaBayes, adabayes
from adabayes.optim.adabayes_fp import AdaBayesFP, adabayes_fp
from adabayes.optim.adabound import AdaBound, adabound

__all__ = ["AdaBayes", "AdaBayesFP", "AdaBound", "adabayes", "adabayes_fp", "adabound", "param_groups"]
