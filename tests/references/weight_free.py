"""Slow, obvious float64 versions: weight-space training of a hidden ReLU layer, concentration by loops over pairs."""

import numpy as np


def weight_space_descent(weight, x, y, readout, lr, steps, x_new=None, batches=None):
    """Plain gradient descent on W for ``½ Σ_batch |A relu(W x) − y|²``; returns W and the outputs on x (and x_new)."""
    weight = weight.astype(np.float64).copy()
    for _ in range(steps):
        for rows in [np.arange(len(x))] if batches is None else batches:
            h = x[rows] @ weight.T
            residual = np.where(h > 0, h, 0.0) @ readout.T - y[rows]
            signal = (residual @ readout) * (h > 0)
            weight -= lr * signal.T @ x[rows]
    outputs = [np.maximum(z @ weight.T, 0.0) @ readout.T for z in (x, x_new) if z is not None]
    return weight, *outputs


def field_descent_by_pairs(field, overlap, readout, y, lr, steps):
    """``h_μ ← h_μ − η Σ_ν Q_{μν} b_ν e_ν`` written out, one pair of examples at a time."""
    field = field.copy()
    for _ in range(steps):
        before = field.copy()
        for mu in range(len(field)):
            for nu in range(len(field)):
                e = readout @ np.maximum(before[nu], 0.0) - y[nu]
                for c in range(len(readout)):
                    b = np.where(before[nu] > 0, readout[c], 0.0)
                    field[mu] -= lr * overlap[mu, nu] * b * e[c]
    return field


def coactivation_by_pairs(masks):
    """``C_{μν} = σ_μ·σ_ν`` pair by pair."""
    return np.array([[float(np.sum(a * b)) for b in masks] for a in masks])


def participation(matrix):
    """``(Σ λ)² / Σ λ²`` from the eigenvalues themselves."""
    values = np.linalg.eigvalsh(matrix)
    return float(values.sum() ** 2 / (values**2).sum())


def mean_metric_by_pairs(weight, masks, chosen):
    """Mean of ``Wᵀ D_μ D_ν W`` over the pairs (μ, ν) for which ``chosen(μ, ν)``, one dense metric at a time."""
    total, count = np.zeros((weight.shape[1], weight.shape[1])), 0
    for mu in range(len(masks)):
        for nu in range(len(masks)):
            if chosen(mu, nu):
                total += weight.T @ np.diag(masks[mu]) @ np.diag(masks[nu]) @ weight
                count += 1
    return total / count


def overlap_by_angles(first, second, k):
    """Mean cos² of the principal angles between the top-k eigenspaces, by projectors of dense eigenvectors."""
    projectors = []
    for matrix in (first, second):
        vectors = np.linalg.eigh(matrix)[1][:, -k:]
        projectors.append(vectors @ vectors.T)
    return float(np.trace(projectors[0] @ projectors[1]) / k)
