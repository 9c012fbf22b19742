"""One moment of training: what the measures see, computed once and shared."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from gramscope.base.errors import InputError
from gramscope.capture import OuterSite, Snapshot, capture
from gramscope.capture.network import Outputs
from gramscope.capture.side_effects import in_modes
from gramscope.kernels.ntk import contracted
from gramscope.record.budget import Budget
from gramscope.record.judge import Judge


@dataclass(frozen=True, eq=False)
class Subject:
    """What is watched: the model, a fixed probe, and how to judge its outputs."""

    model: nn.Module
    x: Any
    y: Tensor | None
    judge: Judge
    outputs: Outputs
    layers: Callable[[str], bool]
    optimizer: Optimizer | None = None
    lr: float | None = None


@dataclass(eq=False)
class Memory:
    """What later moments are compared with: the kernel and the features of the first.

    ``resumed``: the first moment lies in an earlier attempt; what was not stored then cannot be compared with now.
    ``other``: how it differs, where that was of another probe or model. ``fingerprint`` is stored with the first.
    """

    kernel: Tensor | None = None
    features: Tensor | None = None
    resumed: bool = False
    other: str = ""
    fingerprint: NDArray[np.uint8] | None = None


@dataclass(eq=False)
class Moment:
    """The model as it stands. Measures ask for what they need; the snapshot is taken once, in evaluation mode.

    ``asked`` and ``capture_seconds`` tell whether somebody asked for it and what it took: it is shared, so that it is
    not a cost of the one that happened to ask first.
    """

    subject: Subject
    step: int
    memory: Memory = field(default_factory=Memory)
    asked: bool = False
    capture_seconds: float | None = None

    @property
    def snapshot(self) -> Snapshot:
        """Inputs and signals of every weight site: one forward pass, one batched backward pass."""
        self.asked = True
        return self._snapshot

    @cached_property
    def _snapshot(self) -> Snapshot:
        begun = Budget.clock()
        try:
            with evaluating(self.subject.model):
                return capture(self.subject.model, self.subject.x, outputs=self.subject.outputs)
        finally:
            self.capture_seconds = (self.capture_seconds or 0.0) + Budget.clock() - begun

    @property
    def f(self) -> Float[Tensor, "n C"]:
        return self.snapshot.outputs

    @cached_property
    def targets(self) -> Float[Tensor, "n C"]:
        """Targets as rows: one-hot for classes."""
        return self.subject.judge.rows(self.labels_or_values).to(self.f.device)

    @property
    def labels_or_values(self) -> Tensor:
        if self.subject.y is None:
            raise InputError("this measure needs targets: pass probe=(x, y).")
        return self.subject.y

    @cached_property
    def loss_and_residual(self) -> tuple[float, Float[Tensor, "n C"]]:
        y = self.labels_or_values
        with torch.enable_grad():
            f = self.f.detach().clone().requires_grad_()
            value = self.subject.judge.loss(f, y.to(f.device))
            (residual,) = torch.autograd.grad(value, f)
        return float(value.detach()), residual

    @cached_property
    def kernel(self) -> Float[Tensor, "n n"]:
        """The tangent kernel, traced over outputs."""
        with torch.no_grad():
            return contracted(self.snapshot, trace=True, by_site=False)[""]

    @cached_property
    def features(self) -> dict[str, Float[Tensor, "n d"]]:
        """What each weight is given, averaged over positions and uses, by parameter name in order of first use."""
        uses: dict[str, list[OuterSite]] = {}
        for site in self.snapshot.sites:
            if isinstance(site, OuterSite) and self.subject.layers(layer_of(site.name)):
                uses.setdefault(site.name, []).append(site)
        return {name: _mean_input(sites) for name, sites in uses.items()}

    @property
    def last(self) -> str | None:
        """The last weight that makes the outputs; None where none makes one row of them for each example."""
        outer = [site for site in self.snapshot.sites if isinstance(site, OuterSite)]
        ends = [site.name for site in outer if site.groups * site.fan_out == self.f.shape[1] and site.positions == 1]
        return ends[-1] if ends else None


def _mean_input(uses: list[OuterSite]) -> Float[Tensor, "n d"]:
    """Over all uses of the same entries: the first of a recurrent weight sees zeros alone."""
    first = uses[0]
    same = [s for s in uses if s.frame == first.frame and s.inputs.shape[2:] == first.inputs.shape[2:]]
    if len(same) == 1:
        return first.inputs.mean(1).flatten(1)
    positions = sum(site.positions for site in same)
    return torch.stack([site.inputs.mean(1) * (site.positions / positions) for site in same]).sum(0).flatten(1)


def layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode inside, every module's own flag back afterwards."""
    return in_modes([(module, False) for module in model.modules()])
