"""Launches the CPU kernels."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from adabayes._util.tensors import as_float
from adabayes.kernels.coefficients import Rule, StepOptions
from adabayes.kernels.cpu import library
from adabayes.kernels.launch import Operands

__all__ = ["CPULaunch"]


class CPULaunch:
    """Implements :class:`adabayes.kernels.launch.Launch` for the CPU."""

    def __init__(self, rule: Rule, operands: Operands) -> None:
        self._rule = rule
        self._num_tensors = len(operands.params)
        dtypes = {"param_type": operands.params[0].dtype, "state_type": operands.exp_avgs[0].dtype}
        self._types = {name: library.DTYPES[dtype] for name, dtype in dtypes.items()}
        columns: dict[str, Iterable[int]] = {
            "params": map(Tensor.data_ptr, operands.params),
            "exp_avgs": map(Tensor.data_ptr, operands.exp_avgs),
            "second_states": map(Tensor.data_ptr, operands.second_states),
            "numels": map(Tensor.numel, operands.params),
            "indices": operands.indices,
        }
        self._columns = {name: array("q", column) for name, column in columns.items()}
        self._counter = None if operands.steps is None else library.StepCounter(operands.steps)

    def take_step(self, grads: Sequence[int], coefficients: Any, options: StepOptions) -> None:
        """Count a step, update the state, and move the parameters."""
        if options.found_inf is not None and options.found_inf.item():
            return
        assert self._counter is not None
        self._launch(grads, coefficients, self._counter.count(), options)

    def compute_step(self, grads: Sequence[int], coefficients: Any, t: float) -> None:
        """Update the state, and write the step to the memory of the parameters."""
        self._launch(grads, coefficients, array("d", [t]) * self._num_tensors, StepOptions(), returns_step=True)

    def _launch(
        self,
        grads: Sequence[int],
        coefficients: Any,
        counts: array[float],
        options: StepOptions,
        returns_step: bool = False,
    ) -> None:
        rows = {t: row for row, t in enumerate(dict.fromkeys(counts))}  # tensors with equal counts share coefficients
        scalars = {name: as_float(x) for name, x in coefficients._asdict().items() if isinstance(x, Tensor)}
        coefficients = coefficients._replace(**scalars)  # so that coefficients are derived in float64
        table = array("d")
        for t in rows:
            values = zip(self._rule.coefficients, self._rule.derive(coefficients, t, options))
            chosen = zip(self._rule.options, self._rule.chosen_options(coefficients))
            table.extend(
                library.order_coefficients(self._rule.name, {name: as_float(x) for name, x in (*values, *chosen)})
            )
        columns: dict[str, array[Any]] = {
            **self._columns,
            "grads": array("q", grads),
            "counts": counts,
            "rows": array("q", map(rows.__getitem__, counts) if len(rows) > 1 else bytes(8 * self._num_tensors)),
            "coefficients": table,
        }
        pointers = {name: column.buffer_info()[0] for name, column in columns.items()}
        tensors = library.Tensors(
            num_tensors=self._num_tensors,
            threads=torch.get_num_threads(),
            returns_step=returns_step,
            round_params=options.round_params,
            seed=options.seed,
            **self._types,
            **pointers,
        )
        library.call_kernel(self._rule.name, tensors)
