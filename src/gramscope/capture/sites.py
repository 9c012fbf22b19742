"""What capture gives back: the uses of each weight, with their inputs and backward signals.

Index names used throughout: ``n`` examples, ``k`` directions (outputs, or chosen cotangents), ``T``
positions of one example (tokens, pixels, time steps, calls), ``g`` groups, ``i`` and ``o`` the fan-in and
fan-out of one group, ``p`` entries of a parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

Strided = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset


@dataclass(frozen=True)
class Frame:
    """Where the entries of a view lie in its parameter: both as strided views of one storage of ``span`` entries."""

    view: Strided
    parameter: Strided
    span: int

    def index(self) -> Int[Tensor, " p"]:
        """For each entry of the view, the entry of the flattened parameter."""
        memory = torch.arange(self.span, device="cpu")
        where = torch.full((self.span,), -1, device="cpu")
        own = torch.as_strided(memory, *self.parameter).reshape(-1)
        where[own] = torch.arange(len(own), device="cpu")
        return where[torch.as_strided(memory, *self.view).reshape(-1)]


@dataclass(frozen=True, eq=False)
class Site:
    """One use of a weight.

    ``name`` is the parameter's, ``rule`` says how it met its input, ``frame`` tells which entries of the parameter the
    weight was, as it was used (None: all, in their own order).
    """

    name: str
    rule: str
    frame: Frame | None

    @property
    def examples(self) -> int:
        raise NotImplementedError

    @property
    def directions(self) -> int:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the signals."""
        raise NotImplementedError

    @property
    def entries(self) -> int:
        """Number of entries of the weight as it was used."""
        raise NotImplementedError

    def rows(self) -> Inexact[Tensor, "n k p"]:
        """The gradient of every direction of every example, in the coordinates of the weight as used."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Factors:
    """Signals that are a product of a side of the direction and one of the example: ``s_{μcp,o} = F_{co} m_{μp,o}``."""

    of_direction: Inexact[Tensor, "k g o"]
    of_example: Inexact[Tensor, "n T g o"]


@dataclass(frozen=True, eq=False)
class HeldInputs:
    """Site inputs in memory."""

    inputs: Inexact[Tensor, "n T g i"]

    def __call__(self, examples: slice) -> Tensor:
        return self.inputs[examples]


@dataclass(frozen=True, eq=False)
class OuterSite(Site):
    """``u_o = Σ_i W_oi v_i`` at T positions, in g groups: the gradient is ``Σ_T s ⊗ v``.

    ``order`` permutes the axes (g, o, i), each possibly compound with sizes ``axes``, to the weight's own. ``factors``
    are those of the signals, where capture knows that they are a product.
    """

    make_inputs: Callable[[slice], Tensor] = field(repr=False)
    signals: Inexact[Tensor, "n k T g o"]
    fan_in: int
    axes: tuple[int, ...]
    order: tuple[int, ...]
    factors: Factors | None = field(default=None, repr=False)
    _put: list[Tensor] = field(default_factory=list, init=False, repr=False)

    @property
    def inputs(self) -> Inexact[Tensor, "n T g i"]:
        """Site inputs v; for a convolution the unfolded patches, made anew at each call."""
        return self.make_inputs(slice(None))

    def inputs_of(self, examples: slice) -> Inexact[Tensor, "n T g i"]:
        """The inputs of some examples only."""
        return self.make_inputs(examples)

    @property
    def examples(self) -> int:
        return self.signals.shape[0]

    @property
    def directions(self) -> int:
        return self.signals.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.signals.dtype

    @property
    def positions(self) -> int:
        return self.signals.shape[2]

    @property
    def groups(self) -> int:
        return self.signals.shape[3]

    @property
    def fan_out(self) -> int:
        return self.signals.shape[4]

    @property
    def entries(self) -> int:
        return self.groups * self.fan_out * self.fan_in

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the inputs as they are, since the function that makes them holds the whole forward pass."""
        return {**self.__dict__, "make_inputs": HeldInputs(self.inputs), "_put": []}

    def rows(self, out: Inexact[Tensor, "n k p"] | None = None) -> Inexact[Tensor, "n k p"]:
        if out is not None and self._in_order:
            return self.products(out)
        gradient = self.own_axes(self.products())
        return gradient if out is None else out.copy_(gradient)

    def products(self, out: Inexact[Tensor, "n k p"] | None = None) -> Inexact[Tensor, "n k p"]:
        """``Σ_T s ⊗ v``, the gradients in (g, o, i) order."""
        n, k, T, g, o = self.signals.shape
        inputs = self.inputs.to(self.dtype).transpose(1, 2).reshape(n * g, T, self.fan_in)
        if out is not None and g == 1:
            self._put_products(inputs, out.view(n, k, o, self.fan_in))
        else:
            signals = self.signals.permute(0, 3, 1, 4, 2).reshape(n * g, k * o, T)
            gradient = torch.bmm(signals, inputs).view(n, g, k, o, self.fan_in).transpose(1, 2).flatten(2)
            if out is None:
                return gradient
            out.copy_(gradient)
        self._put[:] = [out]
        return out

    def _put_products(self, inputs: Inexact[Tensor, "n T i"], out: Inexact[Tensor, "n k o i"]) -> None:
        """In one group. Signals lie in memory as (n, k, o, T), after a convolution, or as (n, k, T, o)."""
        n, i = len(out), self.fan_in
        signals, positions_first = self.signals[..., 0, :], self.signals.is_contiguous()
        if not self._narrow:
            # All directions of an example in one product.
            stacked = signals.transpose(1, 2).flatten(2).mT if positions_first else signals.mT.flatten(1, 2)
            torch.bmm(stacked, inputs, out=out.view(n, -1, i))
        elif positions_first:
            for direction, mine in enumerate(signals.unbind(1)):
                out[:, direction] = torch.bmm(inputs.mT, mine).mT
        else:
            out.view(n, -1, i).copy_(torch.bmm(inputs.mT, signals.mT.flatten(1, 2).mT).mT)

    @property
    def _narrow(self) -> bool:
        """Products of this width are up to twice as fast the other way round: CPUs like to write 16 numbers at once."""
        return self.fan_in < 32 and self.fan_in != 16 and self.dtype == torch.float32 and not self.signals.is_cuda

    @property
    def made(self) -> Inexact[Tensor, "n k p"] | None:
        """The products, if somebody has them in memory of his own."""
        return self._put[0] if self._put else None

    @cached_property
    def summed(self) -> Inexact[Tensor, "n k go"]:
        """``Σ_T s``, the gradients of an offset."""
        return self.signals.sum(2).flatten(2)

    @property
    def _in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def own_axes(self, gradient: Inexact[Tensor, "n k p"]) -> Inexact[Tensor, "n k p"]:
        """From (g, o, i) order to the order of the weight's own axes."""
        return gradient if self._in_order else in_own_axes(gradient, self.axes, self.order)


