"""Slow and plain: what a linear model on given features learns (arXiv:2410.04264, appendices C, D.2, J)."""

import numpy as np
from scipy.linalg import expm
from scipy.optimize import brentq


def kappa(rho: np.ndarray, n: int, ridge: float) -> float:
    return brentq(lambda k: sum(r / (r + k) for r in rho) + ridge / k - n, 1e-14, 1e8, xtol=1e-300, rtol=1e-14)


def loss(rho: np.ndarray, coefficients: np.ndarray, n: int, ridge: float, noise: float) -> float:
    """Equation 16, with the ridge and the noise of arXiv:2110.03922."""
    learnt = rho / (rho + kappa(rho, n, ridge))
    missed = sum((1 - low) ** 2 * (np.atleast_1d(c) ** 2).sum() for low, c in zip(learnt, coefficients, strict=True))
    variance = noise**2 * (coefficients.shape[1] if coefficients.ndim == 2 else 1)
    return (missed + variance) / (1 - (learnt**2).sum() / n) - variance


def sampled_losses(rho, coefficients, n, ridge, noise, draws, rng) -> np.ndarray:
    """Test losses of ridge regressions on Gaussian features with variances ρ, one for each training set."""
    found = []
    for _ in range(draws):
        e = rng.standard_normal((n, len(rho)))
        phi = e * np.sqrt(rho)
        y = e @ coefficients + noise * rng.standard_normal(n)
        w = phi.T @ np.linalg.solve(phi @ phi.T + ridge * np.eye(n), y)
        found.append(((np.sqrt(rho) * w - coefficients) ** 2).sum())
    return np.array(found)


def flow(covariance: np.ndarray, w_true: np.ndarray, w_start: np.ndarray, t: float) -> np.ndarray:
    """Weights of ``f = Φᵀw`` at time t of gradient flow on ½ E|f - f*|²: dw/dt = -Σ(w - w*)."""
    return w_true + expm(-covariance * t) @ (w_start - w_true)


def nystrom(features: np.ndarray, rho: np.ndarray, modes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p = features.shape[1]
    values, u = np.linalg.eigh(features.T @ features / len(features))
    values, u = values[::-1], u[:, ::-1]
    spans = [
        1 - sum((u[:, i] @ modes[:, j]) ** 2 for i in range(k) for j in range(k)) / k for k in range(1, p + 1)
    ]  # fmt: skip
    return (
        np.array([(values[k] - rho[k]) ** 2 / rho[k] ** 2 for k in range(p)]),
        np.array([1 - abs(u[:, k] @ modes[:, k]) for k in range(p)]),
        np.array(spans),
    )


def projections_without_qr(train: np.ndarray, evaluation: np.ndarray, basis: np.ndarray) -> np.ndarray:
    rho, u = np.linalg.eigh(train.T @ train / len(train))
    total, steps = 0.0, []
    for k in range(len(rho))[::-1]:
        e = evaluation @ u[:, k] / np.sqrt(rho[k])
        total += sum((b @ e) ** 2 for b in basis.T) / (e @ e) / basis.shape[1]
        steps.append(total)
    return np.array(steps)
