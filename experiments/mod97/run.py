"""Table 3 and figure 12 of arXiv:2410.04264: a transformer of two layers that groks arithmetic modulo 97.

Squared error to one-hot targets, Adam 1e-3 with betas .9 and .98, batches of 512, half of the 9,312 equations (tables 9
and 10). The table states weight decay 0, as does the code that it is built on (github.com/teddykoker/grokking); Power
et al. (arXiv:2201.02177) take 1 with AdamW, so both are tried. What the paper calls division is multiplication, a ∘ b
without b = 0; both are tried. Targets are 1, as table 9 says; three times that, as in the paper's image experiments, is
tried too. Its "step 200" is read as epoch 200: table 10 counts 4,000 epochs, and after 200 gradient steps this network
has fitted 1 % of the training pairs.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "Grokking modulo 97 (table 3 and figure 12 of 2410.04264)"
QUESTION = "Is the network lazy when it has fitted the training pairs, and rich when it groks the others?"
SEEDS = 2
EARLY, LATE = 200, 3000  # epochs
DENSE, DENSELY, EVERY = 500, 20, 100  # measured every 20 epochs up to 500, every 100 later


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    if quick:
        return [{"operation": "multiply", "weight_decay": 1.0, "targets": 1.0}]
    grid = [("multiply", 0.0, 1.0), ("multiply", 1.0, 1.0), ("divide", 0.0, 1.0), ("multiply", 0.0, 3.0)]
    return [{"operation": operation, "weight_decay": decay, "targets": targets} for operation, decay, targets in grid]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    p, width, early, late = (11, 32, 20, 60) if quick else (97, 128, EARLY, LATE)
    task = gs.tasks.modular_equations(p, operation=str(case["operation"]), seed=seed)
    model = gs.tasks.causal_transformer(task, width=width, seed=seed).to(device)
    x, y, x_test, y_test = (part.to(device) for part in (task.x, task.y, task.x_test, task.y_test))
    targets = float(case["targets"]) * nn.functional.one_hot(y, p).float()
    decay = float(case["weight_decay"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=decay, fused=device != "cpu"
    )
    rng = torch.Generator().manual_seed(seed)
    rows: list[dict[str, float]] = []
    for epoch in range(late + 1):
        if epoch % (DENSELY if epoch <= DENSE else EVERY) == 0 or epoch in (early, late):
            rows.append({
                "epoch": epoch, "D_LR": gs.measures.network_richness(model, x),
                "train_accuracy": accuracy(model, x, y), "test_accuracy": accuracy(model, x_test, y_test),
            })  # fmt: skip
        for chosen in torch.randperm(len(x), generator=rng).to(device).split(512):
            optimizer.zero_grad()
            (model(x[chosen]) - targets[chosen]).square().mean().backward()
            optimizer.step()
    pd.DataFrame(rows).to_csv(out / "curve.csv", index=False)
    at = {row["epoch"]: row for row in rows}
    found = {f"{name}_{when}": at[epoch][name] for when, epoch in (("early", early), ("late", late))
             for name in ("D_LR", "train_accuracy", "test_accuracy")}  # fmt: skip
    # The laziest point after the training pairs are fitted: where the network is stuck before it groks.
    fitted = [row for row in rows if row["train_accuracy"] > 0.99] or rows[-1:]
    laziest = max(fitted, key=lambda row: row["D_LR"])
    peak = max((row for row in rows if row["epoch"] > 0), key=lambda row: row["D_LR"])
    return {**found, "D_LR_laziest": laziest["D_LR"], "test_accuracy_laziest": laziest["test_accuracy"],
            "epoch_laziest": laziest["epoch"], "D_LR_peak": peak["D_LR"],
            "train_accuracy_peak": peak["train_accuracy"], "epoch_peak": peak["epoch"]}  # fmt: skip


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, 2, figsize=(8.5, 3.4), layout="constrained")
    published = {"D_LR": (0.51, 0.11), "test_accuracy": (0.052, 0.998)}
    for axis, (name, values) in zip(axes, published.items(), strict=True):
        axis.plot([0, 1], values, "k*:", label="published")
        for (operation, decay, scale), rows in table.groupby(["operation", "weight_decay", "targets"], sort=False):
            means = [rows[f"{name}_{when}"].mean() for when in ("early", "late")]
            spread = [rows[f"{name}_{when}"].std() if len(rows) > 1 else 0 for when in ("early", "late")]
            axis.errorbar([0, 1], means, spread, marker="o", label=f"{operation}, decay {decay:g}, targets {scale:g}")
        axis.set(title={"D_LR": "$D_{LR}$", "test_accuracy": "test accuracy"}[name], ylim=(-0.03, 1.05))
        axis.set_xticks([0, 1], [f"epoch {EARLY}", f"epoch {LATE}"])
    axes[0].legend(frameon=False, fontsize=7)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
