"""Table 3 and figure 12 of arXiv:2410.04264: a transformer of two layers that groks arithmetic modulo 97.

Squared error to one-hot targets, Adam 1e-3 with betas .9 and .98, batches of 512, half of the 9,312 equations, weight
decay 0 (tables 9 and 10). The network "code" is that of the code which the paper names, github.com/teddykoker/grokking:
the skip of its attention starts from the normalized stream, it has two more outputs, for the signs, and the learning
rate rises over the first ten steps. "usual" is a causal transformer without these three. What the paper calls division
is multiplication, a ∘ b without b = 0. Its "step 200" is read as epoch 200: table 10 counts 4,000 epochs, and after 200
gradient steps this network has fitted 1 % of the training pairs. Beside what is stated, one thing at a time is changed:
targets of 3, as the paper's image experiments have them; true division; weight decay 1 with AdamW, as Power et al.
(arXiv:2201.02177) take it; the usual network.
"""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "Grokking modulo 97 (table 3 and figure 12 of 2410.04264)"
QUESTION = "Is the network lazy when it has fitted the training pairs, and rich when it groks the others?"
SEEDS = 2
EARLY, LATE, WARM_UP = 200, 3000, 10  # epochs, epochs, steps


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    stated: dict[str, str | int | float | bool] = {
        "network": "code", "operation": "multiply", "weight_decay": 0.0, "targets": 1.0
    }  # fmt: skip
    changes: list[dict[str, str | int | float | bool]] = [
        {}, {"targets": 3.0}, {"operation": "divide"}, {"weight_decay": 1.0}, {"network": "usual"}
    ]  # fmt: skip
    return [{**stated, **change} for change in (changes[3:4] if quick else changes)]


class NormalizedSkip(nn.Module):
    """A block whose two skips start from the normalized stream."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, block.norm_1 = block.norm_1, nn.Identity()
        self.block = block

    def forward(self, stream: Tensor) -> Tensor:
        outputs: Tensor = self.block(self.norm(stream))
        return outputs


def network(name: str, task: gs.tasks.TokenTask, width: int, seed: int) -> nn.Module:
    if name == "usual":
        return gs.tasks.causal_transformer(task, width=width, seed=seed)
    model = gs.tasks.causal_transformer(replace(task, classes=task.vocabulary), width=width, seed=seed)
    model.blocks = nn.Sequential(*map(NormalizedSkip, model.blocks))
    return model


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    p, width, early, late = (11, 32, 20, 60) if quick else (97, 128, EARLY, LATE)
    task = gs.tasks.modular_equations(p, operation=str(case["operation"]), seed=seed)
    model = network(str(case["network"]), task, width, seed).to(device)
    x, y, x_test, y_test = (part.to(device) for part in (task.x, task.y, task.x_test, task.y_test))
    targets = float(case["targets"]) * nn.functional.one_hot(y, model.head.out_features).float()
    gpu = device != "cpu"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=float(case["weight_decay"]), fused=gpu,
        capturable=gpu,
    )  # fmt: skip
    slow_start = case["network"] == "code"
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, k / WARM_UP) if slow_start else 1.0)

    def one_epoch(order: Tensor) -> None:
        for rows in order.split(512):
            optimizer.zero_grad()
            (model(x[rows]) - targets[rows]).square().mean().backward()
            optimizer.step()
            schedule.step()

    train = gs.tasks.CapturedStep(one_epoch, plain=WARM_UP)  # the learning rate is constant when it is captured
    rng = torch.Generator().manual_seed(seed)
    rows: list[dict[str, float]] = []
    for epoch in range(late + 1):
        if epoch % (10 if epoch <= 300 else 100) == 0:
            rows.append({
                "epoch": epoch, "D_LR": gs.measures.network_richness(model, x),
                "train_accuracy": accuracy(model, x, y), "test_accuracy": accuracy(model, x_test, y_test),
            })  # fmt: skip
            pd.DataFrame(rows).to_csv(out / "curve.csv", index=False)
        train(torch.randperm(len(x), generator=rng).to(device))
    at = {row["epoch"]: row for row in rows}
    # Where it is lazy: at the highest D_LR of all, and at the highest one with the training pairs fitted.
    fitted = [row for row in rows if row["train_accuracy"] > 0.99] or rows[-1:]
    points = {
        "early": at[early], "late": at[late], "peak": max(rows, key=lambda row: row["D_LR"]),
        "laziest": max(fitted, key=lambda row: row["D_LR"]),
    }  # fmt: skip
    names = ("D_LR", "train_accuracy", "test_accuracy")
    found = {f"{name}_{when}": row[name] for when, row in points.items() for name in names}
    return {**found, "epoch_peak": points["peak"]["epoch"], "epoch_laziest": points["laziest"]["epoch"]}


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained", sharex=True)
    published = {"D_LR": (0.51, 0.11), "test_accuracy": (0.052, 0.998)}
    keys = ["network", "operation", "weight_decay", "targets"]
    whens = {"peak": "peak", "early": f"epoch {EARLY}", "late": f"epoch {LATE}"}
    for axis, (name, values) in zip(axes, published.items(), strict=True):
        axis.plot([1, 2], values, "k*:", label="published")
        for (model, operation, decay, targets), rows in table.groupby(keys, sort=False):
            means = [rows[f"{name}_{when}"].mean() for when in whens]
            spread = [rows[f"{name}_{when}"].std() if len(rows) > 1 else 0 for when in whens]
            label = f"{model}, {operation}, decay {decay:g}, targets {targets:g}"
            axis.errorbar(range(len(whens)), means, spread, marker="o", label=label)
        axis.set(title={"D_LR": "$D_{LR}$", "test_accuracy": "test accuracy"}[name], ylim=(-0.03, 1.05))
        axis.set_xticks(range(len(whens)), whens.values())
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=7)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
