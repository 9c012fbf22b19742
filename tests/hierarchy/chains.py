"""Random chains for the tests of the hierarchy."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from gramscope.hierarchy import Fields


@dataclass(frozen=True)
class Case:
    weights: list[Tensor]
    biases: list[Tensor | None]
    slopes: list[float]
    readout: Tensor
    x: Tensor
    residual: Tensor

    def fields(self, dtype: torch.dtype = torch.float64) -> Fields:
        return Fields(
            [w.to(dtype) for w in self.weights],
            self.x.to(dtype),
            self.readout.to(dtype),
            biases=[None if b is None else b.to(dtype) for b in self.biases],
            negative_slope=self.slopes,
        )

    @property
    def network(self) -> tuple[list[Tensor], list[Tensor | None], list[float], Tensor]:
        return self.weights, self.biases, self.slopes, self.readout


def make(
    widths: list[int], outputs: int = 1, n: int = 4, bias: bool = False, slope: float = 0.0, seed: int = 0
) -> Case:
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weights = [randn(out, into) * (2 / into) ** 0.5 for into, out in pairwise(widths)]
    biases = [0.3 * randn(len(w)) if bias else None for w in weights]
    readout = randn(outputs, widths[-1]) / widths[-1] ** 0.5
    return Case(weights, biases, [slope] * len(weights), readout, randn(n, widths[0]), randn(n, outputs))


@st.composite
def cases(draw: st.DrawFn, max_depth: int = 4) -> Case:
    depth = draw(st.integers(1, max_depth))
    widths = draw(st.lists(st.integers(1, 7), min_size=depth + 1, max_size=depth + 1))
    return make(
        widths,
        outputs=draw(st.integers(1, 3)),
        n=draw(st.integers(1, 5)),
        bias=draw(st.booleans()),
        slope=draw(st.sampled_from([0.0, 0.1, 1.0])),
        seed=draw(st.integers(0, 10_000)),
    )


def close(got: Tensor, wanted: Tensor, tol: float = 1e-12) -> bool:
    """Relative to the larger of the wanted norm and one: empty fields (all neurons off) compare as zeros."""
    return float((got - wanted).norm()) <= tol * max(1.0, float(wanted.norm()))
