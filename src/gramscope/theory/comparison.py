"""Theory and measurement side by side."""

import io
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from gramscope.base.results import TableResult
from gramscope.base.streams import streams_put_back

if TYPE_CHECKING:
    from rich.table import Table

    from gramscope.theory.finite_width import Flow


@dataclass(frozen=True)
class SampleEstimate:
    """Measured components and their standard errors."""

    value: Tensor
    error: Tensor


Estimates: TypeAlias = dict[tuple[int, str], SampleEstimate]  # by layer and name of the tensor


@dataclass(frozen=True)
class Row:
    """One component of one tensor: pull = (measured - theory)/error."""

    layer: int
    tensor: str
    component: tuple[int, ...]
    theory: float
    measured: float
    error: float
    pull: float


@dataclass(frozen=True, repr=False)
class Comparison(TableResult):
    """What an ensemble of networks measured, beside the theory. ``print(comparison)`` shows the table.

    ``left_out`` names tensors that were not compared: with a kink and the distributional s'', P and Q of the
    theory are not what a sampled network (whose s'' is 0) has; take ``flow(x, kink="autograd")`` for those.
    """

    theory: "Flow"
    estimates: Estimates
    widths: tuple[int, ...]
    networks: int
    left_out: tuple[str, ...] = ()

    def pulls(self, layer: int, tensor: str) -> Tensor:
        """(measured - theory)/error, component by component."""
        estimate = self.estimates[layer, tensor]
        expected = self.theory[layer].tensors()[tensor].to(estimate.value)
        gap = estimate.value - expected
        # Where nothing varies (a linear network's slopes) rounding is the only error there is.
        rounding = 1e-10 * (expected.abs().max() + 1e-300)
        return gap / (estimate.error + rounding)

    @property
    def max_pull(self) -> float:
        """The largest |pull| of all components; many components make 3 or a little more common."""
        return max(float(self.pulls(*key).abs().max()) for key in self.estimates)

    def __repr__(self) -> str:
        count = sum(estimate.value.numel() for estimate in self.estimates.values())
        return f"Comparison({self.networks} networks, {count} components, max_pull={self.max_pull:.3g})"

    def _table(self) -> tuple[list[Row], None]:
        """One row for each component: layer, tensor, its place, theory, measured, error, pull."""
        return self.rows(), None

    def rows(self) -> list[Row]:
        """Every component."""
        found = []
        for (layer, tensor), estimate in self.estimates.items():
            expected, pulls = self.theory[layer].tensors()[tensor], self.pulls(layer, tensor)
            for at in itertools.product(*(range(n) for n in expected.shape)):
                numbers = (float(part[at]) for part in (expected, estimate.value, estimate.error, pulls))
                found.append(Row(layer, tensor, at, *numbers))
        return found

    def table(self) -> "Table":
        """One line for each tensor of each layer: its component with the largest |pull|, and the rms of all pulls."""
        with streams_put_back():  # importing rich draws from Python's random numbers
            from rich.table import Table

        ladder = ", ".join(str(n) for n in self.widths)
        how = f"extrapolated from widths {ladder}" if len(self.widths) > 1 else f"at width {ladder}"
        table = Table(title=f"{self.networks} networks, {how}")
        for name in ("layer", "tensor", "component"):
            table.add_column(name)
        for name in ("theory", "measured", "± error", "pull", "rms pull"):
            table.add_column(name, justify="right")
        for (layer, tensor), estimate in self.estimates.items():
            pulls = self.pulls(layer, tensor)
            at = tuple(int(i) for i in torch.unravel_index(pulls.abs().argmax(), pulls.shape))
            expected = self.theory[layer].tensors()[tensor]
            table.add_row(
                str(layer),
                tensor,
                "".join(str(i) for i in at) if max(at) < 10 else str(at),
                f"{float(expected[at]):.5g}",
                f"{float(estimate.value[at]):.5g}",
                f"{float(estimate.error[at]):.2g}",
                f"{float(pulls[at]):+.2f}",
                f"{math.sqrt(float(pulls.square().mean())):.2f}",
            )
        if self.left_out:
            table.caption = (
                f"{', '.join(self.left_out)} not compared: sampled networks have s'' = 0; use kink='autograd'."
            )
        return table

    def __str__(self) -> str:
        with streams_put_back():
            from rich.console import Console

        stream = io.StringIO()
        Console(file=stream, width=110, force_terminal=False).print(self.table())
        return stream.getvalue()
