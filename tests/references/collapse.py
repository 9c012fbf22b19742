"""Slow and plain: neural collapse with full covariance matrices, one class at a time."""

import numpy as np


def statistics(features: np.ndarray, labels: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Class means and class covariances."""
    phi = np.asarray(features, dtype=np.float64).reshape(len(features), -1)
    means = [phi[labels == c].mean(0) for c in np.unique(labels)]
    covariances = [np.cov(phi[labels == c].T, bias=True).reshape(phi.shape[1], -1) for c in np.unique(labels)]
    return means, covariances


def nc1(features: np.ndarray, labels: np.ndarray, ridge: float = 0.0) -> float:
    """Both scatters are means over the classes; with sums the pseudo-inverse gives the same, the ridge does not."""
    means, covariances = statistics(features, labels)
    centre = sum(means) / len(means)
    between = sum(np.outer(m - centre, m - centre) for m in means) / len(means)
    inverse = np.linalg.pinv(between, rcond=1e-10, hermitian=True)
    if ridge:
        inverse = np.linalg.inv(between + ridge * np.eye(len(between)))
    return float(np.trace(inverse @ sum(covariances))) / len(means)


def nc2(features: np.ndarray, labels: np.ndarray) -> tuple[float, float, float, float]:
    means, _ = statistics(features, labels)
    m = np.stack(means) - sum(means) / len(means)
    count = len(m)
    gram = m @ m.T
    simplex = (np.eye(count) - np.ones((count, count)) / count) / np.sqrt(count - 1)
    norms = np.linalg.norm(m, axis=1)
    cosines = [m[i] @ m[j] / (norms[i] * norms[j]) for i in range(count) for j in range(count) if i != j]
    return (
        float(np.linalg.norm(gram / np.linalg.norm(gram) - simplex)),
        float(np.std(norms) / np.mean(norms)),
        float(np.std(cosines)),
        float(np.mean(np.abs(np.array(cosines) + 1 / (count - 1)))),
    )


def nc3(features: np.ndarray, labels: np.ndarray, weight: np.ndarray) -> float:
    means, _ = statistics(features, labels)
    m = np.stack(means) - sum(means) / len(means)
    w = weight[np.unique(labels)]
    return float(np.linalg.norm(w / np.linalg.norm(w) - m / np.linalg.norm(m)) ** 2)


def nc4(features: np.ndarray, labels: np.ndarray, outputs: np.ndarray) -> float:
    means, _ = statistics(features, labels)
    names = np.unique(labels)
    wrong = 0
    for phi, f in zip(np.asarray(features, dtype=np.float64), outputs, strict=True):
        wrong += names[np.argmin([np.linalg.norm(phi - m) for m in means])] != np.argmax(f)
    return wrong / len(features)


def cdnv(features: np.ndarray, labels: np.ndarray) -> float:
    means, covariances = statistics(features, labels)
    values = [
        (np.trace(covariances[i]) + np.trace(covariances[j])) / (2 * np.sum((means[i] - means[j]) ** 2))
        for i in range(len(means))
        for j in range(i)
    ]
    return float(np.mean(values))
