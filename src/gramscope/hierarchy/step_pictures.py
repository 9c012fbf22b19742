"""Pictures of the hierarchy, with matplotlib where it is installed."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gramscope.base.pyplot import load_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gramscope.hierarchy.explained import ExplainedStep

BLUE, ORANGE, GREY = "#2563a8", "#d9772b", "#8a8f98"


def picture_of_step(step: "ExplainedStep") -> "Figure":
    """Four panels; see :meth:`ExplainedStep.plot`."""
    pyplot = load_pyplot()
    figure, ((layers, outputs), (examples, errors)) = pyplot.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    _layers(layers, step)
    _outputs(outputs, step)
    _examples(figure, examples, step)
    _errors(errors, step)
    return figure


def _layers(axes: "Axes", step: "ExplainedStep") -> None:
    names, values = list(step.shares), [100 * share for share in step.shares.values()]
    axes.barh(names, values, color=[BLUE if value >= 0 else ORANGE for value in values])
    axes.invert_yaxis()
    axes.set(title="Which layer lowered the loss", xlabel="share of the first-order change, %")


def _outputs(axes: "Axes", step: "ExplainedStep") -> None:
    true, predicted = _array(step.measured.flatten()), _array(step.predicted.flatten())
    low, high = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    axes.plot([low, high], [low, high], color=GREY, linewidth=1, zorder=0)
    axes.scatter(predicted, true, s=8, color=BLUE, alpha=0.6, linewidths=0)
    axes.set(title="Change of every output", xlabel="predicted", ylabel="true")


def _examples(figure: "Figure", axes: "Axes", step: "ExplainedStep") -> None:
    axes.set(title="What examples did to each other", xlabel="gradient of example", ylabel="loss of example")
    if step.influence is None:
        axes.text(0.5, 0.5, "not defined: examples are coupled", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    shown = _array(step.influence)
    reach = float(abs(shown).max()) or 1.0
    image = axes.imshow(shown, cmap="RdBu_r", vmin=-reach, vmax=reach, interpolation="nearest", aspect="auto")
    figure.colorbar(image, ax=axes, label="loss change (blue helps)")


def _errors(axes: "Axes", step: "ExplainedStep") -> None:
    titles = {"all": "all that was missed", "rounding": "rounding, at most"}
    colours = {"all": GREY, "second order": BLUE, "mask flips": ORANGE, "rounding": GREY}
    values = [100 * value for value in step.errors.values()]
    names = [titles.get(name, name) for name in step.errors]
    bars = axes.barh(names, values, color=[colours[name] for name in step.errors])
    axes.bar_label(bars, fmt="%.2g %%", padding=3)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set(title="Where the prediction fails", xlabel="% of the true change of the outputs")


def _array(tensor: Tensor) -> NDArray[np.float64]:
    # matplotlib would make the array itself, by a call that numpy warns of.
    return tensor.detach().double().cpu().numpy()
