"""The operators of a linearised network: K, P, their products and the maps to parameters and outputs."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.axes import Axes
from gramscope.base.errors import InputError
from gramscope.linalg import LinearOperator
from gramscope.propagators.network_states import Changes, NetworkStates

# Entries of state vectors that one sweep holds at once; more columns are swept in turns.
ENTRIES = 2**24

Sweep = Callable[[Tensor], Tensor]


def in_turns(sweep: Sweep, x: Float[Tensor, "cols k"], rows: int, weight: int) -> Float[Tensor, "rows k"]:
    """A sweep over rows applied to columns, few enough at a time for ``ENTRIES``."""
    if x.shape[1] == 0:
        return x.new_zeros(rows, 0)
    few = max(1, ENTRIES // max(1, weight))
    with torch.inference_mode(False), torch.no_grad(), exact_arithmetic():
        rows_first = x.mT.clone(memory_format=torch.contiguous_format) if x.is_inference() else x.mT.contiguous()
        parts = [sweep(part) for part in rows_first.split(few)]
    result = torch.cat(parts) if len(parts) > 1 else parts[0]
    # One sum tells that all is finite; only where it is not need the entries be looked at.
    if not bool(result.sum().isfinite()) and not _finite(result) and _finite(x):
        raise InputError(
            f"a product overflowed {x.dtype}: the dynamics explode along the run. Use precision='float64', fewer "
            "steps, or scaled_response, which carries the logarithm of the size."
        )
    return result.mT


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


class StateOperator(LinearOperator):
    """A linear map given by two sweeps over rows; of states to states where no other axes are named."""

    def __init__(
        self, states: NetworkStates, sweep: Sweep, adjoint: Sweep, *, rows: Axes | None = None,
        cols: Axes | None = None, symmetric: bool = False,
    ) -> None:  # fmt: skip
        self.states, self._sweep, self._sweep_adjoint = states, sweep, adjoint
        rows, cols = rows or states.layout.axes, cols or states.layout.axes
        super().__init__(rows, cols, dtype=states.dtype, device=states.device, symmetric=symmetric)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return in_turns(self._sweep, x, self.rows.size, self.rows.size + self.cols.size)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return in_turns(self._sweep_adjoint, x, self.cols.size, self.rows.size + self.cols.size)


class ParameterJacobian(StateOperator):
    """``J = ∂f/∂θ`` at frozen states, or with ``total`` the whole ``ds/dθ = P J``; from parameters to states."""

    def __init__(self, states: NetworkStates, total: bool) -> None:
        self.total = total
        self.sizes = {name: shape.numel() for name, shape in states.parameters.items()}
        super().__init__(states, self._forward, self._backward, cols=Axes(parameter=sum(self.sizes.values())))

    def _forward(self, rows: Float[Tensor, "k p"]) -> Float[Tensor, "k N"]:
        moved = self.states.push(self.changes(rows), len(rows))
        return self.states.propagate(moved) if self.total else moved

    def _backward(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k p"]:
        if self.total:
            q = self.states.propagate_adjoint(q)
        found = self.states.pull(q, self.sizes)
        pieces = [
            found[name].reshape(len(q), -1) if name in found else q.new_zeros(len(q), size)
            for name, size in self.sizes.items()
        ]
        return torch.cat(pieces, dim=1)

    def changes(self, rows: Float[Tensor, "k p"]) -> Changes:
        """Flat rows over all parameters as tensors by name."""
        pieces = rows.split(list(self.sizes.values()), dim=1)
        shapes = self.states.parameters
        return {n: piece.reshape(len(rows), *shapes[n]) for n, piece in zip(self.sizes, pieces, strict=True)}
