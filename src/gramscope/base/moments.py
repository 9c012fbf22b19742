"""Rows in float64, and what is left of them without their mean.

Second moments are kept about the mean (Chan, Golub & LeVeque 1983): ``E[x²] - E[x]²`` of float32 sums can come out
negative, and loses all digits where the mean is large beside the spread. Means are kept to twice the digits of float64
(:class:`Centre`), so that what is left between the means of two batches does not depend on how far from zero they are.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_finite, check_tensor
from gramscope.base.errors import InputError


def as_rows(x: Tensor, what: str = "x") -> Float[Tensor, "n p"]:
    """``x`` (n, ...) of any real dtype as float64 rows (n, p), detached; axes after the first are flattened.

    >>> as_rows(torch.ones(2, 3, 4, dtype=torch.bfloat16)).shape
    torch.Size([2, 12])
    """
    x = examples_first(x, what)
    rows = x.to(torch.float64).reshape(len(x), math.prod(x.shape[1:]))
    check_finite(rows, what, "Look for overflow (float16, bfloat16) or for a run that has diverged.")
    return rows


def examples_first(x: Tensor, what: str) -> Tensor:
    """``x`` (n, ...), detached, where float64 is known."""
    if check_tensor(x, what).dim() == 0:
        raise InputError(f"{what} must have examples on its first axis, got a single number. Add a batch axis.")
    return x.detach().cpu() if x.device.type == "mps" else x.detach()  # the one common device that has no float64


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

    def __getitem__(self, places: Tensor) -> "Centre":
        return Centre(self.mean[places], self.rest[places])

    def to(self, like: Tensor) -> "Centre":
        return Centre(self.mean.to(like), self.rest.to(like))

    def centred(self, rows: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        return (rows - self.mean).sub_(self.rest)


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
