"""F, B, P and Q of residual networks, in which a neuron remembers itself.

On a residual layer ``z^{l+1} = δ z^l + b + W s(z^l)`` the kernel between two neurons holds ``δ W_ij s'(z^l_j) Θ``. It
knows z^l_j, and by the skip so does every later z_j. Expectations then do not factor into derivatives times one tensor,
as they do in plain networks. They are bilinear functionals of a function g of neuron i and a function h of neuron
j ≠ i, each of a layer T of its own:

    X(g, h) = n E[g_i h_j H_ij;bd]       B(g, h) = n E[g_i h_j H_ij;ac H_ij;bd]
    P(g, h) = n E[g_i h_j dH_ijj;012]    Q(g, h) = n E[g_i h_j dH_iij;012]

Each has a recursion in the layer of H (docs/finite-width.md); weights are averaged by ``W_ik → (C_W/n) Σ_a s_k;a ∂_a``.
F is X(z, z), B is B(1, 1), P is P(z, 1) and Q is Q(1, z). Expectations over layers l < T are those of 2n samples with
``E[z^l z^T] = δ_{l+1} ... δ_T K^l``.

Functions go by a letter: "z" and "1"; u = s_a s'_b and v = s'_a s''_b, of which b is the sample of the kernel;
e = s'_a s'_b; w = s_q s''_a.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from gramscope.theory.families import GaussianMoments
from gramscope.theory.recursions import Layer, Rates

Function: TypeAlias = tuple[str, int]  # its letter and its layer


class SelfOverlap:
    """The functionals of one network; layers count from 1.

    ``layers`` give K and Θ; ``ratios[l-1]`` is n_l/n_{l-1}; ``moments`` the expectations of a kernel; ``explicit`` is
    that of :func:`gramscope.theory.recursions.next_layer`.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rates: Sequence[Rates],
        ratios: Sequence[float],
        moments: Callable[[Tensor], GaussianMoments],
        explicit: bool,
    ) -> None:
        self._layers, self._rates, self._ratios = layers, rates, ratios
        self._own = cache(lambda layer: moments(layers[layer - 1].K))
        self._joint = cache(lambda low, high: moments(self._kernel_of_two(low, high)))
        self._keep = float(explicit)
        self.X, self.B, self.P, self.Q = (cache(f) for f in (self._next_X, self._next_B, self._next_P, self._next_Q))

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """F, B, P and Q of one layer."""
        z, one = ("z", layer), ("1", layer)
        found = {"F": self.X(layer, z, z), "B": self.B(layer, one, one)}
        return found | {"P": self.P(layer, z, one), "Q": self.Q(layer, one, z)}

    def _skips(self, low: int, high: int) -> float:
        """δ_{low+1} ... δ_high."""
        return math.prod((rate.skip for rate in self._rates[low:high]), start=1.0)

    def _kernel_of_two(self, low: int, high: int) -> Tensor:
        below, above = self._layers[low - 1].K, self._layers[high - 1].K
        shared = self._skips(low, high) * below
        return torch.cat([torch.cat([below, shared], 1), torch.cat([shared, above], 1)])

    def _four(self, name: str, *factors: int) -> Tensor:
        """An expectation of four factors of these layers, of which there are one or two."""
        low, high = min(factors), max(factors)
        if low == high:
            return getattr(self._own(low), name)
        n = len(self._layers[0].K)
        places = tuple(slice(0, n) if layer == low else slice(n, None) for layer in factors)
        return getattr(self._joint(low, high), name)[places]

    def _below(self, layer: int) -> tuple[int, Tensor, float, float, float]:
        """The layer below with its Θ and ratio; C_W and δ of this one."""
        rate = self._rates[layer - 1]
        return layer - 1, self._layers[layer - 2].Theta, self._ratios[layer - 2], rate.C_W, rate.skip

    # X: axes (a, b) of g and (c, d) of h; the kernel has samples b and d.

    def _next_X(self, layer: int, g: Function, h: Function) -> Tensor:
        if layer == 1:
            return torch.zeros_like(self._layers[0].V)
        low, _, ratio, c, skip = self._below(layer)
        found = c**2 * self._slope(
            layer, g, _swap(self._slope(layer, h, _swap(self._kernel_with(low, "u", ("u", low)))))
        )
        if skip:
            left = self._slope(layer, g, self._kernel_with(low, "u", h))
            right = _swap(self._slope(layer, h, self._kernel_with(low, "u", g)))
            found = found + skip * c * (left + right) + skip**2 * ratio * self.X(low, g, h)
        return found

    def _kernel_with(self, low: int, inner: str, h: Function) -> Tensor:
        """Σ_k E[u_k h_j H_kj], k = j included: ``<u h> Θ + X(u, h)``, for u or v of the layer of H."""
        theta, ratio = self._layers[low - 1].Theta, self._ratios[low - 1]
        return self._mean_with(low, inner, h) * theta[None, :, None, :] + ratio * self.X(low, (inner, low), h)

    def _mean_with(self, low: int, inner: str, h: Function) -> Tensor:
        letter, high = h
        if letter == "z":
            s, K = self._own(low), self._skips(low, high) * self._layers[low - 1].K
            first, second = (s.p11, s.p02) if inner == "u" else (s.p22, s.p13)
            found = torch.einsum("ca,ab->abc", K, first) + torch.einsum("cb,ab->abc", K, second)
            return found[..., None].expand_as(self._layers[0].V)
        if inner + letter == "uu":
            return self._four("q0011", low, high, low, high).permute(0, 2, 1, 3)
        if inner + letter == "uv":
            return self._four("q2110", high, high, low, low).permute(3, 2, 1, 0)
        return self._four("q2110", low, low, high, high).permute(1, 0, 3, 2)

    def _slope(self, layer: int, g: Function, tensor: Tensor) -> Tensor:
        """``Σ_p <∂g_ab/∂z_p> T_pb..``, z_p that of the given layer, on which g depends by its skips."""
        letter, high = g
        kept = self._skips(layer, high)
        if letter == "z":
            return kept * tensor
        s = self._own(high)
        first, second = (s.p11, s.p02) if letter == "u" else (s.p22, s.p13)
        same = torch.einsum("bbcd->bcd", tensor)
        return kept * (first[..., None, None] * tensor + torch.einsum("ab,bcd->abcd", second, same))

    # B: axes (a, b) of i and (c, d) of j; where g is w, b = a and the second axis is q.

    def _next_B(self, layer: int, g: Function, h: Function) -> Tensor:
        if layer == 1:
            return torch.zeros_like(self._layers[0].V)
        low, _, ratio, c, skip = self._below(layer)
        own, other = self._mean(g), _swap(self._mean(h))
        found = c**2 * own * other * _tied(g, self._squares_with(low, ("e", low)))
        if skip:
            left = own * _tied(g, self._squares_with(low, h))
            right = other * (self._squares_of_w(low, g) if g[0] == "w" else _swap(self._squares_with(low, g)))
            found = found + skip**2 * c * (left + right) + skip**4 * ratio * self.B(low, g, h)
        return found

    def _squares_with(self, low: int, h: Function) -> Tensor:
        """``<e h> Θ_ac Θ_bd + B(e, h)``."""
        letter, high = h
        mean = self._own(low).p11[..., None, None] if letter == "1" else self._four("q1111", low, low, high, high)
        theta = self._layers[low - 1].Theta
        squares = torch.einsum("ac,bd->abcd", theta, theta)
        return mean * squares + self._ratios[low - 1] * self.B(low, ("e", low), h)

    def _squares_of_w(self, low: int, g: Function) -> Tensor:
        mean = self._four("q2110", g[1], low, low, g[1]).permute(0, 3, 1, 2)
        theta = self._layers[low - 1].Theta
        squares = torch.einsum("ac,ad->acd", theta, theta)[:, None]
        return mean * squares + self._ratios[low - 1] * self.B(low, g, ("e", low))

    def _mean(self, g: Function) -> Tensor:
        """<g>, on the first two axes."""
        letter, high = g
        if letter == "1":
            return torch.ones_like(self._layers[0].V)
        s = self._own(high)
        return (s.p11 if letter == "e" else s.p02.T)[..., None, None].expand_as(self._layers[0].V)

    # P: axes (0, 1, 2) of dH and that of g, z_3 or u = s_3 s'_0; h is 1 or e = s'_1 s'_2.

    def _next_P(self, layer: int, g: Function, h: Function) -> Tensor:
        if layer == 1:
            return torch.zeros_like(self._layers[0].V)
        low, _, ratio, c, skip = self._below(layer)
        mean = self._mean(h).permute(2, 0, 1, 3)
        inside = c * mean * self._curved(low, ("e", low))
        if skip:
            inside = inside + skip**2 * self._curved(low, h)
        found = c * self._slope(layer, g, inside.permute(3, 0, 1, 2)).permute(1, 2, 3, 0)
        if skip:
            carried = skip**3 * self.P(low, g, h) + skip * c * mean * self.P(low, g, ("e", low))
            found = found + ratio * carried
        return found

    def _curved(self, low: int, h: Function) -> Tensor:
        """``P(u, h) + <w h> Θ_01 Θ_02 + B(w, h)``; the last two come of s'' in the network."""
        found = self._ratios[low - 1] * self.P(low, ("u", low), h)
        if not self._keep:
            return found
        letter, high = h
        theta = self._layers[low - 1].Theta
        mean = self._own(low).p02.T[:, None, None] if letter == "1" else self._four("q2110", low, high, high, low)
        squares = self._ratios[low - 1] * self.B(low, ("w", low), h).permute(0, 2, 3, 1)
        return found + mean * torch.einsum("ab,ac->abc", theta, theta)[..., None] + squares

    # Q: axes (0, 1, 2) of dH and that of h, z_3 or u = s_3 s'_2; g is 1 or e = s'_0 s'_1.

    def _next_Q(self, layer: int, g: Function, h: Function) -> Tensor:
        if layer == 1:
            return torch.zeros_like(self._layers[0].V)
        low, _, ratio, c, skip = self._below(layer)
        found = self._mean(g) * c * self._last_slope(layer, h, self._through(layer, ("u", low)))
        if skip:
            carried = skip**3 * self.Q(low, g, h) + skip**2 * c * self._last_slope(layer, h, self.Q(low, g, ("u", low)))
            found = found + self._mean(g) * skip * self._through(layer, h) + ratio * carried
        return found

    def _last_slope(self, layer: int, h: Function, tensor: Tensor) -> Tensor:
        return self._slope(layer, h, tensor.permute(3, 2, 0, 1)).permute(2, 3, 1, 0)

    def _through(self, layer: int, h: Function) -> Tensor:
        low, theta, ratio, c, _ = self._below(layer)
        curved = self._keep * theta[..., None, None] * self._kernel_with(low, "v", h).permute(1, 0, 3, 2)
        by_rate = self._rates[layer - 1].lambda_W * self._kernel_with(low, "u", h).permute(1, 0, 3, 2)
        return c * (ratio * self.Q(low, ("e", low), h) + curved) + by_rate


def with_self_overlap(
    layers: Sequence[Layer],
    rates: Sequence[Rates],
    ratios: Sequence[Fraction],
    moments: Callable[[Tensor], GaussianMoments],
    explicit: bool,
) -> list[Layer]:
    """The layers with F, B, P and Q of a network with skips."""
    found = SelfOverlap(layers, rates, [float(ratio) for ratio in ratios], moments, explicit)
    return [replace(layer, **found.tensors(place)) for place, layer in enumerate(layers, 1)]


def _swap(tensor: Tensor) -> Tensor:
    """The second pair of axes first."""
    return tensor.permute(2, 3, 0, 1)


def _tied(g: Function, tensor: Tensor) -> Tensor:
    """With w the samples a and b are one."""
    return torch.einsum("aacd->acd", tensor)[:, None] if g[0] == "w" else tensor
