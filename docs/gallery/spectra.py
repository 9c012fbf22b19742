"""The picture of docs/spectra.md: bulk and spikes of a trained weight, a heavy tail, and what α does on noise.

Run from the repository root: python docs/gallery/spectra.py [file.svg]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from gramscope import spectra
from gramscope.tasks import digits, mlp

INK, QUIET, ACCENT, WARM = "#1f2937", "#cbd5e1", "#2563eb", "#d97706"


def trained_weight(steps: int = 600) -> torch.Tensor:
    """The second weight of a network that has learnt the handwritten digits."""
    task = digits(0)
    model = mlp((task.x.shape[1], 256, 256, task.classes), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(len(task.x), (64,), generator=order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(task.x[chosen]), task.y[chosen]).backward()
        optimizer.step()
    return [module for module in model.modules() if isinstance(module, nn.Linear)][1].weight.detach()


def draw_bulk(axes: plt.Axes) -> None:
    weight = trained_weight()
    values = spectra.esd(weight).numpy()
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    noise = spectra.fit_marchenko_pastur(values, shape)
    null = spectra.shuffled_null(weight, shuffles=1).eigenvalues[0]
    count = 50
    ranks = np.arange(1, count + 1)
    bulk = count - noise.spikes
    law = marchenko_pastur_quantiles(shape, noise.sigma, len(values) - noise.spikes)
    axes.axhline(noise.threshold, color=INK, ls=":", lw=1.2, label="spikes lie above")
    axes.plot(ranks[noise.spikes :], law[::-1][:bulk], color=ACCENT, lw=1.6, zorder=3, label="noise that fits the bulk")
    axes.plot(ranks, null[::-1][:count], "x", ms=4, color=WARM, label="entries shuffled")
    axes.plot(ranks, values[::-1][:count], "o", ms=3.5, color=INK, label="trained weight")
    axes.set(xlabel="rank of the eigenvalue", ylabel="$\\lambda$", yscale="log")
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_title(f"A trained weight: {noise.spikes} spikes\non a bulk of noise")
    axes.legend(frameon=False, fontsize=8)


def marchenko_pastur_quantiles(shape: tuple[int, int], sigma: float, count: int) -> np.ndarray:
    """Where the law of noise puts ``count`` eigenvalues, ascending, by summing its density."""
    top = sigma**2 * (np.sqrt(shape[0]) + np.sqrt(shape[1])) ** 2
    grid = top * np.linspace(1e-6, 1, 20_001) ** 2
    density = spectra.marchenko_pastur_density(grid, shape, sigma)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(grid))])
    return np.interp((np.arange(count) + 0.5) / count, below / below[-1], grid)


def draw_tail(axes: plt.Axes) -> None:
    entries = np.random.default_rng(1).standard_t(2, (1024, 512)) / np.sqrt(1024)
    values = spectra.esd(torch.from_numpy(entries)).numpy()
    fit = spectra.fit_tail(values)
    above = 1 - np.arange(len(values)) / len(values)
    shown = np.unique(np.concatenate([np.arange(0, len(values) - 40, 12), np.arange(len(values) - 40, len(values))]))
    axes.loglog(values[shown], above[shown], ".", ms=3, color=INK, label="share above $\\lambda$")
    x = np.array([fit.xmin, values[-1]])
    axes.loglog(x, fit.n_tail / len(values) * (x / fit.xmin) ** (1 - fit.alpha), color=ACCENT, lw=2, label="fit")
    axes.axvline(fit.xmin, color=INK, ls=":", lw=1)
    axes.set(xlabel="$\\lambda$", ylabel="share above", ylim=(1e-3, 1.5))
    axes.minorticks_off()
    axes.set_title(f"Heavy tail: $\\alpha$ = {fit.alpha:.2f} ± {fit.sigma:.2f}\non {fit.n_tail} of {len(values)}")
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def gaussian(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((256, 256))


def heavy_entries(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_t(2, (256, 256))


def heavy_tail(rng: np.random.Generator) -> np.ndarray:
    """Eigenvalues of WᵀW from a power law with α = 2.5, on random singular vectors."""
    left, right = (np.linalg.qr(gaussian(rng))[0] for _ in range(2))
    return (left * (1 - rng.random(256)) ** (-0.5 / 1.5)) @ right.T


def draw_noise(axes: plt.Axes, draws: int = 40) -> None:
    kinds = {"Gaussian\nnoise": gaussian, "entries\nt(2)": heavy_entries, "tail of\n$\\alpha$ = 2.5": heavy_tail}
    colours = {"no power law": WARM, "undecided": QUIET, "no heavier than shuffled": INK, "power law": ACCENT}
    points: dict[str, list[tuple[float, float]]] = {verdict: [] for verdict in colours}
    for place, make in enumerate(kinds.values()):
        for seed in range(draws):
            rng = np.random.default_rng(seed)
            row = spectra.analyze(torch.from_numpy(make(rng))).iloc[0]
            verdict = row["verdict"].removeprefix("truncated ")
            points[verdict].append((place + 0.5 * (rng.random() - 0.5), row["alpha"]))
    for verdict, colour in colours.items():
        axes.plot(*np.array(points[verdict]).reshape(-1, 2).T, "o", ms=4, color=colour, label=verdict)
    axes.axhspan(2, 6, color=QUIET, alpha=0.25, lw=0)
    axes.set(yscale="log", ylabel="$\\alpha$", xticks=range(len(kinds)), xticklabels=list(kinds))
    axes.set_yticks([2, 4, 6, 10, 20, 40], ["2", "4", "6", "10", "20", "40"])
    axes.minorticks_off()
    axes.set_title("$\\alpha$ is wild on noise,\nthe verdict is not")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def main(out: Path) -> None:
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "svg.fonttype": "none", "svg.hashsalt": "gramscope"})
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")
    for draw, panel in zip((draw_bulk, draw_tail, draw_noise), axes, strict=True):
        draw(panel)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=130)
    print(out, out.stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images" / "spectra.svg")
