"""AdaBayes-K: the filter for whole matrices, which moves between SGD and the full-matrix root of SOAP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from adabayes.eigenbasis import (
    basis_of,
    carried,
    factor,
    from_modes,
    modes,
    refreshed,
    rotate,
    rows,
    sides,
    spread,
    to_modes,
)
from adabayes.optim._checks import check_range, explains_unknown
from adabayes.optim._engine import Batch, Group, Step
from adabayes.optim._stack import stack, stack_
from adabayes.optim._state import Entry
from adabayes.optim._tensors import Scalar, as_float, real_view
from adabayes.optim.adabayes_fp import SETTLED, AdaBayesFP

__all__ = ["AdaBayesK"]

_BLOCK = 128  # rows of a factor that are worked out at a time; half of the rest, above the diagonal, is left out
_ALONE = 2**20  # weights of a matrix from which on it is worked on by itself: there is nothing to gain


class _Numbers(NamedTuple):
    """The numbers of one step: those of AdaBayes-FP, and how bases are learnt."""

    rate: Scalar  # lr
    beta1: float
    beta2: float
    eps: float  # lr / lr_sgd
    cautious: bool
    centred: bool
    refresh: int
    max_size: int
    fused: bool | None


class AdaBayesK(AdaBayesFP):
    r"""AdaBayes-K: the paper's filter for a whole weight matrix, in the eigenbasis of its gradients.

    The optimum of a matrix drifts in no preferred direction, and the gradient's Fisher information :math:`H` is a
    matrix. The filter's fixed point is then that of AdaBayes-FP with a matrix root,

    .. math:: P^{-1} = \frac{I}{2\,\text{lr_sgd}}
              + \left(\frac{I}{4\,\text{lr_sgd}^2} + \frac{H}{\text{lr}^2}\right)^{1/2}

    and in the eigenbasis of :math:`H`, taken as that of a Kronecker product, it is AdaBayes-FP word for word:

    .. math::
        \begin{aligned}
        G' &= Q_A^T G_t Q_C \\
        M_t &= \beta_1 M_{t-1} + (1 - \beta_1) G', \qquad V_t = \beta_2 V_{t-1} + (1 - \beta_2) G'^2 \\
        U' &= \frac{M_t / (1 - \beta_1^t)}{\epsilon/2 + \sqrt{\epsilon^2/4 + V_t / (1 - \beta_2^t)}}, \qquad
            \epsilon = \text{lr} / \text{lr_sgd} \\
        W_t &= (1 - \text{lr} \lambda) W_{t-1} - \text{lr}\, Q_A U' Q_C^T \\
        A_t &= \beta_2 A_{t-1} + (1 - \beta_2) G_t G_t^T, \qquad C_t = \beta_2 C_{t-1} + (1 - \beta_2) G_t^T G_t
        \end{aligned}

    Every ``refresh`` steps, at a step of its own for each matrix, :math:`Q_A \leftarrow \text{qr}(A Q_A)` and likewise
    :math:`Q_C`; both averages, which are kept in the eigenbasis, go with them.

    ``lr_sgd`` to infinity is SOAP, the full-matrix root-mean-square normaliser; ``lr`` to infinity is SGD. Where a
    direction has not been seen yet, SOAP would divide noise by noise and so skips its first step; here ``lr_sgd``
    bounds the gain, and no step is skipped.

    Use it for a whole model, in the place of AdamW. Matrices and convolutions are rotated on each side of at most
    ``max_size``; a larger side, such as a vocabulary, keeps its own basis; vectors and numbers get AdaBayes-FP.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: begin with three times AdamW's; what scales it, a scheduler or a group with its own, scales
            ``lr_sgd`` too.
        lr_sgd: the highest learning rate that a direction can get, in units of the averaged gradient. None: 1e5 ``lr``.
        betas: decay of the averaged gradient, and of its averaged square and covariances.
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
        refresh: steps from one update of a basis to the next.
        max_size: of a side that is rotated. A matrix takes 2 (m² + n²) numbers of state beside AdamW's 2 mn.
        cautious: leave out what opposes the newest gradient, and scale up the rest, so that the step stays as long.
        centred: average the squares of what the average did not foresee, :math:`(G' - M_{t-1})^2`, in place of
            :math:`G'^2`. It vanishes, and with it the bound on the step, where gradients have no noise: not for full
            batches.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch.
        batch_size: needed with ``reduction="sum"``; otherwise it has cancelled.
        maximize: ascend instead of descending.
        foreach: the form that works on all matrices of a shape at once. None: whenever it can.
        fused: the kernel for the CPU, for what is done element by element. None: whenever it was built.
        state_dtype: ``torch.bfloat16`` halves the two averages, with stochastic rounding; factors and bases stay fp32.
        stochastic_rounding: round bf16 parameters stochastically, so that small steps are not lost.
        seed: of the rounding.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = AdaBayesK(model.parameters(), lr=1e-2)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['basis_0', 'basis_1', 'exp_avg', 'exp_avg_sq', 'factor_0', 'factor_1', 'step']

    References:
        Aitchison, "Bayesian filtering unifies adaptive and non-adaptive neural network optimization methods",
        NeurIPS 2020, whose future work this is. Vyas et al., "SOAP: Improving and stabilizing Shampoo using Adam",
        2024, the limit. George et al., EKFAC, 2018, eigenvalues in a Kronecker basis. Li, PSGD, 2015, the same Riccati
        equation. Liang et al., "Cautious optimizers", 2024.
    """

    KERNEL = None  # for whole steps; what is done element by element has AdaBayes-FP's
    IN_PLACE = True
    ROTATES = True

    @explains_unknown
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        lr_sgd: float | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        refresh: int = 10,
        max_size: int = 2048,
        cautious: bool = True,
        centred: bool = False,
        reduction: Literal["mean", "sum"] = "mean",
        batch_size: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_sgd": lr_sgd,
            "betas": betas,
            "weight_decay": weight_decay,
            "refresh": refresh,
            "max_size": max_size,
            "cautious": cautious,
            "centred": centred,
            "reduction": reduction,
            "batch_size": batch_size,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        self._slots: tuple[Any, list[int]] = ((), [])
        super(AdaBayesFP, self).__init__(params, defaults)

    def direction(self, gradient: Batch, state: dict[str, Batch], c: _Numbers, t: Scalar) -> Step:
        g = stack([to_modes(x, c.max_size) for x in gradient.tensors])
        bases = _bases(g, state, c, t)
        turned = Batch(list(rotate(g, bases)), True)
        step = self._by_kernel(turned, state, c, t) or super().direction(turned, state, c, t)
        moves = rotate(stack(step.quotient().tensors), bases, back=True)
        shaped = [from_modes(move, x.shape) for move, x in zip(moves, gradient.tensors)]
        learn = partial(self._learn_, g, gradient.indices, state, c, t)
        return Step(Batch(shaped, True), size=step.size, after=learn)

    def _by_kernel(self, gradient: Batch, state: dict[str, Batch], c: _Numbers, t: Scalar) -> Step | None:
        """Do what AdaBayes-FP does by its kernel, if there is one for these tensors."""
        averages = state["exp_avg"].tensors, state["exp_avg_sq"].tensors
        moves = None if c.fused is False else SETTLED.direction(gradient.tensors, *averages, c, as_float(t))
        if moves is None:
            return None
        step = Step(Batch(list(moves), True))
        return step.cautious(gradient) if c.cautious else step

    def _learn_(self, g: Tensor, indices: Sequence[int], state: dict[str, Batch], c: _Numbers, t: Scalar) -> None:
        """Let the factors follow the gradient, and refresh the bases that are due."""
        if t == 1:  # the first bases have been made of the first gradient
            return
        for side in _sides(state):
            _follow_(stack_(state[f"factor_{side}"].tensors), g, side, c)
        for place, index in enumerate(indices):
            if t % c.refresh == self._slots[1][index]:
                _refresh_({name: entry.tensors[place] for name, entry in state.items()})

    def numbers(self, group: Group, lr: Scalar) -> Any:
        options = (group[name] for name in ("cautious", "centred", "refresh", "max_size", "fused"))
        beta1, beta2 = group["betas"]
        return _Numbers(lr, beta1, beta2, self._eps(group), *options)

    # Matrices of one shape are worked on together

    def _parts(self, group: Group) -> list[Group]:
        self._spread_refreshes()
        parts: dict[Any, list[Tensor]] = {}
        seen: set[int] = set()
        for p in group["params"]:
            if hasattr(p, "to_local"):
                raise NotImplementedError(
                    f"AdaBayesK does not take sharded parameters yet, and one of shape {tuple(p.shape)} is a "
                    f"{type(p).__name__}. Use AdaBayesFP with FSDP2 and tensor parallelism."
                )
            alone = p.numel() >= _ALONE or id(p) in seen  # the same parameter twice has two steps
            parts.setdefault(len(parts) if alone else modes(_real_shape(p), group["max_size"]), []).append(p)
            seen.add(id(p))
        return [{**group, "params": params} for params in parts.values()]

    def _spread_refreshes(self) -> None:
        """Work out at which step, modulo ``refresh``, the bases of each parameter are refreshed.

        That depends on shapes and settings alone, so that a resumed run does the same.
        """
        key = [(len(group["params"]), group["refresh"], group["max_size"]) for group in self.param_groups]
        if self._slots[0] == key:
            return
        owners = [(p, group) for group in self.param_groups for p in group["params"]]
        costs = [sum(n**3 for n in _rotated(p, group["max_size"]).values()) for p, group in owners]
        slots = [0] * len(owners)
        for refresh in {group["refresh"] for _, group in owners}:
            places = [i for i, (_, group) in enumerate(owners) if group["refresh"] == refresh]
            for place, slot in zip(places, spread([costs[i] for i in places], int(refresh))):
                slots[place] = slot
        self._slots = key, slots

    @_disable_dynamo  # bases are refreshed by decisions of the program
    def _step_group(self, group: Group) -> None:
        super()._step_group(group)

    # State: averages in the eigenbasis; for each side that is rotated, a factor and a basis

    def _entries(self, group: Group, p: Tensor) -> dict[str, Entry]:
        return _entries_of(_real_shape(p), group["max_size"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._slots = (), []
        super().__setstate__(state)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        for name in ("refresh", "max_size"):
            check_range(name, group[name], least=1.0)
            if int(group[name]) != group[name]:
                raise ValueError(f"Invalid {name}: {group[name]}. It must be a whole number.")

    def _betas_from(self, adamw: tuple[float, ...], group: Group) -> tuple[float, ...]:
        return (adamw[0], group["betas"][1])

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        """Take AdamW's average as the first gradient that the bases are made of, and carry both averages over."""
        step, (beta1, own_beta2) = as_float(adamw["step"]), group["betas"]
        wide = torch.promote_types(adamw["exp_avg"].dtype.to_real(), torch.float32)
        mean, square = (
            to_modes(real_view(adamw[name]).to(wide), group["max_size"]) for name in ("exp_avg", "exp_avg_sq")
        )
        bases: list[Tensor | None] = [None] * mean.dim()
        state = {"step": adamw["step"]}
        for side in _rotated(adamw["exp_avg"], group["max_size"]):
            gradient = mean / (1 - beta1**step)
            state[f"factor_{side}"] = (1 - own_beta2) * factor(gradient, side, mean.dim())
            state[f"basis_{side}"] = bases[side] = basis_of(state[f"factor_{side}"])
        state["exp_avg"] = rotate(mean, bases).contiguous()
        state["exp_avg_sq"] = carried(square, bases) * ((1 - own_beta2**step) / (1 - beta2**step))
        return state


