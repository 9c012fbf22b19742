"""Slow and plain: D_LR and the three curves of arXiv:2410.04264."""

import numpy as np


def d_lr(features: np.ndarray, outputs: np.ndarray, target: str) -> float:
    phi, f = (np.asarray(a, dtype=np.float64).reshape(len(a), -1) for a in (features, outputs))
    phi, f = phi - phi.mean(0), f - f.mean(0)
    if target == "projection":
        f = span(f)
    norm = np.linalg.norm
    return 1 - norm(phi.T @ f) ** 2 / (norm(phi.T @ phi) * norm(f.T @ f))


def span(a: np.ndarray, cut: float = 1e-6) -> np.ndarray:
    """An orthonormal basis of the columns."""
    u, s, _ = np.linalg.svd(a, full_matrices=False)
    return u[:, s > cut * s[0]]


def curves(
    train: np.ndarray, evaluation: np.ndarray, targets: np.ndarray, cut: float = 1e-10
) -> tuple[np.ndarray, np.ndarray]:
    """Π(k) by Gram-Schmidt, one eigenfunction at a time, and ρ_k/ρ_1."""
    rho, u = np.linalg.eigh(train.T @ train / len(train))
    rho, u = rho[::-1], u[:, ::-1]
    basis, found, total, steps = span(targets), [], 0.0, []
    for k in range(len(rho)):
        if rho[k] <= cut * rho[0]:
            break
        e = evaluation @ u[:, k] / np.sqrt(rho[k])
        rest = e.copy()
        for _ in range(2):
            for q in found:
                rest = rest - q * (q @ rest)
        if np.linalg.norm(rest) > 1e-8 * np.linalg.norm(e):
            found.append(rest / np.linalg.norm(rest))
            total += float(np.sum((basis.T @ found[-1]) ** 2))
        steps.append(total / basis.shape[1])
    return np.array(steps), rho / rho[0]


def effective_dimension(rho: np.ndarray) -> float:
    p = rho[1:] / rho[1:].sum()
    p = p[p > 0]
    return 1 + float(np.exp(-(p * np.log(p)).sum()))
