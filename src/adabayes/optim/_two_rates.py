"""Optimizers with two learning rates: ``lr``, which is Adam's, and ``lr_sgd``, which belongs to it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from adabayes._warn import warn
from adabayes.optim._checks import check_range, explain
from adabayes.optim._engine import EngineOptimizer, Group
from adabayes.optim._state import own_state
from adabayes.optim._tensors import as_float
from adabayes.rates import SETTLED_RATIO, warn_if_papers, warn_if_swapped

__all__ = ["TwoRateOptimizer", "unwrap"]

# Settings of AdamW that mean nothing here, or only say how to compute; all others are taken over
_NOT_OURS = {"eps", "amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class TwoRateOptimizer(EngineOptimizer):
    """Resolves ``lr_sgd`` of each group, returns the learning rate of each weight, and continues from AdamW's state."""

    ROTATES: ClassVar[bool] = False  # whether learning rates are those of directions, not of weights

    # Groups

    def _complete_group(self, group: Group) -> None:
        explain(type(self), [name for name in group if name not in self.defaults])
        super()._complete_group(group)
        if group.get("lr_sgd") is None:
            group["lr_sgd"] = self._default_lr_sgd(group)
        given = {**self.defaults, **group}
        base_lr, lr_sgd, weight_decay = (as_float(given[name]) for name in ("base_lr", "lr_sgd", "weight_decay"))
        warn_if_swapped(base_lr, lr_sgd)
        warn_if_papers(base_lr, weight_decay)

    def _default_lr_sgd(self, group: Group) -> float:
        """Return ``lr_sgd`` of a group that does not give its own: in the defaults' ratio, or in the usual one."""
        given = {**self.defaults, **group}
        if self.defaults["lr_sgd"] is None:
            return float(self._ratio(given) * given["base_lr"])
        return float(self.defaults["lr_sgd"] * (given["base_lr"] / self.defaults["base_lr"]))

    def _ratio(self, group: Group) -> float:
        """Return ``lr_sgd / lr`` of a group where ``lr_sgd`` is not given."""
        return SETTLED_RATIO

    def __setstate__(self, state: dict[str, Any]) -> None:
        lacking = [group for group in state["param_groups"] if group.get("lr_sgd") is None]
        super().__setstate__(state)
        for group in lacking:
            group["lr_sgd"] = self._default_lr_sgd(group)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        lr_sgd = group["lr_sgd"]
        if lr_sgd is not None:
            hint = f" It must be above 0; leave it out for {self._ratio(group):g} * lr. To freeze parameters, set lr=0."
            check_range("lr_sgd", lr_sgd, hint=hint)
            if lr_sgd == 0:
                raise ValueError(f"Invalid lr_sgd: 0.{hint}")
        if group["batch_size"] is not None:
            check_range("batch_size", group["batch_size"], least=1.0)
        elif group["reduction"] == "sum":
            raise ValueError(
                "reduction='sum' needs batch_size, which is None: give the number of examples of a step, over all "
                "devices and accumulated gradients."
            )

    # What each weight gets

    def current_rates(self, group: Group) -> tuple[float, float]:
        """Return the present ``lr`` and ``lr_sgd`` of a group, under its schedule."""
        return as_float(group["lr"]), group["lr_sgd"] * self._schedule(group)

    def mean_factor(self, group: Group) -> float:
        """Return the factor from the given gradients to those of the mean loss, whose gains are learning rates."""
        return 1 / group["batch_size"] if group["reduction"] == "sum" else 1.0

    @torch.no_grad()
    def effective_lr(self, param: Tensor) -> Tensor:
        """Return the present learning rate of each weight of ``param``; ``lr_sgd`` where it has had no gradient yet.

        For complex parameters, each component is a weight, as in ``torch.view_as_real``. For AdaBayesK, it is the
        learning rate of each eigendirection, in the shape in which the matrix is rotated.
        """
        return self.relative_gain(param) * self.current_rates(self._group_of(param))[1]

    @torch.no_grad()
    def relative_gain(self, param: Tensor) -> Tensor:
        """Return :meth:`effective_lr` in units of the present ``lr_sgd``: from 0 to 1, also if the schedule is at 0.

        For AdaBayesK, it is that of each eigendirection.
        """
        group = self._group_of(param)
        if not self.has_state(param):
            raise RuntimeError("this parameter has no state yet: take a step with a gradient first")
        return self._relative_gain(group, own_state(self)[param])

    def mean_square(self, param: Tensor) -> Tensor | None:
        """Return the averaged squared gradient of the mean loss in each direction, if the optimizer keeps it."""
        return None

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def _group_of(self, param: Tensor) -> Group:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                return group
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not one of this optimizer's")

    @staticmethod
    def _schedule(group: Group) -> float:
        schedule: float = as_float(group["lr"]) / group["base_lr"]
        return schedule

    # From AdamW

    @torch.no_grad()
    def from_adamw(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert the state dict of a ``torch.optim.AdamW`` into one of this optimizer, to continue from there.

        Create this optimizer with the groups and the learning rate that AdamW was created with: its peak, if there is a
        schedule. Settings that both have are AdamW's: the present learning rate and what its scheduler stored, weight
        decay, momentum. Settings that only this optimizer has stay as they are. The average of squared gradients is
        what AdaBayes-FP needs; for AdaBayes, the gain is set to its fixed point. AMSGrad's maximum is dropped, and so
        is the penalty of an Adam, which has no equivalent.

        Examples:
            >>> from adabayes import AdaBayes
            >>> w = torch.ones(3)
            >>> adamw = torch.optim.AdamW([w], lr=1e-3)
            >>> w.grad = torch.tensor([0.0, 0.1, 1.0])
            >>> adamw.step()
            >>> optimizer = AdaBayes([w], lr=1e-3, lr_sgd=0.1, batch_size=128)
            >>> optimizer.load_state_dict(optimizer.from_adamw(adamw.state_dict()))
            >>> optimizer.effective_lr(w)
            tensor([0.1000, 0.0095, 0.0010])
        """
        saved = state_dict.get("param_groups", [])
        is_adamw = saved and all("eps" in group and len(group.get("betas", ())) == 2 for group in saved)
        if not is_adamw or not all("exp_avg_sq" in state for state in state_dict["state"].values()):
            raise ValueError(
                f"this is not the state dict of an AdamW: it has {sorted(map(str, state_dict))}, and groups with "
                f"{sorted(saved[0]) if saved else 'nothing'}. Give what AdamW.state_dict() returned."
            )
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state dict has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}: make it with the "
                "same groups as AdamW was made with"
            )
        groups, states = [], {}
        for theirs, ours in zip(saved, self.param_groups):
            betas = tuple(map(as_float, theirs["betas"]))
            taken = {name: value for name, value in theirs.items() if name not in _NOT_OURS}
            if theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"]:
                warn(
                    f"weight_decay={theirs['weight_decay']:g} of this Adam is a penalty, not decoupled: it stays at "
                    f"{ours['weight_decay']:g}, as this optimizer was made"
                )
                del taken["weight_decay"]
            group = {
                **{k: v for k, v in ours.items() if k != "params"},
                **taken,
                "betas": self._betas_from(betas, ours),
            }
            groups.append(group)
            for i in theirs["params"]:
                if state := state_dict["state"].get(i):
                    states[i] = self._warm_state(state, group, betas[1])
        return {"state": states, "param_groups": groups}

    def _betas_from(self, adamw: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """Return the betas with which a group continues from AdamW's."""
        return adamw[: self.BETAS]

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        if any("eps" in group and "lr_sgd" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "this state dict was saved by another optimizer, one with an eps. If that was AdamW, load "
                "optimizer.from_adamw(state_dict) instead to go on from there. Nothing was changed."
            )
        super()._check_loadable(state_dict)

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        """Return the state of a parameter, from AdamW's."""
        raise NotImplementedError


def unwrap(optimizer: Any) -> TwoRateOptimizer:
    """Return the optimizer itself, without the wrappers of accelerate (and so of the Trainer) or Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, TwoRateOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has one learning rate, so its weights have no regimes: "
            "diagnostics take an AdaBayes, AdaBayesFP or AdaBayesK"
        )
    return optimizer
