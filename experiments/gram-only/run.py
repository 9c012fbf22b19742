"""Gram-only training of arXiv:2605.06258: only that part of a step is taken which changes WᵀW, or only the other part.

A GELU network 784-256-256-10 on 10,000 images of MNIST, SGD 0.01 with momentum 0.85, two epochs in batches of 128.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import nn

import gramscope as gs

TITLE = "Training the weight Gram matrices alone (2605.06258)"
QUESTION = "Does a network learn as well if each step may change its weights through their Gram matrices only?"
NEEDS = "mnist"
QUICK_NEEDS = ""
SEEDS = 5


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    return [{"step": step} for step in ("full", "altering", "preserving")]


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    task = gs.tasks.digits() if quick else gs.tasks.mnist(train=10_000)
    width = 32 if quick else 256
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [
            nn.Linear(task.x.shape[1], width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 10),
        ]
        model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.85)
    if case["step"] != "full":
        gs.measures.GramOnly(optimizer, keep=str(case["step"]), model=model)
    x, y, x_test, y_test = (part.to(device) for part in (task.x, task.y, task.x_test, task.y_test))
    rng = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(2):
        for rows in torch.randperm(len(x), generator=rng).split(128):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        right = float((model(x_test).argmax(1) == y_test).double().mean())
    return {"test_accuracy": right, "last_loss": sum(losses[-20:]) / len(losses[-20:])}


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    names = {"full": "SGD", "altering": "only what changes WᵀW", "preserving": "only what keeps WᵀW"}
    picture, axis = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
    for place, name in enumerate(names):
        rows = table.loc[table["step"] == name, "test_accuracy"]
        axis.bar(place, rows.mean(), yerr=rows.std() if len(rows) > 1 else None, color="#2f5fb2", width=0.6)
    axis.set_xticks(range(3), list(names.values()), fontsize=8)
    axis.set(title="test accuracy after two epochs", ylim=(0, 1))
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
