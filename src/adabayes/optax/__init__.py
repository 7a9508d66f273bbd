"""AdaBayes for JAX, as optax transformations. It does not need torch.

>>> import jax, jax.numpy as jnp, optax
>>> from adabayes.optax import adabayes
>>> optimizer = adabayes(1e-3, lr_sgd=0.1, batch_size=128)
>>> params = {"w": jnp.ones(3)}
>>> state = optimizer.init(params)
>>> grads = jax.grad(lambda p: (p["w"] ** 2).sum())(params)
>>> updates, state = optimizer.update(grads, state, params)
>>> params = optax.apply_updates(params, updates)
"""

from adabayes._util.missing_extra import missing_extra

try:
    import jax  # noqa: F401
    import optax  # noqa: F401
except ImportError as error:
    raise missing_extra("adabayes.optax needs jax and optax", "jax") from error

from adabayes.optax._adabayes import ScaleByAdaBayesState, adabayes, scale_by_adabayes
from adabayes.optax._adabayes_fp import ScaleByAdaBayesFPState, adabayes_fp, scale_by_adabayes_fp
from adabayes.optax._adabayes_k import ScaleByAdaBayesKState, adabayes_k, scale_by_adabayes_k
from adabayes.optax._compatibility import Rates as Rates  # private, but pickled states name it
from adabayes.optax._regimes import regimes

__all__ = [
    "ScaleByAdaBayesFPState",
    "ScaleByAdaBayesKState",
    "ScaleByAdaBayesState",
    "adabayes",
    "adabayes_fp",
    "adabayes_k",
    "regimes",
    "scale_by_adabayes",
    "scale_by_adabayes_fp",
    "scale_by_adabayes_k",
]
