"""The public API for new optimizers: subclass :class:`EngineOptimizer` or :class:`TwoRateOptimizer`.

docs/adding.md writes an optimizer with it.
"""

from adabayes.optim._engine.batch import Batch, Step
from adabayes.optim._engine.state import Entry, Group, StatefulOptimizer
from adabayes.optim._engine.step import EngineOptimizer
from adabayes.optim._engine.two_rates import TwoRateOptimizer, unwrap

__all__ = ["Batch", "EngineOptimizer", "Entry", "Group", "StatefulOptimizer", "Step", "TwoRateOptimizer", "unwrap"]
