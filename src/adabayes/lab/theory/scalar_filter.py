"""Checks of the theory of the scalar filter, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter

from adabayes import AdaBayes, AdaBayesFP, filtering
from adabayes.lab.theory.claims import Check, Floats, Topic, relative, worst

__all__ = ["drift", "fixed_points", "gain", "kalman", "limits", "normalisers", "schedule"]

LR, LR_SGD, BATCH = 1e-3, 0.1, 128  # the paper's settings
CROSSOVER = LR / LR_SGD


def drift() -> Topic:
    """Show why the optimum of a weight moves."""
    random = np.random.default_rng(0)

    # Two weights. The other one learns by SGD from single data points, whose gradients are -H w + xi, Cov[xi] = H.
    H = np.array([[1.0, 0.8], [0.8, 1.0]])
    lr, steps = 0.01, 400_000
    xi = random.multivariate_normal([0, 0], H, size=steps)
    other = _autoregression(1 - lr * H[1, 1], lr * xi[:, 1])
    optimum = -H[0, 1] / H[0, 0] * other  # Eq. 10
    decay, noise = _fitted(optimum)
    noise_of_sgd = (lr * H[0, 1] / H[0, 0]) ** 2 * H[1, 1]

    def searched(w: float) -> float:
        objective = lambda own: 0.5 * np.array([own, w]) @ H @ np.array([own, w])  # noqa: E731
        return float(minimize_scalar(objective).x)

    worst = max(abs(searched(other[t]) - optimum[t]) for t in range(0, steps, steps // 20))

    # Many weights, which follow the Ornstein-Uhlenbeck process that the paper assumes.
    others, k, eta = 20, 0.01, 0.05
    root = random.standard_normal((others + 1, others + 1)) / math.sqrt(others)
    many = root @ root.T + 0.5 * np.eye(others + 1)
    paths = _autoregression(1 - k, eta * random.standard_normal((steps, others)))
    of_many = -paths @ many[0, 1:] / many[0, 0]
    decay_of_many, noise_of_many = _fitted(of_many)
    predicted = eta**2 * many[0, 1:] @ many[0, 1:] / many[0, 0] ** 2

    # The gradients of single data points, in a linear regression whose features are correlated in the same way.
    features = random.multivariate_normal([0, 0], H, size=steps)
    truth, estimate = np.array([0.5, -0.3]), np.array([0.1, 0.4])
    targets = features @ truth + random.standard_normal(steps)
    at_truth, at_estimate = (((targets - features @ w) * features[:, 0]) for w in (truth, estimate))
    best = truth[0] - H[0, 1] / H[0, 0] * (estimate[1] - truth[1])  # Eq. 10, from the truth

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        shown = slice(0, 1500, 15)
        reach = 1.4 * np.abs(other[shown]).max()
        grid = np.linspace(-reach, reach, 101)
        w_j, w_i = np.meshgrid(grid, grid)
        loss = 0.5 * (H[0, 0] * w_i**2 + 2 * H[0, 1] * w_i * w_j + H[1, 1] * w_j**2)
        left.contour(w_j, w_i, loss, levels=8, colors="0.75", linewidths=0.7)
        left.plot(grid, -H[0, 1] / H[0, 0] * grid, color="tab:red", label="best $w_i$, given $w_j$")
        left.scatter(other[shown], optimum[shown], s=6, c=np.arange(100), zorder=3)
        left.set(xlabel="$w_j$, being learned", ylabel="$w_i$", title="A. The objective couples weights ...")
        left.legend(loc="upper right")
        right.plot(optimum[:1500], color="tab:red")
        right.set(xlabel="iteration", ylabel="best $w_i$", title="B. ... so the optimum of one drifts")

    return Topic(
        "drift",
        "The optimum of a weight drifts, because the others learn",
        "A weight's best value depends on the others. While they learn, it moves: a random walk that is pulled back to "
        "zero (Eq. 10 to 15).",
        (
            Check("best w_i by search, against -H_ij w_j / H_ii: largest difference", worst, 0.0, 1e-6),
            Check("w_j learns by SGD, w_i rests: the optimum's decay, 1 - lr H_jj", decay, 1 - lr * H[1, 1], 1e-3),
            relative("... and the noise, (lr H_ij / H_ii)² H_jj", noise, noise_of_sgd, 0.01),
            Check("if 20 others are Ornstein-Uhlenbeck processes: 1 - k", decay_of_many, 1 - k, 1e-3),
            relative("... and the noise, η_μ² HᵀH / H_ii² (Eq. 15 and what it lacks)", noise_of_many, predicted, 0.01),
            relative("a regression's gradients: their mean, H_ii (w* - μ)",
                      at_estimate.mean(), H[0, 0] * (best - estimate[0]), 0.01),
            relative("... and, at the truth, their variance, H_ii (Fisher)", at_truth.var(), H[0, 0], 0.01),
        ),
        draw,
    )  # fmt: skip


def gain() -> Topic:
    """Show where the filter's gain settles, over seven decades of gradients."""
    sizes = np.geomspace(1e-5, 1e2, 141)
    rms = torch.from_numpy(sizes)
    random = torch.Generator().manual_seed(0)
    steady, fluctuating = (torch.zeros(len(sizes), dtype=torch.float64) for _ in range(2))
    optimizer = AdaBayes([steady, fluctuating], lr=LR, lr_sgd=LR_SGD, batch_size=BATCH)
    steps, averaged = 12_000, torch.zeros_like(rms)
    for step in range(steps):
        steady.grad = rms * (2 * torch.randint(2, rms.shape, generator=random) - 1)
        fluctuating.grad = rms * torch.randn(rms.shape, generator=random, dtype=torch.float64)
        optimizer.step()
        if step >= steps // 2:
            averaged += optimizer.state[fluctuating]["gain"] / (steps // 2)
    gains = optimizer.state[steady]["gain"].numpy()
    snapshot = optimizer.state[fluctuating]["gain"].numpy()
    dynamics = filtering.ornstein_uhlenbeck(filtering.drift(LR, LR_SGD, BATCH), LR_SGD)
    exact = filtering.exact_fixed_point(filtering.curvature(sizes, BATCH), dynamics)
    paper = filtering.fixed_point(sizes**2, LR, LR_SGD)
    below = sizes <= 0.1

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        x = LR / sizes
        ax.plot(x, snapshot, ".", color="0.25", label="AdaBayes, fluctuating gradients")
        ax.plot(x[x < 1], x[x < 1], color="tab:blue", label="Adam")
        ax.plot(x[x > 0.01], np.full((x > 0.01).sum(), LR_SGD), color="tab:orange", label="SGD")
        ax.plot(x, paper, color="tab:green", label="the paper's fixed point")
        ax.plot(x, exact, "--", color="k", linewidth=0.8, label="the exact one")
        ax.axvline(LR_SGD, color="tab:purple", linestyle=":", label="crossover")
        ax.set(xscale="log", yscale="log", xlabel="Adam's learning rate, lr / rms(g)", ylabel="gain", ylim=(1e-7, 1))
        ax.legend(loc="lower right")

    return Topic(
        "gain",
        "The filter settles between SGD and Adam",
        "Real AdaBayes steps at the paper's settings, on gradients of 1e-5 to 1e2: its Figure 3, without a network "
        "(Eq. 17, 18, 21).",
        (
            Check("steady gradients, 7 decades: gain / exact fixed point - 1, at worst", worst(gains, exact), 0, 1e-6),
            Check("fluctuating, up to rms 0.1: mean gain / the paper's - 1, at worst",
                  worst(averaged.numpy()[below], paper[below]), 0, 0.05),
            relative("rms 1e-5: the gain is lr_sgd", float(gains[0]), LR_SGD, 1e-3),
        ),
        draw,
    )  # fmt: skip


def limits() -> Topic:
    """Measure the distance to SGD and to AdamW."""
    sizes = CROSSOVER * np.geomspace(1e-4, 1e4, 81)
    steps = 4000

    def displacement(
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], start: float = 0.0, since: int = 0
    ) -> Floats:
        random = torch.Generator().manual_seed(0)
        weights = torch.full((len(sizes),), start, dtype=torch.float64)
        optimizer = make([weights])
        for step in range(steps):
            if 0 < step == since:
                weights.zero_()
            weights.grad = torch.from_numpy(sizes) * (2 * torch.randint(2, (1,), generator=random) - 1)
            optimizer.step()
        return weights.numpy()

    def fp(lr_sgd: float = LR_SGD, beta1: float = 0.9, weight_decay: float = 0.0, start: float = 0.0) -> Floats:
        return displacement(
            lambda p: AdaBayesFP(p, lr=LR, lr_sgd=lr_sgd, betas=(beta1, 0.999), weight_decay=weight_decay), start
        )

    def filtered(beta1: float) -> Floats:
        return displacement(lambda p: AdaBayes(p, lr=LR, lr_sgd=LR_SGD, batch_size=BATCH, beta1=beta1))

    def adamw(weight_decay: float = 0.0, start: float = 0.0) -> Floats:
        return displacement(lambda p: torch.optim.AdamW(p, lr=LR, eps=0, weight_decay=weight_decay), start)

    sgd = displacement(lambda p: torch.optim.SGD(p, lr=LR_SGD))
    adam = adamw()
    to_sgd = {"AdaBayes-FP": abs(fp(beta1=0) / sgd - 1), "AdaBayes": abs(filtered(0.0) / sgd - 1)}
    to_adam = {"AdaBayes-FP": abs(fp() / adam - 1), "AdaBayes": abs(filtered(0.9) / adam - 1)}
    x = sizes / CROSSOVER
    fixed = filtering.fixed_point(sizes**2, LR, LR_SGD)
    dynamics = filtering.ornstein_uhlenbeck(filtering.drift(LR, LR_SGD, BATCH), LR_SGD)
    exact = filtering.exact_fixed_point(filtering.curvature(sizes, BATCH), dynamics)
    low, middle, high = (int(abs(np.log(x / at)).argmin()) for at in (0.01, 28.0, 100.0))
    # With momentum, torch's SGD sums gradients where we average them, and does not correct the first steps.
    summed = displacement(lambda p: torch.optim.SGD(p, lr=LR_SGD * (1 - 0.9), momentum=0.9), since=1000)
    averaged = displacement(lambda p: AdaBayesFP(p, lr=LR, lr_sgd=LR_SGD), since=1000)
    with_momentum = abs(averaged / summed - 1)
    decayed = worst(fp(1e15, weight_decay=0.05, start=1.0), adamw(0.05, 1.0))

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for style, name in (("-", "AdaBayes-FP"), ("--", "AdaBayes")):
            ax.plot(x, to_sgd[name], style, color="tab:orange", label=f"{name} to SGD")
            ax.plot(x, to_adam[name], style, color="tab:blue", label=f"{name} to AdamW")
        ax.axvline(1, color="tab:purple", linestyle=":", label="crossover")
        ax.axvline(1 / (BATCH * LR) / CROSSOVER, color="0.4", linestyle=":", label="rms(g) = 1 / (B lr)")
        ax.set(xscale="log", yscale="log", ylim=(1e-9, 2), ylabel="relative distance")
        ax.set_xlabel("gradient size, in units of the crossover lr / lr_sgd")
        ax.legend(loc="lower right", ncols=2)

    return Topic(
        "limits",
        "SGD below the crossover, AdamW above",
        f"How far weights have moved after {steps} steps, against torch.optim.SGD and torch.optim.AdamW on the same "
        "gradients. AdaBayes-FP comes ever closer to AdamW; the filter does so in a window, up to rms(g) = 1 / (B lr).",
        (
            relative("FP, 1/100 of the crossover: distance to SGD", to_sgd["AdaBayes-FP"][low],
                      1 - fixed[low] / LR_SGD, 1e-6),
            relative("... with momentum, torch's at lr_sgd / 10, from step 1000", with_momentum[low],
                      1 - fixed[low] / LR_SGD, 1e-6),
            relative("AdaBayes, the same without", to_sgd["AdaBayes"][low], 1 - exact[low] / LR_SGD, 1e-3),
            relative("FP, 100 x the crossover: distance to AdamW", to_adam["AdaBayes-FP"][high],
                      1 - fixed[high] * sizes[high] / LR, 1e-6),
            relative("AdaBayes, in the middle of its window", to_adam["AdaBayes"][middle],
                      1 - exact[middle] * sizes[middle] / LR, 0.05),
            Check("FP at lr_sgd = 1e15, with weight decay: distance to AdamW", decayed, 0, 1e-10),
        ),
        draw,
    )  # fmt: skip


