"""AdaBayes-K: the filter for whole matrices, which moves between SGD and the full-matrix root of SOAP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from adabayes.eigenbasis import (
    Blocks,
    basis_of,
    carried,
    cut,
    factor,
    from_blocks,
    interval,
    learns,
    least_share,
    refreshed,
    rotate,
    sorted_by,
    spread,
    to_blocks,
)
from adabayes.optim._checks import check_whole, explain, explains_unknown
from adabayes.optim._engine import Batch, Group, Step
from adabayes.optim._sharded import Owners, is_sharded, mesh_of, shard_like
from adabayes.optim._shared import SharedWork
from adabayes.optim._stack import cat, cat_, put_back_
from adabayes.optim._state import Entry, own_state
from adabayes.optim._tensors import Scalar, as_float, local, real_view, whole
from adabayes.optim.adabayes_fp import SETTLED, AdaBayesFP

__all__ = ["AdaBayesK"]

_PORTION = 2**20  # weights that a CPU works on at a time


class _Numbers(NamedTuple):
    """The numbers of one step: those of AdaBayes-FP, and how bases are learnt."""

    rate: Scalar  # lr
    beta1: float
    beta2: float
    eps: float  # lr / lr_sgd
    cautious: bool
    centred: bool
    learn_every: int
    refresh: int
    block_size: int
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

    :math:`A` and :math:`C` learn from every ``learn_every``-th gradient, in turn, with :math:`\beta_2` to that power.
    Every ``refresh`` steps, at a step of its own for each matrix, :math:`Q_A \leftarrow \text{qr}(A Q_A)` and likewise
    :math:`Q_C`; :math:`M` is rotated with them, and :math:`V` is put into their order. In the beginning both happen
    more often, after an eighth of the steps so far, rounded down to a power of two, because :math:`A` and :math:`C`
    are averages of few gradients then. Where a basis has turned far, :math:`V` is raised to the least that it can be,
    given :math:`M`.

    ``lr_sgd`` to infinity is SOAP, the full-matrix root-mean-square normaliser; ``lr`` to infinity is SGD. Where a
    direction has not been seen yet, SOAP would divide noise by noise and so skips its first step; here ``lr_sgd``
    bounds the gain, and no step is skipped.

    Use it for a whole model, in the place of AdamW. Matrices and convolutions, seen as out x rest, are cut into blocks
    of at most ``block_size`` on each side, each a matrix of its own; a side above ``max_size``, such as a vocabulary,
    is neither cut nor rotated; vectors and numbers get AdaBayes-FP.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: begin with five times AdamW's; the default is a cautious one. What scales it, a scheduler or a group with
            its own, scales ``lr_sgd`` too.
        lr_sgd: the highest learning rate that a direction can get, in units of the averaged gradient. None: 1e5 ``lr``.
        betas: decay of the averaged gradient, and of its averaged square and covariances.
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
        learn_every: steps from one gradient that a covariance learns from to the next; in the beginning less. 1:
            it learns from all, as SOAP's do.
        refresh: steps from one update of a basis to the next; in the beginning less.
        block_size: largest side of a block. It bounds what a weight costs: 4 numbers of state beside AdamW's 2, and
            about 10 ``block_size`` operations in a step, if its block is a whole one. A layer's width is a good choice.
        max_size: largest side that is rotated.
        cautious: move only in directions whose averaged gradient has the sign of the newest one.
        centred: average the squares of what the average did not foresee, :math:`(G' - M_{t-1})^2`, in place of
            :math:`G'^2`. It vanishes, and with it the bound on the step, where gradients have no noise: not for full
            batches.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch.
        batch_size: needed with ``reduction="sum"``; otherwise it has cancelled.
        maximize: ascend instead of descending.
        foreach: the form that works on all matrices of a shape at once. None: whenever it can.
        fused: a kernel for what is done element by element. None: that of the CPU, whenever it was built.
        state_dtype: ``torch.bfloat16`` halves the two averages, with stochastic rounding; factors and bases stay fp32.
        stochastic_rounding: round bf16 parameters stochastically, so that small steps are not lost.
        seed: of the rounding.
        process_group: of processes that have the same parameters and gradients, as under DDP: each refreshes some of
            the bases for all of them, as by :meth:`share_refreshes`. Sharded parameters (FSDP2) do not need it.

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
        learn_every: int = 2,
        refresh: int = 10,
        block_size: int = 128,
        max_size: int = 16384,
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
        process_group: Any = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_sgd": lr_sgd,
            "betas": betas,
            "weight_decay": weight_decay,
            "learn_every": learn_every,
            "refresh": refresh,
            "block_size": block_size,
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
        self._begin(process_group)
        super(AdaBayesFP, self).__init__(params, defaults)

    def share_refreshes(self, process_group: Any) -> None:
        """Refresh bases together with other processes, which have the same parameters and gradients, as under DDP.

        Each refreshes some of those that are due and sends them to all; weights are the same in all processes, to the
        bit. All of the group must take the same steps from then on. None: each refreshes all of them.
        """
        self._shared = None if process_group is None else SharedWork(process_group)

    def _begin(self, process_group: Any = None) -> None:
        self._slots: tuple[Any, list[int]] = ((), [])
        self._owners = Owners()
        self._part: dict[int, Tensor] = {}  # the parameters that a step is taken with, if they are sharded
        self.share_refreshes(process_group)

    def direction(self, gradient: Batch, state: dict[str, Batch], c: _Numbers, t: Scalar) -> Step:
        sharded = [self._part[index] for index in gradient.indices] if self._part else []
        shapes = [x.shape for x in gradient.tensors]
        blocks = [_cut(shape, c) for shape in (map(_real_shape, sharded) if sharded else shapes)]
        if blocks[0] is None:  # vectors and numbers
            return self._element_by_element(gradient, state, c, t)
        if sharded:
            exchange = self._owners_for(sharded[0]).exchange(sharded, blocks)
            g, ranges = exchange.to_blocks(gradient.tensors), exchange.ranges
            step = self._step_of_blocks(g, gradient.indices, ranges, state, c, t)
            moves = step.numerator.tensors[0]
            return Step(Batch(exchange.from_blocks(moves, shapes, meanwhile=step.after), True))
        g = cat([to_blocks(x, b) for x, b in zip(gradient.tensors, blocks)])
        numbers = [b.number for b in blocks]
        step = self._step_of_blocks(g, gradient.indices, [(0, number) for number in numbers], state, c, t)
        moves = step.numerator.tensors[0].split(numbers)
        shaped = [from_blocks(move, b, shape) for move, b, shape in zip(moves, blocks, shapes)]
        return step._replace(numerator=Batch(shaped, True))

    def _step_of_blocks(
        self,
        g: Tensor,
        indices: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        state: dict[str, Batch],
        c: _Numbers,
        t: Scalar,
    ) -> Step:
        """Return the step of blocks, one after the other, of parameters that have these ranges of them here."""
        if not len(g):
            return Step(Batch([g], True))
        parts = {name: [x for x in entry.tensors if len(x)] for name, entry in state.items()}
        stacked = {name: cat_(part) for name, part in parts.items()}
        shared = None if self._part else self._shared
        _make_bases_(g, stacked, c, t, shared)
        moves = torch.empty_like(g)
        at_once = _blocks_at_once(g)
        for first in range(0, len(g), at_once):
            some = slice(first, first + at_once)
            left, right = (stacked[name][some] if name in stacked else None for name in ("basis_0", "basis_1"))
            averages = {name: Batch([stacked[name][some]], True) for name in ("exp_avg", "exp_avg_sq")}
            step = self._element_by_element(Batch([rotate(g[some], (left, right))], True), averages, c, t)
            back = rotate(step.quotient().tensors[0], (left, right), back=True)
            torch.mul(back, step.size, out=moves[some])
        due = self._due(indices, ranges, c.refresh, int(as_float(t)))

        def learn() -> None:
            _learn_(g, stacked, due, c, t, shared)
            for name, part in parts.items():
                put_back_(part, stacked[name])

        return Step(Batch([moves], True), after=learn)

    def _element_by_element(self, gradient: Batch, state: dict[str, Batch], c: _Numbers, t: Scalar) -> Step:
        """Do what AdaBayes-FP does, by its kernel if there is one for these tensors."""
        averages = state["exp_avg"].tensors, state["exp_avg_sq"].tensors
        moves = None if c.fused is False else SETTLED.direction(gradient.tensors, *averages, c, as_float(t))
        return super().direction(gradient, state, c, t) if moves is None else Step(Batch(moves, True))

    def _due(self, indices: Sequence[int], ranges: Sequence[tuple[int, int]], refresh: int, t: int) -> list[int]:
        """Return which blocks are refreshed at this step, of parameters that have these ranges of them here."""
        first, due, every = 0, list[int](), interval(t, refresh)
        for index, (begin, end) in zip(indices, ranges):
            due += range(first + (t - self._slots[1][index] - begin) % every, first + end - begin, every)
            first += end - begin
        return due

    def numbers(self, group: Group, lr: Scalar) -> Any:
        names = ("cautious", "centred", "learn_every", "refresh", "block_size", "max_size", "fused")
        options = (group[name] for name in names)
        beta1, beta2 = group["betas"]
        return _Numbers(lr, beta1, beta2, self._eps(group), *options)

    # Blocks of one shape are worked on together

    def _parts(self, group: Group) -> list[Group]:
        self._spread_refreshes()
        parts: dict[Any, list[Tensor]] = {}
        weights: dict[Any, int] = {}  # of each kind so far: large matrices of one kind are several parts
        seen: set[int] = set()
        for p in group["params"]:
            blocks = _blocks(p, group)
            again = id(p) in seen  # the same parameter twice has two steps
            kind = len(parts) if again else (blocks and (blocks.m, blocks.n, blocks.sides), mesh_of(p))
            before = weights.setdefault(kind, 0)
            together = blocks is None or is_sharded(p) or self._shared is not None  # they wait for others, once a part
            parts.setdefault((kind, 0 if together else before // _weights_at_once(p)), []).append(p)
            weights[kind] = before + p.numel()
            seen.add(id(p))
        return [{**group, "params": params} for params in parts.values()]

    def _spread_refreshes(self) -> None:
        """Work out at which step, modulo ``refresh``, the bases of each parameter's first block are refreshed.

        That depends on shapes and settings alone, so that a resumed run does the same.
        """
        settings = ("refresh", "block_size", "max_size")
        key = [(len(group["params"]), *(group[name] for name in settings)) for group in self.param_groups]
        if self._slots[0] == key:
            return
        for group in self.param_groups:
            for p in group["params"]:
                self._check_blocks(p, group)
        owners = [(_blocks(p, group), group["refresh"]) for group in self.param_groups for p in group["params"]]
        slots = [0] * len(owners)
        for refresh in {refresh for _, refresh in owners}:
            places = [place for place, (_, other) in enumerate(owners) if other == refresh]
            blocks = [owners[place][0] for place in places]
            costs, numbers = ([getattr(b, name, 0) for b in blocks] for name in ("cost", "number"))
            for place, slot in zip(places, spread(costs, numbers, int(refresh))):
                slots[place] = slot
        self._slots = key, slots

    def _check_blocks(self, p: Tensor, group: Group) -> None:
        """Raise if a parameter has state of other blocks than its group says."""
        if not self.has_state(p):
            return
        found, wanted = own_state(self)[p]["exp_avg"].shape, self._entries(group, p)["exp_avg"].shape_for(p)
        if found != wanted:
            raise RuntimeError(
                f"with block_size={group['block_size']} and max_size={group['max_size']}, the averages of a parameter "
                f"of shape {tuple(p.shape)} are of shape {wanted}, but it has some of shape {tuple(found)}. These "
                "settings cannot change once there is state: set them back, or make a new optimizer."
            )

    def _owners_for(self, p: Tensor) -> Owners:
        """Return the owners of all matrices that are sharded, chosen together when the first of them is needed."""
        if p not in self._owners:
            params = [(p, _blocks(p, group)) for group in self.param_groups for p in group["params"] if is_sharded(p)]
            self._owners.appoint(params)
        return self._owners

    def _here(
        self, indices: list[int], params: list[Tensor], grads: list[Tensor], entries: dict[str, list[Tensor]]
    ) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
        self._part = dict(zip(indices, params)) if is_sharded(params[0]) else {}
        if not self._part:
            return params, grads, entries
        shards = [shard_like(p, gradient) for p, gradient in zip(params, grads)]
        return list(map(local, params)), shards, {name: list(map(local, x)) for name, x in entries.items()}

    @_disable_dynamo  # bases are refreshed by decisions of the program
    def _step_group(self, group: Group) -> None:
        super()._step_group(group)

    # State: averages in the eigenbasis; for each side that is rotated, a factor and a basis

    def _entries(self, group: Group, p: Tensor) -> dict[str, Entry]:
        return _entries_of(_blocks(p, group))

    def _zeros(self, p: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._owners_for(p).zeros(p, shape, dtype) if is_sharded(p) else super()._zeros(p, shape, dtype)

    def _placed(self, p: Tensor, value: Tensor) -> Tensor:
        return self._owners_for(p).placed(p, value) if is_sharded(p) else value

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_owners" not in self.__dict__:  # a copy; not if state is loaded
            self._begin()
        self._slots = (), []
        super().__setstate__(state)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        explain(AdaBayesK, [name for name in ("capturable", "differentiable") if group[name]])
        for name in ("learn_every", "refresh", "block_size", "max_size"):
            group[name] = check_whole(name, group[name])

    def _betas_from(self, adamw: tuple[float, ...], group: Group) -> tuple[float, ...]:
        return (adamw[0], group["betas"][1])

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        """Take AdamW's averages as the first gradient of a matrix and its square; vectors go on where they were.

        So bases, and squares in them, are learnt as fast as in the beginning.
        """
        step, (beta1, own_beta2) = as_float(adamw["step"]), group["betas"]
        wide = torch.promote_types(adamw["exp_avg"].dtype.to_real(), torch.float32)
        mean, square = (real_view(adamw[name]).to(wide) for name in ("exp_avg", "exp_avg_sq"))
        square = square / ((1 - beta2**step) or 1.0)
        blocks = _blocks(adamw["exp_avg"], group)
        if blocks is None:
            return {"step": adamw["step"], "exp_avg": mean, "exp_avg_sq": square * (1 - own_beta2**step)}
        mean, square = (to_blocks(whole(x), blocks) for x in (mean / ((1 - beta1**step) or 1.0), square))
        state = {"step": torch.full_like(torch.as_tensor(adamw["step"], dtype=torch.float32), min(step, 1.0))}
        for side in blocks.sides:
            state[f"factor_{side}"] = (1 - own_beta2) * factor(mean, side)
            state[f"basis_{side}"] = basis_of(state[f"factor_{side}"])
        bases = state.get("basis_0"), state.get("basis_1")
        state["exp_avg"] = (1 - beta1) * rotate(mean, bases)
        state["exp_avg_sq"] = (1 - own_beta2) * carried(square, bases)
        return state


def _cut(shape: Sequence[int], c: _Numbers) -> Any:
    return cut(tuple(shape), c.block_size, c.max_size)


def _blocks(p: Tensor, group: Group) -> Blocks | None:
    return cut(_real_shape(p), group["block_size"], group["max_size"])


def _real_shape(p: Tensor) -> tuple[int, ...]:
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


@lru_cache(maxsize=4096)
def _entries_of(blocks: Blocks | None) -> dict[str, Entry]:
    average = Entry(shape=lambda shape: shape if blocks is None else blocks.shape)
    entries = {"exp_avg": average, "exp_avg_sq": average}
    if blocks is None:
        return entries
    for side in blocks.sides:
        squares = blocks.number, blocks.size(side), blocks.size(side)
        square = Entry(shape=lambda _, squares=squares: squares, low=False)  # type: ignore[misc]
        entries |= {f"factor_{side}": square, f"basis_{side}": square}
    return entries


def _sides(state: dict[str, Any]) -> list[int]:
    return [side for side in (0, 1) if f"basis_{side}" in state]


def _weights_at_once(x: Tensor) -> int:
    """Return how many weights to work on at a time.

    Few enough for the caches of a CPU, and for memory that is used again: a large array gets new memory from the system
    each time, which takes as long as to rotate what is in it. On other devices, all.
    """
    return _PORTION if x.is_cpu else sys.maxsize


def _blocks_at_once(blocks: Tensor) -> int:
    """Return how many of these blocks to work on at a time: at least one, however large it is."""
    return max(1, _weights_at_once(blocks) // blocks[0].numel())


def _make_bases_(g: Tensor, state: dict[str, Tensor], c: _Numbers, t: Scalar, shared: SharedWork | None) -> None:
    """Make the bases of both sides from the first gradient, if this is the first."""
    if t == 1:
        for side in _sides(state):
            covariance = state[f"factor_{side}"]
            _follow_(covariance, g, side, c.beta2)
            state[f"basis_{side}"].copy_(_map(_made, {"basis": covariance}, shared)["basis"])


def _learn_(
    g: Tensor, state: dict[str, Tensor], due: list[int], c: _Numbers, t: Scalar, shared: SharedWork | None
) -> None:
    """Let the factors follow the gradient, and refresh the bases that are due."""
    if t == 1:  # the first bases have been made of the first gradient
        return
    step = int(as_float(t))
    every = interval(step, c.learn_every)
    for side in _sides(state):
        if learns(side, step, every):
            _follow_(state[f"factor_{side}"], g, side, c.beta2**every)
    if due:
        _refresh_(state, due, c, shared)


def _follow_(covariance: Tensor, g: Tensor, side: int, decay: float) -> None:
    """Let factors follow their gradients, A = decay A + (1 - decay) G G^T."""
    x = g.mT if side else g
    covariance.baddbmm_(x, x.mT, beta=decay, alpha=1 - decay)


def _refresh_(state: dict[str, Tensor], due: list[int], c: _Numbers, shared: SharedWork | None) -> None:
    """Refresh the bases of some blocks; the averages go with them."""
    at_once = _blocks_at_once(state["exp_avg"]) if shared is None else len(due)
    for places in torch.tensor(due, device=state["exp_avg"].device).split(at_once):
        chosen = {name: x[places] for name, x in state.items()}
        for side in _sides(state):
            chosen[f"factor_{side}"].nan_to_num_(0.0, 0.0, 0.0)  # what has overflowed begins again
        for name, x in (chosen | _map(partial(_refreshed, c=c), chosen, shared)).items():
            state[name][places] = x


def _refreshed(blocks: dict[str, Tensor], c: _Numbers) -> dict[str, Tensor]:
    """Return new bases of blocks, and the averages in them."""
    square = blocks["exp_avg_sq"]
    old, new = (blocks.get("basis_0"), blocks.get("basis_1")), {}
    for side in _sides(blocks):
        new[f"basis_{side}"], order = refreshed(blocks[f"factor_{side}"], old[side])
        square = sorted_by(square, order, side)
    mean = rotate(rotate(blocks["exp_avg"], old, back=True), (new.get("basis_0"), new.get("basis_1")))
    if not c.centred:
        square = torch.maximum(square, least_share(c.beta1, c.beta2) * mean * mean)
    return {**new, "exp_avg": mean, "exp_avg_sq": square}


def _made(blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"basis": basis_of(blocks["basis"])}


def _map(
    function: Callable[[dict[str, Tensor]], dict[str, Tensor]], blocks: dict[str, Tensor], shared: SharedWork | None
) -> dict[str, Tensor]:
    """Apply a function to blocks, here or together with other processes."""
    if shared is None:
        return function(blocks)
    bases = [x.shape[-1] for name, x in blocks.items() if "basis" in name]
    return shared.map(function, blocks, cost=sum(size**3 for size in bases))
