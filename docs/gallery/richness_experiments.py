"""The experiments of arXiv:2410.04264 that one core can repeat, measured with gramscope: published, earlier, here.

Run from the repository root: python docs/gallery/richness_experiments.py [--only NAME] [--seeds N]
All parts take about five minutes on one core and write docs/images/richness-experiments.svg; one part writes nothing.
MNIST is read from $GRAMSCOPE_DATA or ../shared/data; the parts that need it are skipped, and say so, where it is not.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.base.progress_bar import progress
from gramscope.tasks import Task, label_encoded, mlp, mnist, modular
from gramscope.tasks.idx import data_folder

OUT = Path(__file__).resolve().parents[1] / "images" / "richness-experiments.svg"
ALPHAS = (0.2, 2.0, 20.0)
RICH, LAZY = "#b2452f", "#2f5fb2"


@dataclass(frozen=True)
class Row:
    """A line of the table: what, the paper's value, that of an earlier run, and one value for each seed here."""

    quantity: str
    published: str
    theory: str
    here: Sequence[float]


@dataclass(frozen=True)
class Part:
    rows: list[Row]
    picture: Any = field(repr=False)


# Networks and data ----------------------------------------------------------------------------------------------------


def he(model: nn.Sequential, seed: int) -> nn.Sequential:
    """The same network with He's normal initialisation and zero biases."""
    rng = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=rng)
            nn.init.zeros_(layer.bias)
    return model


