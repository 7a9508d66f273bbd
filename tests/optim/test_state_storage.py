"""The state of one parameter is its own: saving or copying it does not copy that of others."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from adabayes import AdaBayesK

NUM_EQUAL = 48
FORMS: dict[str, dict[str, Any]] = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {}}


@pytest.mark.parametrize("share_bases", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_state_of_one_of_many_equal_matrices_is_saved_and_copied_alone(form: str, share_bases: bool) -> None:
    params = [torch.zeros(16, 8) for _ in range(NUM_EQUAL)]
    optimizer = AdaBayesK(params, block_size=8, refresh=1, share_bases=share_bases, **FORMS[form])
    for seed in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[params[7]]
    own = sum(value.nbytes for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    assert file.tell() < 2 * own + 10_000  # the headers of a file, whatever it holds
    copied = copy.deepcopy(state)
    assert sum(value.untyped_storage().nbytes() for value in copied.values()) == own
