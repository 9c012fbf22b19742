"""Figure 1 of arXiv:2410.04264: labels written into ten pixels of MNIST, true in training, random in the test.

Four layers with He's start, fitted to three times the one-hot labels by Adam 1e-3 in batches of 128 for 100 epochs
(tables 9 and 10); here the whole network for 6 epochs, after which it has read off the labels, and the last layer for
100. The widths are not stated: 512 for the network that is trained whole (its |θ|² is that of table 1),
1,000 for the one of which the last layer alone is trained.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "MNIST with the label in its pixels (figure 1 of 2410.04264)"
QUESTION = "Does a rich network read off the label pixels and fail on the test, where a lazy one succeeds?"
NEEDS = "mnist"
QUICK_NEEDS = ""
SEEDS = 3
WIDTH = {"full": 512, "last": 1000}
EPOCHS = {"full": 6, "last": 100}
FEATURES = 10_000  # training examples from which eigenfunctions are taken


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    return [{"trained": trained} for trained in ("full", "last")]


def network(inputs: int, width: int, seed: int) -> nn.Sequential:
    model = gs.tasks.mlp((inputs, width, width, width, 10))
    rng = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=rng)
            nn.init.zeros_(layer.bias)
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(torch.cat([model(part).argmax(1) for part in x.split(5000)]).eq(y).double().mean())


def fit(model: nn.Module, x: Tensor, targets: Tensor, epochs: int, seed: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=rng).to(x.device).split(128):
            optimizer.zero_grad()
            (model(x[rows]) - targets[rows]).square().mean().backward()
            optimizer.step()


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    task = gs.tasks.label_encoded(gs.tasks.digits() if quick else gs.tasks.mnist(), seed=seed)
    trained = str(case["trained"])
    epochs = 10 if quick else EPOCHS[trained]
    width = 128 if quick else WIDTH[trained]
    x, y, x_test, y_test = (part.to(device) for part in (task.x, task.y, task.x_test, task.y_test))
    model = network(x.shape[1], width, seed).to(device)
    targets = 3 * nn.functional.one_hot(y, 10).float()
    if trained == "full":
        fit(model, x, targets, epochs, seed)
    else:
        with torch.no_grad():
            inputs = torch.cat([model[:-1](part) for part in x.split(5000)])
        fit(model[-1], inputs, targets, epochs, seed)
    last = gs.measures.last_layer(model, x[:2])
    (phi, _), (phi_test, f_test) = (
        next(gs.measures.last_layer_batches(model, part, last)) for part in (x[:FEATURES], x_test)
    )
    curves = gs.measures.richness_curves(phi, phi_test, y_test, f_test)
    assert curves.utilisation is not None
    return {
        "D_LR": gs.measures.richness(phi_test, f_test),
        "D_LR_train": gs.measures.network_richness(model, x[:FEATURES]),
        "test_accuracy": accuracy(model, x_test, y_test),
        "train_accuracy": accuracy(model, x, y),
        "utilisation_of_10": float(curves.utilisation[9]),
        "effective_dimension": float(curves.effective_dimension),
    }


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    published = {"D_LR": (0.0087, 0.63), "test_accuracy": (0.1, 0.744), "utilisation_of_10": (None, None)}
    titles = {
        "D_LR": "$D_{LR}$ on the test set",
        "test_accuracy": "test accuracy",
        "utilisation_of_10": "share of the output\nin ten features",
    }
    picture, axes = pyplot.subplots(1, 3, figsize=(8.5, 3), layout="constrained")
    for axis, (name, values) in zip(axes, published.items(), strict=True):
        for place, trained in enumerate(("full", "last")):
            rows = table.loc[table["trained"] == trained, name]
            axis.bar(
                place,
                rows.mean(),
                yerr=rows.std() if len(rows) > 1 else None,
                color=("#b2452f", "#2f5fb2")[place],
                width=0.6,
            )
            if values[place] is not None:
                axis.plot([place - 0.35, place + 0.35], [values[place]] * 2, color="#222222", linestyle=":")
        axis.set(title=titles[name], ylim=(0, 1))
        axis.set_xticks([0, 1], ["all layers", "last layer only"])
    axes[0].plot([], [], ":", color="#222222", label="published")
    axes[0].legend(frameon=False)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
