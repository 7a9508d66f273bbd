"""What the optimizers share: the parts of torch's contract that do not depend on the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _foreach_supported_types,
    _get_capturable_supported_devices,
    _use_grad_for_differentiable,
)

from adabayes.rates import USUAL_LR

Group = dict[str, Any]
Scalar = float | Tensor

# Named differently in older versions of torch; the old name warns in later ones.
if hasattr(Optimizer, "_accelerator_graph_capture_health_check"):
    _check_graph_capture = Optimizer._accelerator_graph_capture_health_check
else:
    _check_graph_capture = Optimizer._cuda_graph_capture_health_check


class BaseOptimizer(Optimizer):
    """State, groups and checkpoints as torch's own optimizers have them, with two differences.

    Each group keeps the learning rate it was made with as ``base_lr``, so that a schedule is known as the ratio
    ``lr / base_lr``.

    State of bf16 and fp16 parameters is fp32, and stays so through ``load_state_dict``.
    """

    _buffers: ClassVar[Any]  # the state of a parameter beside ``step``
    _betas: ClassVar[int] = 2

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        # A scheduler changes a tensor lr in place, that of the defaults included: so note its value now.
        self._check_group(defaults)
        defaults["base_lr"] = self._base_lr(defaults)
        super().__init__(params, defaults)

    # Groups

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict):
            self._complete_group(param_group)
        super().add_param_group(param_group)

    def _complete_group(self, group: Group) -> None:
        """Check a new group's hyperparameters and work out those that follow from others."""
        given = {**self.defaults, **group}
        self._check_group(given)
        if "base_lr" not in group and "lr" in group:
            group["base_lr"] = self._base_lr(given)

    def _base_lr(self, group: Group) -> float:
        """The learning rate without a schedule; where it starts at 0, Adam's usual one."""
        return as_float(group["lr"]) or USUAL_LR

    def _check_group(self, group: Group) -> None:
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(
                f"Tensor lr must be 1-element, but its shape is {tuple(lr.shape)}. For a learning rate of each "
                "layer, make parameter groups."
            )
        check_range("learning rate", lr)
        check_range("weight_decay value", group["weight_decay"])
        if len(group["betas"]) != self._betas:
            raise ValueError(f"Invalid betas: {group['betas']}. There must be {self._betas}.")
        for i, beta in enumerate(group["betas"]):
            check_range(f"beta parameter at index {i}", beta, below=1.0)
        if group["differentiable"] and group["foreach"]:
            raise RuntimeError(
                "`foreach=True` does not support `differentiable=True`: autograd cannot follow its in-place "
                "arithmetic. Leave `foreach` out, and the single-tensor form is taken."
            )

    # State

    @property
    def _own_state(self) -> dict[Tensor, dict[str, Any]]:
        """What ``state`` is to others."""
        return own_state(self)

    def _buffers_of(self, group: Group) -> tuple[str, ...]:
        return tuple(self._buffers)

    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], steps: list[Tensor], *buffers: list[Tensor]
    ) -> bool:
        """Collect what has a gradient, making state where there is none yet; whether any of it is complex.

        The name and the shape of the arguments matter: torch.compile runs this method instead of tracing it.
        """
        names = self._buffers_of(group)
        has_complex = False
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, but a parameter of shape "
                    f"{tuple(p.shape)} has one of layout {p.grad.layout}. Make the layer with sparse=False, "
                    "or give its parameters to torch.optim.SparseAdam."
                )
            has_complex |= p.is_complex()
            state = self._own_state[p]
            if not state:
                self._init_state(p, state, group)
            params.append(p)
            grads.append(p.grad)
            steps.append(state["step"])
            for name, buffer in zip(names, buffers):
                buffer.append(state[name])
        return has_complex

    def _init_state(self, p: Tensor, state: dict[str, Any], group: Group) -> None:
        # A step on the CPU costs no kernel launch and no synchronisation; graphs can only capture one on the device.
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device=p.device if group["capturable"] else "cpu")
        for name in self._buffers_of(group):
            state[name] = torch.zeros_like(p, dtype=self._state_dtype(p, group), memory_format=torch.preserve_format)

    def _state_dtype(self, p: Tensor, group: Group) -> torch.dtype:
        """State is at least fp32: a change of one part in a thousand is lost in bf16."""
        return torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "base_lr" not in group:
                group["base_lr"] = self._base_lr({"lr": group.get("initial_lr", group["lr"])})
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            for p in group["params"]:
                p_state = self.state.get(p)
                if p_state and not isinstance(p_state["step"], Tensor):
                    p_state["step"] = torch.tensor(
                        float(p_state["step"]),
                        dtype=torch.float32,
                        device=p.device if group["capturable"] else "cpu",
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave. Unlike torch's, this does not round fp32 state to bf16 or fp16."""
        # Optimizer.load_state_dict casts state to the parameter's dtype. So remember the dict as the user's hooks
        # leave it, and put the state back from there before their post hooks see it.
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            self._check_loadable(final)
            loaded.update(final)

        def restore(_: Optimizer) -> None:
            for saved, group in zip(loaded["param_groups"], self.param_groups):
                for i, p in zip(saved["params"], group["params"]):
                    for name, value in loaded["state"].get(i, {}).items():
                        if name != "step" and isinstance(value, Tensor):
                            dtype = self._state_dtype(p, group)
                            self.state[p][name] = value.to(device=p.device, dtype=dtype)

        hooks = (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            needed = ("step", *self._buffers_of({**self.defaults, **group}))
            for i in group["params"]:
                state = state_dict["state"].get(i)
                missing = [name for name in needed if state and name not in state]
                if missing:
                    raise ValueError(
                        f"the state of parameter {i} has {sorted(state)}, but {type(self).__name__} needs {missing} "
                        "as well: this state dict was saved by another optimizer. Start without it, or load it into "
                        "an optimizer of the class that saved it. Nothing was changed."
                    )

    # Steps

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: reevaluates the model and returns the loss; it runs with gradients enabled.
        """
        _check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: Group) -> None:
        raise NotImplementedError


def own_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state that this very object holds."""
    state: dict[Tensor, dict[str, Any]] | None = optimizer.__dict__.get("state")
    if state is None:
        # Lightning's wrappers imitate the class of what they wrap: on this error, Python lets them look in there.
        raise AttributeError(f"this {type(optimizer).__name__} has no state of its own")
    return state


# Checks


def check_range(name: str, value: Any, least: float = 0.0, below: float = float("inf"), hint: str = "") -> None:
    """Raise unless ``least <= value < below``, saying what the value is and what is permitted."""
    if not isinstance(value, (Real, Tensor)):
        raise TypeError(f"Invalid {name}: {value!r} is not a number but a {type(value).__name__}.{hint}")
    number = as_float(value)
    if not least <= number < below:
        upper = "finite" if below == float("inf") else f"below {below:g}"
        raise ValueError(f"Invalid {name}: {number:g}. It must be at least {least:g} and {upper}.{hint}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Invalid {name}: {value!r}. It must be one of {', '.join(map(repr, choices))}.")


def check_call(params: Sequence[Tensor], steps: Sequence[Tensor], capturable: bool) -> None:
    """What torch demands of a call of the functional form, outside torch.compile."""
    if torch.compiler.is_compiling():
        return
    if not all(isinstance(step, Tensor) for step in steps):
        raise RuntimeError("`state_steps` must be a list of singleton tensors, like those of an optimizer's state")
    if capturable:
        supported = _get_capturable_supported_devices()
        for p, step in zip(params, steps):
            if p.device.type != step.device.type or p.device.type not in supported:
                raise AssertionError(
                    f"If capturable=True, params and state_steps must be on supported devices: {supported}; "
                    f"got {p.device.type} and {step.device.type}. Leave capturable out on other devices."
                )


# Pieces of an update


def as_float(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)


def as_scalar(value: Scalar, *, keep_tensor: bool) -> Scalar:
    """A hyperparameter as a number, or as a 0-dim tensor where a graph is being captured or differentiated."""
    if not isinstance(value, Tensor):
        return value
    if keep_tensor or torch.compiler.is_compiling():
        return value.squeeze()
    return value.item()


def in_precision_of(state: Tensor, params: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and gradients to compute with: themselves, or copies where the state's precision is higher."""
    dtype = torch.promote_types(params[0].dtype, state.dtype)
    return (
        params if params[0].dtype == dtype else [p.to(dtype) for p in params],
        grads if grads[0].dtype == state.dtype else [g.to(state.dtype) for g in grads],
    )


def kept(value: Tensor, factor: Scalar) -> Tensor:
    """The value, or a copy that autograd may keep to differentiate by a factor that is a tensor."""
    return value.clone() if isinstance(factor, Tensor) and factor.requires_grad else value


def prefers_foreach(params: Sequence[Tensor], differentiable: bool) -> bool:
    return not differentiable and all(type(p) in _foreach_supported_types for p in params)


def uniform_runs(
    params: list[Tensor], states: list[Tensor], grads: list[Tensor], *others: Sequence[Any]
) -> list[list[Any]]:
    """Split parallel lists into runs that foreach can take at once: of one device, and of one dtype in each list."""
    lists = (params, states, grads, *others)
    if not params:
        return []
    dtypes = [{t.dtype for t in tensors} for tensors in (params, states, grads)]
    if all(len(kinds) == 1 for kinds in dtypes) and len({p.device for p in params}) == 1:
        return [list(lists)]
    runs: dict[Any, list[list[Any]]] = defaultdict(lambda: [[] for _ in lists])
    for row in zip(*lists):
        run = runs[row[0].device, row[0].dtype, row[1].dtype, row[2].dtype]
        for column, item in zip(run, row):
            column.append(item)
    return list(runs.values())


def real_views(*tensors: Tensor) -> list[Tensor]:
    """Complex tensors seen as pairs of reals: each component is a weight of its own."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def local(t: Tensor) -> Tensor:
    """Of a tensor that is sharded over processes, the part that is here."""
    return t.to_local() if hasattr(t, "to_local") else t


def count_step_(steps: list[Tensor]) -> None:
    if not torch.compiler.is_compiling() and steps[0].is_cpu:
        # One wrapped number for all, instead of one each (as in torch.optim).
        torch._foreach_add_(steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)


def step_value(step: Tensor, capturable: bool) -> Scalar:
    """A step count as a number where that costs nothing, else as a tensor."""
    return step if capturable or torch.compiler.is_compiling() else step.item()


def per_step(function: Callable[[Scalar], Any], steps: list[Tensor], capturable: bool) -> list[Any]:
    """What depends on the step count, for each tensor; most have the same count, so each is worked out once."""
    if capturable or torch.compiler.is_compiling():
        return [function(step) for step in steps]
    values = [step.item() for step in steps]
    results = {value: function(value) for value in set(values)}
    return [results[value] for value in values]
