"""The pictures of the short concept pages: seven watched runs on digits, four sound and three broken on purpose.

Run: python docs/gallery/concepts.py (about 40 s on one core); writes docs/images/concept-*.svg.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import torch
from torch import nn

import gramscope as gs
from gramscope.cli.demo import Centred, squared_error
from gramscope.tasks import digits, mlp

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = ("#2f5fb2", "#b2452f", "#3a7d44", "#c9a227", "#7a3b8f")
STEPS, WIDTHS = 400, (64, 64, 64, 64, 10)
Table = pd.DataFrame


def watched(
    model: nn.Module, lr: float, *, loss: Callable[..., torch.Tensor] = nn.functional.cross_entropy,
    momentum: float = 0.0, batch: int = 64, measures: Any = "*",
) -> Table:  # fmt: skip
    """Every measurement of a run of 400 steps, one row a step."""
    task, generator = digits(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    with tempfile.TemporaryDirectory() as folder:
        with gs.watch(
            model, probe=task.balanced(20), out=f"{folder}/run", every="log:10", overhead=None, loss=loss,
            measures=measures,
        ) as scope:  # fmt: skip
            scope.use(optimizer)
            for _ in range(STEPS):
                rows = torch.randint(len(task.x), (batch,), generator=generator)
                optimizer.zero_grad()
                value = loss(model(task.x[rows]), task.y[rows])
                value.backward()
                optimizer.step()
                scope.step(loss=value)
        return gs.open_run(f"{folder}/run").scalars()


def draw(out: Path, name: str, title: str, ylabel: str, lines: Iterable[tuple[str, pd.Series]], **options: Any) -> None:
    """One panel: ``lines`` against the step, ``logy`` for a logarithmic scale, ``level`` for dotted lines."""
    level, logy = options.pop("level", {}), options.pop("logy", False)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    for (label, series), colour in zip(lines, COLOURS, strict=False):
        known = series.dropna()
        known = known[known > 0] if logy else known  # drift is 0 at the start
        axes.plot(known.index + 1, known.to_numpy(), color=colour, label=label, marker=".", markersize=3)
    for label, value in level.items():
        axes.axhline(value, color="#555555", ls=":", lw=1)
        axes.text(1, value, label, transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
    axes.set(xscale="log", xlabel="step + 1", ylabel=ylabel, title=title, yscale="log" if logy else "linear", **options)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(out / f"concept-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def by_layer(table: Table, measure: str) -> list[tuple[str, pd.Series]]:
    return [(f"layer {c.removeprefix(measure + '/')}", table[c]) for c in table if c.startswith(measure + "/")]


def main(out: Path) -> None:
    pyplot.rcParams.update({"svg.hashsalt": "gramscope", "svg.fonttype": "none", "font.size": 9})
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    sound = watched(mlp(WIDTHS), 0.1)
    fast, broken, slow = watched(mlp(WIDTHS), 0.5), watched(mlp(WIDTHS), 4.0), watched(mlp(WIDTHS), 1e-4)
    rich = watched(Centred(mlp(WIDTHS), 0.3), 0.3, loss=squared_error, momentum=0.9)
    lazy = watched(Centred(mlp(WIDTHS), 30.0), 0.3 / 900, loss=squared_error, momentum=0.9)
    whole = watched(mlp(WIDTHS), 0.5, loss=squared_error, batch=1400, measures=["sharpness", "loss"])
    draw(out, "layer-shares", "share of each layer in the next decrease of the loss", "share",
         by_layer(sound, "share"), ylim=(0, 1))  # fmt: skip
    draw(out, "kernel-drift", "same network, same data, two output scales", "kernel drift",
         [("scale 0.3: feature learning", rich["kernel/drift"]), ("scale 30: lazy", lazy["kernel/drift"])],
         logy=True, level={"rich above 2.6": 2.6, "lazy below 0.33": 0.33})  # fmt: skip
    draw(out, "kernel-alignment", "cosine of the kernel with the targets", "kernel alignment",
         [("feature learning", rich["kernel/alignment"]), ("lazy", lazy["kernel/alignment"])], ylim=(0, 1))  # fmt: skip
    draw(out, "step-error", "error of the first-order prediction of a step", "error / true change",
         [("learning rate 0.1", sound["step/error"]), ("learning rate 0.5", fast["step/error"])], logy=True,
         level={"10 %": 0.1})  # fmt: skip
    draw(out, "update-ratio", "size of a step against the size of the weights, layer 0", "update ratio",
         [(f"learning rate {lr}", t["update_ratio/0"]) for lr, t in (("0.1", sound), ("4", broken), ("0.0001", slow))],
         logy=True, level={"0.1": 0.1, "0.001": 1e-3})  # fmt: skip
    draw(out, "dead-units", "ReLU units that are zero on the whole probe, layer 2", "share of units",
         [("learning rate 0.1", sound["dead_units/2"]), ("learning rate 4", broken["dead_units/2"])],
         ylim=(0, 1.02))  # fmt: skip
    draw(out, "noise-scale", "gradient noise scale while the loss falls", "examples",
         [("learning rate 0.1", sound["noise_scale"])], logy=True, level={"batch of 64": 64})  # fmt: skip
    draw(out, "sharpness", "greatest eigenvalue of the Hessian, full-batch gradient descent", "sharpness",
         [("learning rate 0.5", whole["sharpness"])], level={"2 / learning rate": 4.0}, ylim=(0, None))  # fmt: skip
    draw(out, "feature-rank", "effective rank of each layer's outputs", "directions",
         [(label, series) for label, series in by_layer(sound, "feature_rank")], ylim=(0, None))  # fmt: skip
    for name, table in {"sound": sound, "broken": broken, "rich": rich, "lazy": lazy, "whole": whole}.items():
        print(name, {c: round(float(v), 3) for c, v in table.ffill().iloc[-1].items() if c.count("/") < 2 and v == v})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images")
