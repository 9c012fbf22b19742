"""Rows of J and of its derivative ``J̇ = D_v J`` along a direction, for dense kernels and their velocities.

Where examples do not see one another, each row needs its own example only: one example is differentiated for all its
outputs and mapped over the batch, so that n examples cost C backward passes and not n·C. Whether that holds is checked
on the outputs and on J v; where it does not (or where torch cannot map an operation), whole-batch rows are taken.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import GramscopeError, InputError
from gramscope.base.memory import Memory, memory_budget
from gramscope.base.nested import map_tensors, tensors_in
from gramscope.kernels.expansion import Expansion
from gramscope.kernels.graph import Graph, Tangent
from gramscope.kernels.pieces import strips

# Largest difference, relative to the largest entry, between one example alone and the same one in its batch. Examples
# that see one another (batch norm in training) differ at order one; kernels chosen by batch size in the last digits.
SAME = {torch.float64: 1e-5, torch.float32: 1e-3}


@dataclass(frozen=True)
class RowBlock:
    """Gradients (b·C, size) of some examples, one matrix for each parameter (or one for all), and their derivatives."""

    gradients: list[Tensor]
    derivatives: list[Tensor]

    def weighted(self, rates: list[Tensor] | None) -> list[Tensor]:
        return self.gradients if rates is None else [g * r for g, r in zip(self.gradients, rates, strict=True)]


class Rows:
    """Blocks of rows of J, and of J̇ if there is a direction."""

    def __init__(self, expansion: Expansion, direction: Float[Tensor, " p"] | None, graph: Graph | None = None) -> None:
        self.expansion, self.direction = expansion, direction
        self._graph, self._tangent = graph, None if direction is None or graph is None else graph.tangent(direction)
        self._first: RowBlock | None = None
        self.alone = self._examples_alone()
        if expansion.examples > 2 or not self.alone:
            self._first = None

    def _examples_alone(self) -> bool:
        """Whether an example's row can be had from that example by itself."""
        n = self.expansion.examples
        try:
            block, f = self._mapped(slice(0, min(n, 2)))
            self._first = block
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, GramscopeError):
            return False
        with_batch = self.expansion.f[: len(f)]
        limit = SAME.get(self.expansion.dtype, SAME[torch.float32])
        if f.shape != with_batch.shape or not _close(f, with_batch, limit):
            return False
        probe = self._probe()
        alone = _product(block.gradients, self._by_parameter(probe))
        if not _close(alone, self.graph.jvp(probe[:, None])[: len(alone), 0], limit):
            return False
        if self.direction is None or self.tangent is None:
            return True
        # The mapped rows come by forward over reverse mode, products by reverse mode alone; see ``second_derivative``.
        moved = _product(block.derivatives, self._by_parameter(probe))
        return _close(moved, self.tangent.jvp(probe[:, None])[: len(moved), 0], limit)

    def _probe(self) -> Float[Tensor, " p"]:
        """A fixed generic direction; J v of an example must not depend on its company."""
        size = self.expansion.cols.size
        return torch.cos(1.0 + torch.arange(size, dtype=self.expansion.dtype, device=self.expansion.device))

    @property
    def graph(self) -> Graph:
        if self._graph is None:
            self._graph = Graph(self.expansion)
        return self._graph

    @property
    def tangent(self) -> Tangent | None:
        if self._tangent is None and self.direction is not None:
            self._tangent = self.graph.tangent(self.direction)
        return self._tangent

    def _by_parameter(self, vector: Float[Tensor, " p"]) -> list[Tensor]:
        return list(vector.split([p.numel() for p in self.expansion.point]))

    def rates(self, rates: Float[Tensor, " p"] | None) -> list[Tensor] | None:
        if rates is None:
            return None
        return self._by_parameter(rates) if self.alone else [rates]

    def block(self, start: int, stop: int) -> RowBlock:
        if self._first is not None and (start, stop) == (0, self.expansion.examples):
            return self._first
        return self._mapped(slice(start, stop))[0] if self.alone else self._whole(start, stop)

    def _mapped(self, examples: slice) -> tuple[RowBlock, Tensor]:
        expansion = self.expansion
        x = expansion.of_examples(examples)
        count = examples.stop - examples.start
        leaves = tensors_in(x)
        # The rule of ``slice_examples``: tensors with one row for each example are cut, others are passed whole.
        dims = [0 if t.dim() and t.shape[0] == count else None for t in leaves]
        if not any(d == 0 for d in dims):
            raise InputError("no tensor of x has examples on its first axis.")
        zero = [torch.zeros((1, *p.shape), dtype=p.dtype, device=p.device) for p in expansion.point]
        tangents = zero if self.direction is None else expansion.split(self.direction[:, None])

        def one(*single: Tensor) -> tuple[Any, Any, Tensor]:
            parts = iter([t[None] if d == 0 else t for t, d in zip(single, dims, strict=True)])
            mine = map_tensors(lambda _: next(parts), x)

            def outputs(*parameters: Tensor) -> tuple[Tensor, Tensor]:
                f = expansion.run(parameters, mine)[0]
                return f, f

            slopes = torch.func.jacrev(outputs, argnums=tuple(range(len(expansion.point))), has_aux=True)
            if self.direction is None:
                gradients, f = slopes(*expansion.point)
                return gradients, (), f
            both: Any = torch.func.jvp(slopes, expansion.point, tuple(t[0] for t in tangents), has_aux=True)
            return both[0], both[1], both[2]

        with expansion.surroundings():
            gradients, derivatives, f = torch.func.vmap(one, in_dims=tuple(dims), randomness="same")(*leaves)
        return RowBlock(_matrices(gradients, expansion.dtype), _matrices(derivatives, expansion.dtype)), f

    def _whole(self, start: int, stop: int) -> RowBlock:
        width, size = self.expansion.f.shape[1], self.expansion.rows.size
        some = torch.zeros(size, (stop - start) * width, dtype=self.expansion.dtype, device=self.expansion.device)
        some[start * width : stop * width].fill_diagonal_(1.0)
        derivatives = [] if self.tangent is None else [self.tangent.vjp(some).T]
        return RowBlock([self.graph.vjp(some).T], derivatives)


