"""Table 3 and figure 16 of arXiv:2410.04264: a convolution network on MNIST, trained whole or in its last layer alone.

The paper states that the last layer has 1,024 inputs, and nothing else of network and training. Here: two convolutions
with pools and a linear layer, Adam 1e-3, batches of 128, targets one-hot or three times one-hot.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "A convolution network on MNIST, whole or last layer (table 3 of 2410.04264)"
QUESTION = "Can a lazy network be nearly as good as a rich one, and does D_LR tell them apart?"
NEEDS = "mnist"
QUICK_NEEDS = ""
SEEDS = 3
EPOCHS = {"full": 20, "last": 60}


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    scales = (3.0,) if quick else (1.0, 3.0)
    return [{"trained": trained, "scale": scale} for scale in scales for trained in ("full", "last")]


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
    task = gs.tasks.digits() if quick else gs.tasks.mnist()
    size, width, hidden = (8, 8, 128) if quick else (28, 32, 1024)
    model = gs.tasks.wide_cnn(width=width, hidden=hidden, size=size, seed=seed).to(device)
    x, y, x_test, y_test = (part.to(device) for part in (task.x, task.y, task.x_test, task.y_test))
    targets = float(case["scale"]) * nn.functional.one_hot(y, 10).float()
    epochs = 5 if quick else EPOCHS[str(case["trained"])]
    if case["trained"] == "full":
        fit(model, x, targets, epochs, seed)
    else:
        with torch.no_grad():
            inputs = torch.cat([model[:-1](part) for part in x.split(5000)])
        fit(model[-1], inputs, targets, epochs, seed)
    return {
        "D_LR": gs.measures.network_richness(model, x_test.split(2500)),
        "D_LR_train": gs.measures.network_richness(model, x[:10_000].split(2500)),
        "test_accuracy": accuracy(model, x_test, y_test),
        "train_accuracy": accuracy(model, x, y),
    }


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    published = {"full": (0.043, 0.991), "last": (0.51, 0.968)}
    picture, axis = pyplot.subplots(figsize=(5, 3.4), layout="constrained")
    for (trained, scale), rows in table.groupby(["trained", "scale"], sort=False):
        axis.plot(
            rows["D_LR"], rows["test_accuracy"], "o" if scale == 1 else "^", label=f"{trained}, targets × {scale:g}"
        )
    for trained, (richness, correct) in published.items():
        axis.plot(richness, correct, "k*", markersize=10, label=f"{trained}, published")
    axis.set(xlabel="$D_{LR}$ on the test set", ylabel="test accuracy", xlim=(0, 1))
    axis.legend(frameon=False, fontsize=7)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
