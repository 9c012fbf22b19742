"""Subspaces of co-activation, shares of a flow and overlaps by class, by loops over pairs of examples, in float64."""

import numpy as np


def mean_projector(masks: np.ndarray) -> np.ndarray:
    """⟨D_μ D_ν⟩ over all pairs, as a matrix."""
    n, units = masks.shape
    total = np.zeros((units, units))
    for mu in range(n):
        for nu in range(n):
            total += np.diag(masks[mu]) @ np.diag(masks[nu])
    return total / n**2


def projector(weight: np.ndarray, masks: np.ndarray, side: str, k: int) -> np.ndarray:
    """The orthogonal projector on the top k eigenvectors of ⟨P⟩ or Wᵀ⟨P⟩W."""
    mean = mean_projector(masks)
    matrix = mean if side == "output" else weight.T @ mean @ weight
    _, vectors = np.linalg.eigh(matrix)
    top = vectors[:, ::-1][:, :k]
    return top @ top.T


def shares(changes: list[np.ndarray], projectors: list[np.ndarray], side: str) -> tuple[float, float]:
    """⟨Σ Π_s ΔW_s, ΔW⟩ / |ΔW|² and Σ |Π_s ΔW_s|² / Σ |ΔW_s|²."""
    parts = [p @ d if side == "output" else d @ p for p, d in zip(projectors, changes, strict=True)]
    whole = sum(changes)
    path = sum((p**2).sum() for p in parts) / sum((d**2).sum() for d in changes)
    return float((sum(parts) * whole).sum() / (whole**2).sum()), float(path)


def class_overlaps(masks: np.ndarray, labels: np.ndarray, overlap: str) -> tuple[float, float]:
    """Mean overlap over pairs μ ≠ ν of one class, and over pairs of two classes."""
    within, between = [], []
    for mu in range(len(masks)):
        for nu in range(len(masks)):
            a, b = masks[mu], masks[nu]
            lengths = np.sqrt((a @ a) * (b @ b))
            if mu == nu or (overlap == "cosine" and lengths == 0):
                continue
            value = a @ b / (lengths if overlap == "cosine" else len(a))
            (within if labels[mu] == labels[nu] else between).append(value)
    return float(np.mean(within)), float(np.mean(between))
