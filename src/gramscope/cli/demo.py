"""The demo: one network learns digits twice, in the rich and in the lazy regime, and a page compares the two."""

import copy
import inspect
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from torch import Tensor, nn

import gramscope as gs
from gramscope.cli.printed import json_line
from gramscope.cli.training_loop import train
from gramscope.record import Scope
from gramscope.record.budget import FREE, GUARANTEED
from gramscope.store.folders import free_folder
from gramscope.store.store_errors import disk_trouble
from gramscope.tasks import digits, mlp

BATCH, PER_CLASS, LR, MEASURED = 64, 20, 0.3, 20
SCALES = {"rich": 0.3, "lazy": 30.0}  # of the outputs; docs/calibration.md has what lies between


class Centred(nn.Sequential):
    """``s (f - f0)``: a network whose outputs start at zero, with an output scale s that decides its regime.

    To reach the targets with large s its weights need hardly move (lazy); with small s its features must (rich).
    """

    def __init__(self, network: nn.Sequential, scale: float) -> None:
        super().__init__(*network)
        self.scale = scale
        self.start = (copy.deepcopy(network),)  # in a tuple, so that it is no layer of this network

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            start = self.start[0](x)
        for layer in self:
            x = layer(x)
        return self.scale * (x - start)


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Against one-hot targets whose mean is zero."""
    return F.mse_loss(f, F.one_hot(y, f.shape[1]).to(f.dtype) - 1 / f.shape[1])


def run(out: Path, steps: int, width: int, seed: int, as_json: bool = False) -> Path:
    """Train both, print the comparison, and write the report; returns its path."""
    console = Console(width=80, quiet=as_json)
    out = free_folder(out)  # an earlier demo, or whatever else stands there, stays as it is
    with disk_trouble(f"making the demo's folder {out}"):
        out.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before minutes of training
    task = digits(seed)
    widths = (task.x.shape[1], width, width, width, task.classes)
    console.print(_opening(widths, task.x, steps))
    scopes: dict[str, Scope] = {}
    for name, scale in SCALES.items():
        model = Centred(mlp(widths, seed), scale)
        rate = LR / max(1.0, scale**2)  # the outputs of both move at about the same speed
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        scopes[name] = train(
            model, task, optimizer, squared_error, steps=steps, batch=BATCH, seed=seed, out=out / "runs" / name,
            every=max(1, steps // MEASURED), probe=task.balanced(PER_CLASS), label=f"{name} (output scale {scale:g})",
            console=console, name=name, overhead=None,
            config={"output scale": scale, "lr": rate, "steps": steps, "width": width, "seed": seed},
        )  # fmt: skip
    console.print(_comparison(scopes))
    console.print(_verdict(scopes))
    page = gs.report([out / "runs" / name for name in SCALES], out=out / "report.html")
    if as_json:
        last = {name: scope.records[-1]["scalars"] for name, scope in scopes.items()}
        print(json_line({"report": str(page), "runs": last}))
    console.print(f"Report: [bold]{page}[/bold]", soft_wrap=True)
    return page


def _opening(widths: tuple[int, ...], x: Tensor, steps: int) -> Panel:
    shape = "-".join(map(str, widths))
    text = (
        f"A ReLU network {shape} learns {len(x):,} handwritten digits twice, {steps} steps of SGD each. With its "
        f"outputs times {SCALES['rich']:g} it can reach the targets only by changing its features (rich); with its "
        f"outputs times {SCALES['lazy']:g} it hardly needs to change them (lazy). Watching leaves training as it is."
    )
    return Panel(text, title="[bold]gramscope demo", border_style="cyan")


ROWS = {
    "test accuracy": ("accuracy/test", "{:.1%}"),
    "kernel drift from the start": ("kernel/drift", "{:.2f}"),
    "kernel alignment with the labels": ("kernel/alignment", "{:.2f}"),
    "similarity of the features to the start": ("richness/initial_similarity", "{:.2f}"),
    "richness D_LR (0 rich)": ("richness", "{:.2f}"),
    "target linearity of the last hidden layer": ("target_linearity/6", "{:.2f}"),
    "error of the first-order prediction": ("step/error", "{:.1%}"),
}


def _comparison(scopes: dict[str, Scope]) -> Table:
    table = Table(title="After training", title_justify="left")
    table.add_column("")
    for name in scopes:
        table.add_column(name, justify="right")
    last = {name: scope.records[-1]["scalars"] for name, scope in scopes.items()}
    for title, (key, pattern) in ROWS.items():
        table.add_row(title, *(pattern.format(seen[key]) if key in seen else "" for seen in last.values()))
    for key in [key for key in next(iter(last.values())) if key.startswith("share/")]:
        cells = [f"{seen.get(key, float('nan')):.0%}" for seen in last.values()]
        table.add_row(f"share of layer {key.removeprefix('share/')} in the learning", *cells)
    return table


def _verdict(scopes: dict[str, Scope]) -> Panel:
    drift = {name: scope.records[-1]["scalars"].get("kernel/drift", float("nan")) for name, scope in scopes.items()}
    default = inspect.signature(gs.watch).parameters["overhead"].default
    text = (
        f"Same network, same digits: kernel drift {drift['rich']:.2f} in the rich run, {drift['lazy']:.2f} in the lazy "
        "run. The report shows when the kernel moved, and which layer did it.\n"
        f"The demo measures everything {MEASURED} times in a training of less than a second, whatever it costs. In a "
        f"longer training gs.watch keeps to {default:.0%} of the time by default (overhead={default}), beside the "
        f"first {GUARANTEED} measurements and {FREE:g} seconds, which every run has."
    )
    return Panel(text, title="[bold]In words", border_style="green")
