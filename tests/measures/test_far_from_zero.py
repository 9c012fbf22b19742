"""Features far from zero, one row at a time: as exact as one pass, against sums in fractions.

float64 holds a mean of 1e6 to 1e-10. Where the value rests on small differences of means, such digits would be missing.
"""

from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch

from gramscope.base.moments import Centre
from gramscope.measures import CKA, Collapse, TargetLinearity, cka, neural_collapse, target_linearity

FAR = [0.0, 1e6, 1e8, 1e10]
N, LABELS = 90, torch.arange(90) % 3


def data(far: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The spread is one; a mean this far leaves x itself fewer digits, which belong to the data."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=rng, dtype=torch.float64)
    y = torch.randn(N, 2, generator=rng, dtype=torch.float64) + x[:, :2] ** 2
    return x + far, y - far


def about_the_mean(x: torch.Tensor) -> np.ndarray:
    """x minus the mean of each column, rounded once at the end."""
    exact = np.array([[Fraction(v) for v in row] for row in x.tolist()])
    return (exact - exact.sum(0) / len(exact)).astype(np.float64)


def one_by_one(measure, *columns):
    return measure.compute(reduce(measure.merge, [measure.update(*(c[i : i + 1] for c in columns)) for i in range(N)]))


@pytest.mark.parametrize("far", FAR)
def test_means(far):
    x, _ = data(far)
    found = Centre.of(x[:7])
    for n in range(7, N):
        found = found.moved(found.gap(Centre.of(x[n : n + 1])) / (n + 1))
    mean = [sum(map(Fraction, column)) / N for column in x.T.tolist()]
    digits = [
        float(Fraction(m) + Fraction(r) - e)
        for m, r, e in zip(found.mean.tolist(), found.rest.tolist(), mean, strict=True)
    ]
    assert np.abs(digits).max() < 1e-14


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("far", FAR)
def test_cka(far, debiased):
    x, y = data(far)
    a, b = about_the_mean(x), about_the_mean(y)

    def hsic(u, v):
        r, s = (u * u).sum(1), (v * v).sum(1)
        correction = -(N / (N - 2)) * (r @ s) + r.sum() * s.sum() / ((N - 1) * (N - 2))
        return ((u.T @ v) ** 2).sum() + (correction if debiased else 0.0)

    exact = hsic(a, b) / (hsic(a, a) * hsic(b, b)) ** 0.5
    assert cka(x, y, debiased=debiased) == pytest.approx(exact, rel=1e-12)
    assert one_by_one(CKA(debiased=debiased), x, y) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("far", FAR)
def test_collapse(far):
    x, _ = data(far)
    exact = np.array([[Fraction(v) for v in row] for row in x.tolist()])
    means = np.stack([exact[c::3].sum(0) / (N // 3) for c in range(3)])
    within = sum(about_the_mean(x[c::3]).T @ about_the_mean(x[c::3]) / (N // 3) for c in range(3))
    _, s, v = np.linalg.svd((means - means.sum(0) / 3).astype(np.float64), full_matrices=False)
    nc1 = sum(v[i] @ within @ v[i] / s[i] ** 2 for i in range(2))
    for found in (neural_collapse(x, LABELS), one_by_one(Collapse(), x, LABELS)):
        assert found.nc1 == pytest.approx(nc1, rel=1e-12)
        assert found.within == pytest.approx(np.trace(within), rel=1e-13)


@pytest.mark.parametrize("far", FAR)
def test_target_linearity(far):
    """With centred features; without, what is asked for, a map through zero, is itself ill-conditioned there."""
    x, y = data(far)
    h, t = about_the_mean(x), about_the_mean(y)
    q = np.linalg.qr(h)[0]
    exact = np.square(q.T @ t).sum() / np.square(t).sum()
    assert float(target_linearity(x, y, center=True)) == pytest.approx(exact, rel=1e-12)
    assert float(one_by_one(TargetLinearity(center=True), x, y)) == pytest.approx(exact, rel=1e-12)
