"""NNGP and NTK of 1-d convolutions with global average pooling: loops over positions, brute-force integrals."""

import math

import numpy as np


def conv_kernels(x, k, padding, function, depth, C_b, C_W, lambda_b, lambda_W):
    """(n, n) each, for inputs (n, channels, positions); ``function`` is (s, s'), or None for ReLU in closed form."""
    channels, T = x.shape[1:]
    reach = k // 2

    def averaged(values):
        """(1/k) Σ_κ values[a, p + κ, b, q + κ], nothing beyond the ends but for a ring."""
        found = np.zeros_like(values)
        for p in range(T):
            for q in range(T):
                for shift in range(-reach, reach + 1):
                    i, j = p + shift, q + shift
                    if padding == "circular":
                        i, j = i % T, j % T
                    if 0 <= i < T and 0 <= j < T:
                        found[:, p, :, q] += values[:, i, :, j] / k
        return found

    gram = averaged(np.einsum("acp,bcq->apbq", x, x) / channels)
    K, theta = C_b + C_W * gram, lambda_b + lambda_W * gram
    for layer in range(2, depth + 1):
        ss, slopes = np.zeros_like(K), np.zeros_like(K)
        for a, p, b, q in np.ndindex(K.shape):
            ss[a, p, b, q], slopes[a, p, b, q] = integrals(K[a, p, a, p], K[b, q, b, q], K[a, p, b, q], function)
        mean = (lambda v: v.mean((1, 3))) if layer == depth else averaged
        K, theta = C_b + C_W * mean(ss), lambda_b + mean(lambda_W * ss + C_W * slopes * theta)
    return K, theta


def integrals(first, second, both, function):
    """<s s> and <s' s'> of two Gaussian numbers with these variances and covariance."""
    if function is None:
        root = math.sqrt(first * second)
        rho = max(-1.0, min(1.0, both / root))
        angle = math.acos(rho)
        return root / (2 * math.pi) * (math.sin(angle) + (math.pi - angle) * rho), (math.pi - angle) / (2 * math.pi)
    nodes, weights = np.polynomial.hermite_e.hermegauss(140)
    weights = weights / weights.sum()
    slope = both / math.sqrt(first)
    u = math.sqrt(first) * nodes[:, None]
    v = slope * nodes[:, None] + math.sqrt(max(0.0, second - slope**2)) * nodes[None]
    both_weights = np.outer(weights, weights)
    return [(both_weights * f(u) * f(v)).sum() for f in function]
