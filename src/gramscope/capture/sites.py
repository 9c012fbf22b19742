"""What capture gives back: the uses of each weight, with their inputs and backward signals.

Index names used throughout: ``n`` examples, ``k`` directions (outputs, or chosen cotangents), ``T``
positions of one example (tokens, pixels, time steps, calls), ``g`` groups, ``i`` and ``o`` the fan-in and
fan-out of one group, ``p`` entries of a parameter.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from gramscope.base.arithmetic import onednn_pays, product_with_transpose
from gramscope.base.html import html_table

# Patches of a convolution are made for as many examples at once as have AT_ONCE bytes of patches and signals (they stay
# in the cache), and for UNFOLDED at least.
UNFOLDED, AT_ONCE = 2, {"cpu": 2**20, "cuda": 2**26}


@dataclass(frozen=True, eq=False)
class Frame:
    """Which entry of the flattened parameter, of shape ``shape``, each entry of a view of it is."""

    entries: Int[Tensor, " p"]
    shape: tuple[int, ...]

    @cached_property
    def is_transpose(self) -> bool:
        """Is the view the transpose of a matrix?"""
        if len(self.shape) != 2 or len(self.entries) != math.prod(self.shape):
            return False
        own = torch.arange(len(self.entries), device=self.entries.device).reshape(self.shape)
        return torch.equal(self.entries, own.T.flatten())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame) or self.shape != other.shape:
            return False
        return self.entries is other.entries or bool(torch.equal(self.entries, other.entries))

    def __hash__(self) -> int:
        return hash((self.shape, self.entries.shape))


@dataclass(frozen=True, eq=False)
class Site:
    """One use of a weight.

    ``name`` is the parameter's, ``rule`` says how it was used, ``frame`` tells which entries of the parameter the
    weight was, as it was used (None: all, in their own order).
    """

    name: str
    rule: str
    frame: Frame | None

    @property
    def held(self) -> Inexact[Tensor, "n k *rest"]:
        """What is held for each example and direction: signals, or rows of the gradient."""
        raise NotImplementedError

    @property
    def examples(self) -> int:
        return self.held.shape[0]

    @property
    def directions(self) -> int:
        return self.held.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @property
    def entries(self) -> int:
        """Number of entries of the weight as it was used."""
        raise NotImplementedError

    def rows(self) -> Inexact[Tensor, "n k p"]:
        """The gradient of every direction of every example, in the coordinates of the weight as used."""
        raise NotImplementedError

    def whole_rows(self) -> Inexact[Tensor, "n k p"]:
        """The same in the coordinates of the whole parameter."""
        rows = self.rows()
        if self.frame is None:
            return rows
        whole = rows.new_zeros(*rows.shape[:2], math.prod(self.frame.shape))
        return whole.index_copy_(2, self.frame.entries.to(rows.device), rows)

    def part(self, examples: slice, directions: slice) -> "Site":
        """The site of some examples and directions."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class OuterSite(Site):
    """``u_o = Σ_i W_oi v_i`` at T positions, in g groups: the gradient is ``Σ_T s ⊗ v``.

    ``order`` permutes the axes (g, o, i), each possibly compound with sizes ``axes``, to the weight's own.
    ``inputs_of`` gives the inputs of some examples; for a convolution the unfolded patches, made anew at each call.

    >>> import gramscope as gs
    >>> site = gs.capture(torch.nn.Linear(3, 2), torch.randn(5, 3)).by_parameter()["weight"][0]
    >>> site.inputs.shape, site.signals.shape            # (n, T, g, i) and (n, k, T, g, o)
    (torch.Size([5, 1, 1, 3]), torch.Size([5, 2, 1, 1, 2]))
    """

    inputs_of: Callable[[slice], Inexact[Tensor, "n T g i"]] = field(repr=False)
    signals: Inexact[Tensor, "n k T g o"]
    fan_in: int
    axes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def inputs(self) -> Inexact[Tensor, "n T g i"]:
        """Site inputs v of all examples."""
        return self.inputs_of(slice(None))

    @property
    def held(self) -> Inexact[Tensor, "n k *rest"]:
        return self.signals

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

    def __getstate__(self) -> dict[str, object]:
        """For pickle: the inputs as they are, since the function that makes them holds the whole forward pass."""
        return {**self.__dict__, "inputs_of": self.inputs.__getitem__}

    def part(self, examples: slice, directions: slice) -> "OuterSite":
        start, *_ = examples.indices(self.examples)

        def inputs(some: slice) -> Tensor:
            low, high, _ = some.indices(len(signals))
            return self.inputs_of(slice(start + low, start + high))

        signals = self.signals[examples, directions]
        return replace(self, inputs_of=inputs, signals=signals)

    def rows(self) -> Inexact[Tensor, "n k p"]:
        out = self.signals.new_empty(self.examples, self.directions, self.entries)
        return self.own_axes(self.channel_rows(slice(0, self.fan_out), out))

    def channel_rows(self, channels: slice, out: Inexact[Tensor, "n k p"]) -> Inexact[Tensor, "n k p"]:
        """``Σ_T s ⊗ v`` for some output channels of each group, written into ``out`` in the order (g, o, i)."""
        k, g, width = self.directions, self.groups, channels.stop - channels.start
        each = self.positions * g * (self.fan_in + k * width) * out.element_size()
        most = min(AT_ONCE.get(out.device.type, AT_ONCE["cuda"]), out.nbytes // 8)  # little beside the rows
        size = max(UNFOLDED, most // max(1, each))
        by_onednn = g == 1 and onednn_pays(out, k * width * self.positions * self.fan_in)
        for first in range(0, self.examples, size):
            some = slice(first, min(self.examples, first + size))
            v = self.inputs_of(some).to(out.dtype).transpose(1, 2)  # (n, g, T, i)
            s = self.signals[some, ..., channels].to(out.dtype)  # (n, k, T, g, o)
            s = s.permute(0, 3, 1, 4, 2).flatten(2, 3)  # (n, g, ko, T)
            if by_onednn:
                for one, inputs, rows in zip(s[:, 0], v[:, 0], out[some], strict=True):
                    rows.view(len(one), -1).copy_(product_with_transpose(one, inputs.mT))
            elif g == 1:
                torch.bmm(s[:, 0], v[:, 0], out=out[some].view(len(s), k * width, self.fan_in))
            else:
                grouped = torch.matmul(s, v).unflatten(2, (k, width))
                out[some].unflatten(2, (g, width, self.fan_in)).copy_(grouped.transpose(1, 2))
        return out

    def own_axes(self, gradient: Inexact[Tensor, "n k p"]) -> Inexact[Tensor, "n k p"]:
        """From (g, o, i) order to the order of the weight's own axes."""
        if self.order == tuple(range(len(self.order))):
            return gradient
        return gradient.unflatten(2, self.axes).permute(0, 1, *(2 + axis for axis in self.order)).flatten(2)


@dataclass(frozen=True, eq=False)
class LookupSite(Site):
    """``u = W[id]``: the gradient puts each position's signal into the row that was looked up.

    >>> import gramscope as gs
    >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 2), torch.nn.Flatten())
    >>> site = gs.capture(model, torch.tensor([[0, 3, 3], [1, 2, 6]])).by_parameter()["0.weight"][0]
    >>> site.ids.shape, site.signals.shape               # (n, T) and (n, k, T, o)
    (torch.Size([2, 3]), torch.Size([2, 6, 3, 2]))
    """

    ids: Int[Tensor, "n T"]
    signals: Float[Tensor, "n k T o"]
    table: int

    @property
    def held(self) -> Inexact[Tensor, "n k *rest"]:
        return self.signals

    @property
    def entries(self) -> int:
        return self.table * self.signals.shape[3]

    def part(self, examples: slice, directions: slice) -> "LookupSite":
        return replace(self, ids=self.ids[examples], signals=self.signals[examples, directions])

    def rows(self) -> Inexact[Tensor, "n k p"]:
        n, k, _, width = self.signals.shape
        out = self.signals.new_zeros(n, k, self.table, width)
        index = self.ids[:, None, :, None].expand_as(self.signals)
        return out.scatter_add_(2, index, self.signals).flatten(2)


@dataclass(frozen=True, eq=False)
class RowSite(Site):
    """A weight that acts entry by entry (gain, bias, scale) or any other: its gradients as rows.

    >>> import gramscope as gs
    >>> site = gs.capture(torch.nn.LayerNorm(3), torch.randn(5, 3)).by_parameter()["weight"][0]
    >>> site.gradient.shape                              # (n, k, entries of the weight)
    torch.Size([5, 3, 3])
    """

    gradient: Inexact[Tensor, "n k p"]

    @property
    def held(self) -> Inexact[Tensor, "n k *rest"]:
        return self.gradient

    @property
    def entries(self) -> int:
        return self.gradient.shape[2]

    def part(self, examples: slice, directions: slice) -> "RowSite":
        return replace(self, gradient=self.gradient[examples, directions])

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to a file (safetensors), whole or not at all."""
        from gramscope.capture.saved_snapshot import save_snapshot

        save_snapshot(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> "Snapshot":
        """The snapshot that :meth:`save` wrote."""
        from gramscope.capture.saved_snapshot import load_snapshot

        return load_snapshot(path, device)

    def __str__(self) -> str:
        lines = [f"Snapshot of {self.examples} examples, {self.directions} directions"]
        for name, sites in self.by_parameter().items():
            shape = "x".join(map(str, self.parameters[name]))
            lines.append(f"  {name} ({shape}): {_describe(sites)}")
        lines += [f"  left out (frozen): {name}" for name in self.frozen]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """In a notebook: the parameters, and by which rule each was captured."""
        title = f"Snapshot of {self.examples} examples, {self.directions} directions"
        rows = [
            [name, " x ".join(map(str, self.parameters[name])), _describe(sites)]
            for name, sites in self.by_parameter().items()
        ]
        notes = [f"left out (frozen): {', '.join(self.frozen)}"] if self.frozen else []
        return html_table(title, ["parameter", "shape", "captured by"], rows, notes)


def _describe(sites: Sequence[Site]) -> str:
    if not sites:
        return "not used by the output"
    rules = sorted({site.rule for site in sites})
    calls = f", {len(sites)} uses" if len(sites) > 1 else ""
    return ", ".join(rules) + calls
