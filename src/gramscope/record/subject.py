"""What is watched, and what is remembered of the first measurement."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int8
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope import measures
from gramscope.base.nested import ModelInput
from gramscope.capture.known_sites import KnownSites
from gramscope.capture.network import Outputs, named_parameters
from gramscope.capture.side_effects import in_modes
from gramscope.record.objective import Objective

if TYPE_CHECKING:
    from gramscope.measures.linear_targets import TargetLinearityValue
    from gramscope.record.feature_measures import LayerFlow
    from gramscope.record.optimizer_watch import OptimizerWatch


@dataclass(frozen=True, eq=False)
class Subject:
    """What is watched: the model, a fixed probe, and its objective; the step of the first optimiser is rehearsed."""

    model: nn.Module
    x: ModelInput
    y: Tensor | None
    objective: Objective
    outputs: Outputs
    layers: Callable[[str], bool]
    optimizers: tuple[Optimizer, ...] = ()
    lr: float | None = None
    updates: "OptimizerWatch | None" = None

    @cached_property
    def targets(self) -> Tensor:
        """Targets as one row for each example, on the device of the weights."""
        assert self.y is not None
        return self.objective.rows(self.y).to(next(self.model.parameters()).device)

    @cached_property
    def kernel_targets(self) -> Tensor:
        """Rows with the inner products of the targets; n numbers each where labels belong to positions."""
        assert self.y is not None
        return self.objective.few_rows(self.y).to(next(self.model.parameters()).device)

    @property
    def optimizer(self) -> Optimizer | None:
        return self.optimizers[0] if self.optimizers else None

    def by_layer(self, prefix: str, found: Mapping[str, float]) -> dict[str, float]:
        """Numbers by layer under the names of the store, of the chosen layers alone."""
        return {f"{prefix}/{layer}": value for layer, value in found.items() if self.layers(layer)}


@dataclass(eq=False)
class Memory:
    """What later measurements are compared with: the kernel, the features and the weights of the first.

    ``resumed``: the first measurement lies in an earlier attempt; what was not stored then cannot be compared with now.
    ``other``: how it differs, where that was of another probe or model. ``fingerprint`` is stored with the first.
    ``signs`` are those of the random mixtures, where outputs are very many. ``last`` is the weight that makes the
    outputs, if a plain pass tells what it is given (see :func:`gramscope.record.probe_pass.plain_pass`).
    ``sites``: where the weights meet the probe, which is sought once. ``flows``: changes of the weights so far.
    ``linearity``: by weight what it was given at the last measurement, and the target linearity of that.
    ``parameters``: shapes by name at the first kernel, which is a sum over them.
    ``probe_told``: the facts of the probe, which do not change, are in a record. ``coupled``: outputs depend on other
    examples of the probe (as in a graph), as the search for the sites found.
    """

    kernel: Tensor | None = None
    features: Tensor | None = None
    resumed: bool = False
    other: str = ""
    fingerprint: NDArray[np.uint8] | None = None
    weights: dict[str, Tensor] | None = None
    signs: Int8[Tensor, "C k"] | None = None
    last: str | None = None
    sites: KnownSites = field(default_factory=KnownSites)
    flows: "dict[str, LayerFlow] | None" = None
    linearity: "dict[str, tuple[Tensor, TargetLinearityValue]]" = field(default_factory=dict)
    parameters: dict[str, tuple[int, ...]] | None = None
    probe_told: bool = False
    coupled: bool = False

    @property
    def at_start(self) -> bool:
        """Whether nothing was recorded yet: what is said once is said now."""
        return not (self.probe_told or self.resumed)


def layers_by_id(model: nn.Module) -> dict[int, str]:
    """The layer of each parameter, by the parameter's id."""
    return {id(parameter): layer_of(name) for name, parameter in named_parameters(model).items()}


def layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode inside, every module's own flag back afterwards."""
    return in_modes([(module, False) for module in model.modules()])


def weight_keys(model: nn.Module) -> dict[str, str]:
    """Weights by name: the layer's name where the layer has one weight, else the weight's own, so that none is hidden.

    Counted over all parameters, frozen ones too: a series keeps its name when a weight is frozen or set free.

    >>> weight_keys(nn.Sequential(nn.Linear(2, 3), nn.GRU(3, 2)))
    {'0.weight': '0', '1.weight_ih_l0': '1.weight_ih_l0', '1.weight_hh_l0': '1.weight_hh_l0'}
    """
    weights = [name for name, p in named_parameters(model).items() if p.dim() >= 2]
    of_layer = Counter(layer_of(name) for name in weights)
    return {name: layer_of(name) if of_layer[layer_of(name)] == 1 else name for name in weights}


def layer_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The weight of each layer that is one matrix."""
    named, found = named_parameters(model), {}
    for name, weight in measures.weight_forms(model).items():
        matrices = weight.form.matrices(named[name])
        if len(matrices) == 1:
            found[layer_of(name)] = matrices[0].cpu()
    return found
