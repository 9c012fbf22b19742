"""Target linearity by depth and over training: the sequential linearisation of arXiv:2605.06258.

``TL_place_when``: held-out target linearity (with an offset) of the input, of each hidden layer and of the output of a
ReLU network on digits, at the start, after a tenth of the steps and at the end. Rich: plain training. Lazy: the output
is 20 times the change of the network since its start, the loss divided by 20². For the weights of a CNN and of a
transformer: target linearity of what the weight reads, averaged over the positions of an example, in excess of what
random targets give.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import gramscope as gs

TITLE = "Target linearity by layer and over training (2605.06258)"
QUESTION = "Do deep networks make their inputs linear in the target layer by layer, and only when they learn features?"
SEEDS = 5
ALPHA = 20.0
PLACES = ("input", "hidden_1", "hidden_2", "hidden_3", "output")


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    grid = [("mlp", "rich"), ("mlp", "lazy"), ("cnn", "rich"), ("transformer", "rich")]
    return [{"network": network, "regime": regime} for network, regime in grid]


def by_depth(model: nn.Module, task: gs.tasks.Task, when: str) -> dict[str, float]:
    found = gs.measures.layer_target_linearity(
        model, task.x, task.y, ["1", "3", "5", "6"], test=(task.x_test, task.y_test), center=True
    )
    return {f"TL_{place}_{when}": float(value.held_out) for place, value in zip(PLACES, found.values(), strict=True)}


def train_mlp(regime: str, seed: int, steps: int) -> dict[str, float]:
    task = gs.tasks.digits(seed)
    model = gs.tasks.mlp((64, 128, 128, 128, 10), seed)
    frozen = gs.tasks.mlp((64, 128, 128, 128, 10), seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    rng = torch.Generator().manual_seed(seed)
    targets = one_hot(task.y, 10).float()

    def outputs(x: Tensor) -> Tensor:
        if regime == "rich":
            return model(x)
        with torch.no_grad():
            start = frozen(x)
        return ALPHA * (model(x) - start)

    numbers = by_depth(model, task, "start")
    for step in range(1, steps + 1):
        rows = torch.randint(len(task.x), (64,), generator=rng)
        optimizer.zero_grad()
        loss = (outputs(task.x[rows]) - targets[rows]).square().sum(1).mean() / 2
        (loss / (1 if regime == "rich" else ALPHA**2)).backward()
        optimizer.step()
        if step == steps // 10:
            numbers |= by_depth(model, task, "early")
    numbers |= by_depth(model, task, "end")
    with torch.no_grad():
        right = float((outputs(task.x_test).argmax(1) == task.y_test).double().mean())
    hidden = [numbers[f"TL_{place}_end"] for place in PLACES[1:4]]
    return {**numbers, "rise": hidden[-1] - hidden[0], "test_accuracy": right}


def train_weights(network: str, seed: int, steps: int) -> dict[str, float]:
    """A CNN on digits or a transformer on sums modulo 13: linearity by weight, at the start and at the end."""
    if network == "cnn":
        digits = gs.tasks.digits(seed)
        model: nn.Module = gs.tasks.cnn(width=8, seed=seed)
        x, y, seen = digits.x, digits.y, (digits.x_test, digits.y_test)
    else:
        sums = gs.tasks.modular(13, train=0.7, seed=seed)
        model = gs.tasks.modular_transformer(sums, seed=seed)
        # Training pairs are measured too: the held-out ones alone are too few for 13 classes.
        x, y, seen = sums.x, sums.y, (torch.cat([sums.x, sums.x_test]), torch.cat([sums.y, sums.y_test]))
    numbers = by_weight(model, seen, "start")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    numbers |= by_weight(model, seen, "end")
    ends = [value for name, value in numbers.items() if name.endswith("_end")]
    with torch.no_grad():
        right = float((model(seen[0]).argmax(1) == seen[1]).double().mean())
    return {**numbers, "rise": ends[-1] - ends[0], "test_accuracy": right}


def by_weight(model: nn.Module, data: tuple[Tensor, Tensor], when: str) -> dict[str, float]:
    found = gs.measures.weight_target_linearity(model, *data, samples="examples", center=True)
    values = [(name, one.inputs) for name, one in found.items()]
    return {
        f"TL_{place}_{name}_{when}": (float(value) - value.null) / (1 - value.null) if value.null < 1 else float("nan")
        for place, (name, value) in enumerate(values)
    }


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    if case["network"] == "mlp":
        return train_mlp(str(case["regime"]), seed, 100 if quick else 2000)
    steps = {"cnn": 400, "transformer": 1500}[str(case["network"])]
    return train_weights(str(case["network"]), seed, 40 if quick else steps)


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, 4, figsize=(13, 3.4), layout="constrained")
    for axis, regime in zip(axes, ("rich", "lazy"), strict=False):
        rows = table[(table["network"] == "mlp") & (table["regime"] == regime)]
        for when in ("start", "early", "end"):
            chosen = rows[[f"TL_{place}_{when}" for place in PLACES]]
            axis.errorbar(range(5), chosen.mean(), chosen.std().fillna(0), marker="o", label=when)
        axis.set_xticks(range(5), ["input", "1", "2", "3", "output"])
        axis.set(title=f"MLP, {regime}: held-out TL", ylim=(-0.3, 1.05))
        axis.legend(frameon=False, fontsize=7)
    for axis, network in zip(axes[2:], ("cnn", "transformer"), strict=True):
        rows = table[table["network"] == network].dropna(axis=1, how="all")
        for when in ("start", "end"):
            names = [name for name in rows if name.startswith("TL_") and name.endswith(f"_{when}")]
            axis.errorbar(range(len(names)), rows[names].mean(), rows[names].std().fillna(0), marker="o", label=when)
        labels = [name.split("_", 2)[2].rsplit("_", 1)[0].removesuffix(".weight") for name in names]
        labels = [label.replace("attention.", "").replace("_proj", "").replace("_weight", "") for label in labels]
        axis.set_xticks(range(len(names)), labels)
        axis.set(title=f"{network}: TL by weight", ylim=(-0.3, 1.05))
        axis.legend(frameon=False, fontsize=7)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