def fixed_points() -> Topic:
    """Compare the paper's fixed point with the exact one."""
    sizes = np.geomspace(1e-5, 1e3, 161)
    curvature = filtering.curvature(sizes, BATCH)
    k = filtering.drift(LR, LR_SGD, BATCH)
    paper = filtering.fixed_point(sizes**2, LR, LR_SGD)
    both = {"exact": filtering.ornstein_uhlenbeck(k, LR_SGD), "Euler": filtering.euler(k, LR_SGD)}
    settled = {}
    for name, dynamics in both.items():
        variance = np.full_like(sizes, LR_SGD)
        for _ in range(40_000):
            variance = filtering.update(filtering.predict(variance, dynamics), curvature)
        settled[name] = variance
    errors = {name: worst(settled[name], filtering.exact_fixed_point(curvature, both[name])) for name in both}
    at = int(abs(sizes - 2.5).argmin())
    shortfall = 1 - settled["exact"][at] / paper[at]
    # To first order in x = B lr rms(g), where the term that Eq. 20 drops is x of what it keeps.
    h = BATCH * LR * sizes[at]
    predicted = 1 - 2 / (h + math.sqrt(h * h + 4))

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for name, style in (("exact", "-"), ("Euler", "--")):
            ax.plot(sizes, settled[name] / paper, style, label=f"settled filter, {name} dynamics")
        ax.plot(sizes, 1 / (BATCH * LR * sizes), ":", color="0.4", label="1 / (B lr rms(g))")
        ax.axvline(CROSSOVER, color="tab:purple", linestyle=":", label="crossover")
        ax.set(xscale="log", ylim=(0, 1.1), xlabel="gradient size, rms(g)", ylabel="gain / the paper's fixed point")
        ax.legend(loc="lower left")

    return Topic(
        "fixed-points",
        "The paper's fixed point and the exact one",
        "Eq. 20 drops a term. Up to rms(g) = 0.1 that makes little difference; above 1 / (B lr) the gain falls as "
        "1 / (B g²), faster than Adam's.",
        (
            Check("exact dynamics, iterated, against the quadratic: at worst", errors["exact"], 0, 1e-9),
            Check("Euler's, the same", errors["Euler"], 0, 1e-9),
            Check("up to rms 0.1: settled / the paper's - 1, at worst",
                  worst(settled["exact"][sizes <= 0.1], paper[sizes <= 0.1]), 0, 0.01),
            relative("rms 2.5: how far below the paper's", shortfall, predicted, 0.01),
            relative("rms 1000: gain B g²", settled["exact"][-1] * curvature[-1], 1.0, 0.01),
        ),
        draw,
    )  # fmt: skip


