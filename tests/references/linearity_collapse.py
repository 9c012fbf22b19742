"""Target linearity with classes that weigh the same, and NC1 of the fitted outputs, by weighted least squares."""

import numpy as np

from references.collapse import nc1


def fitted_outputs(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least-squares fit of one-hot targets with an offset, each class weighing the same; weights, targets, fit."""
    names, places = np.unique(labels, return_inverse=True)
    counts = np.bincount(places)
    weight = 1 / (len(names) * counts[places])
    hot = np.eye(len(names))[places]
    design = np.column_stack([features.reshape(len(features), -1), np.ones(len(features))])
    root = np.sqrt(weight)[:, None]
    coefficients = np.linalg.lstsq(root * design, root * hot, rcond=1e-12)[0]
    return weight, hot, design @ coefficients


def target_linearity(features: np.ndarray, labels: np.ndarray) -> float:
    weight, hot, fit = fitted_outputs(features, labels)
    mean = (weight[:, None] * hot).sum(0)
    total = (weight[:, None] * (hot - mean) ** 2).sum()
    return float(1 - (weight[:, None] * (hot - fit) ** 2).sum() / total)


def fitted_nc1(features: np.ndarray, labels: np.ndarray) -> float:
    return nc1(fitted_outputs(features, labels)[2], labels)


def simplex_gap(features: np.ndarray, labels: np.ndarray) -> float:
    """|M - (1 - 11ᵀ/C)|, M the centred class means of the fitted outputs."""
    _, _, fit = fitted_outputs(features, labels)
    names = np.unique(labels)
    means = np.stack([fit[labels == c].mean(0) for c in names])
    means = means - means.mean(0)
    return float(np.linalg.norm(means - (np.eye(len(names)) - 1 / len(names))))
