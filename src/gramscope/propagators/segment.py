"""A stretch of autograd graph as a linear map: reverse and forward sweeps of many vectors at once."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gramscope.base.errors import UnsupportedError
from gramscope.capture.batched import batched_gradients

# Entries of a Jacobian that is formed because an operation can be differentiated only once.
MATRIX_ENTRIES = 2**26


class Segment:
    """``∂outputs/∂inputs``; inputs are tensors of the graph or gradient edges.

    The reverse product ``g(c) = Jᵀ c`` is also kept as a graph in the placeholder c; since it is linear in c, a reverse
    pass through *that* graph is the forward product ``J v``. Nothing runs the network again.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Any], shapes: Sequence[torch.Size]) -> None:
        self.outputs, self.inputs, self.shapes = list(outputs), list(inputs), list(shapes)
        self.live = [place for place, output in enumerate(self.outputs) if output.requires_grad]
        self._placeholders: list[Tensor] | None = None
        self._transposed: tuple[Tensor | None, ...] = ()

    def adjoint(self, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """(k, *output shape) for each output to (k, *input shape) for each input; None where nothing depends on it."""
        if not self.live or not self.inputs:
            return [None] * len(self.inputs)
        chosen = [cotangents[place].to(self.outputs[place].dtype).contiguous() for place in self.live]
        return batched_gradients([self.outputs[place] for place in self.live], self.inputs, chosen)

    def tangent(self, tangents: Sequence[Tensor | None], count: int) -> list[Tensor]:
        """(k, *input shape), or None for zero, to (k, *output shape)."""
        result = [output.new_zeros(count, *output.shape) for output in self.outputs]
        if not self.live or all(tangent is None for tangent in tangents):
            return result
        try:
            self._transpose()
        except RuntimeError as error:
            return self._by_matrix(tangents, result, error)
        assert self._placeholders is not None
        pairs = [
            (gradient, tangent)
            for gradient, tangent in zip(self._transposed, tangents, strict=True)
            if gradient is not None and tangent is not None and gradient.requires_grad
        ]
        if not pairs:
            return result
        try:
            found = batched_gradients(
                [g for g, _ in pairs], self._placeholders, [t.to(g.dtype).contiguous() for g, t in pairs]
            )
        except RuntimeError as error:
            return self._by_matrix(tangents, result, error)
        for place, moved in zip(self.live, found, strict=True):
            if moved is not None:
                result[place] = moved
        return result

    def _transpose(self) -> None:
        if self._placeholders is not None:
            return
        outputs = [self.outputs[place] for place in self.live]
        with torch.enable_grad():
            held = [torch.zeros_like(output, requires_grad=True) for output in outputs]
            self._transposed = torch.autograd.grad(outputs, self.inputs, held, create_graph=True, allow_unused=True)
        self._placeholders = held

    def _by_matrix(self, tangents: Sequence[Tensor | None], result: list[Tensor], error: RuntimeError) -> list[Tensor]:
        """Forward products by the matrix itself, where an operation can be differentiated only once."""
        entries = sum(output.numel() for output in self.outputs)
        if entries * sum(shape.numel() for shape in self.shapes) > MATRIX_ENTRIES:
            raise UnsupportedError(
                "a forward sweep needs operations that can be differentiated twice, and one in this model cannot: "
                f"{error} Replace it, take a smaller batch, or use the reverse sweeps (P.T) alone."
            ) from error
        for place, output in enumerate(self.outputs):
            rows = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
            unit = [o.new_zeros(output.numel(), *o.shape) for o in self.outputs]
            unit[place] = rows.reshape(output.numel(), *output.shape)
            for matrix, tangent in zip(self.adjoint(unit), tangents, strict=True):
                if matrix is not None and tangent is not None:
                    # A gradient of real numbers with respect to complex ones carries a conjugate.
                    moved = tangent.to(matrix.dtype).flatten(1) @ matrix.flatten(1).conj().mT
                    moved = moved.real if moved.is_complex() else moved
                    result[place] = result[place] + moved.reshape(result[place].shape)
        return result


def leaves_below(outputs: Iterable[Tensor]) -> dict[Any, Tensor]:
    """The leaf tensors that some outputs were computed from, by their graph nodes."""
    stack = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    seen, found = set(stack), {}
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[node] = leaf
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return found
