"""The seam between the engine and an optimizer: a new one, with state of its own kind, in a few lines.

It passes the whole contract, as one of ``MAKERS`` in conftest.py.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adabayes import AdaBayes, AdaBayesFP, AdaBayesK, AdaBound
from adabayes.optim import adabayes as module
from adabayes.optim import adabayes_k
from adabayes.optim._engine.batch import Batch
from adabayes.optim.adabayes_fp import adabayes_fp_rule
from adabayes.optim.adabayes_k import adabayes_k_rule
from tests.support.whitened import Whitened


@pytest.mark.parametrize("foreach", [False, True])
def test_it_computes_what_it_says(foreach: bool) -> None:
    """Against the formula, written out."""
    torch.manual_seed(0)
    w = torch.randn(3, 4, dtype=torch.float64)
    expected, m, cov = w.clone(), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    optimizer = Whitened([w], lr=0.1, weight_decay=0.1, foreach=foreach)
    for t in range(1, 6):
        w.grad = g = torch.randn(3, 4, dtype=torch.float64)
        optimizer.step()
        m, cov = 0.9 * m + 0.1 * g, 0.99 * cov + 0.01 * g @ g.T
        whitening = torch.linalg.inv(cov / (1 - 0.99**t) + 1e-3 * torch.eye(3, dtype=torch.float64))
        expected = (1 - 0.1 * 0.1) * expected - 0.1 * whitening @ m / (1 - 0.9**t)
    torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)
    assert {name: tuple(entry.shape) for name, entry in optimizer.state[w].items()} == {
        "step": (),
        "exp_avg": (3, 4),
        "covariance": (3, 3),
    }


def test_what_is_not_kept_low_stays_in_fp32() -> None:
    w = torch.ones(3, 4, dtype=torch.bfloat16)
    optimizer = Whitened([w], state_dtype=torch.bfloat16)
    w.grad = torch.ones_like(w)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    dtypes = {name: entry.dtype for name, entry in optimizer.state[w].items()}
    assert dtypes == {"step": torch.float32, "exp_avg": torch.bfloat16, "covariance": torch.float32}


DIRECTIONS = [cls.direction for cls in (AdaBayes, AdaBayesFP, AdaBayesK, AdaBound, Whitened)]


@pytest.mark.parametrize("function", [*DIRECTIONS, adabayes_fp_rule, adabayes_k_rule], ids=lambda f: f.__qualname__)
def test_rules_have_at_most_fifteen_lines(function: Callable[..., Any]) -> None:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    statements = definition.body[1:] if ast.get_docstring(definition) else definition.body
    assert statements[-1].end_lineno is not None
    assert statements[-1].end_lineno - statements[0].lineno + 1 <= 15


def test_the_rule_of_adabayes_k_comes_first_in_its_file() -> None:
    tree = ast.parse(inspect.getsource(adabayes_k))
    first = next(node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    assert first.name == "adabayes_k_rule"


def test_modules_have_the_names_of_their_files() -> None:
    assert inspect.ismodule(module)
    assert module.AdaBayes is AdaBayes


def test_a_batch_is_changed_in_place_or_by_new_tensors() -> None:
    for in_place in (False, True):
        tensors = [torch.ones(2), torch.ones(3)]
        batch = Batch(tensors, in_place)
        batch.mul_(3.0).add_(Batch([torch.ones(2), torch.zeros(3)], in_place), alpha=2.0)
        assert [t.tolist() for t in batch.tensors] == [[5.0, 5.0], [3.0, 3.0, 3.0]]
        assert all((a is b) == in_place for a, b in zip(batch.tensors, tensors))
        other: Any = batch.add(torch.tensor([1.0, 2.0])) if in_place else batch.add(1.0)
        assert other.tensors[0].tolist() == [6.0, 6.0]
        assert batch.tensors[0].tolist() == [5.0, 5.0]


def test_zeros_are_found_among_many_tensors() -> None:
    tensors = [torch.ones(3), torch.zeros(2), torch.empty(0), torch.tensor([1.0, 0.0]), torch.tensor([float("nan")])]
    assert Batch(tensors, True).find_zeros(may_sync=True) == [1, 3, 4]
    assert Batch(tensors, True).find_zeros(may_sync=False) == [0, 1, 2, 3, 4]
    assert Batch([torch.empty(0)], True).find_zeros(may_sync=True) == []
