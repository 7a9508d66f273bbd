"""Correlations of gradients, against covariances that are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import Tensor, nn

from adabayes import AdaBayesK
from adabayes.diagnostics import Correlations

matplotlib.use("agg")

F64 = torch.float64


def fraction(covariance: Tensor) -> float:
    """Return the fraction of a covariance that lies off the diagonal."""
    return 1 - (covariance.diagonal().square().sum() / covariance.square().sum()).item()


def watched(gradients: list[Tensor], beta2: float = 0.99, **sizes: int) -> Correlations:
    """Return the correlations of a parameter that has had these gradients."""
    w = torch.zeros_like(gradients[0])
    watch = Correlations(torch.optim.SGD([("w", w)], 0.1), beta2=beta2, **sizes)
    for g in gradients:
        w.grad = g
        watch.see()
    return watch


def drawn(left: Tensor, right: Tensor, steps: int, seed: int = 0) -> list[Tensor]:
    """Draw gradients whose sides have covariances with these square roots."""
    generator = torch.Generator().manual_seed(seed)
    shape = steps, left.shape[0], right.shape[0]
    return list(left @ torch.randn(shape, generator=generator, dtype=F64) @ right.mT)


def square(n: int, seed: int) -> Tensor:
    return torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=F64)


def scales(n: int) -> Tensor:
    return torch.logspace(-1, 1, n, dtype=F64).diag()


@pytest.mark.parametrize("roots", [torch.eye, scales], ids=["alike", "of different sizes"])
def test_independent_entries_have_a_fraction_of_zero_however_few_are_seen(roots: Callable[[int], Tensor]) -> None:
    """20 gradients of 60 x 5 entries, whose plain fraction of the left side would be 30 %."""
    gradients = drawn(roots(60).to(F64), roots(5).to(F64), 20)
    (layer,) = watched(gradients).layers()
    assert layer.shares == {"left": pytest.approx(0, abs=0.05), "right": pytest.approx(0, abs=0.05)}
    if roots is torch.eye:
        x = torch.stack(gradients)
        assert fraction((x @ x.mT).mean(0)) > 0.3


@pytest.mark.parametrize("seed", range(3))
def test_the_fraction_is_that_of_the_true_covariance(seed: int) -> None:
    """G = L Z R^T of independent Z has A = L L^T and C = R R^T, up to a number."""
    left, right = square(12, seed), scales(9) @ square(9, seed + 10)
    (layer,) = watched(drawn(left, right, 4000), beta2=0.9995).layers()
    expected = fraction(left @ left.mT), fraction(right @ right.mT)
    assert layer.shares == {"left": pytest.approx(expected[0], abs=0.02), "right": pytest.approx(expected[1], abs=0.02)}
    kronecker = torch.kron(left @ left.mT, right @ right.mT)
    assert layer.total == pytest.approx(fraction(kronecker), abs=0.01)


def test_correlated_columns_do_not_make_rows_look_correlated() -> None:
    """Columns that are all the same are one example of a row's entries, not 30."""
    same = torch.ones(30, 30, dtype=F64)
    fractions = [watched(drawn(scales(40), same, 50, seed)).layers()[0].shares["left"] for seed in range(20)]
    assert sum(fraction or 0.0 for fraction in fractions) / len(fractions) < 0.05
    assert watched(drawn(scales(40), same, 50)).layers()[0].shares["right"] == pytest.approx(1 - 1 / 30)


def test_turned_into_the_eigenbasis_nothing_is_left() -> None:
    gradients = drawn(square(8, 0), square(6, 1), 2000)
    x = torch.stack(gradients)
    left, right = (torch.linalg.eigh(c.mean(0))[1] for c in (x @ x.mT, x.mT @ x))
    before, after = (watched(g, beta2=0.999).total for g in (gradients, list(left.mT @ x @ right)))
    assert before is not None
    assert after is not None
    assert before > 0.5
    assert after < 0.02


def test_a_convolution_is_the_matrix_that_is_rotated() -> None:
    gradients = [torch.randn(6, 5, 3, 2, generator=torch.Generator().manual_seed(i)) for i in range(30)]
    gradients = [g + g.roll(1, 0) + 2 * g.mean((2, 3), keepdim=True) for g in gradients]
    as_matrix = watched([g.reshape(6, 30) for g in gradients]).layers()[0]
    assert watched(gradients).layers()[0].shares == pytest.approx(as_matrix.shares)


def test_only_what_lies_within_blocks_counts() -> None:
    """Two blocks without correlations of their own, but all the more between them."""
    noise = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(400)]
    gradients = [torch.cat([g, g]) for g in noise]
    uncut, cut = (watched(gradients, beta2=0.999, block_size=size).layers()[0] for size in (8, 4))
    assert uncut.shares["left"] == pytest.approx(0.5, abs=0.05)
    assert cut.shares["left"] == pytest.approx(0.0, abs=0.05)