def _real_shape(p: Tensor) -> tuple[int, ...]:
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


def _rotated(p: Tensor, max_size: int) -> dict[int, int]:
    """Return the sides of a parameter that are rotated, and their sizes."""
    shape = _real_shape(p)
    return {side: modes(shape, max_size)[side] for side in sides(shape, max_size)}


@lru_cache(maxsize=4096)
def _entries_of(shape: tuple[int, ...], max_size: int) -> dict[str, Entry]:
    rotated = modes(shape, max_size)
    average = Entry(shape=lambda _: rotated)
    entries = {"exp_avg": average, "exp_avg_sq": average}
    for side in sides(shape, max_size):
        square = Entry(shape=lambda _, n=rotated[side]: (n, n), low=False)  # type: ignore[misc]
        entries |= {f"factor_{side}": square, f"basis_{side}": square}
    return entries


def _sides(state: dict[str, Any]) -> list[int]:
    return [int(name.removeprefix("basis_")) for name in state if name.startswith("basis_")]


def _bases(g: Tensor, state: dict[str, Batch], c: _Numbers, t: Scalar) -> list[Tensor | None]:
    """Return the bases of each mode of stacked gradients, at the first step those of the first gradient."""
    bases: list[Tensor | None] = [None] * (g.dim() - 1)
    for side in _sides(state):
        basis = bases[side] = stack_(state[f"basis_{side}"].tensors)
        if t == 1:
            covariance = stack_(state[f"factor_{side}"].tensors)
            _follow_(covariance, g, side, c)
            basis.copy_(basis_of(_symmetric(covariance)))
    return bases


