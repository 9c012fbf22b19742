"""The picture of an explained step."""

from typing import TYPE_CHECKING

from gramscope.base.charts import agreement_chart, heat_map
from gramscope.base.pyplot import Axes, Figure, load_pyplot

if TYPE_CHECKING:
    from gramscope.hierarchy.explained import ExplainedStep

BLUE, ORANGE, GREY = "#2563a8", "#d9772b", "#8a8f98"


def picture_of_step(step: "ExplainedStep") -> Figure:
    """Four panels; see :meth:`ExplainedStep.plot`."""
    figure, ((layers, outputs), (examples, errors)) = load_pyplot().subplots(
        2, 2, figsize=(9, 6.4), layout="constrained"
    )
    values = [100 * share for share in step.shares.values()]
    layers.barh(list(step.shares), values, color=[BLUE if value >= 0 else ORANGE for value in values])
    layers.invert_yaxis()
    layers.set(title="Which layer lowered the loss", xlabel="share of the first-order change, %")
    agreement_chart(step.predicted, step.measured, "Change of every output", axes=outputs)
    _examples(examples, step)
    _errors(errors, step)
    return figure


def _examples(axes: Axes, step: "ExplainedStep") -> None:
    title, words = "What examples did to each other", ("loss of example", "gradient of example")
    if step.influence is None:
        axes.set(title=title, xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not defined: examples are coupled", ha="center", va="center", transform=axes.transAxes)
        return
    reach = float(step.influence.abs().max()) or 1.0
    heat_map(step.influence, title, *words, axes=axes, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")


def _errors(axes: Axes, step: "ExplainedStep") -> None:
    titles = {"all": "all that was missed", "rounding": "rounding, at most"}
    colours = {"all": GREY, "second order": BLUE, "mask flips": ORANGE, "rounding": GREY}
    values = [100 * value for value in step.errors.values()]
    names = [titles.get(name, name) for name in step.errors]
    bars = axes.barh(names, values, color=[colours[name] for name in step.errors])
    axes.bar_label(bars, fmt="%.2g %%", padding=3)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set(title="Where the prediction fails", xlabel="% of the true change of the outputs")