def test_it_follows_the_factors_of_adabayes_k() -> None:
    w = torch.zeros(5, 4)
    optimizer = AdaBayesK([w], learn_every=1, fused=False)
    watch = Correlations(optimizer)
    for seed in range(7):
        w.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        watch.see()
        optimizer.step()
    ((_, matrix),) = watch._matrices.items()
    for side in (0, 1):
        theirs = optimizer.state[w][f"factor_{side}"]
        torch.testing.assert_close(matrix._factors[side]._average.tril(), theirs.tril())  # type: ignore[union-attr]


def test_training_is_the_same_with_and_without() -> None:
    def train(watching: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 2))
        net.register_parameter("unused", nn.Parameter(torch.zeros(3, 3)))
        optimizer = torch.optim.AdamW(net.parameters())
        watch = Correlations(net)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 1, 4, 4)).square().mean().backward()
            if watching:
                before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
                watch.see()
                after = [p.grad for p in net.parameters() if p.grad is not None]
                assert all(torch.equal(a, b) for a, b in zip(before, after))
            optimizer.step()
        assert [layer.name for layer in watch.layers()] == (["0.weight", "3.weight"] if watching else [])
        return [*(p.detach() for p in net.parameters()), torch.rand(1)]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False)))


def test_low_precision_is_summed_in_fp32() -> None:
    gradients = [g.bfloat16() for g in drawn(square(6, 0), square(5, 1), 30)]
    low, wide = (watched(g).layers()[0].shares for g in (gradients, [g.float() for g in gradients]))
    assert low == wide


def test_components_of_complex_weights_are_weights() -> None:
    gradients = drawn(square(4, 0), square(6, 1), 30)
    pairs = [torch.view_as_complex(g.reshape(4, 3, 2)) for g in gradients]
    (layer,) = watched(pairs).layers()
    assert layer.shape == (4, 3, 2)
    assert layer.shares == pytest.approx(watched(gradients).layers()[0].shares)


def test_large_sides_are_not_looked_at(tmp_path: Path) -> None:
    w = torch.nn.ParameterDict({"both": torch.zeros(7, 8), "one": torch.zeros(7, 3), "vector": torch.zeros(4)})
    w["narrow"] = torch.zeros(3, 1)
    watch = Correlations(w, max_size=4)
    for seed in range(20):
        for p in w.values():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        watch.see()
    both, one, narrow = watch.layers()
    assert (both.shares, both.total) == ({"left": None, "right": None}, None)
    assert one.shares["left"] is None
    assert one.total == pytest.approx(one.shares["right"])
    assert narrow.shares["right"] == 0
    assert watch.total == pytest.approx((21 * one.total + 3 * (narrow.total or 0)) / 24)  # type: ignore[operator]
    assert "-: a side larger than 4, not looked at." in watch.table()
    ax = watch.plot(tmp_path / "correlations.png")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one", "narrow"]
    assert (tmp_path / "correlations.png").read_bytes().startswith(b"\x89PNG")


def test_gradients_that_are_not_finite_are_left_out() -> None:
    gradients = drawn(square(4, 0), square(3, 1), 20)
    broken = [*gradients[:5], gradients[5] / 0, gradients[6] * float("nan"), *gradients[5:]]
    assert watched(broken).layers() == watched(gradients).layers()


@pytest.mark.parametrize(
    ("gradients", "verdict"),
    [
        (drawn(scales(20), scales(20), 100), "AdaBayes-K would be much like AdaBayes-FP here, and slower."),
        (drawn(square(20, 0), square(20, 1), 100), "AdaBayes-K has much to use here: try it."),
        (drawn(scales(20), scales(20), 3), "Seen 3 gradients. It takes 20 to tell."),
        ([torch.ones(1)] * 30, "Seen 0 gradients. It takes 20 to tell."),
    ],
    ids=["independent", "correlated", "few", "vectors"],
)
def test_the_verdict(gradients: list[Tensor], verdict: str) -> None:
    watch = watched(gradients)
    assert watch.verdict.endswith(verdict)
    assert verdict in " ".join(watch.table().split())
    assert max(map(len, watch.table().splitlines())) <= 80


def test_the_verdict_where_nothing_would_be_rotated() -> None:
    assert "AdaBayes-K would be AdaBayes-FP" in watched(drawn(scales(6), scales(6), 20), max_size=5).table()


def test_no_gradient_at_all_is_no_error() -> None:
    watch = watched([torch.zeros(3, 2)] * 20)
    assert watch.total == 0


def test_wrong_calls() -> None:
    w = torch.zeros(3, 2)
    with pytest.raises(TypeError, match="takes a model or an optimizer, not a list"):
        Correlations([w])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid max_size: 0"):
        Correlations(nn.Linear(2, 2), max_size=0)
    with pytest.raises(ValueError, match="Invalid beta2: 1"):
        Correlations(nn.Linear(2, 2), beta2=1.0)
    with pytest.raises(RuntimeError, match="nothing to draw"):
        Correlations(nn.Linear(2, 2)).plot()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="weight has a sparse gradient"):
        Correlations(embedding).see()
