"""Means and scatter matrices in float64 that merge exactly: over batches, over ranks, in any order.

Second moments are kept about the mean (Chan, Golub & LeVeque 1983): ``E[x²] - E[x]²`` of float32 sums can come out
negative, and loses all digits where the mean is large beside the spread. Means are kept to twice the digits of float64
(:class:`Centre`), so that what is left between the means of two batches does not depend on how far from zero they are.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite, check_plain
from gramscope.base.errors import InputError


def as_rows(x: Tensor, what: str = "x") -> Float[Tensor, "n p"]:
    """``x`` (n, ...) of any real dtype as float64 rows (n, p), detached; axes after the first are flattened.

    >>> as_rows(torch.ones(2, 3, 4, dtype=torch.bfloat16)).shape
    torch.Size([2, 12])
    """
    if not isinstance(x, Tensor):
        raise InputError(f"{what} must be a torch.Tensor, got {type(x).__name__}. Convert it: torch.as_tensor(...).")
    check_plain(x, what)
    if x.dim() == 0:
        raise InputError(f"{what} must have examples on its first axis, got a single number. Add a batch axis.")
    x = x.detach()
    if x.device.type == "mps":  # the one common device that knows no float64
        x = x.cpu()
    rows = x.to(torch.float64).reshape(x.shape[0], -1) if x.numel() else x.new_zeros(_empty(x), dtype=torch.float64)
    check_finite(rows, what, "Look for overflow (float16, bfloat16) or for a run that has diverged.")
    return rows


def _empty(x: Tensor) -> tuple[int, int]:
    width = 1
    for size in x.shape[1:]:
        width *= size
    return x.shape[0], width


@dataclass(frozen=True, eq=False)
class Centre:
    """A mean to twice the digits of float64: ``mean + rest``, with ``rest`` below the last digit of ``mean``.

    >>> far = Centre.of(torch.tensor([[1e16], [1e16], [1e16 + 2]], dtype=torch.float64))
    >>> far.mean.item() == 1e16, round(far.rest.item(), 12)
    (True, 0.666666666667)
    """

    mean: Float[Tensor, "*k p"]
    rest: Float[Tensor, "*k p"]

    @classmethod
    def of(cls, rows: Float[Tensor, "n p"]) -> "Centre":
        """The mean of rows; zero if there are none."""
        if len(rows) == 0:
            return cls(rows.new_zeros(rows.shape[1]), rows.new_zeros(rows.shape[1]))
        mean = rows.mean(0)
        return cls(mean, torch.zeros_like(mean)).moved((rows - mean).mean(0))

    def moved(self, step: Float[Tensor, "*k p"]) -> "Centre":
        """``mean + rest + step``; the sum of two numbers and its rounding error are both exact (Knuth's two-sum)."""
        step = self.rest + step
        mean = self.mean + step
        taken = mean - self.mean
        return Centre(mean, (self.mean - (mean - taken)) + (step - taken))

    def gap(self, other: "Centre") -> Float[Tensor, "*k p"]:
        """``other - self``, right to the digits of the difference."""
        return (other.mean.to(self.mean) - self.mean) + (other.rest.to(self.mean) - self.rest)

    def where(self, condition: Tensor, other: "Centre") -> "Centre":
        return Centre(torch.where(condition, self.mean, other.mean), torch.where(condition, self.rest, other.rest))

    def __getitem__(self, places: Tensor) -> "Centre":
        return Centre(self.mean[places], self.rest[places])

    def to(self, like: Tensor) -> "Centre":
        return Centre(self.mean.to(like), self.rest.to(like))

    def centred(self, rows: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        return (rows - self.mean).sub_(self.rest)


@dataclass(frozen=True, eq=False)
class Moments:
    """Number ``n``, ``mean`` (p,) and ``scatter`` ``Σ (x - mean)(x - mean)ᵀ`` (p, p) of rows.

    Merging two (Chan, Golub & LeVeque 1983, eq. 2.1): ``M = M_a + M_b + (n_a n_b / n) δ δᵀ``, ``δ = mean_b - mean_a``.

    >>> x = torch.arange(6.0).reshape(3, 2)
    >>> split = Moments.of(x[:1]).merged(Moments.of(x[1:]))
    >>> split.n, split.mean.tolist(), split.scatter.tolist()
    (3, [2.0, 3.0], [[8.0, 8.0], [8.0, 8.0]])
    """

    n: int
    centre: Centre
    scatter: Float[Tensor, "p p"]

    @classmethod
    def of(cls, x: Tensor, what: str = "x") -> "Moments":
        """Moments of the rows of ``x`` (n, ...); no rows give the neutral element of merging."""
        cross = CrossMoments.of(x, x, what, what)
        return cls(cross.n, cross.centre_x, cross.scatter)

    @property
    def mean(self) -> Float[Tensor, " p"]:
        return self.centre.mean

    def merged(self, other: "Moments") -> "Moments":
        """Moments of both sets of rows."""
        _check_widths(self.mean, other.mean)
        merged = self._crossed().merged(other._crossed())
        return Moments(merged.n, merged.centre_x, merged.scatter)

    def _crossed(self) -> "CrossMoments":
        return CrossMoments(self.n, self.centre, self.centre, self.scatter)

    def covariance(self, *, unbiased: bool = False) -> Float[Tensor, "p p"]:
        """``scatter / n``, or ``/(n-1)`` if ``unbiased``."""
        return self.scatter / _divisor(self.n, unbiased)

    def second_moment(self) -> Float[Tensor, "p p"]:
        """The uncentred ``XᵀX / n``."""
        return self.covariance() + torch.outer(self.mean, self.mean)


@dataclass(frozen=True, eq=False)
class CrossMoments:
    """Number ``n``, means and cross scatter ``Σ (x - mean_x)(y - mean_y)ᵀ`` (p, q) of paired rows.

    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> CrossMoments.of(x, 2 * x).scatter.item()
    4.0
    """

    n: int
    centre_x: Centre
    centre_y: Centre
    scatter: Float[Tensor, "p q"]

    @property
    def mean_x(self) -> Float[Tensor, " p"]:
        return self.centre_x.mean

    @property
    def mean_y(self) -> Float[Tensor, " q"]:
        return self.centre_y.mean

    @classmethod
    def of(cls, x: Tensor, y: Tensor, what_x: str = "x", what_y: str = "y") -> "CrossMoments":
        """Moments of paired rows of ``x`` (n, ...) and ``y`` (n, ...)."""
        rows_x = as_rows(x, what_x)
        rows_y = rows_x if y is x else as_rows(y, what_y).to(rows_x.device)
        check_paired(rows_x, rows_y, what_x, what_y)
        same = rows_y is rows_x
        centre_x = Centre.of(rows_x)
        centre_y = centre_x if same else Centre.of(rows_y)
        centred_x = centre_x.centred(rows_x)
        centred_y = centred_x if same else centre_y.centred(rows_y)
        return cls(len(rows_x), centre_x, centre_y, centred_x.mT @ centred_y)

    def merged(self, other: "CrossMoments") -> "CrossMoments":
        """Moments of both sets of pairs."""
        _check_widths(self.mean_x, other.mean_x)
        _check_widths(self.mean_y, other.mean_y)
        n, scatter = self.n + other.n, other.scatter.to(self.scatter)
        if other.n == 0 or self.n == 0:
            centres = other.centre_x.to(self.scatter), other.centre_y.to(self.scatter)
            return self if other.n == 0 else CrossMoments(n, *centres, scatter)
        gap_x, gap_y, weight = self.centre_x.gap(other.centre_x), self.centre_y.gap(other.centre_y), other.n / n
        total = self.scatter + scatter + torch.outer(gap_x, gap_y) * (self.n * weight)
        return CrossMoments(n, self.centre_x.moved(gap_x * weight), self.centre_y.moved(gap_y * weight), total)

    def covariance(self, *, unbiased: bool = False) -> Float[Tensor, "p q"]:
        """``scatter / n``, or ``/(n-1)`` if ``unbiased``."""
        return self.scatter / _divisor(self.n, unbiased)


def centered_rows(x: Float[Tensor, "n *p"]) -> Float[Tensor, "n *p"]:
    """``x - mean over the examples``, in float64 and to twice its digits: a large mean costs none.

    >>> centered_rows(torch.tensor([[1e9], [1e9 + 64]])).tolist()
    [[-32.0], [32.0]]
    """
    rows = x.detach().double().flatten(1) if x.dim() > 1 else x.detach().double()[:, None]
    return Centre.of(rows).centred(rows).reshape(x.shape)


def centered_kernel(kernel: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    """``H K H`` with ``H = 1 - 11ᵀ/n``: the kernel of features that are centred over the examples.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> centered_kernel(x @ x.T).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    return kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()


def check_paired(x: Tensor, y: Tensor, what_x: str, what_y: str) -> None:
    """Raise unless both have the same number of rows."""
    if len(x) != len(y):
        raise InputError(
            f"{what_x} and {what_y} must have one row for each of the same examples, got {len(x)} and {len(y)} rows. "
            "Pass the two for the same batch, in the same order."
        )


def _check_widths(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise InputError(
            f"moments of rows of the same width can be merged, got widths {a.shape[-1]} and {b.shape[-1]}. "
            "Batches of unequal spatial size or length need a pooling reduction first."
        )


def _divisor(n: int, unbiased: bool) -> int:
    if n <= unbiased:
        raise InputError(f"a covariance needs at least {1 + unbiased} rows, got {n}.")
    return n - unbiased
