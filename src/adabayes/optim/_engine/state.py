"""The state of parameters: how it is declared, created, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from adabayes._util.checks import check_integer
from adabayes._util.tensors import check_memory, may_be_freed, real_shape
from adabayes.optim._engine import compatibility
from adabayes.optim._engine.memory import with_own_memory

__all__ = ["Entry", "Group", "StatefulOptimizer", "dtype_name", "name_of", "settings_of"]

Group = dict[str, Any]

_OTHER_PARAMETERS = (
    ": the state dict is that of another model, or of the same parameters in another order. Nothing was changed."
)
_MOST_FP32_STEPS = 2**23  # fp32 counts to 2**24; plans of fused steps are used 2**23 times at most


class Entry(NamedTuple):
    """One entry of a parameter's state, which is zero until the first step.

    Args:
        shape: function that computes the entry's shape from the parameter's, where complex numbers count as pairs of
            reals. None: the entry has the shape of the parameter.
        low: whether the entry is kept in the group's ``state_dtype``. If not, it is at least fp32.
    """

    shape: Callable[[Sequence[int]], Sequence[int]] | None = None
    low: bool = True

    def shape_for(self, p: Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter's entry."""
        return tuple(p.shape) if self.shape is None else tuple(self.shape(real_shape(p)))


class StatefulOptimizer(Optimizer):
    """Keeps state and checkpoints as torch's optimizers do, with two differences.

    The state of bf16 and fp16 parameters is fp32, or has the ``state_dtype``, and stays so through ``load_state_dict``.
    State that does not fit the parameters is refused before anything changes.
    """

    STATE: ClassVar[dict[str, Entry]]  # the entries of each parameter's state, apart from its step count

    def _entries(self, group: Group, p: Tensor) -> dict[str, Entry]:
        """Return the entries of a parameter's state; by default those of the class."""
        return self.STATE

    # Creating state

    def has_state(self, param: Tensor) -> bool:
        """Tell whether a parameter has state, that is, whether a step had a gradient for it."""
        return bool(self.state.get(param))

    def state_dtype_of(self, param: Tensor, group: Group) -> torch.dtype:
        """Return the dtype in which averages of a parameter's gradients are kept."""
        wide = _wide(param.dtype)
        if group.get("state_dtype") is None:
            return wide
        if wide != torch.float32:
            raise ValueError(f"state_dtype=torch.bfloat16 is for fp32, bf16 and fp16 parameters, not for {param.dtype}")
        return torch.bfloat16

    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], steps: list[Tensor], *entries: list[Tensor]
    ) -> bool:
        """Collect parameters that have a gradient, create missing state, and return whether any parameter is complex.

        Keep the name and the signature: torch.compile runs this method instead of tracing it.
        """
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
            state = self.state[p]
            if not state:
                self._make_state(p, state, group)
            for name, t in {"parameter": p, "gradient": p.grad, **state}.items():
                if may_be_freed(t):
                    check_memory(name, t)
            if not group["capturable"]:  # a captured graph must not read values
                _widen_step_count_(state)
            params.append(p)
            grads.append(p.grad)
            steps.append(state["step"])
            for name, column in zip(self._entries(group, p), entries):
                if name not in state:
                    raise RuntimeError(
                        f"the state of a parameter of shape {tuple(p.shape)} has {sorted(state)}, but not {name}. Was "
                        "its data replaced by data of another shape? Make a new optimizer, or delete "
                        "optimizer.state[parameter] to start it again."
                    )
                column.append(state[name])
        return has_complex

    def _make_state(self, p: Tensor, state: dict[str, Any], group: Group) -> None:
        low = self.state_dtype_of(p, group)
        made: dict[str, Tensor] = {"step": self._step_count(0.0, p, group)}
        for name, entry in self._entries(group, p).items():
            dtype = low if entry.low else _wide(p.dtype)
            if entry.shape is None:
                made[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            else:
                made[name] = self._new_entry(p, entry.shape_for(p), dtype.to_real())
        state.update(made)

    def _new_entry(self, p: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Create an entry whose shape is not that of its parameter."""
        return torch.zeros(shape, dtype=dtype, device=p.device)

    def _to_storage(self, p: Tensor, value: Tensor) -> Tensor:
        """Convert a loaded entry to this process's storage format."""
        return value

    def _step_count(self, value: float, p: Tensor, group: Group) -> Tensor:
        """Create a step count, with the dtype that torch's optimizers choose."""
        double = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        dtype = torch.float64 if double else torch.float32
        return torch.tensor(value, dtype=dtype, device=self._step_device(p, group))

    def _step_device(self, p: Tensor, group: Group) -> torch.device:
        """Return the device of a parameter's step count.

        On the CPU it needs neither a kernel launch nor a device sync. Graphs need it on the parameter's device.
        """
        return p.device if group["capturable"] else torch.device("cpu")

    # Saving and loading state

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the settings, as torch's optimizers do.

        If entries of state do not have the shapes of their parameters, each saved group lists these shapes as
        ``param_shapes``, so that :meth:`load_state_dict` can compare them.
        """
        state_dict = super().state_dict()
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            entries = (entry for p in group["params"] for entry in self._entries(group, p).values())
            if any(entry.shape is not None for entry in entries):
                saved["param_shapes"] = [list(p.shape) for p in group["params"]]
        return state_dict

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.pop("param_shapes", None)
            group.update(self._complete_loaded(group))
            for p in group["params"]:
                if compatibility.lacks_float_step(self.state.get(p, {})):
                    self.state[p]["step"] = self._step_count(float(self.state[p]["step"]), p, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Unlike torch's, this does not round fp32 state to bf16 or fp16."""
        # Optimizer.load_state_dict casts state to the parameter's dtype. So keep the dict as the user's hooks leave it,
        # and restore the state from there before the user's post hooks run.
        loaded: dict[str, Any] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            self._check_loadable(final)
            loaded.update(final)

        def restore(_: Optimizer) -> None:
            restored: dict[tuple[Tensor, str], Tensor] = {}
            for saved, group in zip(loaded["param_groups"], self.param_groups):
                for i, p in zip(saved["params"], group["params"]):
                    entries = self._entries(group, p)
                    for name, value in loaded["state"].get(i, {}).items():
                        if name != "step" and isinstance(value, Tensor):
                            entry = entries.get(name, Entry())
                            dtype = self.state_dtype_of(p, group) if entry.low else _wide(p.dtype)
                            dtype = dtype if entry.shape is None else dtype.to_real()
                            restored[p, name] = self._to_storage(p, value.to(device=p.device, dtype=dtype))
                        elif name == "step" and isinstance(value, Tensor):  # torch may have put it on another device
                            step = self.state[p][name]
                            self.state[p][name] = step.to(self._step_device(p, group))
            for (p, name), value in zip(restored, with_own_memory(list(restored.values()))):
                self.state[p][name] = value

        hooks = (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _complete_loaded(self, group: Group) -> Group:
        """Return a loaded group with all settings, including those that it lacks."""
        return {**group, **compatibility.missing_settings(group, self.defaults)}

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raise if the state lacks an entry, or does not fit its parameter."""
        saved_sizes, sizes = (
            [len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self.param_groups)
        )
        if saved_sizes != sizes:
            raise ValueError(
                f"this state dict has groups of {saved_sizes} parameters, but the optimizer has groups of {sizes}: "
                "make it with the groups of the optimizer that was saved. Nothing was changed."
            )
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            settings = self._complete_loaded(saved)
            for i, p, saved_shape in zip(saved["params"], group["params"], _param_shapes(saved)):
                if state := state_dict["state"].get(i):
                    name = name_of(i, saved)
                    self._check_entries(name, state, self._entries(settings, p), p)
                    if saved_shape is not None and tuple(saved_shape) != tuple(p.shape):
                        raise ValueError(
                            f"{name} had shape {tuple(saved_shape)} when this state dict was saved, but has shape "
                            f"{tuple(p.shape)} here{_OTHER_PARAMETERS}"
                        )

    def _check_entries(self, name: str, state: dict[str, Any], entries: dict[str, Entry], p: Tensor) -> None:
        """Raise if loaded state lacks an entry, if an entry has a wrong shape, or if the step count is no count."""
        if missing := [entry for entry in ("step", *entries) if entry not in state]:
            raise ValueError(
                f"the state of {name} has {sorted(state)}, but {type(self).__name__} needs {missing} as well: "
                "this state dict was saved by another optimizer. Start without it, or load it into an "
                "optimizer of the class that saved it. Nothing was changed."
            )
        shapes = {"step": (), **{entry: made.shape_for(p) for entry, made in entries.items()}}
        for entry, shape in shapes.items():
            value = state[entry]
            fits = not isinstance(value, Tensor) or tuple(value.shape) == shape
            if not (fits or (entry == "step" and value.numel() == 1)):
                raise ValueError(
                    f"{entry} of {name} has shape {tuple(value.shape)} in this state dict, but for a "
                    f"parameter of shape {tuple(p.shape)} it must be {shape}{_OTHER_PARAMETERS}"
                )
        if not getattr(state["step"], "is_meta", False):
            check_integer(f"step count of {name}", state["step"], least=0, hint=" Nothing was changed.")


def settings_of(arguments: dict[str, Any], exclude: Sequence[str] = ()) -> Group:
    """Return the arguments of a constructor, its ``locals()``, as the default settings of parameter groups."""
    return {name: x for name, x in arguments.items() if name not in ("self", "params", "__class__", *exclude)}


def dtype_name(dtype: Any) -> str | None:
    """Return ``state_dtype`` as a string, so that parameter groups can be written as JSON."""
    if dtype in (None, "bfloat16"):
        return dtype  # type: ignore[no-any-return]
    if dtype == torch.bfloat16:
        return "bfloat16"
    raise ValueError(f"Invalid state_dtype: {dtype!r}. It must be None (fp32, or float64) or torch.bfloat16.")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the least precise dtype for state: bf16 would lose a change of one part in a thousand."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _widen_step_count_(state: dict[str, Any]) -> None:
    """Continue a step count in float64 before it reaches 2**24, where fp32 stands still."""
    step = state["step"]
    if step.dtype == torch.float32 and not step.is_meta and step.item() >= _MOST_FP32_STEPS:
        state["step"] = step.double()


def _param_shapes(saved: Group) -> Iterable[Sequence[int] | None]:
    """Return the shapes of a saved group's parameters; None where they are not known.

    Version 0.2 did not save them. A distributed checkpoint may split a group, and then no longer knows whose they are.
    """
    shapes: list[Sequence[int]] = saved.get("param_shapes", [])
    return shapes if len(shapes) == len(saved["params"]) else repeat(None)


def name_of(i: int, group: Group) -> str:
    """Return how a message refers to a parameter: by its index and, if it has one, its name."""
    if names := group.get("param_names"):
        return f"parameter {i} ({names[group['params'].index(i)]})"
    return f"parameter {i}"