def normalisers() -> Topic:
    """Derive the root mean square from drift, and the mean square from forgetting (Appendix A)."""
    sizes = np.geomspace(1e-4, 1e1, 101)
    lam, eta, sigma2, steps = 0.01, 0.01, 1.0, 40_000  # in the paper's units; the filter's memory is 10,000 steps
    noise = filtering.ornstein_uhlenbeck(filtering.drift(eta, sigma2), sigma2)
    random = np.random.default_rng(0)
    fading = drifting = np.full_like(sizes, sigma2)
    s, von = lam / fading, 0.0  # VON's scale, for the same start; its largest distance
    for _ in range(steps):
        g = sizes * (2 * random.integers(2) - 1)
        fading = filtering.update(filtering.predict(fading, filtering.fading_memory(lam)), filtering.curvature(g))
        s = (1 - lam) * s + lam * g**2  # variational online Newton: Eq. 7 of Khan et al. (2018), without its prior
        von = max(von, worst(lam / s, fading))
        drifting = filtering.update(filtering.predict(drifting, noise), filtering.curvature(g))
    predicted = filtering.mean_square_fixed_point(sizes**2, lam)

    def slope(gains: Floats) -> float:
        inside = (sizes >= 0.1) & (sizes <= 3)  # well above the crossover, well below 1 / eta
        return float(np.polyfit(np.log(sizes[inside]), np.log(gains[inside]), 1)[0])

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        ax.plot(sizes, fading, color="tab:red", label="forgetting (Ollivier)")
        ax.plot(sizes[::5], (lam / s)[::5], "o", color="tab:red", markersize=3, label="variational online Newton")
        ax.plot(sizes, drifting, color="tab:green", label="drift (AdaBayes)")
        ax.plot(sizes, eta / sizes, ":", color="tab:blue", label="Adam, η / rms(g)")
        ax.set(xscale="log", yscale="log", xlabel="gradient size, rms(g)", ylabel="learning rate")
        ax.legend(loc="lower left")

    return Topic(
        "normalisers",
        "Drift gives Adam's root mean square, forgetting a mean square",
        "Ollivier's fading memory and variational online Newton are the same filter, and divide by the mean square. "
        "Process noise that does not depend on the variance divides by its root (Appendix A).",
        (
            Check("forgetting: slope of log gain over log gradient", slope(fading), -2.0, 1e-6),
            Check("drift: the same slope", slope(drifting), -1.0, 0.03),
            Check("forgetting, settled: gain / (λ / g²) - 1, at worst", worst(fading, predicted), 0, 1e-6),
            Check("variational online Newton, step by step, against forgetting", von, 0, 1e-9),
        ),
        draw,
    )  # fmt: skip


