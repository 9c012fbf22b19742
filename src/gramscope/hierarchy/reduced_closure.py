"""Where the dynamics of (Q, G, M) closes, and where it needs the elementary transports (arXiv:2606.09744, prop. 3, 4).

One first-order step of the fields is split by what it takes to write it down:

- ``Δx^ℓ`` = *local* ``-η Σ_ν Q^{ℓ-1}_{μν} P^ℓ_{μν} g^ℓ_ν e_ν`` + *transported* ``D^ℓ W^ℓ Δx^{ℓ-1}`` (eq. 152);
- ``Δg^ℓ`` = *correlator* ``-η Σ_ν G^{ℓ+1} x^ℓ e`` + *metric* ``-η Σ_ν G^{ℓ+2} M^ℓ x^ℓ e`` + *iterated*, the
  pullbacks of pullbacks, which M alone does not give (eqs. 185 to 192).

Local, correlator and metric are written in overlaps, fields and M. Transported and iterated need the weights.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gramscope.base.results import Result, TableResult
from gramscope.hierarchy.fields import Fields, check_fields


@dataclass(frozen=True, repr=False)
class LayerClosure(Result):
    """Norms of the parts of one layer's step, as fractions of the norm of their sum (NaN where that is zero).

    Parts may cancel, so a fraction can exceed 1. ``correlator``, ``metric`` and ``iterated`` are NaN for the last
    layer, whose conjugate field is the fixed readout.
    """

    layer: int
    local: float
    transported: float
    correlator: float
    metric: float
    iterated: float

    @property
    def closes(self) -> bool:
        """Neither field of this layer needs a transport: both extra parts are zero (or nothing moves)."""
        return not (self.transported > 0 or self.iterated > 0)


@dataclass(frozen=True, eq=False, repr=False)
class Closure(TableResult, shown=("closes", "second_order", "mask_flips")):
    """Where one step of the reduced dynamics closes, by layer; and what first order at fixed masks leaves out.

    ``second_order`` and ``mask_flips`` are norms of parts of the outputs' true change, as fractions of it.
    """

    rows_from: ClassVar[str] = "layers"
    plotted: ClassVar[tuple[str, ...]] = ("local", "transported", "iterated")

    layers: list[LayerClosure]
    second_order: float
    mask_flips: float
    flips: list[int]

    @property
    def closes(self) -> bool:
        return all(layer.closes for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"The step {'closes' if self.closes else 'does not close'} in (Q, G, M) and the fields."]
        for layer in self.layers:
            needs = [f"transports carry {layer.transported:.3g} of Δx"] if layer.transported > 0 else []
            needs += [f"iterated pullbacks carry {layer.iterated:.3g} of Δg"] if layer.iterated > 0 else []
            lines.append(f"  layer {layer.layer}: {'closed' if layer.closes else '; '.join(needs)}")
        lines.append(f"  of the outputs: second order {self.second_order:.3g}, mask flips {self.mask_flips:.3g}")
        return "\n".join(lines)


def closure(fields: Fields, residual: Tensor, lr: float) -> Closure:
    """Split one gradient step into what the reduced state says by itself and what needs the weights.

    Args:
        fields: the network on its examples.
        residual: ``e = ∂loss/∂f``; ``fields.outputs - y`` for half the squared error.
        lr: the learning rate; it matters for the parts beyond first order only.

    Reference: arXiv:2606.09744, eqs. 152, 185 to 192, propositions 3 and 4.

    Example:
        >>> import gramscope as gs
        >>> rng = torch.Generator().manual_seed(0)
        >>> w = [torch.randn(4, 3, generator=rng), torch.randn(5, 4, generator=rng)]
        >>> x = torch.randn(6, 3, generator=rng)
        >>> one, two = gs.hierarchy.Fields(w[:1], x), gs.hierarchy.Fields(w, x)
        >>> [gs.hierarchy.closure(fields, fields.outputs, 0.1).closes for fields in (one, two)]
        [True, False]
    """
    check_fields(fields)
    comparison = fields.compare_step(residual, lr)
    errors = comparison.errors()
    change = comparison.predicted.activations
    layers = [
        LayerClosure(layer, *_forward(fields, change, layer), *_backward(fields, residual, layer))
        for layer in range(1, fields.depth + 1)
    ]
    return Closure(layers, errors["second order"], errors["mask flips"], comparison.flips)


def _forward(fields: Fields, change: list[Tensor], layer: int) -> list[float]:
    """Fractions of Δx^ℓ: local and transported."""
    transported = fields.slopes(layer) * (change[layer - 1] @ fields.weights[layer - 1].T)
    return _fractions([change[layer] - transported, transported])


def _backward(fields: Fields, residual: Tensor, layer: int) -> list[float]:
    """Fractions of Δg^ℓ: by the correlator, by the metric, by iterated pullbacks."""
    if layer == fields.depth:
        return [math.nan] * 3
    x = fields.activations[layer]
    v = residual[..., None] * (x if fields.single else x[:, None])
    pullback = fields.pullback(layer)
    levels = [pullback.level(k).apply(v, constant=residual) for k in range(layer + 1, fields.depth + 1)]
    none = torch.zeros_like(levels[0])
    return _fractions([levels[0], levels[1] if len(levels) > 1 else none, sum(levels[2:], none)])


def _fractions(parts: list[Tensor]) -> list[float]:
    size = float(torch.stack(parts).sum(0).norm())
    return [float(part.norm()) / size if size else math.nan for part in parts]
