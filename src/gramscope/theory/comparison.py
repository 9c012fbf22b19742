"""Theory and measurement side by side."""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from gramscope.base.results import TableResult

if TYPE_CHECKING:
    from pandas import DataFrame

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

    def worst(self) -> "DataFrame":
        """One row for each tensor of each layer: its component with the largest |pull|, and the rms of all pulls."""
        from pandas import DataFrame

        groups = itertools.groupby(self.rows(), key=lambda row: (row.layer, row.tensor))
        found = []
        for _, group in groups:
            rows = list(group)
            rms = math.sqrt(sum(row.pull**2 for row in rows) / len(rows))
            found.append(asdict(max(rows, key=lambda row: abs(row.pull))) | {"rms_pull": rms})
        return DataFrame(found)

    def __str__(self) -> str:
        ladder = ", ".join(str(n) for n in self.widths)
        how = f"extrapolated from widths {ladder}" if len(self.widths) > 1 else f"at width {ladder}"
        lines = [f"{self.networks} networks, {how}", self.worst().to_string(index=False, float_format="{:.4g}".format)]
        if self.left_out:
            lines.append(
                f"{', '.join(self.left_out)} not compared: sampled networks have s'' = 0; use kink='autograd'."
            )
        return "\n".join(lines)
