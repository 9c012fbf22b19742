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


A_STEP = "the measure step: scope.use(optimizer), and in a short run overhead=None"
KNOWN = (
    Entry(training.TITLE, "scope.step(loss=loss), or a probe with targets", training.panel),
    Entry(layers.SHARES, "the measure shares, and a probe with targets", layers.shares),
    Entry(kernels.MOVES, "the measure kernel", kernels.moves),
    Entry(richness.TITLE, "the measure richness", richness.panel),
    Entry(health.TITLE, "the measures gradient, update, weights or dead_units", health.panel),
    Entry(layers.LINEARITY, "the measure target_linearity, and a probe with targets", layers.linearity),
    Entry(gram.TITLE, A_STEP, gram.panel),
    Entry(spectra.TITLE, "the measure spectra", spectra.panel),
    Entry(layers.FLIPS, f"ReLU units, and {A_STEP}", layers.flips),
    Entry(steps.TITLE, A_STEP, steps.panel),
    Entry(kernels.MATRIX, "the measure kernel", kernels.matrix),
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
