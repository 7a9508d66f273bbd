"""Which matrices AdaBayes-K's kernel serves, and state that it must not touch."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from adabayes import AdaBayesK
from adabayes.kernels.cpu import library, matrix
from tests.kernels.common import needs_kernels


@needs_kernels
@pytest.mark.parametrize("odd", [torch.zeros(300, 300), torch.zeros(6, 4, dtype=torch.bfloat16)], ids=["large", "bf16"])
def test_a_matrix_without_a_kernel_does_not_keep_others_from_theirs(
    odd: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    call = library.call_matrix_kernel

    def counting(matrices: matrix._Matrices) -> None:
        served.append(matrices.num_clusters)
        call(matrices)

    monkeypatch.setattr(library, "call_matrix_kernel", counting)
    params = [torch.zeros(8, 5), odd.clone(), torch.zeros(7, 3)]
    optimizer = AdaBayesK(params, block_size=512)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
    assert served == [2] * 3
    assert all(p.any() for p in params)


def step(optimizer: AdaBayesK, p: torch.Tensor) -> None:
    p.grad = torch.randn(p.shape).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("change", [{"share_bases": True}, {"block_size": 4}, {"max_size": 20}], ids=str)
def test_settings_that_change_the_state_are_refused(change: dict[str, int], fused: bool | None) -> None:
    p = torch.zeros(24, 16)
    optimizer = AdaBayesK([p], block_size=8, max_size=16384, fused=fused)
    if "max_size" in change:
        optimizer = AdaBayesK([p], block_size=30, fused=fused)  # 24 is above the new max_size
    step(optimizer, p)
    before = p.clone()
    optimizer.param_groups[0].update(change)
    with pytest.raises(RuntimeError, match=r"cannot change once there is state|but not"):
        step(optimizer, p)
    assert torch.equal(p, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["exp_avg_sq", "factor_0", "basis_1"])
def test_the_kernel_refuses_state_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    """It would write beyond the end of the state. Torch's operations step the matrix, or raise an error."""
    p = torch.zeros(24, 16)
    optimizer = AdaBayesK([p], block_size=8)
    step(optimizer, p)
    optimizer.state[p][name] = optimizer.state[p][name].to(dtype)
    with suppress(RuntimeError):
        step(optimizer, p)
    assert not optimizer._fused_matrices


def test_plans_of_replaced_parameters_are_forgotten() -> None:
    p = torch.zeros(8, 8)
    optimizer = AdaBayesK([p])
    for size in range(4, 24):
        p.data = torch.zeros(size, size)
        optimizer.state.clear()
        step(optimizer, p)
    assert sum(map(len, optimizer._fused_matrices._plans.values())) <= 4


def test_the_first_factors_use_the_present_beta2() -> None:
    """A skipped first step makes a plan, too."""
    factors = []
    for skips in (True, False):
        p = torch.zeros(6, 4)
        p.grad = torch.ones(6, 4)
        optimizer = AdaBayesK([p], fused=True)
        if skips:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(1.0)  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        optimizer.param_groups[0]["betas"] = (0.9, 0.5)
        optimizer.step()
        factors.append(optimizer.state[p]["factor_0"])
    assert torch.equal(*factors)


@needs_kernels
@pytest.mark.parametrize(("shape", "order"), [((8, 20, 3, 3), (0, 2, 3, 1)), ((3, 6, 5, 7), (1, 0, 2, 3))], ids=str)
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_memory_formats_give_the_same_bits(shape: tuple[int, ...], order: tuple[int, ...], batch_dims: int) -> None:
    """Channels last, and a stack of matrices whose rows are not next to each other."""
    weights = []
    for dims in (tuple(range(len(shape))), order):
        generator = torch.Generator().manual_seed(0)
        back = [dims.index(i) for i in range(len(dims))]
        p = torch.randn(shape, generator=generator).permute(dims).contiguous().permute(back)
        optimizer = AdaBayesK([p], block_size=16, batch_dims=batch_dims)
        for _ in range(20):
            p.grad = torch.empty_like(p).copy_(torch.randn(shape, generator=generator))
            optimizer.step()
        assert optimizer._fused_matrices
        weights.append(p)
    assert weights[0].stride() != weights[1].stride()
    assert torch.equal(*weights)