def in_own_axes(
    gradient: Inexact[Tensor, "n k p"], axes: tuple[int, ...], order: tuple[int, ...]
) -> Inexact[Tensor, "n k p"]:
    """From (g, o, i) order, compound with sizes ``axes``, to that of the weight's own axes."""
    return gradient.unflatten(2, axes).permute(0, 1, *(2 + axis for axis in order)).flatten(2)


@dataclass(frozen=True, eq=False)
class LookupSite(Site):
    """``u = W[id]``: the gradient puts each position's signal into the row that was looked up."""

    ids: Int[Tensor, "n T"]
    signals: Float[Tensor, "n k T o"]
    table: int

    @property
    def examples(self) -> int:
        return self.signals.shape[0]

    @property
    def directions(self) -> int:
        return self.signals.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.signals.dtype

    @property
    def entries(self) -> int:
        return self.table * self.signals.shape[3]

    def rows(self) -> Inexact[Tensor, "n k p"]:
        n, k, _, width = self.signals.shape
        out = self.signals.new_zeros(n, k, self.table, width)
        index = self.ids[:, None, :, None].expand_as(self.signals)
        return out.scatter_add_(2, index, self.signals).flatten(2)


@dataclass(frozen=True, eq=False)
class RowSite(Site):
    """A weight that acts entry by entry (gain, bias, scale) or any other: its gradients as rows."""

    gradient: Inexact[Tensor, "n k p"]

    @property
    def examples(self) -> int:
        return self.gradient.shape[0]

    @property
    def directions(self) -> int:
        return self.gradient.shape[1]

    @property
    def entries(self) -> int:
        return self.gradient.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.gradient.dtype

    def rows(self) -> Inexact[Tensor, "n k p"]:
        return self.gradient


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Inputs and backward signals of every weight site for one batch of examples.

    ``outputs`` (n, C) are the network's outputs, ``directions`` the number k of cotangents for which signals
    were taken (k = C when all outputs were asked for).
    """

    sites: tuple[Site, ...] = field(repr=False)
    outputs: Float[Tensor, "n C"] = field(repr=False)
    directions: int
    parameters: dict[str, torch.Size]
    frozen: tuple[str, ...]
    fallback: tuple[str, ...]
    unreached: tuple[str, ...]

    @property
    def examples(self) -> int:
        return self.outputs.shape[0]

    def by_parameter(self) -> dict[str, tuple[Site, ...]]:
        """Sites of each parameter; several where it is used more than once (tied weights, reused modules)."""
        uses: dict[str, list[Site]] = {name: [] for name in self.parameters}
        for site in self.sites:
            uses[site.name].append(site)
        return {name: tuple(sites) for name, sites in uses.items()}

    def __str__(self) -> str:
        lines = [f"Snapshot of {self.examples} examples, {self.directions} directions"]
        for name, sites in self.by_parameter().items():
            shape = "x".join(map(str, self.parameters[name]))
            lines.append(f"  {name} ({shape}): {_describe(sites)}")
        lines += [f"  left out (frozen): {name}" for name in self.frozen]
        return "\n".join(lines)


def _describe(sites: Sequence[Site]) -> str:
    if not sites:
        return "not used by the output"
    rules = sorted({site.rule for site in sites})
    calls = f", {len(sites)} uses" if len(sites) > 1 else ""
    return ", ".join(rules) + calls
