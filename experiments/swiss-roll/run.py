"""The Swiss roll of arXiv:2605.06258: the weight Gram matrix learns the virtual covariance, and unrolls the sheet.

A tanh network 3-256-1 on 500 points, 100 full-batch steps in float64. ``cosine``: of the change of WᵀW with the changes
that the steps taken ask for; ``gradient_cosine``: with those of the gradients alone.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import nn

import gramscope as gs

TITLE = "The Swiss roll unrolled (2605.06258)"
QUESTION = "Does the weight Gram matrix learn the virtual covariance, and is the virtual input linear in the target?"
SEEDS = 10
STEPS, SCALE = 100, 700.0


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    return [{"optimizer": name} for name in ("SGD", "SGD with momentum", "Adam")]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "Adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if "momentum" in name else 0.0)


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    roll = gs.tasks.swiss_roll(100 if quick else 500, seed=seed)
    points, y = roll.x.to(device), roll.y.to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 1)).double().to(device)
    optimizer = optimizer_of(str(case["optimizer"]), model)
    asked = torch.zeros_like(points)
    losses = []
    with gs.measures.GramTracker(model, optimizer, "0.weight") as tracker:
        for _ in range(STEPS):
            x = points.clone().requires_grad_()
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean() / 2
            loss.backward()
            assert x.grad is not None
            asked += x.grad
            optimizer.step()
            losses.append(float(loss.detach()))
        change = tracker.compute()["0.weight"]
    moved = gs.measures.virtual_update(points, asked, SCALE)
    return {
        "cosine": float(change.cosine),
        "gradient_cosine": float(change.gradient_cosine),
        # What is missing to 1, which the eight digits of a cosine do not hold.
        "gap": 1 - float(change.cosine),
        "gradient_gap": 1 - float(change.gradient_cosine),
        "linearity_input": float(gs.measures.target_linearity(points, y)),
        "linearity_virtual": float(gs.measures.target_linearity(moved, y)),
        "loss_start": losses[0],
        "loss_end": losses[-1],
    }


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    names = list(dict.fromkeys(table["optimizer"]))
    for place, name in enumerate(names):
        rows = table[table["optimizer"] == name]
        for number, gap, mark in (("cosine", "gap", "o"), ("gradient_cosine", "gradient_gap", "x")):
            label, colour = number if place == 0 else None, "#2f5fb2" if mark == "o" else "#b2452f"
            axes[0].semilogy([place] * len(rows), rows[gap], mark, color=colour, label=label)
        for number, mark in (("linearity_input", "_"), ("linearity_virtual", "o")):
            label, colour = number if place == 0 else None, "#2f5fb2" if mark == "o" else "#222222"
            axes[1].plot([place] * len(rows), rows[number], mark, color=colour, label=label)
    axes[0].set(title="1 - cosine of the change of WᵀW")
    axes[1].set(title="target linearity", ylim=(-0.03, 1.03))
    for axis in axes:
        axis.set_xticks(range(len(names)), names)
        axis.legend(frameon=False, fontsize=8)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