def schedule() -> Topic:
    """Show the effect of a drop of the learning rate."""
    before, after = 3000, 12_000
    sizes = torch.tensor([1e-4, 0.5], dtype=torch.float64)  # far below the crossover, and far above
    histories = {}
    for dynamics in ("exact", "paper"):
        weights = torch.zeros(2, dtype=torch.float64)
        optimizer = AdaBayes([weights], lr=LR, lr_sgd=LR_SGD, batch_size=BATCH, beta1=0, dynamics=dynamics)
        rows = []
        for step in range(before + after):
            if step == before:
                optimizer.param_groups[0]["lr"] = LR / 10
            weights.zero_().grad = sizes.clone()
            optimizer.step()
            rows.append((-weights / sizes).numpy().copy())
        histories[dynamics] = np.array(rows)

    def next_step(dynamics: str, weight: int) -> float:
        return float(histories[dynamics][before, weight] / histories[dynamics][before - 1, weight])

    slow = histories["paper"][before:, 0]
    left = (slow - LR_SGD / 10) / (LR_SGD - LR_SGD / 10)
    steps_taken = int((left > 1 / math.e).sum())
    memory = (LR_SGD / 10) / (BATCH * (LR / 10) ** 2)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2)
        for ax, weight, title in ((axes[0], 0, "a weight that is SGD-like"), (axes[1], 1, "one that is Adam-like")):
            for dynamics, style in (("exact", "-"), ("paper", "--")):
                history = histories[dynamics][:, weight]
                ax.plot(np.arange(len(history)) - before, history, style, label=f'dynamics="{dynamics}"')
            ax.set(yscale="log", xlabel="steps after lr was divided by ten", title=title)
        axes[1].set_xlim(-200, 800)
        axes[0].set_ylabel("effective learning rate")
        axes[0].legend(loc="upper right")

    return Topic(
        "schedule",
        "A tenfold drop of the learning rate",
        'With dynamics="exact" the schedule scales the step, and every weight follows at once. In the paper\'s '
        "algorithm it goes into the filter, whose memory has become ten times as long.",
        (
            relative("exact, SGD-like: learning rate one step after the drop", next_step("exact", 0), 0.1, 1e-3),
            relative("exact, Adam-like: the same", next_step("exact", 1), 0.1, 1e-3),
            relative("paper, SGD-like: how much less after a step", 1 - next_step("paper", 0), 0.9 / memory, 0.01),
            relative("paper, SGD-like: steps to 1/e of the way, lr_sgd / (B lr²)", steps_taken, memory, 0.01),
        ),
        draw,
    )  # fmt: skip


