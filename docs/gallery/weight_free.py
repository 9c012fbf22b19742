"""Three ways to train one hidden layer on digits: in the weights, in the field, in the activations alone.

Run from the repository root: python docs/gallery/weight_free.py. Writes docs/images/weight-free.svg.
"""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy import ndarray
from sklearn.datasets import load_digits

from gramscope.hierarchy.field_training import activation_step, field_step, safe_rate

OUT = Path(__file__).resolve().parents[1] / "images" / "weight-free.svg"
STEPS, UNITS = 1000, 64


def train() -> dict[str, ndarray]:
    """Losses of the three, the distance of the field from the weights, and the mask entries that the closure lost."""
    images, labels = load_digits(return_X_y=True)
    x, y = images[:400] / 16.0, np.eye(10)[labels[:400]]
    x = np.concatenate([x, np.ones((400, 1))], axis=1)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((UNITS, 65)) / np.sqrt((x**2).sum(1).mean())
    readout = rng.choice([-1.0, 1.0], (10, UNITS)) / np.sqrt(UNITS)
    overlap = x @ x.T
    lr = safe_rate(overlap, readout, 400)
    field = x @ weight.T
    closure = np.maximum(field, 0.0)
    found: dict[str, list[float]] = {"weights": [], "field": [], "closure": [], "apart": [], "lost": []}
    for _ in range(STEPS):
        h = x @ weight.T
        e = {
            "weights": np.maximum(h, 0.0) @ readout.T - y,
            "field": np.maximum(field, 0.0) @ readout.T - y,
            "closure": closure @ readout.T - y,
        }
        for name, residual in e.items():
            found[name].append(float((residual**2).sum() / 800))
        found["apart"].append(float(np.abs(e["weights"] - e["field"]).max()))
        found["lost"].append(float(((h > 0) & (closure == 0)).mean()))
        weight = weight - lr * ((e["weights"] @ readout) * (h > 0)).T @ x
        field = field_step(field, overlap, readout, e["field"], lr)
        closure = activation_step(closure, overlap, readout, e["closure"], lr)
    return {name: np.array(values) for name, values in found.items()}


def draw(found: dict[str, ndarray]) -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "gramscope", "font.size": 9})
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(9.6, 2.9), layout="constrained")
    steps = np.arange(0, STEPS, 5)
    found = {name: values[steps] for name, values in found.items()}
    left.semilogy(steps, found["weights"], color="#bbbbbb", linewidth=5, label="weights")
    left.semilogy(steps, found["field"], color="#1f5fa8", linewidth=1.4, label="field (exact)")
    left.semilogy(steps, found["closure"], color="#c8501e", linewidth=1.4, label="activations only")
    left.set(title="Loss", xlabel="step")
    left.set_yticks([0.2, 0.5, 1.0, 2.0], ["0.2", "0.5", "1", "2"])
    left.minorticks_off()
    left.legend(frameon=False)
    middle.semilogy(steps[1:], np.maximum(found["apart"][1:], 1e-17), color="#1f5fa8", linewidth=1)
    middle.axhline(1e-9, color="#888888", linewidth=0.8, linestyle=":")
    middle.text(STEPS, 1.4e-9, "promised: below 1e-9", ha="right", color="#666666")
    middle.set(title="Largest difference of an output,\nfield against weights", xlabel="step", ylim=(1e-17, 1e-7))
    right.plot(steps, 100 * found["lost"], color="#c8501e", linewidth=1.4)
    right.set(title="On in truth, lost by the closure\n(% of unit-example pairs)", xlabel="step", ylim=(0, None))
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    result = train()
    picture = draw(result)
    picture.savefig(OUT, metadata={"Date": None})
    print({name: float(values[-1]) for name, values in result.items()}, "apart, at most:", result["apart"].max())
    print(f"{OUT.name}: {OUT.stat().st_size / 1000:.0f} kB")
