"""Slow and plain: HSIC and CKA as their papers write them, with full matrices or sums over quadruples."""

from itertools import permutations

import torch
from torch import Tensor


def gram(x: Tensor) -> Tensor:
    x = x.double().flatten(1)
    return x @ x.mT


def rbf_gram(x: Tensor, bandwidth: float) -> Tensor:
    x = x.double().flatten(1)
    return torch.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / (2 * bandwidth**2))


def hsic_biased(k: Tensor, other: Tensor) -> Tensor:
    """tr(K H L H), Gretton et al. 2005."""
    n = len(k)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    return torch.trace(k @ h @ other @ h)


def hsic_unbiased(k: Tensor, other: Tensor) -> Tensor:
    """HSIC₁ of Song et al. 2012, eq. 5, with zeroed diagonals."""
    n, one = len(k), torch.ones(len(k), dtype=torch.float64)
    k, other = k - torch.diag(k.diagonal()), other - torch.diag(other.diagonal())
    middle = (one @ k @ one) * (one @ other @ one) / ((n - 1) * (n - 2))
    return (torch.trace(k @ other) + middle - 2 / (n - 2) * (one @ k @ other @ one)) / (n * (n - 3))


def hsic_by_quadruples(k: Tensor, other: Tensor) -> Tensor:
    """The U-statistic itself: the mean over ordered quadruples of K_ij (L_ij + L_qr - 2 L_iq)."""
    terms = [k[i, j] * (other[i, j] + other[q, r] - 2 * other[i, q]) for i, j, q, r in permutations(range(len(k)), 4)]
    return torch.stack(terms).mean()


def hsic_one_pass(x: Tensor, y: Tensor) -> Tensor:
    """The one-pass form, from uncentred sums."""
    x, y = x.double().flatten(1), y.double().flatten(1)
    n, r, s = len(x), x.square().sum(1), y.square().sum(1)
    xy, sx, sy, rs = x.mT @ y, x.sum(0), y.sum(0), (r * s).sum()
    first = xy.square().sum() - rs
    second = (sx @ sx - r.sum()) * (sy @ sy - s.sum()) / ((n - 1) * (n - 2))
    third = 2 / (n - 2) * (sx @ xy @ sy - sx @ (s @ x) - sy @ (r @ y) + rs)
    return (first + second - third) / (n * (n - 3))


def cka(k: Tensor, other: Tensor, debiased: bool) -> float:
    hsic = hsic_unbiased if debiased else hsic_biased
    return float(hsic(k, other) / torch.sqrt(hsic(k, k) * hsic(other, other)))