def kalman() -> Topic:
    """Compare the scalar updates with exact inference."""
    random = np.random.default_rng(0)
    paths, steps, eta, sigma2 = 40_000, 60, 0.3, 1.0
    k = filtering.drift(eta, sigma2)
    dynamics = filtering.euler(k, sigma2)
    H = np.exp(random.normal(-1, 1, steps))  # the curvature, which differs from step to step

    # The model: the optimum drifts, and each gradient is taken at the mean believed before it.
    truth = math.sqrt(sigma2) * random.standard_normal(paths)
    mean, variance = np.zeros(paths), sigma2
    history: list[tuple[float, float, float, float]] = []  # of the first path: truth, gradient at zero, mean, variance
    squared = np.zeros((steps, 3))  # error, variance, gradient, each squared, over paths
    priors = np.zeros(steps)
    for t in range(steps):
        truth = (1 - k) * truth + eta * random.standard_normal(paths)
        prior_mean, prior = (1 - k) * mean, filtering.predict(variance, dynamics)
        gradient = H[t] * (truth - prior_mean) + math.sqrt(H[t]) * random.standard_normal(paths)
        variance = filtering.update(prior, H[t])
        mean = filtering.move(prior_mean, variance, gradient)
        history.append((truth[0], gradient[0] + H[t] * prior_mean[0], mean[0], variance))
        squared[t] = np.mean((truth - mean) ** 2), variance, np.mean(gradient**2)
        priors[t] = prior
    true, seen, means, variances = np.array(history).T

    # Brute force: the joint Gaussian of the whole path and all gradients, conditioned on those up to t.
    walk = np.array([[(1 - k) ** (t - s) if s <= t else 0.0 for s in range(steps)] for t in range(steps)])
    first = (1 - k) ** np.arange(1, steps + 1)
    joint = eta**2 * walk @ walk.T + sigma2 * np.outer(first, first)
    brute = np.zeros((steps, 2))
    for t in range(steps):
        upto = slice(0, t + 1)
        with_all = H[upto, None] * joint[upto, upto] * H[upto] + np.diag(H[upto])
        weights = np.linalg.solve(with_all, H[upto] * joint[upto, t])
        brute[t] = weights @ seen[upto], joint[t, t] - weights @ (H[upto] * joint[upto, t])
    late = slice(20, None)

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        t, width = np.arange(steps), 2 * np.sqrt(variances)
        ax.fill_between(t, means - width, means + width, color="tab:green", alpha=0.2, linewidth=0)
        ax.plot(t, true, color="tab:red", label="optimum")
        ax.plot(t, means, color="tab:green", label="filter, ± 2 standard deviations")
        ax.plot(t, brute[:, 0], "k.", markersize=3, label="brute force")
        ax.set(xlabel="step", ylabel="weight")
        ax.legend(loc="upper right")

    return Topic(
        "kalman",
        "Two scalar updates are the whole posterior",
        "The optimum of a weight, simulated, and inferred from gradients: by Eq. 17 and 18, and by the joint Gaussian "
        "of everything.",
        (
            Check("mean, against the joint posterior: largest difference",
                  float(abs(means - brute[:, 0]).max()), 0, 1e-9),
            Check("variance, the same", worst(variances, brute[:, 1]), 0, 1e-9),
            relative("squared error / variance, 40,000 paths: calibrated",
                      (squared[late, 0] / squared[late, 1]).mean(), 1.0, 0.01),
            relative("⟨g²⟩ / H: what g² in place of H overstates, 1 + H s²_prior",
                      (squared[late, 2] / H[late]).mean(), (1 + H[late] * priors[late]).mean(), 0.01),
        ),
        draw,
    )  # fmt: skip


# Pieces


def _autoregression(decay: float, noise: Floats) -> Floats:
    """Simulate x(t+1) = decay x(t) + noise(t) in each column."""
    return np.asarray(lfilter([1.0], [1.0, -decay], noise, axis=0))


def _fitted(path: Floats) -> tuple[float, float]:
    """Fit the decay and the noise of an autoregression by least squares."""
    decay = float(path[1:] @ path[:-1] / (path[:-1] @ path[:-1]))
    return decay, float(np.var(path[1:] - decay * path[:-1]))
