"""Training a neural network as Bayesian filtering: optimizers that move by themselves between SGD and AdamW."""

from adabayes.optim import AdaBayes, AdaBayesFP, AdaBound

__all__ = ["AdaBayes", "AdaBayesFP", "AdaBound", "__version__"]
__version__ = "0.1.0"
