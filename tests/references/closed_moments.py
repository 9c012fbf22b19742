"""Expectations in closed form for sin and for the error function: the reference of the quadrature."""

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.theory.families import PAIRS, QUADS, GaussianMoments
from references.orthants import four_signs_of_tables


def sine_moments(kernel: Float[Tensor, "n n"]) -> GaussianMoments:
    """All moments of s = sin: a product of sines is a sum of cosines, and <cos(ε·z + φ)> = cos φ exp(-εᵀKε/2)."""
    return GaussianMoments(**{name: _sine(kernel, orders) for name, orders in (PAIRS | QUADS).items()})


def _sine(kernel: Tensor, orders: tuple[int, ...]) -> Tensor:
    slots = len(orders)
    blocks = _slot_blocks(kernel, slots, 0.0)
    total = kernel.new_zeros(blocks.shape[:-2])
    for signs in itertools.product((1, -1), repeat=slots):
        # sin⁽ᵏ⁾(z) = sin(z + kπ/2); the quarter turns add up to a number whose cosine is exactly 0 or ±1.
        turns = sum(sign * order for sign, order in zip(signs, orders, strict=True)) % 4
        factor = math.prod(signs) * (1, 0, -1, 0)[turns]
        if factor:
            e = kernel.new_tensor(signs)
            total = total + factor * torch.exp(-0.5 * torch.einsum("i,...ij,j->...", e, blocks, e))
    # (1/2i)^slots
    return total * ((-1) ** (slots // 2) / 2**slots)


def erf_moments(kernel: Float[Tensor, "n n"]) -> GaussianMoments:
    """All moments of s = erf: erf(z) = E[sgn(z + ξ/√2)] with a fresh ξ ~ N(0, 1) for each factor.

    So each factor is a sign, 2δ, 2δ' of a Gaussian vector with covariance K + ½, which is never singular.
    """
    two = _slot_blocks(kernel, 2, 0.5)
    four = _slot_blocks(kernel, 4, 0.5)
    var_a, var_b, cov = two[..., 0, 0], two[..., 1, 1], two[..., 0, 1]
    det = var_a * var_b - cov**2
    density = 1 / (2 * math.pi * det.sqrt())
    scale = four.diagonal(dim1=-2, dim2=-1).sqrt()
    return GaussianMoments(
        p00=2 / math.pi * torch.asin(cov / (var_a * var_b).sqrt()),
        p11=4 * density,
        p02=2 * _slope_sign(var_b, cov, var_a),
        p22=4 * density * cov / det,
        p13=-4 * density * var_a / det,
        q0000=four_signs_of_tables(four / (scale[..., :, None] * scale[..., None, :])),
        q0011=_two_signs_two_deltas(four),
        q1111=16 / (4 * math.pi**2 * torch.linalg.det(four).sqrt()),
        q2110=_slope_two_deltas_sign(four),
    )


def _slot_blocks(kernel: Tensor, slots: int, noise: float) -> Tensor:
    """(n,) * slots + (slots, slots): the covariance of every choice of samples, plus independent noise in each slot."""
    n = kernel.shape[0]
    samples = torch.stack(torch.meshgrid(*[torch.arange(n, device=kernel.device)] * slots, indexing="ij"), dim=-1)
    blocks = kernel[samples[..., :, None], samples[..., None, :]]
    return blocks + noise * torch.eye(slots, dtype=kernel.dtype, device=kernel.device)


def _slope_sign(var_0: Tensor, cov: Tensor, var_1: Tensor) -> Tensor:
    """E[δ'(y₀) sgn y₁] = - p(0) d/dy₀ E[sgn y₁ | y₀] at 0."""
    left = var_1 - cov**2 / var_0
    return -(1 / (2 * math.pi * var_0).sqrt()) * math.sqrt(2 / math.pi) * (cov / var_0) / left.sqrt()


def _given_zero(blocks: Tensor, zero: tuple[int, int], rest: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Covariance of two slots given that two others are 0, and the density of those at 0."""
    inner = blocks[..., zero, :][..., zero]
    cross = blocks[..., rest, :][..., zero]
    outer = blocks[..., rest, :][..., rest]
    left = outer - cross @ torch.linalg.solve(inner, cross.transpose(-1, -2))
    return left, 1 / (2 * math.pi * torch.linalg.det(inner).sqrt())


def _two_signs_two_deltas(blocks: Tensor) -> Tensor:
    left, density = _given_zero(blocks, (2, 3), (0, 1))
    rho = left[..., 0, 1] / (left[..., 0, 0] * left[..., 1, 1]).sqrt()
    return 4 * density * 2 / math.pi * torch.asin(rho.clamp(-1, 1))


def _slope_two_deltas_sign(blocks: Tensor) -> Tensor:
    left, density = _given_zero(blocks, (1, 2), (0, 3))
    return 8 * density * _slope_sign(left[..., 0, 0], left[..., 0, 1], left[..., 1, 1])
