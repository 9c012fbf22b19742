"""Rich and lazy training of one network on digits: D_LR on the way, and the three curves at the end.

Run: python docs/gallery/richness.py (about 20 s on one core); writes docs/images/richness.svg.
The network computes s·(f - f₀) and is fitted to one-hot targets by squared error: a large s leaves the features almost
where they were (lazy), a small s moves them far (rich).
"""

import sys
from pathlib import Path

import matplotlib
import torch

import gramscope as gs
from gramscope.tasks import digits, mlp

matplotlib.use("Agg")
from matplotlib import pyplot

SCALES = {"rich (s = 0.1)": (0.1, "#b2452f"), "between (s = 1)": (1.0, "#c9a227"), "lazy (s = 30)": (30.0, "#2f5fb2")}
STEPS, SHOWN = 1500, 40


def train(scale: float) -> tuple[list[int], list[float], gs.measures.Curves, float]:
    """Steps and D_LR along the way; curves and test accuracy at the end."""
    task = digits(0)
    model, frozen = mlp((64, 64, 64, 10), seed=1), mlp((64, 64, 64, 10), seed=1)
    targets = torch.nn.functional.one_hot(task.y, 10).float()
    # The same speed in function space for all scales.
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2 / scale**2 if scale > 1 else 0.2, momentum=0.9)
    steps, values = [], []
    for step in range(STEPS + 1):
        if step in {int(1.6**k) for k in range(20)} | {0, STEPS}:
            phi = gs.measures.features(model, task.x, "3")["3"]
            steps.append(step)
            values.append(gs.measures.richness(phi, model(task.x).detach() - frozen(task.x).detach()) if step else None)
        loss = (scale * (model(task.x) - frozen(task.x).detach()) - targets).square().mean() / 2
        optimiser.zero_grad()
        (loss / (scale if scale < 1 else 1.0)).backward()
        optimiser.step()
    phi, phi_test = (gs.measures.features(model, x, "3")["3"] for x in (task.x, task.x_test))
    with torch.no_grad():
        f = scale * (model(task.x_test) - frozen(task.x_test))
    accuracy = float((f.argmax(1) == task.y_test).float().mean())
    return steps[1:], values[1:], gs.measures.richness_curves(phi, phi_test, task.y_test, f), accuracy


def main(out: Path) -> None:
    pyplot.rcParams.update({"svg.hashsalt": "gramscope", "svg.fonttype": "none", "font.size": 9})
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(1, 4, figsize=(11, 2.9), layout="constrained")
    for name, (scale, colour) in SCALES.items():
        steps, values, curves, accuracy = train(scale)
        dimension = curves.effective_dimension
        print(f"{name}: D_LR {values[-1]:.3f}, test accuracy {accuracy:.3f}, effective dimension {dimension:.1f}")
        axes[0].semilogx(steps, values, color=colour)
        places = range(1, SHOWN + 1)
        axes[1].plot(places, curves.quality[:SHOWN], color=colour)
        axes[2].plot(places, curves.utilisation[:SHOWN], color=colour)
        axes[3].semilogy(places, curves.intensity[:SHOWN], color=colour, label=name)
    axes[0].set(title=r"$D_{LR}$ while training", xlabel="step", ylim=(0, 1))
    axes[1].set(title="quality", xlabel="eigenfunctions k", ylim=(0, 1))
    axes[2].set(title="utilisation", xlabel="eigenfunctions k", ylim=(0, 1))
    axes[3].set(title="intensity", xlabel="eigenfunction k")
    axes[3].legend(frameon=False, fontsize=8, loc="upper right")
    for axis in axes[1:]:
        axis.axvline(10, color="#999999", linewidth=0.8, linestyle=":")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "images" / "richness.svg")
