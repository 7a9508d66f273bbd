"""Checks of the theory of AdaBayes-K, by simulation: the filter of a whole matrix, and rotated problems."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.linalg import sqrtm
from scipy.signal import lfilter

from adabayes import AdaBayesFP, AdaBayesK, filtering, matrix_filtering
from adabayes.eigenbasis import rotate
from adabayes.filtering import Dynamics
from adabayes.lab.theory.claims import Check, Floats, Topic, relative, worst

__all__ = ["matrix", "rotation"]

ETA, SIGMA2 = 0.05, 0.5  # in the paper's units; the crossover is at h = (η / σ²)² = 0.01, the filter's memory 200 steps
ROWS, COLUMNS = 6, 4
WEIGHTS = ROWS * COLUMNS
IDENTITY = np.eye(WEIGHTS)


def matrix() -> Topic:
    """Show where the filter of a whole matrix settles, and why scalar filters are enough."""
    random = np.random.default_rng(0)
    A, C = (_covariance(random, 1e-3, 1.0, ROWS), _covariance(random, 1e-2, 0.25, COLUMNS))
    H = np.asarray(np.kron(A, C), np.float64)  # of w = vec W, row by row
    dynamics = filtering.euler(filtering.drift(ETA, SIGMA2), SIGMA2)

    # The filter of all 24 weights, by inverting matrices.
    settled = SIGMA2 * IDENTITY
    for _ in range(6000):
        settled = matrix_filtering.update(_predict(settled, dynamics), H)
    exact = matrix_filtering.exact_fixed_point(H, dynamics)
    paper = matrix_filtering.fixed_point(H, ETA, SIGMA2)
    root = IDENTITY / (2 * SIGMA2) + sqrtm(IDENTITY / (4 * SIGMA2**2) + H / ETA**2)
    error = _error_of_the_filter(random, H, settled)

    # Limits.
    lam = 0.05
    forgetting = IDENTITY
    for _ in range(600):
        forgetting = matrix_filtering.update(filtering.predict(forgetting, filtering.fading_memory(lam)), H)
    adam_like = matrix_filtering.fixed_point(H, ETA, 1e9)
    g = random.standard_normal(WEIGHTS)
    unseen = random.standard_normal(WEIGHTS)
    unseen -= g * (g @ unseen) / (g @ g)
    after_one = matrix_filtering.fixed_point(np.outer(g, g), ETA, SIGMA2) @ unseen

    # The basis from two small factors, the expected G Gᵀ and Gᵀ G.
    cells = H.reshape(ROWS, COLUMNS, ROWS, COLUMNS)
    bases = eigenvectors(np.einsum("ikjk->ij", cells)), eigenvectors(np.einsum("kikj->ij", cells))
    Q = np.kron(*bases)
    diagonal = Q.T @ H @ Q
    h = np.diag(diagonal)
    covariances, means = _filtered_in_both_bases(random, H, bases, dynamics)
    gains = _gains_of_the_optimizer(random, A, C, bases)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
        for ax, values, title in ((axes[0], H, "A. $H$, weight by weight"), (axes[1], diagonal, "B. in $Q_A ⊗ Q_C$")):
            ax.imshow(np.abs(values) + 1e-12, norm=LogNorm(1e-5, 0.3, clip=True), cmap="Greys")
            ax.set(xticks=[], yticks=[], title=title)
            ax.grid(False)
        ax, x = axes[2], np.geomspace(h.min() / 3, 3 * h.max(), 101)
        ax.axhline(SIGMA2, color="tab:orange", label=r"SGD, $\sigma^2$")
        ax.plot(x, ETA / np.sqrt(x), color="tab:blue", label=r"the root, $η / \sqrt{h}$")
        ax.plot(x, lam / x, ":", color="tab:red", label="forgetting, $λ / h$")
        ax.plot(x, filtering.fixed_point(x, ETA, SIGMA2), color="tab:green", label="closed form")
        ax.plot(h, np.diag(Q.T @ settled @ Q), "k.", label="24 x 24 filter, settled")
        ax.set(xscale="log", yscale="log", ylim=(0.02, 3), xlabel="eigenvalue $h$ of $H$", ylabel="gain")
        ax.set_title("C. A gain for each direction")
        ax.legend(loc="lower left", fontsize=6)

    return Topic(
        "matrix",
        "A matrix has the same filter, with a matrix root",
        "The weights of a 6 x 4 matrix, filtered together: a covariance of 24 x 24, made by inverting matrices. It "
        "settles at Eq. 21 with a matrix root, and in the eigenbasis of H it is 24 scalar filters.",
        (
            Check("24 x 24 filter, settled: P / exact fixed point - 1, any direction",
                  _apart(settled, exact), 0, 1e-10),
            Check("... against the paper's, where η √h ≤ 0.025, which it neglects",
                  _apart(settled, paper), 0, 0.02),
            Check("the paper's, against the matrix root of scipy", _apart(paper, np.linalg.inv(root)), 0, 1e-10),
            relative("squared error / P, 400 paths: calibrated", np.trace(np.linalg.solve(exact, error)) / WEIGHTS,
                     1.0, 0.02),
            Check("H → 0: P / σ² - 1, SGD",
                  _apart(matrix_filtering.fixed_point(1e-12 * H, ETA, SIGMA2), SIGMA2 * IDENTITY), 0, 1e-9),
            Check("η → ∞: the same", _apart(matrix_filtering.fixed_point(H, 1e6, SIGMA2), SIGMA2 * IDENTITY), 0, 1e-9),
            Check("σ² → ∞: P H P / η² - 1, the full-matrix root",
                  _apart(adam_like @ H @ adam_like, ETA**2 * IDENTITY), 0, 1e-6),
            Check("forgetting, settled: P H / λ - 1, natural gradient",
                  _apart(forgetting @ H, lam * IDENTITY), 0, 1e-9),
            Check("one gradient seen: P / σ² - 1 at right angles to it", worst(after_one, SIGMA2 * unseen), 0, 1e-9),
            Check("Q_A ⊗ Q_C, from two factors: share of H off the diagonal",
                  float(np.linalg.norm(diagonal - np.diag(h)) / np.linalg.norm(h)), 0, 1e-12),
            Check("24 scalar filters, rotated back: covariance, at worst", covariances, 0, 1e-10),
            Check("... and mean", means, 0, 1e-10),
            Check("AdaBayes-K's own gains / the paper's fixed point - 1, at worst",
                  worst(gains, filtering.fixed_point(h.reshape(gains.shape), ETA, SIGMA2)), 0, 0.03),
        ),
        draw,
    )  # fmt: skip


def rotation() -> Topic:
    """Compare optimizers on a correlated problem and on the same problem, rotated."""
    random = np.random.default_rng(0)

    # A layer of 24 weights and 8 others, which all learn by SGD: gradients -H w + xi, Cov[xi] = H.
    lr, steps, size = 0.02, 100_000, WEIGHTS + 8
    H = _covariance(random, 0.1, 4.0, size)
    w = _learned_by_sgd(random, H, lr, steps)
    inside, outside = np.arange(size) < WEIGHTS, np.arange(size) >= WEIGHTS
    Q = np.eye(size)
    Q[:WEIGHTS, :WEIGHTS] = eigenvectors(H[:WEIGHTS, :WEIGHTS])
    step = lr**2 * (H + lr * H @ H @ np.linalg.inv(2 * np.eye(size) - lr * H))  # covariance of a step of w, settled

    def optima(basis: Floats, of: NDArray[np.bool_]) -> Floats:
        """Return how the best value of each coordinate of the layer depends on the others: -H_ij / H_ii (Eq. 10)."""
        turned = basis.T @ H @ basis
        pull = np.eye(size) - turned / np.diag(turned)[:, None]
        return (pull * of)[:WEIGHTS] @ basis.T

    def drift(pulls: Floats) -> float:
        return float(np.sqrt(np.mean(np.diff(w @ pulls.T, axis=0) ** 2)))

    def predicted(pulls: Floats) -> float:
        return math.sqrt(np.trace(pulls @ step @ pulls.T) / WEIGHTS)

    everything = inside | outside
    by_weight, by_eigenvector = optima(np.eye(size), everything), optima(Q, everything)

    paths = {name: (_path(make, 0.0), _path(make, TURN)) for name, make in OPTIMIZERS.items()}
    turn = _turn(TURN)

    def apart(name: str, step: int | None = None) -> float:
        """Return the distance from the rotated path to the path of the rotated problem, relative to the path's size."""
        straight, turned = paths[name]
        moved = (straight - straight[0])[1:step]
        return float(np.linalg.norm((turned - turned[0])[1:step] - moved @ turn.T) / np.linalg.norm(moved))

    sign = np.sign(QUADRATIC @ START)
    first = np.linalg.norm(np.sign(turn @ QUADRATIC @ START) - turn @ sign) / np.linalg.norm(sign)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 3)
        grid = np.linspace(-1.3, 1.3, 101)
        points = np.stack(np.meshgrid(grid, grid), axis=-1)
        for i, title in enumerate(("A. A correlated quadratic ...", "B. ... and the same, rotated")):
            ax, own = axes[i], points @ (turn if i else np.eye(2))
            loss = 0.5 * np.einsum("...i,ij,...j", own, QUADRATIC, own)
            ax.contour(grid, grid, loss, levels=np.geomspace(0.001, 1.5, 8), colors="0.8", linewidths=0.6)
            for (name, both), (color, style) in zip(paths.items(), STYLES):
                ax.plot(*both[i].T, style, color=color, label=name, linewidth=1.0)
            ax.plot(0, 0, "k+")
            ax.set(aspect="equal", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), xticks=[], yticks=[], title=title)
            ax.grid(False)
        axes[0].legend(loc="lower right", fontsize=6)
        shown = slice(1000, 2500)
        axes[2].plot(w[shown] @ by_weight[0], color="tab:red", label="a weight")
        axes[2].plot(w[shown] @ by_eigenvector[0], color="tab:green", label="an eigenvector")
        axes[2].set(xlabel="iteration", ylim=(-0.3, 0.4), title="C. Drift of the best value of")
        axes[2].legend(loc="upper center", ncols=2)

    return Topic(
        "rotation",
        "A rotated problem is the same problem",
        "AdaBayes-K goes the same way however a problem is rotated, and Adam does not. In the eigenbasis of a layer, "
        "the other weights of the layer do not move a coordinate's optimum; other layers still do.",
        (
            relative("a weight's optimum: drift per step, from all others",
                     drift(by_weight), predicted(by_weight), 0.01),
            Check("an eigenvector's: drift from within the layer, share of that",
                  drift(optima(Q, inside)) / drift(by_weight), 0, 1e-10),
            relative("... drift in all, predicted from the other layer alone",
                     drift(by_eigenvector), predicted(optima(Q, outside)), 0.01),
            Check("SGD: path of the rotated problem, against the rotated path", apart("SGD"), 0, 1e-9),
            Check("AdaBayes-K: the same", apart("AdaBayes-K"), 0, 1e-6),
            relative("Adam, first step: the same, from the signs of gradients", apart("Adam", 2), first, 1e-3),
        ),
        draw,
    )  # fmt: skip


