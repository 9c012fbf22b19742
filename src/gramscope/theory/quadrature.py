"""Gaussian expectations of products of one-sample functions, by tensor Gauss-Hermite quadrature.

<f₁(z₁) f₂(z₂) ...> over z ~ N(0, C) is an integral over as many independent variables u as C has rank, with z = L u
from a pivoted Cholesky factor: C may be singular, and is never inverted. Three things keep it cheap:

- a function is evaluated on the grid of those variables only that its sample depends on;
- the last variable, when a single sample depends on it, is integrated first, in one dimension, and the result, a
  function of one number, is tabulated: four samples cost a grid of three dimensions, three samples one of two;
- nodes of negligible weight are left out: more than half of them at the orders that tanh needs;
- odd activations need half of the grid: all expectations in use are even under z -> -z.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError

Jet = Callable[[Tensor], Tensor]  # (*points) -> (orders, *points)

_RANK_TOLERANCE = 1e-14  # of the largest variance: less is rounding of the kernel
_MAX_ORDER = 400_000
_MAX_POINTS = 3e9  # of a grid: minutes
_CHUNK = 4_000_000  # points of a grid held at a time
_STENCIL = 6  # points of the local interpolation of a tabulated function


@functools.lru_cache(maxsize=256)
def _hermite(order: int, negligible: float) -> tuple[np.ndarray, np.ndarray]:
    from scipy.special import roots_hermitenorm

    nodes, weights = roots_hermitenorm(order)
    weights = weights / weights.sum()
    keep = weights > negligible
    return nodes[keep], weights[keep] / weights[keep].sum()


def gauss_hermite(order: int, like: Tensor, negligible: float = 1e-22) -> tuple[Tensor, Tensor]:
    """Nodes and weights for <f>, u ~ N(0, 1), those with a negligible weight left out.

    >>> u, w = gauss_hermite(40, torch.zeros((), dtype=torch.float64))
    >>> round(float((w * u**4).sum()), 12)
    3.0
    """
    nodes, weights = _hermite(order, negligible)
    return like.new_tensor(nodes), like.new_tensor(weights)


@dataclass(frozen=True)
class Factor:
    """z = L u: ``loadings[i, k]`` of slot i on variable k; ``depth[i]``: how many variables slot i needs."""

    loadings: Tensor
    depth: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.loadings.shape[1]


def factorise(covariance: Float[Tensor, "slots slots"], labels: tuple[int, ...]) -> Factor:
    """Pivoted Cholesky factor; a sample that fills several slots is taken first, so that the last variable is alone."""
    slots = covariance.shape[0]
    residual = covariance.clone()
    # What the rounding of the factor itself leaves behind is no variance.
    floor = _RANK_TOLERANCE * float(covariance.diagonal().max().clamp(min=1e-300))
    columns: list[Tensor] = []
    remaining = list(range(slots))
    depth = [0] * slots
    while remaining:
        variances = residual.diagonal()
        remaining = [i for i in remaining if float(variances[i]) > floor]
        if not remaining:
            break
        pivot = max(remaining, key=lambda i: (labels.count(labels[i]), float(variances[i])))
        column = residual[:, pivot] / variances[pivot].sqrt()
        column = torch.where(variances > floor, column, torch.zeros_like(column))
        columns.append(column)
        residual = residual - torch.outer(column, column)
        residual[pivot, :] = 0
        residual[:, pivot] = 0
        for i in range(slots):
            if float(column[i]) != 0:
                depth[i] = len(columns)
        remaining.remove(pivot)
    loadings = torch.stack(columns, dim=1) if columns else covariance.new_zeros(slots, 0)
    return Factor(loadings, tuple(depth))


def orders_at(level: int, factor: Factor) -> list[int]:
    """Gauss-Hermite order of each variable: spacing in z must stay the same, and spacing in u falls as 1/√order.

    A variable that fewer slots depend on meets poles of lower order, and needs fewer nodes for the same error.
    """
    scale = factor.loadings.square().amax(dim=0)
    share = (factor.loadings != 0).double().mean(dim=0).sqrt()
    return [math.ceil(level * (1 + float(value)) * float(part)) for value, part in zip(scale, share, strict=True)]


@dataclass(frozen=True)
class Integrand:
    """The jet of an activation, whether that is odd, and the weight below which a node does not count."""

    jet: Jet
    odd: bool = False
    negligible: float = 1e-22


def expectation(
    integrand: Integrand, covariance: Float[Tensor, "slots slots"], labels: tuple[int, ...], level: int
) -> Float[Tensor, "..."]:
    """<f⁽ᵏ¹⁾(z₁) ... f⁽ᵏˢ⁾(z_s)> for all orders k of the jet at once: shape (orders,) * slots.

    ``labels`` name the sample of each slot; ``level`` sets the accuracy, see :func:`orders_at`. For an odd activation
    only entries whose orders have the sum of an even number are right.
    """
    factor = factorise(covariance, labels)
    orders = orders_at(level, factor)
    _check_size(orders, covariance)
    rules = [gauss_hermite(order, covariance, integrand.negligible) for order in orders]
    if not rules:
        return _on_grid(integrand.jet, factor, rules, level)
    nodes, weights = rules[0]
    if integrand.odd:
        keep = nodes >= 0
        nodes, weights = nodes[keep], torch.where(nodes > 0, 2.0, 1.0)[keep] * weights[keep]
    width = max(1, _CHUNK // math.prod(len(w) for _, w in rules[1:3]))
    pieces = zip(nodes.split(width), weights.split(width), strict=True)
    return torch.stack([_on_grid(integrand.jet, factor, [piece, *rules[1:]], level) for piece in pieces]).sum(0)


def _check_size(orders: list[int], covariance: Tensor) -> None:
    # About 16/(π/√order) nodes of each variable count; of four variables one is integrated alone.
    points = math.prod(5.1 * math.sqrt(order) for order in orders[:3])
    if max(orders, default=0) > _MAX_ORDER or points > _MAX_POINTS:
        raise InputError(
            f"Gaussian expectations must fit a grid, but variances of {float(covariance.diagonal().max()):.3g} ask for "
            f"Gauss-Hermite orders {orders} ({points:.1g} points). Scale the inputs or C_W down, or the tolerance up."
        )


def _on_grid(jet: Jet, factor: Factor, rules: list[tuple[Tensor, Tensor]], level: int) -> Tensor:
    rank = factor.rank
    values: list[Tensor] = []
    deepest = [i for i, depth in enumerate(factor.depth) if depth == rank]
    # With one variable alone the grid of the others is a single point, and smoothing is the plain sum.
    smoothed = deepest[0] if rank > 1 and len(deepest) == 1 else None
    for i, depth in enumerate(factor.depth):
        if i == smoothed:
            centre = _coordinate(factor.loadings[i], rules, depth - 1)
            values.append(_smoothed(jet, centre, float(factor.loadings[i, depth - 1]), rules[depth - 1], level))
        else:
            values.append(jet(_coordinate(factor.loadings[i], rules, depth)))
    grids = rank - 1 if smoothed is not None else rank
    return _contract(values, [weights for _, weights in rules[:grids]])


def _coordinate(loadings: Tensor, rules: list[tuple[Tensor, Tensor]], depth: int) -> Tensor:
    """z of one slot on the grid of its first ``depth`` variables."""
    z = loadings.new_zeros(())
    for k in range(depth):
        z = z[..., None] + loadings[k] * rules[k][0]
    return z


def _contract(values: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Sum of products over the grid, one variable at a time, the last first; order axes kept, in the order of slots."""
    # Each pending tensor: (slots whose order axes it carries, the tensor with those axes in front and then variables).
    pending: list[tuple[list[int], Tensor]] = [([i], value) for i, value in enumerate(values)]
    for k in reversed(range(len(weights))):
        here = [item for item in pending if item[1].ndim - len(item[0]) == k + 1]
        pending = [item for item in pending if item[1].ndim - len(item[0]) <= k]
        slots, product = here[0][0], here[0][1] * weights[k]
        for more, tensor in here[1:-1]:
            slots, product = slots + more, _outer(product, len(slots), tensor, len(more))
        if len(here) == 1:
            pending.append((slots, product.sum(-1)))
        else:
            more, tensor = here[-1]
            pending.append((slots + more, _inner(product, len(slots), tensor, len(more))))
    slots, result = pending[0]
    for more, tensor in pending[1:]:
        slots, result = slots + more, _outer(result, len(slots), tensor, len(more))
    return result.permute([slots.index(i) for i in range(len(values))])


