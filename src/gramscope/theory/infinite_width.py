"""The two kernels of infinite width: NNGP (before training) and NTK (of training), for pairs of inputs alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float64
from torch import Tensor

from gramscope.base.charts import heat_map
from gramscope.base.errors import InputError
from gramscope.base.pyplot import Figure, load_pyplot
from gramscope.base.results import Result
from gramscope.theory.activation_functions import Activation, Kinked
from gramscope.theory.recursions import Rates

_FIRST_NODES, _LAST_NODES = 49, 1200
_REACH = 9.5  # standard deviations; the normal weight beyond is 1e-20
_MAX_POINTS = 1 << 22  # of the grid, for all pairs of one block together


@dataclass(frozen=True, eq=False, repr=False)
class InfiniteWidthKernels(Result):
    """``nngp`` (n, m): covariance of the outputs at initialisation. ``ntk`` (n, m): the tangent kernel of training."""

    nngp: Float64[Tensor, "n m"] = field(repr=False)
    ntk: Float64[Tensor, "n m"] = field(repr=False)

    def plot(self) -> Figure:
        """Both kernels as heat maps, side by side; a figure."""
        figure, axes = load_pyplot().subplots(1, 2, figsize=(9, 4), layout="constrained")
        for place, (name, kernel) in enumerate({"NNGP": self.nngp, "NTK": self.ntk}.items()):
            heat_map(kernel, name, "input", "input", axes=axes[place])
        return figure

    def __repr__(self) -> str:
        n, m = self.nngp.shape
        means = f"mean diagonal {float(self.nngp.diagonal().mean()):.4g} and {float(self.ntk.diagonal().mean()):.4g}"
        return f"InfiniteWidthKernels(nngp and ntk of {n} x {m} inputs, {means})"


def infinite_width_kernels(
    activation: Activation, rates: Sequence[Rates], x: Float64[Tensor, "n d"], x2: Float64[Tensor, "m d"]
) -> InfiniteWidthKernels:
    """``K¹ = C_b + C_W x·x'/n₀``, ``K^{l+1} = C_b + C_W ⟨s s'⟩``, ``Θ^{l+1} = λ_b + λ_W ⟨s s'⟩ + C_W ⟨ṡ ṡ'⟩ Θ^l``.

    A residual layer adds ``δ² K^l`` and ``δ² Θ^l``.

    Lee et al. 2018 (arXiv:1711.00165), eq. 5; Jacot et al. 2018 (arXiv:1806.07572), theorem 1; learning rates as in
    PDLT, chapter 8.
    """
    width = x.shape[1]
    raw = ((x * x).sum(1) / width, (x2 * x2).sum(1) / width, x @ x2.T / width)
    rate = rates[0]
    first, second, both = (rate.C_b + rate.C_W * part for part in raw)
    theta = rate.lambda_b + rate.lambda_W * raw[2]
    for rate in rates[1:]:
        rows, columns = first[:, None].expand_as(both), second[None].expand_as(both)
        values, slopes = pair_moments(activation, rows, columns, both)
        own = [pair_moments(activation, variance, variance, variance)[0] for variance in (first, second)]
        before, kept = (first, second, both), rate.skip**2
        first, second, both = (
            rate.C_b + rate.C_W * part + kept * old for part, old in zip((*own, values), before, strict=True)
        )
        theta = rate.lambda_b + rate.lambda_W * values + (rate.C_W * slopes + kept) * theta
    return InfiniteWidthKernels(both, theta)


def pair_moments(activation: Activation, first: Tensor, second: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """``⟨s(u) s(v)⟩`` and ``⟨ṡ(u) ṡ(v)⟩`` from the variances of u and v and their covariance, entry by entry."""
    root = (first * second).sqrt()
    # Rounding must not make |covariance| exceed the root of the variances.
    both = torch.maximum(torch.minimum(both, root), -root)
    if isinstance(activation, Kinked):
        return _kinked(activation, root, both)
    found = _smooth(activation, first.reshape(-1), second.reshape(-1), both.reshape(-1))
    return found[0].reshape(both.shape), found[1].reshape(both.shape)


def _kinked(activation: Kinked, root: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """In closed form: with ``s = m z + d |z|``, ``⟨|u||v|⟩ = (2/π) √(k k') (√(1−ρ²) + ρ asin ρ)`` (Cho & Saul 2009)."""
    mean, half = (activation.a_plus + activation.a_minus) / 2, (activation.a_plus - activation.a_minus) / 2
    correlation = torch.where(root > 0, both / torch.where(root > 0, root, 1.0), 1.0).clamp(-1, 1)
    angle = torch.asin(correlation)
    across = (1 - correlation) * (1 + correlation)
    sizes = 2 / math.pi * root * (across.sqrt() + correlation * angle)
    return mean**2 * both + half**2 * sizes, mean**2 + half**2 * (2 / math.pi) * angle


def _smooth(activation: Activation, first: Tensor, second: Tensor, both: Tensor) -> Float64[Tensor, "2 p"]:
    """By the trapezoidal rule in two dimensions, refined until two grids agree to 1e-8.

    For an analytic s its error falls as ``e^{−c/h}`` with the step h, so that of the finer grid is below 1e-11.
    """
    nodes, before = _FIRST_NODES, None
    while nodes <= _LAST_NODES:
        found = _on_grid(activation, first, second, both, nodes)
        if before is not None and bool(((found - before).abs() <= 1e-8 * (1 + found.abs())).all()):
            return found
        nodes, before = math.ceil(1.5 * nodes), found
    raise InputError(
        f"Gaussian expectations of {activation.name!r} must converge, but they change on {_LAST_NODES} nodes. Has "
        "it a kink? Use Kinked(a_plus, a_minus)."
    )


def _on_grid(activation: Activation, first: Tensor, second: Tensor, both: Tensor, count: int) -> Float64[Tensor, "2 p"]:
    nodes = torch.linspace(-_REACH, _REACH, count, dtype=torch.float64, device=first.device)
    weights = torch.exp(-(nodes**2) / 2)
    weights = weights / weights.sum()
    spread = first.sqrt()
    slope = torch.where(spread > 0, both / torch.where(spread > 0, spread, 1.0), 0.0)
    rest = (second - slope**2).clamp(min=0).sqrt()
    parts = []
    block = max(1, _MAX_POINTS // len(nodes) ** 2)
    for start in range(0, len(first), block):
        some = slice(start, start + block)
        u = activation.jets(spread[some, None] * nodes)[:2]
        v = activation.jets(slope[some, None, None] * nodes[:, None] + rest[some, None, None] * nodes)[:2]
        parts.append(torch.einsum("jpa,jpab,a,b->jp", u, v, weights, weights))
    return torch.cat(parts, dim=1)