# Pieces of the matrix's filter


def eigenvectors(H: Floats) -> Floats:
    """Return the eigenvectors of a covariance as columns, sorted by eigenvalue, largest first."""
    return np.asarray(np.linalg.eigh(H)[1][:, ::-1])


def _covariance(random: np.random.Generator, low: float, high: float, size: int) -> Floats:
    """Return a covariance with eigenvalues from low to high and random eigenvectors."""
    Q = np.linalg.qr(random.standard_normal((size, size)))[0]
    return np.asarray((Q * np.geomspace(low, high, size)) @ Q.T)


def _apart(P: Floats, expected: Floats) -> float:
    """Return the largest relative difference of two matrices, in any direction."""
    return float(np.linalg.norm(np.linalg.solve(expected, P) - np.eye(len(P)), 2))


def _predict(P: Floats, dynamics: Dynamics) -> Floats:
    return np.asarray(filtering.predict(P, Dynamics(dynamics.forget, dynamics.noise * IDENTITY)))


def _error_of_the_filter(random: np.random.Generator, H: Floats, P: Floats) -> Floats:
    """Return the covariance of w* - mu over 400 paths of the settled filter, once they have settled too."""
    k, root = filtering.drift(ETA, SIGMA2), np.linalg.cholesky(H)
    truth = math.sqrt(SIGMA2) * random.standard_normal((400, WEIGHTS))
    mean, covariance, late = np.zeros_like(truth), np.zeros_like(H), range(500, 1000)
    for t in range(late.stop):
        truth = (1 - k) * truth + ETA * random.standard_normal(truth.shape)
        mean = (1 - k) * mean
        gradient = (truth - mean) @ H + random.standard_normal(truth.shape) @ root.T
        mean = filtering.move(mean, 1.0, gradient @ P)
        if t in late:
            covariance += (truth - mean).T @ (truth - mean) / (len(truth) * len(late))
    return covariance


