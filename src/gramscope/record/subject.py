"""What is watched, and what is remembered of the first measurement."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int8
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.base.nested import ModelInput
from gramscope.capture.known_sites import KnownSites
from gramscope.capture.network import Outputs, named_parameters
from gramscope.capture.side_effects import in_modes
from gramscope.record.objective import Objective

if TYPE_CHECKING:
    from gramscope.measures.linear_targets import TargetLinearityValue
    from gramscope.record.feature_measures import LayerFlow
    from gramscope.record.given_gradients import GivenGradients
    from gramscope.record.last_update import LastUpdate


@dataclass(frozen=True, eq=False)
class Subject:
    """What is watched: the model, a fixed probe, and its objective."""

    model: nn.Module
    x: ModelInput
    y: Tensor | None
    objective: Objective
    outputs: Outputs
    layers: Callable[[str], bool]
    optimizer: Optimizer | None = None
    lr: float | None = None
    last_update: "LastUpdate | None" = None
    given: "GivenGradients | None" = None


@dataclass(eq=False)
class Memory:
    """What later moments are compared with: the kernel, the features and the weights of the first.

    ``resumed``: the first measurement lies in an earlier attempt; what was not stored then cannot be compared with now.
    ``other``: how it differs, where that was of another probe or model. ``fingerprint`` is stored with the first.
    ``signs`` are those of the random mixtures, where outputs are very many. ``last`` is the weight that makes the
    outputs, if a plain pass tells what it is given (see :mod:`gramscope.record.plain_pass`).
    ``sites``: where the weights meet the probe, which is sought once. ``flows``: changes of the weights so far.
    ``linearity``: by weight what it was given at the last measurement, and the target linearity of that.
    ``probe_told``: the facts of the probe, which do not change, are in a record.
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
    probe_told: bool = False

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