def _outer(a: Tensor, a_orders: int, b: Tensor, b_orders: int) -> Tensor:
    shape = [*a.shape[:a_orders], *b.shape[:b_orders], *a.shape[a_orders:]]
    flat = a.flatten(0, a_orders - 1)[:, None] * b.flatten(0, b_orders - 1)[None]
    return flat.reshape(shape)


def _inner(a: Tensor, a_orders: int, b: Tensor, b_orders: int) -> Tensor:
    """As _outer, summed over the last variable, by matrix products."""
    shape = [*a.shape[:a_orders], *b.shape[:b_orders], *a.shape[a_orders:-1]]
    left = a.flatten(0, a_orders - 1).movedim(0, -2)
    right = b.flatten(0, b_orders - 1).movedim(0, -1)
    product = left @ right
    return product.flatten(-2).movedim(-1, 0).reshape(shape)


def _smoothed(jet: Jet, centre: Tensor, spread: float, rule: tuple[Tensor, Tensor], level: int) -> Tensor:
    """<f(centre + spread u)> over u ~ N(0, 1), directly or from a table of the same where there are many centres."""
    nodes, weights = rule
    step = 0.09 / math.sqrt(level)
    reach = float(centre.abs().max()) if centre.numel() else 0.0
    cells = math.ceil(2 * reach / step) + 1
    if centre.numel() <= 2 * cells:
        return jet(centre[..., None] + spread * nodes) @ weights
    places = (torch.arange(cells + _STENCIL, dtype=centre.dtype, device=centre.device) - 2) * step - reach
    table = jet(places[:, None] + spread * nodes) @ weights
    return _interpolate(table, (centre + reach) / step + 2)


def _interpolate(table: Float[Tensor, "orders places"], position: Tensor) -> Tensor:
    """Local polynomial of degree 5 through the six nearest entries of each row, at real-valued positions."""
    cell = position.floor().clamp(2, table.shape[1] - 4)
    t = position - cell
    coefficients = _cell_polynomials(table)[cell.long() - 2]
    result = coefficients[..., -1, :]
    for k in reversed(range(_STENCIL - 1)):
        result = torch.addcmul(coefficients[..., k, :], result, t[..., None])
    return result.movedim(-1, 0)


def _cell_polynomials(table: Tensor) -> Tensor:
    """Power-basis coefficients of each cell: (cells, 6, orders)."""
    offsets = np.arange(_STENCIL) - 2
    to_power = table.new_tensor(np.linalg.inv(np.vander(offsets, increasing=True).astype(float)))
    windows = table.unfold(1, _STENCIL, 1)
    return torch.einsum("ps,ocs->cpo", to_power, windows).contiguous()
