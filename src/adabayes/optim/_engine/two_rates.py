"""Optimizers with two learning rates: ``lr``, which is Adam's, and ``lr_sgd``, SGD's."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from adabayes._util.checks import check_integer, check_range
from adabayes._util.tensors import as_float
from adabayes._util.warn import warn
from adabayes.optim._engine.compatibility import lacks_lr_sgd
from adabayes.optim._engine.explain import explain
from adabayes.optim._engine.state import Group, name_of
from adabayes.optim._engine.step import EngineOptimizer
from adabayes.rates import FIXED_POINT_RATIO, warn_if_papers, warn_if_swapped

__all__ = ["TwoRateOptimizer", "unwrap"]

# Settings of AdamW that have no meaning here, or only select a form; all others are adopted
_NOT_OURS = {"eps", "amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


class TwoRateOptimizer(EngineOptimizer):
    """Resolves ``lr_sgd`` of each group, reports the learning rate of each weight, and continues from AdamW's state."""

    ROTATES: ClassVar[bool] = False  # whether learning rates belong to eigendirections instead of weights

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
        """Return the ``lr_sgd`` of a group without its own: by the ratio of the defaults, or the usual ratio."""
        given = {**self.defaults, **group}
        if self.defaults["lr_sgd"] is None:
            return float(self._ratio(given) * given["base_lr"])
        return float(self.defaults["lr_sgd"] * (given["base_lr"] / self.defaults["base_lr"]))

    def _ratio(self, group: Group) -> float:
        """Return the default of ``lr_sgd / lr``."""
        return FIXED_POINT_RATIO

    def __setstate__(self, state: dict[str, Any]) -> None:
        lacking = [group for group in state["param_groups"] if lacks_lr_sgd(group)]
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

    # The learning rate of each weight

    def current_rates(self, group: Group, param: Tensor | None = None) -> tuple[float, float]:
        """Return the present ``lr`` and ``lr_sgd`` of a group, which follow its schedule.

        Args:
            group: the parameter group.
            param: return the rates of this parameter, which are ``matrix_scale`` times as large if AdaBayes-K rotates
                it. None: those of a parameter that is not rotated.
        """
        scale = 1.0 if param is None else self._scale(group, param)
        return scale * as_float(group["lr"]), scale * group["lr_sgd"] * self._schedule(group)

    def _scale(self, group: Group, param: Tensor) -> float:
        """Return how many times as large as in the group both learning rates of a parameter are."""
        return 1.0

    def mean_factor(self, group: Group) -> float:
        """Return the factor that converts gradients to those of the mean loss, whose gains are learning rates."""
        return 1 / group["batch_size"] if group["reduction"] == "sum" else 1.0

    @torch.no_grad()
    def effective_lr(self, param: Tensor) -> Tensor:
        """Return the present learning rate of each weight of ``param``; the highest for weights without a gradient yet.

        For complex parameters, each component is a weight, as in ``torch.view_as_real``. For AdaBayesK, these are the
        learning rates of eigendirections, including ``matrix_scale``, in the shape of the stack of blocks.
        """
        return self.relative_gain(param) * self.current_rates(self._group_of(param), param)[1]

    @torch.no_grad()
    def relative_gain(self, param: Tensor) -> Tensor:
        """Return :meth:`effective_lr` in units of the highest possible one: from 0 to 1, even if the schedule is at 0.

        For AdaBayesK, these are the gains of eigendirections.
        """
        group = self._group_of(param)
        if not self.has_state(param):
            raise RuntimeError("this parameter has no state yet: take a step with a gradient first")
        return self._relative_gain(group, self.state[param])

    def mean_square(self, param: Tensor) -> Tensor | None:
        """Return the averaged squared gradient of the mean loss, if the optimizer keeps it."""
        return None

    def _relative_gain(self, group: Group, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def _group_of(self, param: Tensor) -> Group:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                return group
        raise ValueError(f"a parameter of shape {tuple(param.shape)} does not belong to this optimizer")

    @staticmethod
    def _schedule(group: Group) -> float:
        schedule: float = as_float(group["lr"]) / group["base_lr"]
        return schedule

    # From AdamW

    @torch.no_grad()
    def from_adamw(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert the state dict of a ``torch.optim.AdamW`` into one of this optimizer, to continue from there.

        Create this optimizer with the groups and the learning rate that AdamW was created with: the peak, if there is a
        schedule. Settings that both optimizers have are copied from AdamW: the present learning rate, the scheduler's
        entries, weight decay, momentum. Settings that only this optimizer has are kept. AdaBayes-FP uses AdamW's
        average of squared gradients; AdaBayes sets its gain to the fixed point; AdaBayes-K treats AdamW's averages
        of a matrix as its first gradient, and counts steps from there. AMSGrad's maximum is dropped, and so is
        the L2 penalty of Adam, which has no equivalent here.

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
        if not (saved and all("eps" in group and len(group.get("betas", ())) == 2 for group in saved)):
            raise ValueError(
                f"this is not the state dict of an AdamW: it has {sorted(map(str, state_dict))}, and groups with "
                f"{sorted(saved[0]) if saved else 'nothing'}. Give what AdamW.state_dict() returned."
            )
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the state dict has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}: make it with the "
                "same groups as AdamW"
            )
        groups, states = [], {}
        for theirs, ours in zip(saved, self.param_groups):
            betas = tuple(map(as_float, theirs["betas"]))
            adopted = {name: value for name, value in theirs.items() if name not in _NOT_OURS}
            if theirs.get("decoupled_weight_decay") is False and theirs["weight_decay"]:
                warn(
                    f"weight_decay={theirs['weight_decay']:g} of this Adam is a penalty, not decoupled decay: "
                    f"weight_decay stays at {ours['weight_decay']:g}, the value of this optimizer"
                )
                del adopted["weight_decay"]
            group = {
                **{k: v for k, v in ours.items() if k != "params"},
                **adopted,
                "betas": self._betas_from(betas, ours),
            }
            groups.append(group)
            for i, p in zip(theirs["params"], ours["params"]):
                if state := state_dict["state"].get(i):
                    _check_adamw_state(name_of(i, theirs), state, p)
                    states[i] = self._warm_state(state, group, betas[1])
        return {"state": states, "param_groups": groups}

    def _betas_from(self, adamw: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """Return the betas of a group that continues from AdamW."""
        return adamw[: self.BETAS]

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        if any("eps" in group and "lr_sgd" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "this state dict was saved by another optimizer, one with an eps. If that was AdamW, load "
                "optimizer.from_adamw(state_dict) instead to continue from it. Nothing was changed."
            )
        super()._check_loadable(state_dict)

    def _warm_state(self, adamw: dict[str, Any], group: Group, beta2: float) -> dict[str, Any]:
        """Return a parameter's state, converted from AdamW's."""
        raise NotImplementedError


def _check_adamw_state(name: str, state: dict[str, Any], p: Tensor) -> None:
    """Raise if this is not AdamW's state of a parameter."""
    if missing := [entry for entry in ("step", "exp_avg", "exp_avg_sq") if entry not in state]:
        raise ValueError(
            f"this is not the state dict of an AdamW: the state of {name} has {sorted(state)}, but not {missing}. Give "
            "what AdamW.state_dict() returned."
        )
    check_integer(f"step count of {name}", state["step"], least=0)
    for entry in ("exp_avg", "exp_avg_sq"):
        if state[entry].shape != p.shape:
            raise ValueError(
                f"{entry} of {name} has shape {tuple(state[entry].shape)} in this state dict, but this optimizer's "
                f"parameter has shape {tuple(p.shape)}: AdamW had another model, or the same parameters in another "
                "order."
            )


def unwrap(optimizer: Any) -> TwoRateOptimizer:
    """Return the optimizer inside the wrappers of accelerate (which the HF Trainer uses) or Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, TwoRateOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} has one learning rate, so its weights have no regimes: "
            "diagnostics take an optimizer with two, such as AdaBayesK"
        )
    return optimizer