def _filtered_in_both_bases(
    random: np.random.Generator, H: Floats, bases: tuple[Floats, Floats], dynamics: Dynamics
) -> tuple[float, float]:
    """Run a 24 x 24 filter and 24 scalar ones on the same gradients, and return the largest differences."""
    Q, decay = np.kron(*bases), math.sqrt(1 - dynamics.forget)
    root, h = np.linalg.cholesky(H), np.diag(Q.T @ H @ Q).reshape(ROWS, COLUMNS)
    P, mean = SIGMA2 * IDENTITY, np.zeros(WEIGHTS)
    variance, rotated = np.full((ROWS, COLUMNS), SIGMA2), np.zeros((ROWS, COLUMNS))
    truth, of_covariance, of_mean = np.zeros(WEIGHTS), 0.0, 0.0
    for c in np.exp(random.normal(0, 1, 100)):  # batches with more and less information
        truth = decay * truth + math.sqrt(dynamics.noise) * random.standard_normal(WEIGHTS)
        gradient = c * H @ (truth - decay * mean) + math.sqrt(c) * root @ random.standard_normal(WEIGHTS)
        P = matrix_filtering.update(_predict(P, dynamics), c * H)
        mean = decay * mean + P @ gradient
        variance = filtering.update(filtering.predict(variance, dynamics), c * h)
        rotated = filtering.move(decay * rotated, variance, rotate(gradient.reshape(ROWS, COLUMNS), bases))
        of_covariance = max(of_covariance, _apart((Q * variance.ravel()) @ Q.T, P))
        of_mean = max(of_mean, float(np.abs(rotate(rotated, bases, back=True).ravel() - mean).max()))
    return of_covariance, of_mean


