"""Rows of table 3 and figure 2 of arXiv:2410.04264: ResNet18 and an MLP on CIFAR-10.

Squared error to three times the one-hot labels, SGD with momentum .9 and the learning rate 0.05 of table 10, batches of
128, shifts and mirrors (H.4.2). The paper trains 200 epochs on 50,000 images; here ResNet18 has 60 epochs, with the
learning rate falling to 0 along a half cosine, on the first 12,000 images or as many as there are. So accuracies must
be lower, and only the order of D_LR is compared closely. The MLP is cheap and has 100 epochs: figure 14 says that its
D_LR rises from about epoch 30 on.
"""

import math
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import gramscope as gs

TITLE = "ResNet18 and an MLP on CIFAR-10 (table 3 and figure 2 of 2410.04264)"
QUESTION = "How do weight decay, shuffled labels, the architecture and the number of images change D_LR?"
NEEDS = "cifar10"
QUICK_NEEDS = ""
SEEDS = 2
IMAGES, SHUFFLED_IMAGES, BATCH = 12_000, 10_000, 128
EPOCHS = {"resnet18": 60, "mlp": 100}
DECAY = 5e-5


def cases(quick: bool) -> list[dict[str, str | int | float | bool]]:
    base: dict[str, str | int | float | bool] = {
        "part": "", "network": "resnet18", "images": IMAGES, "weight_decay": DECAY, "shuffled": 0.0
    }  # fmt: skip
    decays = [{**base, "part": "weight decay", "weight_decay": decay} for decay in (0.0, 1e-4, 1e-3)]
    labels = [
        {**base, "part": "shuffled labels", "images": SHUFFLED_IMAGES, "shuffled": share} for share in (0.0, 0.1, 1.0)
    ]
    curve = [{**base, "part": "learning curve", "images": images} for images in (250, 1000, 4000)]
    networks = [{**base, "part": "network", "network": name} for name in ("resnet18", "mlp")]
    return [curve[1]] if quick else [*decays, *labels, *networks, *curve]


def data(images: int, quick: bool) -> gs.tasks.Task:
    """The first images of CIFAR-10; in the quick version the 8 x 8 digits, enlarged and grey."""
    if not quick:
        return gs.tasks.cifar10(train=images)
    small = gs.tasks.digits()
    x, x_test = (
        nn.functional.interpolate(part.reshape(-1, 1, 8, 8), size=32).repeat(1, 3, 1, 1)
        for part in (small.x[:images], small.x_test)
    )
    return gs.tasks.Task(x, small.y[:images], x_test, small.y_test)


def network(name: str, seed: int, quick: bool) -> nn.Module:
    if name == "resnet18":
        return gs.tasks.resnet18(width=8 if quick else 64, seed=seed)
    return nn.Sequential(nn.Flatten(), gs.tasks.mlp((3072, 512, 512, 512, 10), seed))  # as in figure 14


def labels(y: Tensor, shuffled: float, seed: int) -> Tensor:
    """The labels, a share of them permuted among their examples."""
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(y), generator=rng)[: round(shuffled * len(y))]
    changed = y.clone()
    changed[chosen] = y[chosen[torch.randperm(len(chosen), generator=rng)]]
    return changed


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(torch.cat([model(part).argmax(1) for part in x.split(1000)]).eq(y).double().mean())


def fit(model: nn.Module, x: Tensor, targets: Tensor, decay: float, epochs: int, seed: int) -> None:
    """Mixed precision on a GPU, plain float32 elsewhere."""
    steps = epochs * math.ceil(len(x) / BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rng = torch.Generator().manual_seed(seed)
    model.train()
    for epoch in range(epochs):
        moved = gs.tasks.crop_and_flip(x, seed=1000 * seed + epoch).contiguous(memory_format=torch.channels_last)
        for rows in torch.randperm(len(x), generator=rng).to(x.device).split(BATCH):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                outputs = model(moved[rows])
            (outputs.float() - targets[rows]).square().mean().backward()
            optimizer.step()
            schedule.step()


def run(
    case: dict[str, str | int | float | bool], seed: int, *, quick: bool, device: str, out: Path
) -> dict[str, float]:
    task = data(int(case["images"]), quick)
    x, x_test, y_test = task.x.to(device), task.x_test.to(device), task.y_test.to(device)
    y = labels(task.y, float(case["shuffled"]), seed).to(device)
    # The same number of steps for few images as for 4,000: the small sets must be fitted too.
    epochs = 1 if quick else EPOCHS[str(case["network"])] * max(1, round(4000 / len(x)))
    model = network(str(case["network"]), seed, quick).to(device, memory_format=torch.channels_last)
    fit(model, x, 3 * nn.functional.one_hot(y, 10).float(), float(case["weight_decay"]), epochs, seed)
    model.eval()
    return {
        "D_LR": gs.measures.network_richness(model, x_test.split(500)),
        "D_LR_train": gs.measures.network_richness(model, x[:2000].split(500)),
        "train_accuracy": accuracy(model, x, y),
        "test_accuracy": accuracy(model, x_test, y_test),
    }


def figure(table: pd.DataFrame, path: Path) -> None:
    from matplotlib import pyplot

    curve = table[(table["part"] == "learning curve") | (table["part"] == "network") & (table["network"] == "resnet18")]
    means = curve.groupby("images")[["D_LR", "D_LR_train", "test_accuracy"]].mean()
    panels = 4 if len(means) > 1 else 3  # the learning curve may not have been run
    picture, axes = pyplot.subplots(1, panels, figsize=(3 * panels, 3.2), layout="constrained")
    published: dict[str, tuple[str, dict[object, float]]] = {
        "weight decay": ("weight_decay", {0.0: 0.05, 1e-4: 0.015, 1e-3: 0.003}),
        "shuffled labels": ("shuffled", {0.0: 0.031, 0.1: 0.042, 1.0: 0.034}),
        "network": ("network", {"resnet18": 0.026, "mlp": 0.48}),
    }
    for axis, (part, (key, values)) in zip(axes, published.items(), strict=False):
        rows = table[table["part"] == part].groupby(key, sort=False)
        names = list(values)
        axis.plot(range(len(names)), list(values.values()), "k*", label="published")
        for number, mark in (("D_LR", "o"), ("D_LR_train", "x")):
            axis.plot(range(len(names)), [rows[number].mean().get(name) for name in names], mark, label=number)
        axis.set_xticks(range(len(names)), [str(name) for name in names])
        axis.set(title=part, ylim=(0, None), xlabel=key.replace("_", " "))
    axes[0].set_ylabel("$D_{LR}$")
    axes[0].legend(frameon=False, fontsize=7)
    for name in means if panels == 4 else ():
        axes[3].semilogx(means.index, means[name], "o-", label=name)
        axes[3].set(title="learning curve", xlabel="training images", ylim=(0, 1))
        axes[3].legend(frameon=False, fontsize=7)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)
