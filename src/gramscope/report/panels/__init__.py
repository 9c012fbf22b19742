"""The panels of the page, one subject a file, in the order in which they are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gramscope.report.figure import Panel
from gramscope.report.panels import gram, health, kernels, layers, others, richness, spectra, steps, training
from gramscope.report.view import RunView


@dataclass(frozen=True)
class Absent:
    """A panel that is left out, and what a run must record for it to be drawn."""

    title: str
    needs: str


@dataclass(frozen=True)
class Entry:
    """How a panel is made: ``build`` gives None where no run holds what it needs."""

    title: str
    needs: str
    build: Callable[[Sequence[RunView]], Panel | None]


KNOWN = (
    Entry(training.TITLE, "loss or accuracy", training.panel),
    Entry(layers.SHARES, "share/<layer>", layers.shares),
    Entry(kernels.MOVES, "kernel/drift or kernel/alignment", kernels.moves),
    Entry(richness.TITLE, "richness or the arrays richness/quality, …", richness.panel),
    Entry(health.TITLE, "gradient_norm/<layer>, update_ratio/<layer>, dead_units/<layer>, …", health.panel),
    Entry(layers.LINEARITY, "target_linearity/<layer>", layers.linearity),
    Entry(gram.TITLE, "delta_gram/<layer> and delta_vc/<layer>", gram.panel),
    Entry(spectra.TITLE, "the arrays spectrum/<weight>, or alpha/<weight>", spectra.panel),
    Entry(layers.FLIPS, "flips/<activation>", layers.flips),
    Entry(steps.TITLE, "step/predicted_loss_change or the arrays step/predicted and step/true", steps.panel),
    Entry(kernels.MATRIX, "the array kernel", kernels.matrix),
)
# Whatever the panels above did not take: nothing that a run holds is dropped.
REST = (
    Entry(training.UPKEEP, "lr, norm/parameters or overhead", training.upkeep),
    Entry(others.SCALARS, "", others.scalars),
    Entry(others.ARRAYS, "", others.arrays),
)


def all_panels(views: Sequence[RunView]) -> tuple[list[Panel], list[Absent]]:
    """The panels that the runs can fill, and the others with what they would need."""
    drawn: list[Panel] = []
    absent: list[Absent] = []
    for entry in KNOWN:
        panel = entry.build(views)
        if panel is None:
            absent.append(Absent(entry.title, entry.needs))
        else:
            drawn.append(panel)
    drawn += [panel for entry in REST if (panel := entry.build(views)) is not None]
    return drawn, absent
