"""Old import path of ``Rates``, which states pickled by version 0.2 name."""

from adabayes.optax._compatibility import Rates as Rates