def without_biases(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_parameter("bias", None)
    return model


def one_hot(labels: Tensor, classes: int = 10) -> Tensor:
    return nn.functional.one_hot(labels, classes).float()


def unit_pixels(task: Task) -> Task:
    """Pixels from 0 to 1. With standardised ones the label pixels are weak beside the image and are used far later."""
    low, span = task.x.min(), task.x.max() - task.x.min()
    return replace(task, x=(task.x - low) / span, x_test=(task.x_test - low) / span)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(torch.cat([model(part).argmax(1) for part in x.split(2500)]).eq(y).double().mean())


def fit(model: nn.Module, x: Tensor, targets: Tensor, epochs: int, seed: int, after: Callable[[int], None]) -> None:
    """Adam 1e-3, squared error, batches of 128 (tables 9 and 10); ``after`` is called with each epoch's number."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(x), generator=rng).split(128):
            optimiser.zero_grad()
            (model(x[rows]) - targets[rows]).square().mean().backward()
            optimiser.step()
        after(epoch)


# Label-encoded MNIST --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """On the test set, by epoch: D_LR and accuracy; at the end: the curves, and the accuracy in training."""

    epochs: list[int]
    richness: list[float]
    accuracy: list[float]
    train_accuracy: float
    curves: gs.measures.Curves = field(repr=False)


def encoded(task: Task, *, lazy: bool, width: int, epochs: int, every: int = 1, seed: int = 0) -> Encoded:
    """Figure 1: four layers fitted to three times the one-hot labels; ``lazy`` trains the last layer only."""
    coded = label_encoded(task, seed=seed)
    model = he(mlp((coded.x.shape[1], width, width, width, 10)), seed)
    targets = 3 * one_hot(coded.y)
    seen, values, accuracies = [], [], []
    with progress(f"label-encoded MNIST, {'lazy' if lazy else 'rich'}", epochs) as advance:

        def after(epoch: int) -> None:
            if epoch % every == 0 or epoch in (0, epochs):
                seen.append(epoch)
                values.append(gs.measures.network_richness(model, coded.x_test.split(2500)))
                accuracies.append(accuracy(model, coded.x_test, coded.y_test))
            advance()

        after(0)
        if lazy:
            with torch.no_grad():
                inputs = torch.cat([model[:-1](part) for part in coded.x.split(2500)])
            fit(model[-1], inputs, targets, epochs, seed, after)
        else:
            fit(model, coded.x, targets, epochs, seed, after)
    some = slice(0, 10_000)
    last = gs.measures.last_layer(model, coded.x[:2])
    pairs = [next(gs.measures.last_layer_batches(model, x, last)) for x in (coded.x[some], coded.x_test)]
    curves = gs.measures.richness_curves(pairs[0][0], pairs[1][0], coded.y_test, pairs[1][1])
    return Encoded(seen, values, accuracies, accuracy(model, coded.x, coded.y), curves)


def encoded_part(lazy: bool) -> Part:
    run = encoded(mnist(), lazy=lazy, width=1000 if lazy else 512, epochs=30 if lazy else 6, every=5 if lazy else 1)
    assert run.curves.utilisation is not None
    used = float(run.curves.utilisation[9])
    found = (run.richness[-1], run.accuracy[-1], run.train_accuracy, used, run.curves.effective_dimension)
    published = ("0.63", "0.744", "0.987", "", "") if lazy else ("0.0087", "0.100", "1.000", "", "")
    theory = ("0.642", "0.768", "", "", "") if lazy else ("0.0119", "0.102", "", "", "")
    names = ("D_LR", "test accuracy", "training accuracy", "utilisation of 10", "effective dimension")
    return Part([Row(*row) for row in zip(names, published, theory, [[v] for v in found], strict=True)], run)


# Target downscaling ---------------------------------------------------------------------------------------------------


def downscaled(
    task: Task, alpha: float, *, images: int = 1000, epochs: int = 100, width: int = 512, seed: int = 0
) -> dict[str, float]:
    """Table 2: training on targets y/α. Measured on the training images; accuracy on the test set.

    The paper does not state the network. Four layers of width 512 with He's start have |θ|² = 2·(3·512 + 10) = 3,092 in
    expectation, which is the |θ|² = 3.1e3 of the paper's MNIST network before training (table 1).
    """
    task = unit_pixels(task)
    x, y = task.x[:images], task.y[:images]
    model = he(mlp((x.shape[1], width, width, width, 10)), seed)
    before, _ = next(gs.measures.last_layer_batches(model, x))
    fit(model, x, one_hot(y) / alpha, epochs, seed, lambda epoch: None)
    phi, outputs = next(gs.measures.last_layer_batches(model, x))
    ridged = gs.measures.neural_collapse(phi, y, ridge=1e-4)
    return {
        "D_LR": gs.measures.richness(phi, outputs),
        "NC1": gs.measures.neural_collapse(phi, y).nc1,
        "NC1, ridge 1e-4": ridged.nc1,
        "Tr Σ_W": ridged.mean_within,
        "S_init": gs.measures.initial_similarity(before, phi),
        "|θ|²": gs.measures.parameter_norm(model) ** 2,
        "test accuracy": accuracy(model, task.x_test, task.y_test),
    }


PUBLISHED_2 = {
    "D_LR": ("0.049", "0.11", "0.56"), "NC1, ridge 1e-4": ("2.3e4", "3.2e3", "8.1e2"),
    "Tr Σ_W": ("2.0", "0.31", "0.12"),
    "S_init": ("0.068", "0.041", "0.052"), "|θ|²": ("3.4e3", "3.2e3", "3.2e3"),
    "test accuracy": ("0.927", "0.924", "0.883"),
}  # fmt: skip
THEORY_2 = {  # its NC1 with a ridge, 1.1e6 and so on, is of Σ_W summed over the ten classes
    "D_LR": ("0.08", "0.37", "0.72"), "NC1": ("0.28", "2.4", "16"), "NC1, ridge 1e-4": ("1.1e5", "1.7e4", "4e3")
}  # fmt: skip


def downscaling_part(seeds: int) -> Part:
    task = mnist()
    with progress("target downscaling", 3 * seeds) as advance:
        found: dict[float, list[dict[str, float]]] = {alpha: [] for alpha in ALPHAS}
        for alpha in ALPHAS:
            for seed in range(seeds):
                found[alpha].append(downscaled(task, alpha, seed=seed))
                advance()
    blank = ("", "", "")
    rows = [
        Row(f"{name}, α = {alpha:g}", PUBLISHED_2.get(name, blank)[i], THEORY_2.get(name, blank)[i],
            [run[name] for run in found[alpha]])
        for name in found[ALPHAS[0]][0]
        for i, alpha in enumerate(ALPHAS)
    ]  # fmt: skip
    return Part(rows, found)


# Nyström --------------------------------------------------------------------------------------------------------------


def subspace_error(vectors: Tensor) -> Tensor:
    """Equation 74 for every k: ``1 - (1/k) Σ_{i,j≤k} v_ij²``, for vectors (p, p) as columns in the true basis."""
    shared = vectors.square().cumsum(0).cumsum(1).diagonal()
    return 1 - shared / torch.arange(1, len(shared) + 1, dtype=shared.dtype)


def gaussian_features(n: int, p: int, exponent: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Equation 61: independent Gaussian features with variances ``ρ_k = k^-exponent``, and these."""
    rho = torch.arange(1, p + 1, dtype=torch.float64) ** -exponent
    return torch.randn(n, p, generator=rng, dtype=torch.float64) * rho.sqrt(), rho


def nystrom(p: int, n: int, exponent: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The error of the first k eigenfunctions for every k: in parameters (eq. 74), and as functions (after QR)."""
    phi, rho = gaussian_features(n, p, exponent, torch.Generator().manual_seed(seed))
    values, vectors = torch.linalg.eigh(phi.mT @ phi / n)
    values, vectors = values.flip(0), vectors.flip(1)
    functions = torch.linalg.qr(rho.sqrt()[:, None] * vectors / values.sqrt()).Q
    return subspace_error(vectors), subspace_error(functions)


def nystrom_curve(p: int, n: int, exponent: float, k: int, seed: int = 0) -> float:
    """The same from ``richness_curves``, with a second sample as the evaluation set and the first k true eigenfunctions
    as targets: what quality lacks at k."""
    rng = torch.Generator().manual_seed(seed)
    phi, _ = gaussian_features(n, p, exponent, rng)
    evaluation, _ = gaussian_features(n, p, exponent, rng)
    quality = gs.measures.richness_curves(phi, evaluation, evaluation[:, :k]).quality
    assert quality is not None
    return 1 - float(quality[k - 1])


def nystrom_part(seeds: int) -> Part:
    p, n, middle, exponents = 1000, 10_000, 400, (0.5, 1.0, 2.0)
    with progress("Nyström", (len(exponents) + 1) * seeds) as advance:
        errors: dict[float, list[tuple[Tensor, Tensor]]] = {exponent: [] for exponent in exponents}
        sampled = []
        for seed in range(seeds):
            for exponent in exponents:
                errors[exponent].append(nystrom(p, n, exponent, seed))
                advance()
            sampled.append(nystrom_curve(p, n, exponents[0], middle, seed))
            advance()
    rows = [
        Row(f"largest error, ρ = k^-{e:g}", "< 0.25", "0.21" if e == exponents[0] else "",
            [float(a.max()) for a, _ in errors[e]])
        for e in exponents
    ]  # fmt: skip
    rows.append(Row(f"as functions, k = {middle}", "", "", [float(b[middle - 1]) for _, b in errors[exponents[0]]]))
    rows.append(Row("the same by richness_curves", "", "", sampled))
    return Part(rows, {exponent: found[0][0] for exponent, found in errors.items()})


# Grokking -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grokking:
    """By step: D_LR on the training pairs and on the others, and the two accuracies."""

    steps: list[int] = field(default_factory=list)
    richness: list[float] = field(default_factory=list)
    test_richness: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)

    @property
    def laziest(self) -> int:
        """Where D_LR is highest once every training pair is right."""
        fitted = [place for place, value in enumerate(self.train_accuracy) if value == 1]
        return max(fitted, key=lambda place: self.richness[place])


def grokking(
    seed: int = 0, *, p: int = 31, width: int = 256, rate: float = 3e-3, share: float = 0.6, steps: int = 4000,
    every: int = 100,
) -> Grokking:  # fmt: skip
    """Addition modulo p by two hidden layers without biases; full-batch AdamW, weight decay 1, squared error.

    Loss and biases are not stated; these were chosen because D_LR before grokking is then .75, as in an earlier run.
    """
    task = modular(p, seed=seed, train=share)
    x, x_test = (one_hot(tokens[:, :2], p).flatten(1) for tokens in (task.x, task.x_test))
    model = without_biases(mlp((2 * p, width, width, p), seed))
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1.0)
    targets, found = one_hot(task.y, p), Grokking()
    with progress(f"grokking, seed {seed}", steps) as advance:
        for step in range(steps + 1):
            if step % every == 0:
                found.steps.append(step)
                found.richness.append(gs.measures.network_richness(model, x))
                found.test_richness.append(gs.measures.network_richness(model, x_test))
                found.train_accuracy.append(accuracy(model, x, task.y))
                found.test_accuracy.append(accuracy(model, x_test, task.y_test))
            optimiser.zero_grad()
            (model(x) - targets).square().mean().backward()
            optimiser.step()
            advance()
    return found


def grokking_part(seeds: int) -> Part:
    runs = [grokking(seed) for seed in range(seeds)]
    fitted = [(run.richness[run.laziest], run.test_accuracy[run.laziest]) for run in runs]
    rows = [
        Row(
            "D_LR, before (highest once fitted)",
            "0.51",
            "0.75",
            [value for value, _ in fitted],
        ),
        Row("test accuracy at that step", "", "< 0.01", [value for _, value in fitted]),
        Row("D_LR, after", "0.11", "0.014-0.035", [r.richness[-1] for r in runs]),
        Row("D_LR on the test pairs, after", "", "", [r.test_richness[-1] for r in runs]),
        Row("test accuracy, after", "", "1.00", [r.test_accuracy[-1] for r in runs]),
    ]
    return Part(rows, runs)


# Table and picture ----------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, bool, Callable[[int], Part]]] = {
    "encoded-rich": ("label-encoded MNIST, all layers, width 512, 6 epochs", True, lambda _: encoded_part(False)),
    "encoded-lazy": ("label-encoded MNIST, last layer only, width 1000, 30 epochs", True, lambda _: encoded_part(True)),
    "downscaling": ("targets y/α, 1,000 MNIST images, 100 epochs", True, lambda seeds: downscaling_part(min(seeds, 2))),
    "nystrom": ("Nyström method, p = 1000, n = 10,000", False, nystrom_part),
    "grokking": ("addition mod 31 (published: a transformer mod 97), 4,000 steps", False, grokking_part),
}  # fmt: skip


def show(title: str, part: Part, seconds: float) -> None:
    print(f"\n{title} ({seconds:.0f} s)\n{'':36} {'published':>10} {'earlier':>12}   here, seed by seed")
    for row in part.rows:
        here = "  ".join(f"{value:.3g}" if value < 1e4 else f"{value:.2g}" for value in row.here)
        print(f"{row.quantity:36} {row.published:>10} {row.theory:>12}   {here}")


def draw(found: dict[str, Part]) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gramscope", "font.size": 8.5})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9})
    figure, axes = pyplot.subplot_mosaic(
        "GEAU;GDCN", figsize=(11.5, 4.6), layout="constrained", width_ratios=(1.75, 1, 1, 1)
    )
    draw_grokking(axes["G"], found["grokking"].picture)
    draw_encoded(axes["E"], axes["A"], axes["U"], found["encoded-rich"].picture, found["encoded-lazy"].picture)
    draw_downscaling(axes["D"], axes["C"], found["downscaling"].picture)
    for exponent, colour in zip(found["nystrom"].picture, ("#222222", "#777777", "#bbbbbb"), strict=True):
        errors = found["nystrom"].picture[exponent]
        places = range(0, len(errors), 20)
        axes["N"].plot([k + 1 for k in places], errors[::20], color=colour, label=f"$k^{{-{exponent:g}}}$")
    axes["N"].axhline(0.25, color="#999999", linewidth=0.8, linestyle=":")
    axes["N"].set(title="Nyström: error of k functions", xlabel="k", ylim=(0, 0.3), yticks=[0, 0.1, 0.2, 0.3])
    for name in "GEAUD":
        axes[name].set_yticks([0, 0.5, 1])
    axes["N"].legend(frameon=False, fontsize=7.5, ncols=3, loc="upper right", bbox_to_anchor=(1, 0.86))
    return figure


def draw_grokking(axis: Any, runs: list[Grokking]) -> None:
    for place, run in enumerate(runs):
        faint = {"alpha": 1.0 if place == 0 else 0.3, "linewidth": 1.6 if place == 0 else 0.9}
        axis.plot(run.steps, run.richness, color=RICH, **faint)
        axis.plot(run.steps, run.test_accuracy, color="#2f8f4e", **faint)
        if place == 0:
            axis.plot(run.steps, run.train_accuracy, color="#999999", linewidth=1, linestyle="--")
    axis.set(title="addition mod 31: lazy first, rich when it groks", xlabel="step", ylim=(-0.02, 1.05))
    axis.text(350, 0.94, "training accuracy", color="#777777")
    axis.text(700, 0.7, r"$D_{LR}$", color=RICH)
    axis.text(2650, 0.72, "test accuracy", color="#2f8f4e")


def draw_encoded(values: Any, accuracies: Any, used: Any, rich: Encoded, lazy: Encoded) -> None:
    for run, colour, name in ((rich, RICH, "all layers"), (lazy, LAZY, "last layer only")):
        assert run.curves.utilisation is not None
        values.plot(run.epochs, run.richness, "o-", color=colour, markersize=3, label=name)
        accuracies.plot(run.epochs, run.accuracy, "o-", color=colour, markersize=3)
        used.plot(range(1, 61), run.curves.utilisation[:60], color=colour)
    values.set(title=r"label-encoded MNIST: $D_{LR}$", xlabel="epoch", ylim=(0, 1))
    values.legend(frameon=False, fontsize=7.5, loc="upper right")
    accuracies.set(title="its test accuracy", xlabel="epoch", ylim=(0, 1))
    accuracies.axhline(0.1, color="#999999", linewidth=0.8, linestyle=":")
    used.axvline(10, color="#999999", linewidth=0.8, linestyle=":")
    used.set(title="its utilisation", xlabel="eigenfunctions k", ylim=(0, 1.03))


def draw_downscaling(values: Any, collapse: Any, found: dict[float, list[dict[str, float]]]) -> None:
    def mean(name: str) -> list[float]:
        return [sum(run[name] for run in found[alpha]) / len(found[alpha]) for alpha in ALPHAS]

    values.semilogx(
        ALPHAS, [float(v) for v in PUBLISHED_2["D_LR"]], "s:", color="#999999", markersize=3, label="published"
    )
    values.semilogx(ALPHAS, mean("D_LR"), "o-", color="#222222", markersize=3, label="here")
    values.set(title=r"targets y/α: $D_{LR}$", xlabel="α", ylim=(0, 1))
    values.legend(frameon=False, fontsize=7.5, loc="upper left")
    collapse.loglog(ALPHAS, mean("NC1"), "o-", color="#222222", markersize=3)
    collapse.loglog(ALPHAS, mean("NC1, ridge 1e-4"), "o-", color=LAZY, markersize=3)
    collapse.text(0.2, 12, "pseudo-inverse", color="#222222")
    collapse.text(0.25, 3e2, "ridge $10^{-4}$", color=LAZY)
    collapse.set(title="the same: NC1 two ways", xlabel="α", ylim=(0.05, 1e7), yticks=[0.1, 1e3, 1e7])
    for axis in (values, collapse):
        axis.set_xticks(ALPHAS, [f"{alpha:g}" for alpha in ALPHAS])
        axis.minorticks_off()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="run one part and draw nothing")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds where they are cheap (default 3)")
    parser.add_argument("--out", type=Path, default=OUT, help="where the picture goes")
    options = parser.parse_args()
    found: dict[str, Part] = {}
    for name in [options.only] if options.only else PARTS:
        title, needs_mnist, run = PARTS[name]
        if needs_mnist and data_folder("mnist") is None:
            print(f"\n{title}\nskipped: MNIST lies in neither $GRAMSCOPE_DATA nor ../shared/data.")
            continue
        start = time.perf_counter()
        found[name] = run(options.seeds)
        show(title, found[name], time.perf_counter() - start)
    if len(found) == len(PARTS):
        draw(found).savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)
        print(f"\nwritten: {options.out}")
    elif not options.only:
        print("\nnot drawn: the picture needs every part.")


if __name__ == "__main__":
    main()