def dense_kernel(rows: Rows, rates: Float[Tensor, " p"] | None, memory: Memory) -> Float[Tensor, "u u"]:
    """``J λ Jᵀ``."""
    return _assembled(rows, rates, memory, velocity=False)


def dense_velocity(rows: Rows, rates: Float[Tensor, " p"] | None, memory: Memory) -> Float[Tensor, "u u"]:
    """``J̇ λ Jᵀ + J λ J̇ᵀ``, the derivative of the kernel along the direction of ``rows``."""
    return _assembled(rows, rates, memory, velocity=True)


def _assembled(rows: Rows, rates: Float[Tensor, " p"] | None, memory: Memory, velocity: bool) -> Tensor:
    expansion = rows.expansion
    width, size = expansion.f.shape[1], expansion.rows.size
    result = torch.zeros(size, size, dtype=expansion.dtype, device=expansion.device)
    by_parameter = rows.rates(rates)
    blocks = list(strips(expansion.examples, _examples_in_block(expansion, memory, velocity)))
    for place, (start, stop) in enumerate(blocks):
        mine = rows.block(start, stop)
        for start2, stop2 in blocks[place:]:
            theirs = mine if start2 == start else rows.block(start2, stop2)
            tile = _tile(mine, theirs, by_parameter, velocity)
            if theirs is mine:
                tile = (tile + tile.T) / 2  # both halves are sums of the same numbers in another order
            result[start * width : stop * width, start2 * width : stop2 * width] = tile
            result[start2 * width : stop2 * width, start * width : stop * width] = tile.T
    return result


def _tile(mine: RowBlock, theirs: RowBlock, rates: list[Tensor] | None, velocity: bool) -> Tensor:
    if not velocity:
        return _summed(mine.gradients, theirs.weighted(rates))
    moved = _summed(mine.derivatives, theirs.weighted(rates))
    return moved + (moved.T if theirs is mine else _summed(mine.weighted(rates), theirs.derivatives))


def _summed(left: list[Tensor], right: list[Tensor]) -> Tensor:
    total = left[0] @ right[0].T
    for a, b in zip(left[1:], right[1:], strict=True):
        total.addmm_(a, b.T)
    return total


def _examples_in_block(expansion: Expansion, memory: Memory, velocity: bool) -> int:
    """Examples whose rows, derivatives and the copies of both fit twice into the budget."""
    budget = memory_budget(memory, expansion.device)
    item, size = expansion.dtype.itemsize, expansion.rows.size
    each = (8 if velocity else 4) * expansion.f.shape[1] * expansion.cols.size * item
    room = budget - size * size * item
    if room < each:
        raise InputError(
            f"memory must be at least {size * size * item + each:,} bytes for this kernel of {size} rows and "
            f"{expansion.cols.size} parameters, got {budget:,}. Choose fewer outputs, or use the operator form, which "
            "holds no rows."
        )
    return int(min(expansion.examples, room // each))


def _matrices(parts: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """(b, C, *shape) for each parameter as (b·C, size)."""
    return [part.detach().flatten(0, 1).reshape(part.shape[0] * part.shape[1], -1).to(dtype) for part in parts]


def _product(rows: list[Tensor], vector: list[Tensor]) -> Tensor:
    return torch.stack([part @ piece for part, piece in zip(rows, vector, strict=True)]).sum(dim=0)


def _close(a: Tensor, b: Tensor, limit: float) -> bool:
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= limit * max(scale, torch.finfo(b.dtype).tiny)).all())
