"""Table 2 of arXiv:2410.04264: targets divided by α, 1,000 images of MNIST, Adam 1e-3, 100 epochs in batches of 128.

The paper names neither the network nor the scale of the pixels nor the set on which D_LR is measured. Two starts of
four layers have the |θ|² of its table 1: width 512 with He's weights, and width 1,024 with weights of variance
1 / fan-in (LeCun's), whose features and outputs are smaller. Both are tried, and two scales of the pixels, torch's own
start, and both sets. Two slips would give values of S_init like the published ones: ``S_init_permuted`` compares the
kernels with the examples in two orders, ``S_init_features`` the matrices ΦᵀΦ of the units instead of ΦΦᵀ.
"""

import math
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "Target downscaling (table 2 of 2410.04264)"
QUESTION = "Does D_LR order networks by how lazily they were trained, and do S_init, |θ|² and NC1 fail to?"
NEEDS = "mnist"
QUICK_NEEDS = ""
SEEDS = 5
ALPHAS = (0.2, 2.0, 20.0)
SETTINGS = (("unit", "lecun"), ("unit", "he"), ("standardised", "he"), ("unit", "torch"))
WIDTHS = {"lecun": 1024, "he": 512, "torch": 512}
VARIANCE = {"lecun": 1.0, "he": 2.0}  # of the weights, times fan-in; torch's own start has a third


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    settings = SETTINGS[:1] if quick else SETTINGS
    return [{"alpha": alpha, "pixels": pixels, "start": start} for pixels, start in settings for alpha in ALPHAS]


def network(inputs: int, width: int, start: str, seed: int) -> nn.Sequential:
    model = gs.tasks.mlp((inputs, width, width, width, 10), seed)
    rng = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, nn.Linear) and start in VARIANCE:
            nn.init.normal_(layer.weight, std=math.sqrt(VARIANCE[start] / layer.in_features), generator=rng)
            nn.init.zeros_(layer.bias)
    return model


def feature_similarity(a: Tensor, b: Tensor) -> float:
    """The cosine of ΦᵀΦ and Φ₀ᵀΦ₀ of centred features: what a script has that transposes Φ."""
    a, b = a.double() - a.double().mean(0), b.double() - b.double().mean(0)
    return float(nn.functional.cosine_similarity((a.mT @ a).flatten(), (b.mT @ b).flatten(), dim=0))


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    task = gs.tasks.digits() if quick else gs.tasks.mnist()
    width, epochs = (128, 40) if quick else (WIDTHS[str(case["start"])], 100)
    low, span = (task.x.min(), task.x.max() - task.x.min()) if case["pixels"] == "unit" else (0.0, 1.0)
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(task.x), generator=rng)[:1000]
    x, y = ((task.x[chosen] - low) / span).to(device), task.y[chosen].to(device)
    x_test, y_test = ((task.x_test - low) / span).to(device), task.y_test.to(device)
    model = network(x.shape[1], width, str(case["start"]), seed).to(device)
    before, _ = next(gs.measures.last_layer_batches(model, x))
    targets = nn.functional.one_hot(y, 10).float() / float(case["alpha"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=rng).split(128):
            optimizer.zero_grad()
            (model(x[rows]) - targets[rows]).square().mean().backward()
            optimizer.step()
    phi, outputs = next(gs.measures.last_layer_batches(model, x))
    ridged = gs.measures.neural_collapse(phi, y, ridge=1e-4)
    order = torch.randperm(len(x), generator=rng)
    return {
        "D_LR": gs.measures.richness(phi, outputs),
        "D_LR_test": gs.measures.network_richness(model, x_test[:2500]),
        "S_init": gs.measures.initial_similarity(before, phi),
        "S_init_permuted": gs.measures.initial_similarity(before[order], phi),
        "S_init_features": feature_similarity(before, phi),
        "theta2": gs.measures.parameter_norm(model) ** 2,
        "NC1": gs.measures.neural_collapse(phi, y).nc1,
        "NC1_ridge": ridged.nc1,
        "trace_within": ridged.mean_within,
        "train_accuracy": accuracy(model, x, y),
        "test_accuracy": accuracy(model, x_test, y_test),
    }


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    published = {
        "D_LR": ("$D_{LR}$", (0.049, 0.11, 0.56)), "trace_within": ("Tr $Σ_W$", (2.0, 0.31, 0.12)),
        "test_accuracy": ("test accuracy", (0.927, 0.924, 0.883)), "S_init": ("$S_{init}$", (0.068, 0.041, 0.052)),
    }  # fmt: skip
    picture, axes = pyplot.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
    for axis, (name, (title, values)) in zip(axes, published.items(), strict=True):
        for (pixels, start), rows in table.groupby(["pixels", "start"], sort=False):
            found, label = rows.groupby("alpha")[name].agg(["mean", "std"]), f"{start}, pixels {pixels}"
            axis.errorbar(found.index, found["mean"], found["std"].fillna(0), marker="o", ms=4, label=label)
        if name == "S_init":
            best = table[(table["start"] == SETTINGS[0][1]) & (table["pixels"] == SETTINGS[0][0])].groupby("alpha")
            for slip, mark in (("S_init_permuted", "x"), ("S_init_features", "+")):
                axis.plot(best[slip].mean(), mark, color="C0", ms=7, label=slip.removeprefix("S_init_") + ", lecun")
        axis.plot(ALPHAS, values, "k*:", ms=8, label="published")
        axis.set(title=title, xscale="log", xlabel="α", yscale="log" if name == "trace_within" else "linear")
        axis.set_xticks(ALPHAS, [f"{alpha:g}" for alpha in ALPHAS])
    picture.legend(*axes[3].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
