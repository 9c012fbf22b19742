"""The space of a thick-restart Lanczos iteration: an orthonormal basis and the operator as seen on it."""

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.rng import gaussian
from gramscope.linalg.operator import LinearOperator, require_finite


class KrylovSpace:
    """Rows ``Q`` of a preallocated basis with ``A Qᵀ = Qᵀ H + q rᵀ``; ``q`` is the vector of the next product.

    ``H`` is the projected matrix in float64 on the CPU. ``r`` holds one number, ``beta``, in its last place. The
    basis has the operator's own precision and one vector in each row, so that a step reads it in memory order.
    """

    def __init__(self, op: LinearOperator, limit: int, rng: torch.Generator) -> None:
        self.op, self.limit, self.rng = op, limit, rng
        self.basis = torch.zeros((limit + 1, op.cols.size), dtype=op.dtype, device=op.device)
        self.projected = torch.zeros((limit, limit), dtype=torch.float64, device="cpu")
        # What a row of Q lost when its coupling to an old q was dropped; part of its residual.
        self.dropped = torch.zeros(limit, dtype=torch.float64, device="cpu")
        self.width, self.products, self.beta, self.largest = 0, 0, 0.0, 0.0
        self._first_coupled = 0  # q is coupled to the rows from here on
        self._draw()

    def expand(self) -> None:
        """One product with ``q``, which joins the basis; what is orthogonal to the basis becomes the next ``q``.

        The rows that q is coupled to are projected out first, then all rows, where only rounding errors are left.
        These two products with the whole basis keep it orthonormal to working precision.
        """
        old, self.width = self.width, self.width + 1
        rows = self.basis[: self.width]
        coupled = rows[self._first_coupled :]
        image = self.op._matmat(rows[old][:, None])[:, 0].clone()
        overlap = coupled @ image
        image.addmv_(coupled.T, overlap, alpha=-1)
        column = rows @ image
        image.addmv_(rows.T, column, alpha=-1)
        column[self._first_coupled :] += overlap
        self.beta = float(torch.linalg.vector_norm(image, dtype=torch.float64))
        self.products += 1
        if not math.isfinite(self.beta):
            require_finite(image, self.op)
        found = column.to(device="cpu", dtype=torch.float64)
        self.projected[: self.width, old] = self.projected[old, : self.width] = found
        self.largest = max(self.largest, abs(float(found[-1])), self.beta)
        self._first_coupled = old
        # Below this the remainder is the rounding error of the product, not a direction of A.
        if (
            self.width == len(image)
            or self.beta <= 10 * len(image) ** 0.5 * torch.finfo(image.dtype).eps * self.largest
        ):
            self.beta = 0.0
            self._draw()
        else:
            torch.div(image, self.beta, out=self.basis[self.width])

    def ritz(self) -> tuple[Float64[Tensor, " width"], Float64[Tensor, "width width"], Float64[Tensor, " width"]]:
        """Ritz values, greatest first, their vectors in the basis, and their residuals ``‖A v − θ v‖``."""
        values, small = torch.linalg.eigh(self.projected[: self.width, : self.width])
        values, small = values.flip(0), small.flip(1)
        return values, small, self._residuals(small)

    def vectors(self, small: Float64[Tensor, "width k"]) -> Float[Tensor, "k n"]:
        return small.mT.to(self.basis) @ self.basis[: self.width]

    def restart(self, values: Float64[Tensor, " kept"], small: Float64[Tensor, "width kept"]) -> None:
        """Keep these Ritz vectors and ``q``, to which each of them is coupled."""
        kept, q = len(values), self.basis[self.width].clone()
        self.basis[:kept] = self.vectors(small)
        self.basis[kept] = q
        self.projected.zero_()
        self.projected.diagonal()[:kept] = values
        self.dropped[:kept] = small.mT @ self.dropped[: self.width]
        self.dropped[kept:] = 0
        self.width, self._first_coupled = kept, 0

    def restart_afresh(self, values: Float64[Tensor, " kept"], small: Float64[Tensor, "width kept"]) -> None:
        """Keep these Ritz vectors alone and go on with a random direction, which sees what ``q`` could not."""
        lost = self._residuals(small)
        self.restart(values, small)
        self.dropped[: self.width] = lost
        self._draw()

    def _residuals(self, small: Float64[Tensor, "width k"]) -> Float64[Tensor, " k"]:
        rounding = torch.finfo(self.basis.dtype).eps * self.largest
        found = torch.hypot(self.beta * small[-1], small.mT @ self.dropped[: self.width])
        return found.clamp(min=rounding)

    def _draw(self) -> None:
        """A random ``q``, orthogonal to the basis."""
        rows, n = self.basis[: self.width], self.basis.shape[1]
        if self.width == n:
            return
        q = gaussian(n, 1, rng=self.rng, dtype=self.basis.dtype, device=self.basis.device)[:, 0]
        for _ in range(2):  # the first pass leaves rounding errors of what it removed
            q = q - rows.T @ (rows @ q)
            q = q / torch.linalg.vector_norm(q)
        self.basis[self.width] = q
        self._first_coupled = self.width
