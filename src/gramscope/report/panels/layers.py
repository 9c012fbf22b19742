"""What is measured layer by layer: shares in the learning, target linearity, mask flips."""

from collections.abc import Mapping, Sequence

import numpy as np

from gramscope.report.figure import Axis, Colour, Line, Panel, Plot
from gramscope.report.panels.drawing import (
    STEP,
    by_layer,
    caption,
    colours_of,
    common_limits,
    heat_over_steps,
    many,
    mapped_note,
    number,
    percent,
    table,
    unit_range,
)
from gramscope.report.panels.validity import at_step, change, tells_change
from gramscope.report.view import RunView, Series

SHARES = "Which layer learns"
LINEARITY = "Target linearity, layer by layer"
FLIPS = "Mask flips"


def shares(views: Sequence[RunView]) -> Panel | None:
    families = [view.family("share") for view in views]
    if not any(families):
        return None
    colours = colours_of(families)
    negative = [view.name for view, family in zip(views, families, strict=True) if _lowest(family) < -1e-3]
    mapped = [view.name for view, family in zip(views, families, strict=True) if many(family)]
    limits = common_limits(filter(many, families))
    plots: list[Plot] = []
    for view, family in zip(views, families, strict=True):
        if not family:
            continue
        if many(family):
            plots.append(heat_over_steps(caption(views, view, "shares"), "share", view, family, limits))
            continue
        steps, rows = table(family)
        if view.name in negative:
            plots.append(
                Plot(
                    caption(views, view, "shares"),
                    STEP,
                    Axis("share"),
                    [by_layer(view, family, colours)],
                    run=view.index,
                )
            )
            continue
        # The stack starts at the first layer; a step at which a layer was not measured counts as nothing in it.
        filled = np.nan_to_num(rows)
        marks = [
            Line(name, steps, filled[place], view.index, colours[name], stacked=True)
            for place, name in enumerate(family)
        ]
        top = max(1.0, float(filled.sum(0).max()))
        plots.append(
            Plot(
                caption(views, view, "shares, stacked"),
                STEP,
                Axis("share", range=(0.0, 1.0 if top < 1.01 else top)),
                [marks],
                run=view.index,
            )
        )
    notes = mapped_note(mapped)
    if set(negative) - set(mapped):
        lined = [name for name in negative if name not in mapped]
        notes.append(
            f"Some layers of {', '.join(lined)} were pushed the wrong way (negative share), so lines are drawn."
        )
    size, most = ("height", "thickest") if len(mapped) < len(views) else ("brightness", "brightest")
    return Panel(
        "shares",
        SHARES,
        f"The {size} of a band is the layer's share in the next decrease of the loss: the {most} does the learning.",
        [_share_words(view, family) for view, family in zip(views, families, strict=True)],
        plots,
        notes=notes,
    )


def _lowest(family: Mapping[str, Series]) -> float:
    values = [float(np.nanmin(series.values)) for series in family.values() if len(series.finite.values)]
    return min(values, default=0.0)


def _share_words(view: RunView, family: Mapping[str, Series]) -> str:
    measured = {name: series for name, series in family.items() if len(series.finite.values)}
    if not measured:
        return f"{view.name}: no shares recorded."
    first = max(measured, key=lambda name: measured[name].first)
    last = max(measured, key=lambda name: measured[name].last)
    if not all(tells_change(view, series) for series in measured.values()):
        when = measured[last].finite.steps[-1]
        return f"{view.name}: at step {when:,.0f} layer {last} leads with {percent(measured[last].last)}."
    return (
        f"{view.name}: at {at_step(measured[first], 0)} layer {first} leads with {percent(measured[first].first)}, "
        f"at {at_step(measured[last])} layer {last} with {percent(measured[last].last)}."
    )


def linearity(views: Sequence[RunView]) -> Panel | None:
    families = [view.family("target_linearity") for view in views]
    if not any(families):
        return None
    limits = common_limits(filter(many, families))
    colours = colours_of(families)
    plots, notes = [], []
    for view, family in zip(views, families, strict=True):
        title = caption(views, view, "target linearity")
        if many(family):
            plots.append(heat_over_steps(title, "target linearity", view, family, limits))
        elif family:
            marks = [*by_layer(view, family, colours), *_nulls(view, family, colours)]
            axis = Axis("target linearity", range=unit_range(marks))
            plots.append(Plot(title, STEP, axis, [marks], run=view.index))
        notes += _null_notes(view, family)
    words = []
    for view, family in zip(views, families, strict=True):
        growth = {name: s.last - s.first for name, s in family.items() if tells_change(view, s)}
        if growth:
            most = max(growth, key=lambda name: abs(growth[name]))
            still = number(family[most].first) == number(family[most].last)
            moved = f"layer {most} changed most, {change(view, family[most])}"
            words.append(f"{view.name}: {'no layer changed visibly' if still else moved}.")
    return Panel(
        "linearity",
        LINEARITY,
        "1 means that a linear map of this layer's inputs gives the targets. The dotted line of a layer is its null, "
        "what random targets reach: only what lies above it was learnt or was in the data.",
        words,
        plots,
        notes=notes + mapped_note([view.name for view, family in zip(views, families, strict=True) if many(family)]),
    )


def _nulls(view: RunView, family: Mapping[str, Series], colours: Mapping[str, Colour]) -> list[Line]:
    """A dotted line for each layer, in the layer's colour."""
    return [
        Line(f"{layer}, null", null.steps, null.values, view.index, colours[layer], dash="dot", legend=False)
        for layer, null in view.family("target_linearity_null").items()
        if layer in family
    ]


def _null_notes(view: RunView, family: Mapping[str, Series]) -> list[str]:
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
    plots = []
    limits = common_limits(filter(many, families))
    for view, family in zip(views, families, strict=True):
        if family:
            title = caption(views, view, "mask flips")
            if many(family):
                plots.append(heat_over_steps(title, "mask flips", view, family, limits))
                continue
            marks = by_layer(view, family, colours)
            whole = all(float(value).is_integer() for s in family.values() for value in s.finite.values.tolist())
            axis = Axis("masks flipped" if whole else "fraction of masks flipped")
            plots.append(Plot(title, STEP, axis, [marks], run=view.index))
    words = []
    for view, family in zip(views, families, strict=True):
        ends = {name: series.last for name, series in family.items() if len(series.finite.values)}
        if ends:
            most = max(ends, key=lambda name: ends[name])
            words.append(f"{view.name}: at the end most flips are in activation {most} ({number(ends[most])}).")
    return Panel(
        "flips",
        FLIPS,
        "How many units of an activation switched on or off; at zero the network has settled into one linear piece.",
        words,
        plots,
        notes=mapped_note([view.name for view, family in zip(views, families, strict=True) if many(family)]),
    )
