"""AdaBayes-K: the filter for matrices, which moves between SGD and the full-matrix root of SOAP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from adabayes._blocks.blocks import Blocks, cut, to_blocks
from adabayes._blocks.schedule import due_bases, interval
from adabayes._util.averages import bias_correction
from adabayes._util.checks import check_range
from adabayes._util.tensors import Scalar, as_float, full, local, real_shape, real_view
from adabayes.eigenbasis import carry_over, limit, rotate
from adabayes.kernels.coefficients import ADABAYES_FP
from adabayes.optim._engine.batch import Batch, Step
from adabayes.optim._engine.explain import explain, explains_unknown
from adabayes.optim._engine.fixed_point import FixedPointOptimizer, crossover
from adabayes.optim._engine.state import Entry, Group, settings_of
from adabayes.optim._engine.step import Columns
from adabayes.optim._matrix.fused import FusedMatrixSteps
from adabayes.optim._matrix.layout import (
    Subgroups,
    blocks_of,
    check_integers,
    check_state,
    entries_of,
    layout_of,
    split_by_kind,
)
from adabayes.optim._matrix.refresh import MatrixState, initialize_bases_, learn_factors_, refresh_bases_
from adabayes.optim._matrix.replicated import Ranks, Replicas
from adabayes.optim._matrix.sharded import Owners, ShardedStack, is_sharded, shard_like
from adabayes.optim._matrix.stack import LocalStack, StackedState
from adabayes.optim.adabayes_fp import adabayes_fp_steps
from adabayes.rates import MATRIX_SCALE

__all__ = ["AdaBayesK", "adabayes_k_rule"]


def adabayes_k_rule(
    G: Tensor, state: MatrixState, coefficients: Coefficients, t: int, due: tuple[list[int], list[int]], ranks: Ranks
) -> Tensor:
    r"""Update the state of a stack of matrices and return their step, :math:`\text{lr}\,Q_A U' Q_C^T`.

    .. math::
        \begin{aligned}
        G' &= Q_A^T G Q_C \\
        M &\leftarrow \beta_1 M + (1 - \beta_1) G', \qquad V \leftarrow \beta_2 V + (1 - \beta_2) G'^2, \qquad
            U' = \frac{\hat M}{\epsilon/2 + \sqrt{\epsilon^2/4 + \hat V}} \\
        A &\leftarrow \beta_2 A + (1 - \beta_2) G G^T, \qquad C \leftarrow \beta_2 C + (1 - \beta_2) G^T G \\
        Q_A &\leftarrow \text{qr}(A Q_A), \qquad Q_C \leftarrow \text{qr}(C Q_C)
        \end{aligned}

    Hats denote debiased averages, :math:`\hat M = M / (1 - \beta_1^t)`. At the first step, :math:`Q_A` and :math:`Q_C`
    are the eigenvectors of :math:`A` and :math:`C`. With ``cautious``, :math:`U' = 0` where :math:`M` and :math:`G'`
    disagree in sign. With ``centred``, :math:`V` averages :math:`(G' - M)^2`, with the old :math:`M`. Later, the
    factors learn every ``learn_every`` steps, alternating, with :math:`\beta_2` to that power, and the bases of due
    matrices are refreshed: :math:`M` is rotated into the new bases, and :math:`V` is reordered and raised to its lower
    bound.

    Args:
        G: the gradients, which are not changed.
        state: the state, which is updated in place.
        coefficients: the coefficients of this step.
        t: the step count, from 1.
        due: the indices of the left and of the right bases that are refreshed.
        ranks: the ranks that split the work on bases.
    """
    G = limit(G)
    if t == 1:
        initialize_bases_(state, G, coefficients.beta2, ranks)
    bases = state.bases_of_matrices()
    (update,) = adabayes_fp_steps([rotate(G, bases)], [state.M], [state.V], coefficients, t, coefficients.fused)
    step: Tensor = rotate(update, bases, back=True)
    if t > 1:
        learn_factors_(state, G, coefficients, t)
        refresh_bases_(state, coefficients, due, ranks)
    return step


class Coefficients(NamedTuple):
    """The settings of one step."""

    lr: Scalar  # for matrices, including matrix_scale
    beta1: float
    beta2: float
    eps: float  # lr / lr_sgd, in the units of the given gradients
    cautious: bool
    centred: bool
    learn_every: int
    refresh: int
    fused: bool | None
    layout: tuple[int | tuple[int, int], int, int, bool]  # how parameters are cut into blocks


class AdaBayesK(FixedPointOptimizer):
    r"""AdaBayes-K: the paper's filter for a weight matrix, in the eigenbasis of its gradients.

    The optimum of a matrix drifts in no preferred direction, and the gradient's Fisher information :math:`H` is a
    matrix. The filter's fixed point is then that of AdaBayes-FP with a matrix root,

    .. math:: P^{-1} = \frac{I}{2\,\text{lr_sgd}}
              + \left(\frac{I}{4\,\text{lr_sgd}^2} + \frac{H}{\text{lr}^2}\right)^{1/2}

    and in the eigenbasis of :math:`H`, approximated by a Kronecker product, it is AdaBayes-FP for each coordinate:

    .. math::
        \begin{aligned}
        G' &= Q_A^T G_t Q_C \\
        M_t &= \beta_1 M_{t-1} + (1 - \beta_1) G', \qquad V_t = \beta_2 V_{t-1} + (1 - \beta_2) G'^2 \\
        U' &= \frac{M_t / (1 - \beta_1^t)}{\epsilon/2 + \sqrt{\epsilon^2/4 + V_t / (1 - \beta_2^t)}}, \qquad
            \epsilon = \text{lr} / \text{lr_sgd} \\
        W_t &= (1 - \text{lr} \lambda) W_{t-1} - s\, \text{lr}\, Q_A U' Q_C^T \\
        A_t &= \beta_2 A_{t-1} + (1 - \beta_2) G_t G_t^T, \qquad C_t = \beta_2 C_{t-1} + (1 - \beta_2) G_t^T G_t
        \end{aligned}

    :math:`s` is ``matrix_scale``. :math:`A` and :math:`C` learn every ``learn_every`` steps, alternating, with
    :math:`\beta_2` to that power. Every ``refresh`` steps, :math:`Q_A \leftarrow \text{qr}(A Q_A)`, and :math:`Q_C`
    likewise; :math:`M` is rotated into the new bases, and :math:`V` is reordered. The blocks of a matrix are refreshed
    at different steps. In the beginning, :math:`A` and :math:`C` average few gradients, so both intervals are shorter:
    an eighth of the steps so far, rounded down to a power of two. After a refresh, :math:`V` is raised to the least
    value that is possible with the new :math:`M` (:func:`adabayes.eigenbasis.least_ratio`), except with ``centred``.

    The limit of an infinite ``lr_sgd`` is the full-matrix root-mean-square normaliser: SOAP, if ``cautious`` is False,
    ``learn_every`` is 1, and :math:`V` stays above its lower bound. The limit of an infinite ``lr`` is SGD. In
    directions without earlier gradients, SOAP would divide noise by noise, so it skips its first step. Here ``lr_sgd``
    bounds the gain, and no step is skipped.

    Use it for all parameters of a model, in place of AdamW. Matrices and convolutions, seen as out x rest, are cut into
    blocks of at most ``block_size`` on each side, and each block is rotated by itself. A side above ``max_size``, such
    as a vocabulary, is neither cut nor rotated. Vectors and scalars get AdaBayes-FP.

    Args:
        params: parameters, named parameters or parameter groups, as for any optimizer of torch.
        lr: AdamW's learning rate. Parameters that are rotated move ``matrix_scale`` times as far. A scheduler, or a
            group with its own ``lr``, scales ``lr_sgd`` with it.
        lr_sgd: the highest learning rate that a direction can get, in units of the averaged gradient, and before it is
            multiplied by ``matrix_scale``. None: 1e5 ``lr``.
        betas: decay of the averaged gradient, and of its averaged square and covariances.
        weight_decay: decoupled, in AdamW's convention: each step multiplies weights by ``1 - lr * weight_decay``.
        matrix_scale: factor of both learning rates of parameters that are rotated, but not of their weight decay. With
            the default, the learning rate of AdamW can stay. Version 0.2 had no such factor: its learning rates are
            those of ``matrix_scale=1``.
        learn_every: steps between two gradients that a covariance learns from; fewer in the beginning. With 1, it
            learns from all gradients, as in SOAP.
        refresh: steps between two refreshes of a basis; fewer in the beginning.
        block_size: largest side of a block. It bounds the cost per weight: 6 floats of state, where AdamW has 2, and
            about 10 ``block_size`` operations per step, if the block is full. The width of a layer is a good choice. A
            pair gives the largest height and the largest width.
        max_size: largest side that is rotated.
        batch_dims: number of leading dimensions that count matrices: 1 for experts that are stacked as
            ``E x out x in``, which are then rotated separately. :func:`adabayes.param_groups` finds them.
        share_bases: whether all blocks in a row share the basis of their left side, and all blocks in a column that of
            their right side. A matrix of R x C blocks then has R + C bases instead of 2 R C, which saves memory and
            refreshes. It does not work with sharded parameters.
        cautious: move only in directions whose averaged gradient has the sign of the newest one.
        centred: average :math:`(G' - M_{t-1})^2` instead of :math:`G'^2`. Where gradients have no noise, this average
            vanishes, and steps are not bounded: do not use it with full batches.
        reduction: ``"mean"`` or ``"sum"``: how the loss was reduced over the minibatch.
        batch_size: needed with ``reduction="sum"``; otherwise it cancels.
        maximize: ascend instead of descending.
        foreach: work on all blocks of one size at once. None: whenever that is possible.
        fused: use a kernel: on the CPU for the whole step, on a GPU for element-wise operations. None: on the CPU, if
            it was built.
        state_dtype: ``torch.bfloat16`` halves the two averages, with stochastic rounding; factors and bases stay fp32.
        stochastic_rounding: round bf16 parameters stochastically, so that small steps are not lost.
        seed: seed of the rounding.
        process_group: ranks that have the same parameters and gradients, as under DDP, and split the refreshes among
            them: see :meth:`share_refreshes`. Sharded parameters (FSDP2) do not need it.

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

    KERNEL = ADABAYES_FP
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
        matrix_scale: float = MATRIX_SCALE,
        learn_every: int = 2,
        refresh: int = 10,
        block_size: int | tuple[int, int] = 128,
        max_size: int = 16384,
        batch_dims: int = 0,
        share_bases: bool = False,
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
        defaults = settings_of(locals(), exclude=("process_group",))
        self._owners = Owners()
        self._subgroups_of = Subgroups(self._forget_plans)
        self._fused_matrices = FusedMatrixSteps()
        self.share_refreshes(process_group)
        super().__init__(params, defaults)

    def share_refreshes(self, process_group: Any) -> None:
        """Split the refreshes of bases across ranks that have the same parameters and gradients, as under DDP.

        Each rank refreshes some of the bases and sends them to the others, so all ranks end with identical bits. All
        ranks of the group must take the same steps from then on. None: each rank refreshes all bases.
        """
        self._ranks = Ranks() if process_group is None else Replicas(process_group)

    def direction(self, gradient: Batch, state: dict[str, Batch], coefficients: Coefficients, t: Scalar) -> Step:
        step_count = int(as_float(t))
        blocks = [cut(real_shape(p), *coefficients.layout) for p in gradient.params]
        if blocks[0] is None:  # not rotated
            averages = state["exp_avg"].tensors, state["exp_avg_sq"].tensors
            steps = adabayes_fp_steps(gradient.tensors, *averages, coefficients, step_count, coefficients.fused)
            return Step(Batch(steps, in_place=True))
        stack = self._stack(gradient.params, [b for b in blocks if b])
        ranks = self._ranks if isinstance(stack, LocalStack) else Ranks()  # a sharded block has one owner
        G = stack.to_blocks(gradient.tensors)
        if len(G):
            entries = {name: batch.tensors for name, batch in state.items()}
            G = _step_stack(G, entries, stack, coefficients, step_count, ranks)
        return Step(Batch(stack.from_blocks(G, [x.shape for x in gradient.tensors]), in_place=True))

    def coefficients(self, group: Group, lr: Scalar) -> Coefficients:
        beta1, beta2 = group["betas"]
        return Coefficients(
            lr=lr * group["matrix_scale"] if _is_rotated(group) else lr,
            beta1=beta1,
            beta2=beta2,
            eps=crossover(group),
            cautious=group["cautious"],
            centred=group["centred"],
            learn_every=group["learn_every"],
            refresh=group["refresh"],
            fused=group["fused"],
            layout=layout_of(group),
        )

    def _stack(self, params: Sequence[Tensor], blocks: Sequence[Blocks]) -> LocalStack | ShardedStack:
        """Return how the blocks of these parameters are stacked: here, or at their owners if they are sharded."""
        return self._appointed_owners(params[0]).stack(params, blocks) if is_sharded(params[0]) else LocalStack(blocks)

    # Steps are not compiled: refreshes depend on the step count, and the CPU's kernel takes the step in one call

    @_disable_dynamo
    def _subgroups(self, group: Group) -> list[Group]:
        return self._subgroups_of(group)

    def _forget_plans(self) -> None:
        self._fused.forget_plans()
        self._fused_matrices.forget_plans()

    @_disable_dynamo
    def _step_fused(self, group: Group) -> bool:
        if not _is_rotated(group):
            return super()._step_fused(group)
        if self._ranks.communicates:
            return False
        # Where no kernel can serve a matrix, torch's operations take the step, also with fused=True and a GradScaler
        with torch._C._DisableAutocast():  # for the first bases
            return self._fused_matrices.step(self, group)

    def _split(self, group: Group, coefficients: Coefficients) -> list[Group]:
        check_state(self.state, group)
        return [{**group, "params": params} for params in split_by_kind(group)]

    @_disable_dynamo
    def _step_group(self, group: Group) -> None:
        with torch._C._DisableAutocast():  # matrix products keep the precision of the state
            super()._step_group(group)

    # Sharded parameters

    def _appointed_owners(self, p: Tensor) -> Owners:
        """Return the owners of all sharded matrices; appoint them together when the first one is needed."""
        if p not in self._owners:
            params = [(q, blocks_of(q, group)) for group in self.param_groups for q in group["params"] if is_sharded(q)]
            self._owners.appoint(params)
        return self._owners

    def _localize(
        self, params: list[Tensor], grads: list[Tensor], entries: Columns
    ) -> tuple[list[Tensor], list[Tensor], Columns]:
        if not is_sharded(params[0]):
            return params, grads, entries
        shards = [shard_like(p, gradient) for p, gradient in zip(params, grads)]
        return list(map(local, params)), shards, {name: list(map(local, x)) for name, x in entries.items()}

    # State

    def _step_device(self, p: Tensor, group: Group) -> torch.device:
        """Return the CPU: the program decides by the step count which bases are refreshed."""
        return torch.device("cpu")

    def _entries(self, group: Group, p: Tensor) -> dict[str, Entry]:
        return entries_of(blocks_of(p, group))

    def _new_entry(self, p: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (
            self._appointed_owners(p).new_entry(p, shape, dtype)
            if is_sharded(p)
            else super()._new_entry(p, shape, dtype)
        )

    def _to_storage(self, p: Tensor, value: Tensor) -> Tensor:
        return self._appointed_owners(p).to_storage(p, value) if is_sharded(p) else value

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_owners" not in self.__dict__:  # in a copy, but not when a state dict is loaded
            self._owners = Owners()
            self.share_refreshes(None)
        self._subgroups_of = Subgroups(self._forget_plans)
        self._fused_matrices = FusedMatrixSteps()
        super().__setstate__(state)

    def _complete_group(self, group: Group) -> None:
        super()._complete_group(group)
        group.update(check_integers({**self.defaults, **group}))

    def _complete_loaded(self, group: Group) -> Group:
        group = super()._complete_loaded(group)
        return {**group, **check_integers(group)}

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        explain(AdaBayesK, [name for name in ("capturable", "differentiable") if group[name]])
        group.update(check_integers(group))
        check_range("matrix_scale", group["matrix_scale"])

    # Learning rates

    def _scale(self, group: Group, param: Tensor) -> float:
        return 1.0 if blocks_of(param, group) is None else float(group["matrix_scale"])

    # Migration

    def _betas_from(self, adamw: tuple[float, ...], group: Group) -> tuple[float, ...]:
        return (adamw[0], group["betas"][1])

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        """Use AdamW's averages as the first gradient of a matrix and its square; vectors continue from AdamW's state.

        Bases, and squares in them, are then learned as fast as in the beginning.
        """
        step, (beta1, own_beta2) = as_float(adamw["step"]), group["betas"]
        wide = torch.promote_types(adamw["exp_avg"].dtype.to_real(), torch.float32)
        mean, square = (real_view(adamw[name]).to(wide) for name in ("exp_avg", "exp_avg_sq"))
        square = square / (bias_correction(beta2, step) or 1.0)
        blocks = blocks_of(adamw["exp_avg"], group)
        if blocks is None:
            square = square * bias_correction(own_beta2, step)
            return {"step": adamw["step"], "exp_avg": mean, "exp_avg_sq": square}
        mean = mean / (bias_correction(beta1, step) or 1.0)
        mean, square = (to_blocks(full(x), blocks) for x in (mean, square))
        state = {name: mean.new_zeros(entry.shape_for(adamw["exp_avg"])) for name, entry in entries_of(blocks).items()}
        stack = StackedState({name: [x] for name, x in state.items()}, LocalStack([blocks]).owners(mean.device))
        initialize_bases_(stack.matrices, mean, own_beta2, Ranks())
        bases = stack.matrices.bases_of_matrices()
        state["exp_avg"] = (1 - beta1) * rotate(mean, bases)
        state["exp_avg_sq"] = (1 - own_beta2) * carry_over(square, bases)
        state["step"] = torch.full_like(torch.as_tensor(adamw["step"], dtype=torch.float32), min(step, 1.0))
        return state


def _step_stack(
    G: Tensor, entries: Columns, stack: LocalStack | ShardedStack, coefficients: Coefficients, t: int, ranks: Ranks
) -> Tensor:
    """Update the state of stacked blocks, given their gradients, and return their step."""
    every = interval(t, coefficients.refresh)
    left, right = (due_bases(t, every, ranges) for ranges in stack.ranges)
    state = StackedState(entries, stack.owners(G.device))
    step = adabayes_k_rule(G, state.matrices, coefficients, t, (left, right), ranks)
    state.copy_back_()
    return step


def _is_rotated(subgroup: Group) -> bool:
    """Tell whether the parameters of a subgroup are rotated: all of them are, or none."""
    return blocks_of(subgroup["params"][0], subgroup) is not None
