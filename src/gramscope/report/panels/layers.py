"""What is measured layer by layer: shares in the learning, target linearity, mask flips."""

from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Line, Mark, Panel
from gramscope.report.panels.drawing import (
    Family,
    by_layer,
    colours_of,
    layer_plots,
    many,
    mapped_note,
    number,
    percent,
    table,
    unit_range,
    words_of,
)
from gramscope.report.panels.validity import at_step, change, tells_change
from gramscope.report.view import RunView

SHARES = "Which layer learns"
LINEARITY = "Target linearity, layer by layer"
FLIPS = "Mask flips"
VISIBLE = 0.02  # a smaller change of target linearity is lost in the choice of the probe


def shares(views: Sequence[RunView]) -> Panel | None:
    families = [view.family("share") for view in views]
    if not any(families):
        return None
    colours, lined = colours_of(families), list[str]()

    def draw(view: RunView, family: Family) -> tuple[Sequence[Mark], Axis]:
        if _lowest(family) < -1e-3:
            lined.append(view.name)
            return by_layer(view, family, colours), Axis("share")
        # The stack starts at the first layer; a step at which a layer was not measured counts as nothing in it.
        steps, rows = table(family)
        filled, layers = np.nan_to_num(rows), enumerate(family)
        marks = [Line(name, steps, filled[at], view.index, colours[name], stacked=True) for at, name in layers]
        top = max(1.0, float(filled.sum(0).max()))
        return marks, Axis("share", range=(0.0, 1.0 if top < 1.01 else top))

    plots = layer_plots(views, families, "shares", draw)
    notes = mapped_note(views, families)
    if lined:
        notes.append(
            f"Some layers of {', '.join(lined)} were pushed the wrong way (negative share), so lines are drawn."
        )
    size, most = ("brightness", "brightest") if all(map(many, families)) else ("height", "thickest")
    return Panel(
        "shares",
        SHARES,
        f"The {size} of a band is the layer's share in the next decrease of the loss: the {most} does the learning.",
        words_of(views, who_learns),
        plots,
        notes=notes,
    )


def _lowest(family: Family) -> float:
    values = [float(np.nanmin(series.values)) for series in family.values() if len(series.finite.values)]
    return min(values, default=0.0)


def who_learns(view: RunView) -> str:
    """The layer with the largest share, at the first and at the last measurement."""
    family = {name: s.finite for name, s in view.family("share").items() if len(s.finite.values)}
    if not family:
        return ""
    first, last = (max(family, key=lambda name: float(family[name].values[place])) for place in (0, -1))
    share_first, share_last = percent(family[first].first), percent(family[last].last)
    begin, end = at_step(family[first], 0), at_step(family[last])
    if not all(tells_change(view, s) for s in family.values()):
        return f"At {end} layer {last} learns most ({share_last} of the loss decrease)."
    if first == last:
        return f"Layer {first} learns most at {begin} ({share_first} of the loss decrease) and at {end} ({share_last})."
    return (
        f"At {begin} layer {first} learns most ({share_first} of the loss decrease), at {end} layer {last} "
        f"({share_last})."
    )


def linearity_change(view: RunView) -> str:
    """The layer whose inputs changed most in what they tell of the targets by a linear map."""
    family = view.family("target_linearity")
    growth = {name: s.last - s.first for name, s in family.items() if tells_change(view, s)}
    if not growth:
        return ""
    most = max(growth, key=lambda name: abs(growth[name]))
    series = family[most]
    if abs(growth[most]) < VISIBLE:
        return (
            f"Target linearity changed by less than {VISIBLE} in each layer, {at_step(series, 0)} to {at_step(series)}."
        )
    return f"Target linearity changed most in layer {most}: {change(view, series)}."


def linearity(views: Sequence[RunView]) -> Panel | None:
    families = [view.family("target_linearity") for view in views]
    if not any(families):
        return None
    colours = colours_of(families)

    def draw(view: RunView, family: Family) -> tuple[Sequence[Mark], Axis]:
        marks = [*by_layer(view, family, colours), *_nulls(view, family, colours)]
        return marks, Axis("target linearity", range=unit_range(marks))

    notes = [note for view, family in zip(views, families, strict=True) for note in _null_notes(view, family)]
    return Panel(
        "linearity",
        LINEARITY,
        "1 means that a linear map of this layer's inputs gives the targets. The dotted line of a layer is its null, "
        "what random targets reach: only what lies above it was learnt or was in the data.",
        words_of(views, linearity_change),
        layer_plots(views, families, "target linearity", draw),
        notes=notes + mapped_note(views, families),
    )


def _nulls(view: RunView, family: Family, colours: Mapping[str, Colour]) -> list[Line]:
    """A dotted line for each layer, in the layer's colour."""
    return [
        Line(f"{layer}, null", null.steps, null.values, view.index, colours[layer], dash="dot", legend=False)
        for layer, null in view.family("target_linearity_null").items()
        if layer in family
    ]


def _null_notes(view: RunView, family: Family) -> list[str]:
    nulls = view.family("target_linearity_null")
    full = [layer for layer in family if layer in nulls and nulls[layer].last == 1]
    unknown = [layer for layer in family if layer not in nulls]
    said = []
    if full:
        said.append(
            f"{view.name}: the inputs of layer {', '.join(full)} have as many independent directions as the probe has "
            "rows: target linearity is 1 there for any targets, random ones too, and says nothing. Take a larger probe."
        )
    if unknown:
        said.append(f"{view.name}: the null of layer {', '.join(unknown)} is not known: it was not recorded.")
    return said


def flips(views: Sequence[RunView]) -> Panel | None:
    families = [view.family("flips") for view in views]
    if not any(families):
        return None
    colours = colours_of(families)

    def draw(view: RunView, family: Family) -> tuple[Sequence[Mark], Axis]:
        whole = all(float(value).is_integer() for s in family.values() for value in s.finite.values.tolist())
        return by_layer(view, family, colours), Axis("masks flipped" if whole else "fraction of masks flipped")

    words = []
    for view, family in zip(views, families, strict=True):
        ends = {name: series.last for name, series in family.items() if len(series.finite.values)}
        if ends:
            most = max(ends, key=lambda name: ends[name])
            words.append(
                f"{view.name}: at the end most flips are in activation {most} ({number(ends[most])})."
                if ends[most]
                else f"{view.name}: at the end no unit switches."
            )
    return Panel(
        "flips",
        FLIPS,
        "How many units of an activation switched on or off; at zero the network has settled into one linear piece.",
        words,
        layer_plots(views, families, "mask flips", draw),
        notes=mapped_note(views, families),
    )
