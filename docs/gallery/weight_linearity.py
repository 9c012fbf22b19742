"""Target linearity of what the weights of a CNN and of a transformer read, before and after training.

Positions are samples; the second number of each pair averages the positions of an example first. Run from the
repository root: python docs/gallery/weight_linearity.py. Prints a table; two minutes on one core.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gramscope.measures import weight_target_linearity
from gramscope.tasks import cnn, digits, modular, modular_transformer


def fit(model: nn.Module, x: Tensor, y: Tensor, steps: int, batch: int) -> nn.Module:
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3, weight_decay=0.1)
    rng = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (batch,), generator=rng)
        optimizer.zero_grad()
        cross_entropy(trained(x[rows]), y[rows]).backward()
        optimizer.step()
    return trained


def show(name: str, model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], steps: int) -> None:
    trained = fit(model, *train, steps, 64)
    with torch.no_grad():
        accuracy = float((trained(test[0]).argmax(1) == test[1]).double().mean())
    print(f"{name}: accuracy on what is measured {100 * accuracy:.1f} %", flush=True)
    print("| weight | rows, positions | positions: null, before, after | examples: null, before, after |")
    print("|---|---|---|---|")
    found = [
        weight_target_linearity(net, *test, samples=samples, center=True)
        for samples in ("positions", "examples")
        for net in (model, trained)
    ]
    for weight, first in found[0].items():
        values = [each[weight].inputs for each in found]
        pairs = [f"{v.null:.3f}, {float(v):.3f}, {float(w):.3f}" for v, w in (values[:2], values[2:])]
        print(f"| `{weight}` | {first.rows}, {first.positions} | {pairs[0]} | {pairs[1]} |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    task = digits()
    show("CNN on digits", cnn(width=8), (task.x, task.y), (task.x_test, task.y_test), 400)
    sums = modular(13, train=0.7)
    # Training pairs are measured too: the held-out ones alone are too few for 13 classes.
    every = torch.cat([sums.x, sums.x_test]), torch.cat([sums.y, sums.y_test])
    show("transformer on sums modulo 13", modular_transformer(sums), (sums.x, sums.y), every, 1500)


if __name__ == "__main__":
    main()