def _gains_of_the_optimizer(random: np.random.Generator, A: Floats, C: Floats, bases: tuple[Floats, Floats]) -> Floats:
    """Return the learning rate that AdaBayes-K gives each eigenvector, once it has learnt its bases from gradients."""
    w = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    optimizer = AdaBayesK([w], lr=ETA, lr_sgd=SIGMA2, betas=(0.0, 0.999), matrix_scale=1, cautious=False)
    left, right = np.linalg.cholesky(A), np.linalg.cholesky(C)
    products, squares = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    for t in range(4000):
        gradient = left @ random.standard_normal((ROWS, COLUMNS)) @ right.T
        w.zero_().grad = torch.from_numpy(gradient)
        optimizer.step()
        if t >= 1500:
            turned = rotate(gradient, bases)
            products -= rotate(w.numpy(), bases) * turned
            squares += turned**2
    return np.asarray(products / squares)


# Pieces of the rotated problem

TURN = 45.0  # degrees
QUADRATIC = np.array([[0.51, 0.49], [0.49, 0.51]])  # eigenvalues 1 and 0.02
START = np.array([-0.2, 1.1])
OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.9, 0.99)),
    "AdaBayes-FP": lambda p: AdaBayesFP(p, lr=0.02, lr_sgd=2.0, betas=(0.9, 0.99)),
    "AdaBayes-K": lambda p: AdaBayesK(p, lr=0.02, lr_sgd=2.0, betas=(0.9, 0.99), matrix_scale=1, refresh=1),
}
STYLES = (("tab:orange", "-"), ("tab:blue", "-"), ("tab:purple", "--"), ("tab:green", "-"))


def _turn(degrees: float) -> Floats:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def _path(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], degrees: float, steps: int = 150) -> Floats:
    """Return the path of a 2 x 1 matrix down the quadratic, rotated by an angle; gradients have a little noise."""
    turn, root = _turn(degrees), np.linalg.cholesky(QUADRATIC)
    random = np.random.default_rng(0)
    w = torch.from_numpy(turn @ START)[:, None]
    optimizer, path = make([w]), [w.numpy().ravel().copy()]
    for _ in range(steps):
        noise = 0.05 * root @ random.standard_normal(2)
        w.grad = torch.from_numpy(turn @ (QUADRATIC @ turn.T @ path[-1] + noise))[:, None]
        optimizer.step()
        path.append(w.numpy().ravel().copy())
    return np.array(path)


def _learned_by_sgd(random: np.random.Generator, H: Floats, lr: float, steps: int) -> Floats:
    """Return a path of weights, w(t+1) = w(t) - lr H w(t) + lr xi(t), Cov[xi] = H, that has settled."""
    h, Q = np.linalg.eigh(H)
    xi = random.standard_normal((steps + 2000, len(h))) * np.sqrt(h)
    rotated = [lfilter([lr], [1.0, lr * value - 1.0], noise) for value, noise in zip(h, xi.T)]
    return np.asarray(np.column_stack(rotated)[2000:] @ Q.T)
