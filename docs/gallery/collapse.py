"""Neural collapse on 500 digits: a network with batch norm, trained far past zero training error.

Run: python docs/gallery/collapse.py (about 10 s on one core); writes docs/images/collapse.svg.
"""

import sys
from pathlib import Path

import matplotlib
import torch
from torch import nn

import gramscope as gs
from gramscope.tasks import digits

matplotlib.use("Agg")
from matplotlib import pyplot

STEPS = 2500
LINES = {
    "nc1": ("NC1: within over between", "#b2452f"),
    "nc2": ("NC2: distance to the simplex", "#2f5fb2"),
    "nc3": ("NC3: weights against means", "#3a7d44"),
    "cdnv": ("class-distance variance", "#c9a227"),
}


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    hidden = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def main(out: Path) -> None:
    x, y = digits(0).balanced(50)
    model = network(seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    seen: dict[str, list[float]] = {name: [] for name in (*LINES, "nc4", "error", "ridged", "mean_within")}
    steps = sorted({int(1.5**k) for k in range(20)} | {STEPS})
    for step in range(1, STEPS + 1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step in steps:
            phi = gs.measures.features(model, x, "5")["5"]
            found = gs.measures.neural_collapse(phi, y, weight=model[6].weight, bias=model[6].bias)
            ridged = gs.measures.neural_collapse(phi, y, ridge=1e-4)
            for name in (*LINES, "nc4"):
                seen[name].append(getattr(found, name))
            seen["ridged"].append(ridged.nc1)
            seen["mean_within"].append(found.mean_within)
            seen["error"].append(float((gs.measures.features(model, x, "")[""].argmax(1) != y).float().mean()))
    print({name: (round(values[0], 4), round(values[-1], 6)) for name, values in seen.items()})
    pyplot.rcParams.update({"svg.hashsalt": "gramscope", "svg.fonttype": "none", "font.size": 9})
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3), layout="constrained")
    for name, (label, colour) in LINES.items():
        axes[0].loglog(steps, seen[name], color=colour, label=label)
    axes[0].set(title="distances that vanish in full collapse", xlabel="step", ylim=(None, 100))
    axes[0].legend(frameon=False, fontsize=8, loc="upper right")
    axes[1].semilogx(steps, seen["error"], color="#555555", label="training error")
    axes[1].semilogx(steps, seen["nc4"], color="#7a3b8f", label="NC4: disagrees with nearest mean")
    axes[1].set(title="shares of examples", xlabel="step", ylim=(0, 1))
    axes[1].legend(frameon=False, fontsize=8)
    axes[2].loglog(steps, seen["nc1"], color="#b2452f", label="pseudo-inverse (default)")
    axes[2].loglog(steps, seen["ridged"], color="#555555", label="ridge 1e-4")
    within = [1e4 * value for value in seen["mean_within"]]
    axes[2].loglog(steps, within, color="#555555", ls=":", label="1e4 · mean Tr Σ_W")
    axes[2].set(title="what the ridge does to NC1", xlabel="step")
    axes[2].legend(frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images" / "collapse.svg")
