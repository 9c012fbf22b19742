"""How far from infinite width: the depth-to-width ratio, and the strength of each 1/n tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from gramscope.base.errors import InputError
from gramscope.base.results import Result
from gramscope.theory.finite_width import FiniteWidthMLP, Flow, check_flow

Regime = Literal["infinite-width", "representation learning", "strongly coupled"]


@dataclass(frozen=True, repr=False)
class DepthToWidth(Result, shown=("ratio", "regime", "depth", "width", "deepest")):
    """L/n with n the harmonic mean of the hidden widths, and what it means for perturbation theory in 1/n."""

    depth: int
    width: float

    @property
    def ratio(self) -> float:
        return self.depth / self.width

    @property
    def regime(self) -> Regime:
        """Below 0.01 a kernel machine to a percent; up to 1 the 1/n expansion orders; beyond, it does not."""
        if self.ratio < 0.01:
            return "infinite-width"
        return "representation learning" if self.ratio < 1 else "strongly coupled"

    @property
    def deepest(self) -> int:
        """The depth at which L/n reaches 1, the cutoff of the effective theory at this width."""
        return int(self.width)


def depth_to_width(network: FiniteWidthMLP | Flow | nn.Module | Sequence[int]) -> DepthToWidth:
    """The expansion parameter L/n of a theory, of widths n_0, n_1, ..., n_L, or of a torch module of Linear layers.

    All dimensionless 1/n corrections grow as l/n at criticality (PDLT, arXiv:2106.10165), so L/n is the cutoff.

    >>> found = depth_to_width([784, 512, 512, 512, 10])
    >>> found.ratio, found.regime, found.deepest
    (0.0078125, 'infinite-width', 512)
    >>> depth_to_width(nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))).ratio
    0.1
    """
    if isinstance(network, Flow):
        widths = network.widths
    elif isinstance(network, FiniteWidthMLP):
        widths = network.layer_widths()
    else:
        widths = FiniteWidthMLP(_linear_widths(network) if isinstance(network, nn.Module) else network).layer_widths()
    hidden = widths[:-1]
    if not hidden:
        raise InputError("the network must have a hidden layer: a single layer is Gaussian at every width.")
    return DepthToWidth(len(widths), len(hidden) / sum(1 / n for n in hidden))


def _linear_widths(model: nn.Module) -> list[int]:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = [type(module).__name__ for module in model.modules() if _mixes(module)]
    if others:
        raise InputError(
            f"the module must be a chain of Linear layers, but it has weights in {', '.join(sorted(set(others)))}, "
            "which the theory of fully connected networks does not cover. Pass the widths n_0, ..., n_L that you mean."
        )
    chained = all(a.out_features == b.in_features for a, b in pairwise(layers))
    if not layers or not chained:
        shapes = [(layer.in_features, layer.out_features) for layer in layers]
        raise InputError(
            f"the module must be a chain of Linear layers, each as wide as the next expects, got {shapes}. "
            "Pass the widths n_0, ..., n_L that you mean."
        )
    return [layers[0].in_features, *(layer.out_features for layer in layers)]


def _mixes(module: nn.Module) -> bool:
    """Whether it is no Linear layer and has a weight matrix; gains and biases of a normalisation are vectors."""
    if isinstance(module, nn.Linear | ParametrizationList):
        return False
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def strengths(flow: Flow) -> dict[str, torch.Tensor]:
    """Dimensionless size of each 1/n tensor, layers 2..L, the largest over the inputs' own components.

    V/(nK²), D/(nKΘ), F/(nKΘ), A/(nΘ²), B/(nΘ²), P/(nΘ²), Q/(nΘ²) with n = n_{l-1}: (11.62). The theory to first order
    in 1/n holds where all are small against 1.

    >>> mlp = FiniteWidthMLP(depth=8, widths=64, activation="relu", C_W=2.0, lambda_b=0.0)
    >>> round(float(strengths(mlp.flow(torch.ones(1, 3)))["Q"][-1]) * 64 / 8, 3)       # l/3n, up to 1/l²
    0.328
    """
    check_flow(flow, "flow")
    if len(flow) < 2:
        raise InputError("the flow must have at least two layers: a single layer has no 1/n tensors.")
    found: dict[str, list[torch.Tensor]] = {}
    for layer in range(2, len(flow) + 1):
        tensors, n = flow[layer].tensors(), flow.fan_in(layer)
        K, Theta = tensors["K"].diagonal(), tensors["Theta"].diagonal()
        units = {"V": K * K, "D": K * Theta, "F": K * Theta} | dict.fromkeys("ABPQ", Theta * Theta)
        for name, unit in units.items():
            relative = torch.einsum("aaaa->a", tensors[name]) / (n * unit)
            found.setdefault(name, []).append(relative[relative.abs().argmax()])
    return {name: torch.stack(values) for name, values in found.items()}
