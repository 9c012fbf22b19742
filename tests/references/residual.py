"""Three layers with a skip in the second, tanh, one input: the output's F, B, P and Q, by quadrature and by sampling.

``z¹ = b + W x``, ``z² = δ z¹ + b + W s(z¹)``, ``z³ = b + W s(z²)``. H¹ is Θ¹ times the identity, so that
``H² = Θ¹ M Mᵀ + (λ_b + λ_W |s|²/n) 1`` with ``M = W diag(s') + δ``; nothing is taken from the recursions.
"""

import numpy as np
import torch


def tanh_derivatives(z):
    s = np.tanh(z) if isinstance(z, np.ndarray) else torch.tanh(z)
    return s, 1 - s**2, -2 * s * (1 - s**2)


def output_F_and_B(K, Theta, skip, C_W, nodes=120):
    """Of the output, from K and Θ of layers 1 and 2; z¹ and z² of one neuron have the covariance δ K¹."""
    t, w = np.polynomial.hermite_e.hermegauss(nodes)
    weights = np.outer(w, w) / w.sum() ** 2
    one = np.sqrt(K[0]) * t[:, None] + 0 * t[None]
    two = skip * one + np.sqrt(K[1] - skip**2 * K[0]) * t[None]
    (s1, d1, _), (s2, d2, c2) = tanh_derivatives(one), tanh_derivatives(two)

    def mean(values):
        return float((weights * values).sum())

    slope = mean(d2**2 + s2 * c2)  # <(s s')'>
    between = C_W**2 * slope**2 * mean((s1 * d1) ** 2) + 2 * skip * C_W * slope * mean(s2 * d2 * s1 * d1)
    F = C_W**2 * (mean((s2 * d2) ** 2) * Theta[1] + between * Theta[0])
    squares = C_W**2 * mean(d2**2) ** 2 * mean(d1**4) + 2 * skip**2 * C_W * mean(d2**2) * mean(d2**2 * d1**2)
    return F, C_W**2 * (mean(d2**4) * Theta[1] ** 2 + squares * Theta[0] ** 2)


def sampled_output(n, count, K, Theta, skip, rates, seed):
    """Mean and standard error of F, B, P and Q of the output at width n, its weights integrated out; rates by name."""
    rng = torch.Generator().manual_seed(seed)
    c, lam = rates["C_W"], rates["lambda_W"]

    def normal(*shape):
        return torch.randn(count, *shape, generator=rng, dtype=torch.float64)

    one = K**0.5 * normal(n)
    s, d, curved = tanh_derivatives(one)
    W = (c / n) ** 0.5 * normal(n, n)
    eye = torch.eye(n, dtype=torch.float64)
    M = W * d[:, None] + skip * eye
    H = Theta * M @ M.mT + (rates["lambda_b"] + lam / n * s.square().sum(1))[:, None, None] * eye
    S, D, C = tanh_derivatives(skip * one + (W @ s[..., None])[..., 0] + rates["C_b"] ** 0.5 * normal(n))
    by_rate = lam / n * Theta * (M @ (s * d)[..., None])[..., 0]
    ikk = Theta**2 * (W * curved[:, None]) @ M.square().mT + torch.diag_embed(2 * by_rate)
    kki = Theta**2 * (W * curved[:, None] * M) @ M.mT + by_rate[:, None] + torch.diag_embed(by_rate)

    def form(left, matrix, right):
        return c**2 / n * torch.einsum("ri,rij,rj->r", left, matrix, right)

    diagonal = H.diagonal(dim1=1, dim2=2)
    found = {"F": form(S * D, H, S * D), "B": form(D**2, H**2, D**2)}
    found["P"] = form(C * S, H**2, D**2) + form(S * D, ikk, D**2)
    found["Q"] = form(C * D * diagonal, H, S * D) + form(D**2, kki, S * D) + lam / c * found["F"]
    return {name: (float(v.mean()), float(v.std()) / count**0.5) for name, v in found.items()}
