"""The fewest floating-point operations that an exact NTK takes by the known dense contractions.

A weight site ``u = W v`` with ``T`` positions, ``F`` inputs and ``O`` outputs a position holds,
for ``n`` examples and ``C`` network outputs, inputs ``V (n, T, F)`` and signals ``S (n, C, T, O)``.
Multiply-adds of its layer kernel over the ``n (n + 1) / 2`` distinct pairs of examples:

    (a) example gradients   n C T F O  +  (entries) F O
    (b) position space      (pairs) (T² F + C² T² O + C² T²)
    (c) half-contracted     (pairs) (T² F + C T² O + C² T O)

and with the trace over outputs C² becomes C throughout. The floor of a site is the least of the
three; the forward pass and the backward pass of all C outputs come on top. One multiply-add is two
FLOP. Not counted: elementwise work. Not assumed: fast (Strassen, Winograd) products, or structure of
a special network, such as signals that are the same for every example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

_SITES = (nn.Linear, nn.Conv2d, nn.BatchNorm2d)


@dataclass(frozen=True)
class Site:
    """A weight site as the count sees it."""

    name: str
    positions: int
    fan_in: int
    fan_out: int
    groups: int = 1
    bias: bool = False
    elementwise: bool = False
    first: bool = False
    last: bool = False

    @property
    def macs(self) -> int:
        """Multiply-adds of one example's forward pass; of one output's backward pass as well."""
        return 0 if self.elementwise else self.positions * self.fan_in * self.fan_out * self.groups


@dataclass(frozen=True)
class Floor:
    """FLOP by part; ``method`` names each site's cheapest contraction."""

    forward: float
    signals: float
    grams: float
    method: dict[str, str]

    @property
    def total(self) -> float:
        return self.forward + self.signals + self.grams


def sites(model: nn.Module, example: Tensor) -> list[Site]:
    """The weight sites met by one example (``example``: shape ``(1, ...)``)."""
    found: list[Site] = []
    outputs: list[Tensor] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def record(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            found.append(_site(name, module, args[0], out))
            outputs.append(out)

        return record

    handles = [m.register_forward_hook(hook(name)) for name, m in model.named_modules() if isinstance(m, _SITES)]
    try:
        result = model(example)
    finally:
        for handle in handles:
            handle.remove()
    return [Site(**{**vars(site), "last": out is result}) for site, out in zip(found, outputs, strict=True)]


def _site(name: str, module: nn.Module, v: Tensor, out: Tensor) -> Site:
    first = not v.requires_grad
    if isinstance(module, nn.Linear):
        return Site(name, 1, module.in_features, module.out_features, bias=module.bias is not None, first=first)
    positions = out[0, 0].numel()
    if isinstance(module, nn.BatchNorm2d):
        return Site(name, positions, 1, module.num_features, bias=True, elementwise=True, first=first)
    assert isinstance(module, nn.Conv2d)
    fan_in = module.weight[0].numel()
    fan_out = module.out_channels // module.groups
    return Site(name, positions, fan_in, fan_out, groups=module.groups, bias=module.bias is not None, first=first)


def flop_floor(model: nn.Module, x: Tensor, outputs: int, reduce: str = "none") -> Floor:
    """The floor of the kernel of ``model`` on ``x`` against itself."""
    n = len(x)
    found = sites(model, x[:1])
    forward = sum(site.macs for site in found) * n
    # The signals of the last site are the identity, and those one site below are its weight's rows.
    signals = sum(site.macs for site in found if not (site.first or site.last)) * n * outputs
    method: dict[str, str] = {}
    grams = 0.0
    for site in found:
        costs = contraction_macs(site, n, outputs, reduce)
        method[site.name] = min(costs, key=costs.__getitem__)
        grams += costs[method[site.name]]
    return Floor(2.0 * forward, 2.0 * signals, 2.0 * grams, method)


def contraction_macs(site: Site, n: int, outputs: int, reduce: str = "none") -> dict[str, float]:
    """Multiply-adds of the site's layer kernel by each method."""
    pairs = n * (n + 1) / 2
    full = reduce == "none"
    entries = n * outputs * (n * outputs + 1) / 2 if full else pairs * outputs
    squared = outputs**2 if full else outputs
    t, f, o, g = site.positions, site.fan_in, site.fan_out, site.groups
    if site.last:
        # Signals are the identity: the kernel is the Gram matrix of the inputs, once for all outputs.
        return {"inputs": pairs * f}
    if site.elementwise:
        # A gain and a shift per channel: sums over positions, then two Gram products.
        return {"channels": 2.0 * n * outputs * t * o + 2.0 * entries * o}
    summed = squared * t * t if t > 1 else 0
    return {
        "example gradients": g * (n * outputs * t * f * o + entries * (f + site.bias) * o),
        "position space": g * pairs * (t * t * f + squared * t * t * o + summed),
        "half-contracted": g * pairs * (t * t * f + outputs * t * t * o + squared * t * o),
    }