def _follow_(covariance: Tensor, g: Tensor, side: int, c: _Numbers) -> None:
    """Let factors follow their gradients, A = beta2 A + (1 - beta2) G G^T, on the diagonal and below."""
    x = rows(g, side, g.dim() - 1)
    size = x.shape[-2]
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        block = covariance[:, start:end, :end]
        block.baddbmm_(x[:, start:end], x[:, :end].mT, beta=c.beta2, alpha=1 - c.beta2)


def _symmetric(covariance: Tensor) -> Tensor:
    """Fill in what is above the diagonal of a factor."""
    return covariance.tril() + covariance.tril(-1).mT


def _refresh_(state: dict[str, Tensor]) -> None:
    """Refresh the bases of one matrix; the averages go with them."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    old: list[Tensor | None] = [None] * mean.dim()
    new = old.copy()
    for side in _sides(state):
        covariance = state[f"factor_{side}"].nan_to_num_(0.0, 0.0, 0.0)  # what has overflown begins again
        old[side] = state[f"basis_{side}"]
        new[side], order = refreshed(_symmetric(covariance), old[side])
        square.copy_(square.index_select(side, order))
    mean.copy_(rotate(rotate(mean, old, back=True), new))
    for basis, now in zip(old, new):
        if basis is not None and now is not None:
            basis.copy_(now)
