"""What a linearised network must offer: two sweeps over its states and two maps to and from its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.propagators.layout import StateLayout

Changes = dict[str, Tensor]  # parameter name -> (k, *shape of the parameter), a complex one as two real ones


class States(ABC):
    """The state equations ``s = f(s, θ)`` linearised at one run: ``ds = L ds + J dθ``.

    Vectors over the N states come as rows, ``(k, N)``, in the order of ``layout``; each method takes k of them at once.
    """

    layout: StateLayout
    values: Float[Tensor, " N"]
    parameters: dict[str, torch.Size]
    dtype: torch.dtype
    device: torch.device
    output_axes: Axes

    @abstractmethod
    def propagate(self, q: Float[Tensor, "k N"], local: bool = False) -> Float[Tensor, "k N"]:
        """``P q = (1 - L)^-1 q``; with ``local`` one step of influence, ``L q = ∂f/∂s q``."""

    @abstractmethod
    def propagate_adjoint(self, q: Float[Tensor, "k N"], local: bool = False) -> Float[Tensor, "k N"]:
        """``P* q``, backpropagation, or ``L* q``."""

    @abstractmethod
    def pull(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Changes:
        """``J* q`` for the named parameters, at frozen states."""

    @abstractmethod
    def push(self, changes: Mapping[str, Tensor], count: int) -> Float[Tensor, "k N"]:
        """``J dθ``; parameters that are not named stay as they are. ``count`` is the k of an empty mapping."""

    def step(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Float[Tensor, "k N"]:
        """``P K P* q`` of the named parameters."""
        return self.propagate(self.kernel(self.propagate_adjoint(q), names))

    def kernel(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Float[Tensor, "k N"]:
        """``K q`` of the named parameters."""
        return self.push(self.pull(q, names), len(q))

    @abstractmethod
    def read(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k M"]:
        """``C q``, the change of the outputs."""

    @abstractmethod
    def read_adjoint(self, q: Float[Tensor, "k M"]) -> Float[Tensor, "k N"]:
        """``C* q``."""
