"""The recursions of an activation with a kink where inputs lie at small angles: in decimals, from layer 1 to L."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from gramscope.theory.activation_functions import Kinked
from gramscope.theory.decimal_arithmetic import NARROW, Decimals, Doubles, Number
from gramscope.theory.kinked import (
    ROUNDING,
    Lines,
    Table,
    is_narrow,
    lines_of,
    moment_arrays,
    narrowest,
    on_lines,
    pair_moments,
    without_rounding,
)
from gramscope.theory.recursions import Layer, Rates, next_arrays


@dataclass(frozen=True)
class DecimalGram:
    """The matrix x·x/n_0 in decimals, and what is known of its digits.

    ``least`` is the 1 - ρ² of layer 1 below which two samples are on one line, ``unit`` the distance from 1 below which
    one is not a multiple of the other but the same.
    """

    gram: Callable[[], np.ndarray]
    least: float
    unit: float


def of_inputs(x: Tensor, dtype: torch.dtype) -> DecimalGram:
    """Inputs are exact; a sine below the rounding of their dtype is what is left of multiplying by a number."""
    eps = torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps

    def gram() -> np.ndarray:
        rows = np.array([[Decimal(v) for v in row] for row in x.cpu().tolist()], dtype=object)
        return rows @ rows.T / x.shape[1]

    return DecimalGram(gram, eps**2, 4 * eps)


def of_gram(gram: Tensor) -> DecimalGram:
    """A matrix of doubles holds no angle whose square is below its rounding."""
    rows = gram.cpu().tolist()

    def cleaned() -> np.ndarray:
        return np.array(without_rounding([[Decimal(v) for v in row] for row in rows]), dtype=object)

    return DecimalGram(cleaned, 4 * ROUNDING, 4 * ROUNDING)


def narrow_layers(
    activation: Kinked,
    source: DecimalGram,
    gram: Tensor,
    rates: Sequence[Rates],
    ratios: Sequence[Fraction],
    explicit: bool,
) -> list[Layer] | None:
    """All layers, or None where no two samples are close, or on one line, in any layer."""
    first = (rates[0].C_b + rates[0].C_W * gram).cpu().tolist()
    if min(row[i] for i, row in enumerate(first)) <= 0 or not any(
        is_narrow(table) for table, _ in _kernels(activation, first, Doubles.collinear, rates, Doubles())
    ):
        return None
    numbers = Decimals(ROUNDING)
    while True:
        with numbers.context():
            tables = _kernels(activation, _first_kernel(source, rates[0], numbers), source.least, rates, numbers)
            sine = min(narrowest(table, lines) for table, lines in tables)
        # Samples on one line stay here: in doubles rounding would part them after many layers.
        needed = Decimals(min(sine, Decimal(NARROW)))
        if needed.digits <= numbers.digits:
            break
        numbers = needed  # angles shrink with depth: those lost in too few digits come to light with more
    with needed.context():
        return _layers(activation, source, rates, ratios, explicit, needed, gram.device)


def _first_kernel(source: DecimalGram, rates: Rates, numbers: Doubles) -> list[list[Number]]:
    kernel = numbers.number(rates.C_b) + numbers.number(rates.C_W) * source.gram()
    return on_lines(kernel.tolist(), lines_of(kernel.tolist(), numbers.number(source.least)), source.unit)


def _kernels(
    activation: Kinked, kernel: Table, least: float, rates: Sequence[Rates], numbers: Doubles
) -> list[tuple[Table, Lines]]:
    """K and the lines of layers 1 ... L - 1."""
    found, n = [], len(kernel)
    for place, rate in enumerate(rates[1:]):
        lines = lines_of(kernel, numbers.collinear if place else numbers.number(least))
        found.append((kernel, lines))
        c_b, c_w, kept = (numbers.number(value) for value in (rate.C_b, rate.C_W, rate.skip**2))
        before = kernel
        kernel = [
            [
                c_b + c_w * pair_moments(activation, before, lines, (a, b), numbers)["p00"] + kept * before[a][b]
                for b in range(n)
            ]
            for a in range(n)
        ]
    return found


def _layers(
    activation: Kinked,
    source: DecimalGram,
    rates: Sequence[Rates],
    ratios: Sequence[Fraction],
    explicit: bool,
    numbers: Decimals,
    device: torch.device,
) -> list[Layer]:
    exact = [SimpleNamespace(**{name: Decimal(value) for name, value in vars(rate).items()}) for rate in rates]
    K = np.array(_first_kernel(source, rates[0], numbers), dtype=object)
    n = len(K)
    theta = exact[0].lambda_b + exact[0].lambda_W * source.gram()
    zero = np.full((n,) * 4, Decimal(0), dtype=object)
    now = {"K": K, "Theta": theta} | dict.fromkeys("VDFABPQ", zero)
    found = [_rounded(now, device)]
    for place, rate in enumerate(exact[1:]):
        table = now["K"].tolist()
        lines = lines_of(table, numbers.collinear if place else numbers.number(source.least))
        moments = moment_arrays(activation, table, lines, numbers)
        ratio = Decimal(ratios[place].numerator) / ratios[place].denominator
        now = next_arrays(SimpleNamespace(**now), SimpleNamespace(**moments), rate, ratio, explicit)
        found.append(_rounded(now, device))
    return found


def _rounded(arrays: dict[str, np.ndarray], device: torch.device) -> Layer:
    return Layer(**{name: torch.from_numpy(array.astype(np.float64)).to(device) for name, array in arrays.items()})
