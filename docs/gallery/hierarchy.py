"""Picture for docs/hierarchy.md: layer shares and the parts of each step's error while a network learns digits.

python docs/gallery/hierarchy.py docs/images/hierarchy.svg
"""

import sys

import torch
from matplotlib import pyplot
from torch import nn

import gramscope as gs
from gramscope import tasks

STEPS, EVERY, RATE = 600, 6, 0.3


def main(path: str) -> None:
    task = tasks.digits()
    x, y = task.x[:512].double(), task.y[:512]
    net = tasks.mlp((64, 48, 48, 48, 10)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    seen, steps = [], []
    for step in range(STEPS):
        if step % EVERY == 0:
            seen.append(gs.explain_step(net, x, y, loss="cross_entropy", optimizer=optimizer))
            steps.append(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    draw(steps, seen, path)


def draw(steps, seen, path) -> None:
    pyplot.rcParams.update({"svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"})
    figure, (top, below) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    names = list(seen[0].shares)
    shares = [[100 * s.shares[name] for s in seen] for name in names]
    colours = ["#1b4f8f", "#4f8fc9", "#9cc3e6", "#d9772b"]
    top.stackplot(steps, shares, labels=[f"layer {i + 1}" for i in range(len(names))], colors=colours)
    top.set(ylabel="share of the loss decrease, %", ylim=(0, 100), title="Which layer learns")
    top.legend(loc="upper right", framealpha=0.9, ncols=4)
    for part, colour, style in (
        ("all", "#555", "-"),
        ("second order", "#1b4f8f", "--"),
        ("mask flips", "#d9772b", "-"),
    ):
        label = "all that was missed" if part == "all" else part
        below.plot(steps, [100 * s.errors[part] for s in seen], style, color=colour, label=label, linewidth=1.2)
    below.set(
        ylabel="% of the outputs' change", xlabel="step", title="What first order does not predict", xlim=(0, steps[-1])
    )
    below.set_yscale("log")
    below.legend(loc="upper right", framealpha=0.9)
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/images/hierarchy.svg")
