"""The pullback hierarchy: how a step changes the conjugate fields (arXiv:2606.09744, section 5).

``A^ℓ_{μν} = G^{ℓ+1}_{μν} 1 + W^{ℓ+1,T} D_μ A^{ℓ+1}_{μν} D_ν W^{ℓ+1}``, ``A^L = 0``, or in closed form
``A^ℓ_{μν} = Σ_{k>ℓ} G^k_{μν} (T^{k-1←ℓ}_μ)ᵀ T^{k-1←ℓ}_ν`` with the transports ``T^{k←ℓ}_μ = D^k_μ W^k ... D^{ℓ+1}_μ
W^{ℓ+1}``.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.axes import Axes
from gramscope.base.checks import check_count, check_tensor
from gramscope.base.errors import InputError
from gramscope.linalg import LinearOperator, eigenvalues_top

if TYPE_CHECKING:
    from gramscope.hierarchy.fields import Fields


class Pullback(LinearOperator):
    """``A^ℓ`` on vectors over (example, output, unit), applied through transports.

    Symmetric and positive semi-definite: ``vᵀ A v = Σ_k |Σ_ν b^k_ν ⊗ T^{k-1←ℓ}_ν v_ν|²``. A product costs two sweeps
    through the layers above ℓ; nothing of size n N² or n² N² is held.

    ``levels`` are the terms k of the closed form that count, all of ℓ+1..L by default; ``level(k)`` is one term alone.
    """

    def __init__(self, fields: "Fields", layer: int, levels: tuple[int, ...] | None = None) -> None:
        self.fields, self.layer = fields, layer
        self.levels = tuple(range(layer + 1, fields.depth + 1)) if levels is None else levels
        sizes = {"example": fields.n, "output": len(fields.chain.readout), "unit": fields.widths[layer]}
        if fields.single:
            del sizes["output"]
        readout = fields.chain.readout
        axes = Axes(**sizes)
        super().__init__(axes, axes, dtype=readout.dtype, device=readout.device, symmetric=True)

    def level(self, k: int) -> "Pullback":
        """The term ``G^k_{μν} (T^{k-1←ℓ}_μ)ᵀ T^{k-1←ℓ}_ν`` alone; the terms of all levels sum to the whole."""
        check_count(k, "k", self.layer + 1, self.fields.depth, f"the levels of layer {self.layer}")
        return Pullback(self.fields, self.layer, (k,))

    def apply(self, v: Tensor, constant: Tensor | None = None) -> Tensor:
        """``Σ_ν A_{μν} v_ν`` for v of shape (n, N_ℓ), or (n, C, N_ℓ) with several outputs.

        ``constant`` (n,) or (n, C) is the entry of v along the constant input that biases are weights of; the step
        prediction of a network with biases is ``Δg = -η apply(x e, constant=e)``.
        """
        wanted = self.rows.shape
        if tuple(check_tensor(v, "v").shape) != wanted:
            raise InputError(f"v must have shape {wanted} ({', '.join(self.rows)}), got {tuple(v.shape)}.")
        if constant is not None and tuple(check_tensor(constant, "constant").shape) != wanted[:-1]:
            raise InputError(f"constant must have shape {wanted[:-1]}, got {tuple(constant.shape)}.")
        one = v.to(dtype=self.dtype, device=self.device)[:, None]  # (n, 1, (C,) N)
        one = one.unsqueeze(2) if self.fields.single else one
        along = None if constant is None else constant.to(one).reshape(*one.shape[:3])
        return self._sweep(one, along).reshape(wanted)

    @exact_arithmetic()
    def pair(self, mu: int, nu: int) -> Tensor:
        """``A^ℓ_{μν}`` as a matrix, (N, N) or (C, N, C, N), by the backward recursion."""
        fields = self.fields
        mu, nu = fields._example(mu), fields._example(nu)
        outputs, width = fields.chain.readout.shape
        found = fields.chain.readout.new_zeros(outputs, width, outputs, width)  # A^L = 0
        for layer in range(fields.depth - 1, self.layer - 1, -1):
            slopes, weight = fields.slopes(layer + 1), fields.chain.weights[layer]
            left, right = slopes[mu, :, None] * weight, slopes[nu, :, None] * weight
            found = torch.einsum("oi,codp,pj->cidj", left, found, right)
            if layer + 1 in self.levels:
                b, unit = fields._signal(layer + 1), torch.eye(weight.shape[1], dtype=self.dtype, device=self.device)
                found = found + torch.einsum("cd,ij->cidj", b[mu] @ b[nu].T, unit)
        return found[0, :, 0] if fields.single else found

    def spectrum(self, k: int | None = None) -> Float[Tensor, " k"]:
        """The k largest eigenvalues (Lanczos), or all of them (from the dense matrix), largest first."""
        if k is None:
            return torch.linalg.eigvalsh(self.dense()).flip(0)
        return eigenvalues_top(self, k).values

    # Matrix-free -------------------------------------------------------------------------------------

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        n, width, count = self.fields.n, self.fields.widths[self.layer], x.shape[1]
        if count == 0:
            return torch.zeros_like(x)
        v = x.T.reshape(count, n, -1, width).transpose(0, 1)
        return self._sweep(v, None).transpose(0, 1).reshape(count, -1).T.contiguous()

    @exact_arithmetic()
    def _sweep(self, v: Float[Tensor, "n k C N"], constant: Float[Tensor, "n k C"] | None) -> Float[Tensor, "n k C N"]:
        """Up: ``v^k = D^k W^k v^{k-1}``. Down: ``y^k = Σ_ν G^{k+1}_{μν} v^k_ν + W^{k+1,T} D^{k+1} y^{k+1}``."""
        chain = self.fields.chain
        if not self.levels:
            return torch.zeros_like(v)
        top = max(self.levels)
        transported = [v]
        for layer in range(self.layer + 1, top):
            up = transported[-1] @ chain.weights[layer - 1].T
            bias = chain.biases[layer - 1]
            if constant is not None and bias is not None:
                up = up + constant[..., None] * bias
            transported.append(up * self.fields.slopes(layer)[:, None, None])
        down: Tensor | None = None
        for layer in range(top, self.layer, -1):  # down holds y^layer, and becomes y^{layer-1}
            if down is not None:
                down = (down * self.fields.slopes(layer)[:, None, None]) @ chain.weights[layer - 1]
            if layer in self.levels:
                share = self._correlate(layer, transported[layer - 1 - self.layer])
                down = share if down is None else down + share
        assert down is not None
        return down

    def _correlate(self, level: int, v: Float[Tensor, "n k C N"]) -> Float[Tensor, "n k C N"]:
        """``Σ_{νd} G_{μc,νd} v_{νd}``, by examples (n² of them) or by weights (N x N), whichever costs less."""
        b = self.fields._signal(level)  # (n, C, N_level)
        n, count, outputs, width = v.shape
        rows, signal_width = n * outputs, b.shape[2]
        by_examples = rows * rows * (signal_width + count * width)
        by_weights = 2 * rows * count * signal_width * width
        if by_examples <= by_weights:
            flat = b.flatten(0, 1)
            gram = flat @ flat.T
            columns = v.transpose(1, 2).reshape(rows, count * width)
            return (gram @ columns).reshape(n, outputs, count, width).transpose(1, 2)
        met = torch.einsum("ncs,nkci->ksi", b, v)
        return torch.einsum("ncs,ksi->nkci", b, met)
