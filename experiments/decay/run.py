"""Table 1 of arXiv:2410.04264: weight decay alone, in float32 and float64, with and without biases.

The paper names SGD with learning rate 1e-6 and weight decay 1e-3 for 200 epochs of MNIST in batches of 128, 93,800
steps. These shrink no weight: (1 - 1e-9)^93,800 is 0.9999. Its |θ|² of 2.2e-5 needs learning rate times weight decay of
1e-4, which is the case "found". 100 steps are taken at a time: learning rate times 100, and the decay of 100 steps at
once. A case with 25 at a time ("fine") shows what that changes.
"""

import warnings
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "Weight decay without learning (table 1 of 2410.04264)"
QUESTION = "Does D_LR rise to 1 when weight decay shrinks a network that does not learn?"
NEEDS = "mnist"
QUICK_NEEDS = ""
SEEDS = 3
LR, STEPS, BATCH = 1e-6, 93_800, 128
MERGED = {(False, "coarse"): 100, (False, "fine"): 25, (True, "coarse"): 400, (True, "fine"): 200}
DECAY = {"stated": 1e-3, "found": 1e2}


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    grid: list[dict[str, str | int | float | bool]] = [
        {"decay": "found", "biases": biases, "dtype": dtype, "steps": "coarse"}
        for biases in (False, True)
        for dtype in ("float32", "float64")
    ]
    grid.append({"decay": "stated", "biases": True, "dtype": "float32", "steps": "coarse"})
    # The same with finer steps: the control of the merging.
    grid.append({"decay": "found", "biases": True, "dtype": "float32", "steps": "fine"})
    return grid


def data(quick: bool) -> tuple[gs.tasks.Task, int]:
    """Pixels from 0 to 1, and the width of the hidden layers."""
    task, width = (gs.tasks.digits(), 64) if quick else (gs.tasks.mnist(), 512)
    low, span = task.x.min(), task.x.max() - task.x.min()
    return gs.tasks.Task((task.x - low) / span, task.y, (task.x_test - low) / span, task.y_test), width


def network(inputs: int, width: int, biases: bool, seed: int) -> nn.Sequential:
    """Four layers with He's start. Width 512 has |θ|² = 2 (3 · 512 + 10) = 3,092 in the mean, the paper's 3.1e3."""
    model = gs.tasks.mlp((inputs, width, width, width, 10))
    rng = torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=rng)
            nn.init.zeros_(layer.bias)
            if not biases:
                layer.register_parameter("bias", None)
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def unguarded(phi: Tensor, outputs: Tensor) -> float:
    """D_LR with no guard against rounding, in the precision of the network: what a plain script gets."""
    phi, outputs = phi - phi.mean(0), outputs - outputs.mean(0)
    cross, own, other = (phi.mT @ outputs).norm(), (phi.mT @ phi).norm(), (outputs.mT @ outputs).norm()
    return float(1 - cross * (cross / own) / other)


def measured(
    model: nn.Sequential, x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], start: Tensor | None
) -> dict[str, float]:
    phi, outputs = next(gs.measures.last_layer_batches(model, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.measures.UndefinedMeasureWarning)  # NaN says the same
        collapse = gs.measures.neural_collapse(phi, y, ridge=1e-4)
        return {
            "D_LR": gs.measures.richness(phi, outputs),
            "D_LR_unguarded": unguarded(phi, outputs),
            # The readout of centred features: the same in exact arithmetic, and its bias cannot swallow the digits.
            "D_LR_centred": gs.measures.richness(phi - phi.mean(0), (phi - phi.mean(0)) @ model[-1].weight.detach().mT),
            "S_init": gs.measures.initial_similarity(phi if start is None else start, phi),
            "theta2": gs.measures.parameter_norm(model) ** 2,
            "NC1": collapse.nc1,
            # What is left of the features beside their mean, as a share: below 1e-7 float32 holds none of it.
            "spread": float((phi - phi.mean(0)).norm() / phi.norm()),
            "train_accuracy": accuracy(model, x, y),
            "test_accuracy": accuracy(model, *test),
        }


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    task, width = data(quick)
    dtype = getattr(torch, str(case["dtype"]))
    model = network(task.x.shape[1], width, bool(case["biases"]), seed).to(device, dtype)
    x, y = task.x.to(device, dtype), task.y.to(device)
    probe, test = (x[:2000], y[:2000]), (task.x_test[:2000].to(device, dtype), task.y_test[:2000].to(device))
    targets = nn.functional.one_hot(y, 10).to(dtype)
    before = measured(model, *probe, test, None)
    start, _ = next(gs.measures.last_layer_batches(model, probe[0]))
    merged = MERGED[quick, str(case["steps"])]
    shrink = (1 - LR * DECAY[str(case["decay"])]) ** merged
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * merged)
    for _ in range(STEPS // merged):
        rows = torch.randint(len(x), (BATCH,), generator=rng).to(device)
        optimizer.zero_grad()
        (model(x[rows]) - targets[rows]).square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(shrink)
        optimizer.step()
    after = measured(model, *probe, test, start)
    numbers = {f"{name}_start": value for name, value in before.items() if name != "S_init"}
    return {**numbers, **{f"{name}_end": value for name, value in after.items()}}


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    def label(text: str, place: int) -> str | None:
        return text if place == 0 else None

    picture, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    keys = ["decay", "biases", "dtype", "steps"]
    groups = list(table.groupby(keys, sort=False))
    names = [f"{a}\n{'biases' if b else 'no biases'}\n{c}\n{d} steps" for (a, b, c, d), _ in groups]
    for place, (_, rows) in enumerate(groups):
        axes[0].plot(
            [place] * len(rows), rows["D_LR_centred_end"], "o", color="#2f5fb2", label=label("exact, end", place)
        )
        axes[0].plot(
            [place] * len(rows),
            rows["D_LR_unguarded_end"],
            "x",
            color="#b2452f",
            label=label("plain script, end", place),
        )
        axes[0].plot(
            [place] * len(rows), rows["D_LR_start"], "_", color="#222222", markersize=14, label=label("start", place)
        )
        axes[1].semilogy([place] * len(rows), rows["theta2_end"], "o", color="#2f5fb2")
    axes[0].axhline(1.0, color="#999999", linestyle=":", label="published after 200 epochs")
    axes[0].axhline(0.59, color="#999999", linestyle="--", label="published at the start")
    axes[0].set(title="$D_{LR}$", ylim=(0, 1.08))
    axes[1].axhline(2.2e-5, color="#999999", linestyle=":", label="published")
    axes[1].set(title="$|θ|^2$ at the end")
    for axis in axes:
        axis.set_xticks(range(len(names)), names, fontsize=6.5)
        axis.legend(frameon=False, fontsize=7, loc="lower left" if axis is axes[0] else "center left")
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
