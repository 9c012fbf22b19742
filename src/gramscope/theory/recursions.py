"""One step of the finite-width recursions: the tensors of layer l + 1 from those of layer l (PDLT, arXiv:2106.10165).

Tensors carry sample axes only, in the index order of the theory. At layer l, with n = n_{l-1} and neurons i ≠ j:

    E[z_i;a z_i;b z_j;c z_j;d]_conn = V_(ab)(cd)/n     E[z_i;a z_i;b ΔH_jj;cd] = D_abcd/n
    E[z_i;a z_j;c H_ij;bd] = F_abcd/n                  E[H_ij;ac H_ij;bd] = B_abcd/n
    Cov[H_ii;ab, H_jj;cd] = A_(ab)(cd)/n
    E[dH_ijj;012 z_i;3] = P_0123/n                     E[dH_iij;012 z_j;3] = Q_0123/n
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.results import Result, TableResult
from gramscope.theory.families import GaussianMoments

# One formula serves tensors with floats, and numpy arrays of decimals where doubles do not reach.
Array: TypeAlias = Any
Number: TypeAlias = Any
_Arrays: TypeAlias = Any  # has the tensors of a layer, or of its moments, as attributes
_Numbers: TypeAlias = Any  # has the rates of a layer as attributes


@dataclass(frozen=True)
class Layer(Result):
    """The tensors of one layer. K and Θ are of order 1; V, D, F, A, B, P, Q are coefficients of 1/n_{l-1}.

    >>> import gramscope as gs
    >>> flow = gs.theory.FiniteWidthMLP(widths=[2, 50, 50, 1], activation="relu", C_W=2.0).flow(torch.eye(2).double())
    >>> flow[1].K.shape, flow[3].Q.shape
    (torch.Size([2, 2]), torch.Size([2, 2, 2, 2]))
    """

    K: Float[Tensor, "n n"]
    Theta: Float[Tensor, "n n"]
    V: Float[Tensor, "n n n n"]
    D: Float[Tensor, "n n n n"]
    F: Float[Tensor, "n n n n"]
    A: Float[Tensor, "n n n n"]
    B: Float[Tensor, "n n n n"]
    P: Float[Tensor, "n n n n"]
    Q: Float[Tensor, "n n n n"]

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={tensor.flatten()[0].item():.6g}" for name, tensor in self.tensors().items())
        n = self.K.shape[0]
        return f"Layer({n} sample{'s' if n > 1 else ''}; first entries {shown})"


@dataclass(frozen=True, repr=False)
class LayerStack(TableResult):
    """Layers 1 ... L; ``stack[l]`` counts from 1, as the theory does. The table has the means over the samples."""

    plotted: ClassVar[tuple[str, ...]] = ("K", "Theta")

    layers: tuple[Layer, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, layer: int) -> Layer:
        if not isinstance(layer, int) or not (1 <= layer <= len(self) or -len(self) <= layer <= -1):
            raise IndexError(f"layer must be 1 ... {len(self)} (or -1 for the output), got {layer!r}.")
        return self.layers[layer - 1 if layer > 0 else layer]

    def _table(self) -> tuple[list[dict[str, float]], range]:
        """A row a layer: the means of K and Θ over the samples."""
        means = [{name: float(getattr(layer, name).diagonal().mean()) for name in self.plotted} for layer in self]
        return means, range(1, len(self) + 1)


@dataclass(frozen=True)
class Rates:
    """Hyperparameters of one layer: variances C_b, C_W/n_{l-1}, learning rates λ_b, λ_W/n_{l-1}.

    ``skip`` is δ of a residual layer, ``z' = δ z + b + W s``; 0 for a plain one.
    """

    C_b: float
    C_W: float
    lambda_b: float
    lambda_W: float
    skip: float = 0.0


def first_layer(gram: Float[Tensor, "n n"], rates: Rates) -> Layer:
    """K = C_b + C_W x·x/n₀, Θ = λ_b + λ_W x·x/n₀; a Gaussian layer has no 1/n tensors."""
    n = gram.shape[0]
    zero = gram.new_zeros((n,) * 4)
    return Layer(rates.C_b + rates.C_W * gram, rates.lambda_b + rates.lambda_W * gram, *[zero] * 7)


def next_layer(layer: Layer, moments: GaussianMoments, rates: Rates, ratio: float, explicit_kink: bool = True) -> Layer:
    """The tensors of layer l + 1.

    F, B, P and Q are those of a network without skips (:mod:`gramscope.theory.self_overlap` has the others). ``ratio``
    is n_l/n_{l-1}; ``explicit_kink=False`` drops the s'' that autograd drops and keeps those
    that come from differentiating an expectation; it is meant for activations with a kink.
    """
    return Layer(**next_arrays(layer, moments, rates, ratio, explicit_kink))


def next_arrays(
    layer: _Arrays, moments: _Arrays, rates: _Numbers, ratio: Number, explicit_kink: bool
) -> dict[str, Array]:
    """:func:`next_layer` for anything with these attributes: tensors and floats, or numpy arrays of decimals."""
    c, lw, kept = rates.C_W, rates.lambda_W, rates.skip**2
    s = moments
    theta = layer.Theta
    grow = _Carriers(s, theta, c, lw, kept)
    slope = c * s.p11 + kept  # <w_ab> has this factor of Θ, and so has everything that is carried through s'
    mean_w = lw * s.p00 + c * theta * s.p11  # "Omega", of the weights of this layer alone
    ssw = lw * s.q0000 + c * s.q0011 * theta[None, None]  # <s_a s_b w_cd>
    F = _next_F(layer, s, rates, ratio)
    P, Q = _next_P_Q(layer, s, F, rates, ratio, explicit_kink)
    # <z_a z_b f_cd> - K_ab <f_cd> = DD[f_cd ; K_ac K_bd + K_ad K_bc]/2: a skip lets a neuron meet itself.
    itself = einsum("ac,bd->abcd", layer.K, layer.K) + einsum("ad,bc->abcd", layer.K, layer.K)
    crossed = c * kept / 2 * grow.ss(itself)
    through_V = grow.g(layer.V)
    return {
        "K": rates.C_b + c * s.p00 + kept * layer.K,
        "Theta": rates.lambda_b + lw * s.p00 + slope * theta,
        "V": c**2 * (s.q0000 - _outer(s.p00, s.p00)) + crossed + _swap(crossed)
        + ratio / 4 * _swap(grow.g(_swap(through_V))),
        "D": c * (ssw - _outer(s.p00, mean_w)) + kept / 2 * _swap(grow.w(itself))
        + ratio * (_swap(grow.w(_swap(through_V))) / 4 + slope[None, None] / 2 * grow.g(layer.D)),
        "F": F,
        "A": _next_A(layer, s, grow, mean_w, rates, slope, ratio),
        "B": _next_B(layer, s, rates, ratio),
        "P": P,
        "Q": Q,
    }  # fmt: skip


class _Carriers:
    """DD[f_ab ; T] = Σ_pq <∂_p ∂_q f_ab> T_pq.. on the first pair of indices of T.

    f = s_a s_b, f = w_ab, and f = g_ab = C_W s_a s_b + δ² z_a z_b.
    """

    def __init__(self, s: _Arrays, theta: Array, c: Number, lw: Number, kept: Number) -> None:
        self._s, self._theta, self._c, self._lw, self._kept = s, theta, c, lw, kept

    def ss(self, tensor: Array) -> Array:
        return _second_derivatives(self._s.p02.T, self._s.p11, self._s.p02, tensor)

    def g(self, tensor: Array) -> Array:
        return self._c * self.ss(tensor) + 2 * self._kept * tensor

    def w(self, tensor: Array) -> Array:
        slopes = _second_derivatives(self._s.p13.T, self._s.p22, self._s.p13, tensor)
        return self._lw * self.ss(tensor) + self._c * self._theta[:, :, None, None] * slopes


def _second_derivatives(aa: Array, ab: Array, bb: Array, tensor: Array) -> Array:
    """<f''_a f_b> T_aa + 2 <f'_a f'_b> T_ab + <f_a f''_b> T_bb."""
    return (
        einsum("ab,aacd->abcd", aa, tensor)
        + 2 * einsum("ab,abcd->abcd", ab, tensor)
        + einsum("ab,bbcd->abcd", bb, tensor)
    )


def _swap(tensor: Array) -> Array:
    """The second pair of indices first."""
    return einsum("abcd->cdab", tensor)


def einsum(equation: str, *operands: Array) -> Array:
    return (torch.einsum if isinstance(operands[0], Tensor) else np.einsum)(equation, *operands)


def _outer(left: Array, right: Array) -> Array:
    return einsum("ab,cd->abcd", left, right)


def _next_A(
    layer: _Arrays, s: _Arrays, grow: _Carriers, mean_w: Array, rates: _Numbers, slope: Array, ratio: Number
) -> Array:
    c, lw, theta = rates.C_W, rates.lambda_W, layer.Theta
    mixed = c * lw * s.q0011 * theta[None, None]
    mean_ww = lw**2 * s.q0000 + mixed + _swap(mixed) + c**2 * s.q1111 * _outer(theta, theta)
    through_D = slope[None, None] / 2 * grow.w(layer.D)
    carried = _swap(grow.w(_swap(grow.w(layer.V)))) / 4 + through_D + _swap(through_D)
    carried = carried + _outer(slope, slope) * layer.A
    return mean_ww - _outer(mean_w, mean_w) + ratio * carried


def _next_B(layer: _Arrays, s: _Arrays, rates: _Numbers, ratio: Number) -> Array:
    source = s.q1111 * einsum("ac,bd->abcd", layer.Theta, layer.Theta)
    return rates.C_W**2 * (source + ratio * _outer(s.p11, s.p11) * layer.B)


def _next_F(layer: _Arrays, s: _Arrays, rates: _Numbers, ratio: Number) -> Array:
    """Derivatives of s_a s'_b fall on a or on b; those of s_c s'_d on c or on d."""
    right = einsum("cd,abcd->abcd", s.p11, layer.F) + einsum("cd,abdd->abcd", s.p02, layer.F)
    carried = einsum("ab,abcd->abcd", s.p11, right) + einsum("ab,bbcd->abcd", s.p02, right)
    return rates.C_W**2 * (einsum("acbd,bd->abcd", s.q0011, layer.Theta) + ratio * carried)


def _next_P_Q(
    layer: _Arrays, s: _Arrays, next_F: Array, rates: _Numbers, ratio: Number, explicit: bool
) -> tuple[Array, Array]:
    c, theta = rates.C_W, layer.Theta
    keep = 1 if explicit else 0
    s20 = s.p02.T  # <s''_a s_b>
    source = keep * s.q2110 * einsum("ab,ac->abc", theta, theta)[..., None]
    inner = einsum("ad,abca->abcd", s20, layer.P) + keep * einsum("ad,aabc->abcd", s20, layer.B)
    inner = inner + einsum("ad,abcd->abcd", s.p11, layer.P)
    P = c**2 * (source + ratio * einsum("bc,abcd->abcd", s.p11, inner))
    inner = einsum("cd,abcc->abcd", s20, layer.Q) + einsum("cd,abcd->abcd", s.p11, layer.Q)
    carried = einsum("ab,abcd->abcd", s.p11, inner)
    if explicit:
        carried = carried + theta[:, :, None, None] * _through_F(layer.F, s)
    return P, c**2 * (source + ratio * carried) + rates.lambda_W / c * einsum("abcd->badc", next_F)


def _through_F(F: Array, s: _Arrays) -> Array:
    """Σ_{p in {0,1}} Σ_{q in {2,3}} u_p v_q F_{p 0 q 2}; the indices 0 1 2 3 are a b c d."""
    right = einsum("cd,pacc->pacd", s.p02.T, F) + einsum("cd,padc->pacd", s.p11, F)
    return einsum("ab,aacd->abcd", s.p13.T, right) + einsum("ab,bacd->abcd", s.p22, right)
