"""Rounding: how far the numbers of a network are off, and so which directions of a matrix count.

Storing a number rounds it to its dtype, by up to ε of itself. The sums before run in float32 or better; they are off by
about ``16 min(ε, ε₃₂)`` of their terms. Where terms cancel, the column is short but its error is not, so the error of
sums is taken relative to the middle column at least. This gives each column of H (n, p) an error ``e_j``, which points
in no direction in particular. Divide each column by e_j, which changes no span: independent errors then have singular
values up to ``1 + √(p/n)`` (Marchenko & Pastur 1967; Higham & Mary 2019 on their independence). A direction counts if
its singular value is more than twice that, the floor. Measured on a CPU and a GPU: the errors of one float32 layer
reach a third of the floor (inner lengths up to 16,384), those of twelve in a row three quarters; bfloat16 and float16
0.3 for one layer, 0.7 for six, 1 for twelve.

LAPACK's rule ``ε max(n, p) σ_max`` is a worst case: with float32 and 5,000 rows it would cut at σ_max/1,700.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

SOME = 16  # rows, and of them about so many numbers, that most often show whether all are rounded
FEW = 8  # directions that are looked at one by one for being rounding
EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Rounding:
    """How numbers were rounded, as far as they show it; merges over batches.

    ``dtype`` is the epsilon of the coarsest dtype that they came in, ``fits`` that of the coarsest dtype that holds all
    of them: bfloat16 numbers cast to float32 stay bfloat16 numbers. Masks, counts, pixels of 8 bits and other numbers
    of few digits show no rounding.

    >>> x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    >>> Rounding.of(x).eps == EPS32, Rounding.of(x.bfloat16().double()).eps == 2**-7
    (True, True)
    >>> Rounding.of((x > 0).float()).eps == EPS64
    True
    """

    dtype: float = 0.0
    fits: float = math.inf

    @classmethod
    def of(cls, x: Shaped[Tensor, "n ..."], dtype: torch.dtype | None = None) -> "Rounding":
        """The rounding of ``x``; ``dtype`` is what it was computed in, if that is known to be less."""
        if not x.is_floating_point() or x.numel() == 0:
            return cls()
        x = x.detach().cpu() if x.device.type == "mps" else x.detach()  # mps knows no float64
        own = max(torch.finfo(x.dtype).eps, torch.finfo(dtype or x.dtype).eps)
        some = x[:SOME].reshape(-1)  # along the diagonal
        if _rounded(some[:: len(some) // SOME + 1].double().tolist(), own):
            return cls(own, own)
        shorter = (torch.bfloat16, torch.float16, torch.float32)
        fits = next((eps for d in shorter if (eps := torch.finfo(d).eps) > own and _holds(d, x)), own)
        return cls() if _exact(x, fits) else cls(own, fits)

    def merged(self, other: "Rounding") -> "Rounding":
        return Rounding(max(self.dtype, other.dtype), min(self.fits, other.fits))

    @property
    def eps(self) -> float:
        """Epsilon of the dtype that rounded the numbers; float64's where none did, since we compute in that."""
        return max(self.dtype, self.fits, EPS64) if self.dtype else EPS64

    @property
    def relative(self) -> float:
        """``ε + 16 min(ε, ε₃₂)``: the error of numbers that are all of one size, relative to that."""
        return self.eps + 16 * min(self.eps, EPS32)

    def errors(self, lengths: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """e_j, the length of the error of each column, from the lengths of the columns; never zero."""
        some = lengths[lengths > 1e3 * EPS64 * lengths.max()].sort().values
        middle = float(some[len(some) // 2]) if len(some) else 1.0
        return self.eps * lengths + (self.relative - self.eps) * lengths.clamp_min(middle)


def floor(n: int, p: int) -> float:
    """Singular values of H (n, p), each column divided by its error, that are rounding: up to ``2 (1 + √(p/n))``."""
    return 2 * (1 + math.sqrt(p / n))


def column_basis(
    h: Float[Tensor, "rows p"], rounding: Rounding, n: int, lengths: Float[Tensor, " p"]
) -> Float[Tensor, "rows r"]:
    """An orthonormal basis of the columns of H (float64) that leaves rounding out; r is the numerical rank.

    ``h`` is H, or ``Q H`` with orthonormal columns in Q, of n examples. ``lengths`` are those of the columns before
    they were centred: what centring leaves of a constant column is rounding.
    """
    unit, p = (h / rounding.errors(lengths))[:, h.any(0)], h.shape[1]  # columns of zeros (dead units) span nothing
    wide = len(unit) < unit.shape[1]
    if wide:  # only U is asked for, so a square factor will do
        q, r = torch.eye(len(unit), dtype=unit.dtype, device=unit.device), torch.linalg.qr(unit.mT, mode="r")[1]
    else:
        q, r = torch.linalg.qr(unit)
    own = max(n, p) * EPS64  # the error of the SVD, relative to the greatest singular value
    below = _few_below(r.mT if wide else r, max(floor(n, p), own * float(r.norm())), upper=not wide)
    if below is not None:
        return q @ torch.linalg.qr(below, mode="complete")[0][:, below.shape[1] :] if below.shape[1] else q
    u, s, _ = torch.linalg.svd(r.mT if wide else r)
    return q @ u[:, s > max(floor(n, p), own * float(s[0]))]


def _few_below(triangle: Float[Tensor, "k k"], bound: float, upper: bool) -> Float[Tensor, "k few"] | None:
    """The left singular vectors of a triangle up to a bound, if they are certainly few; else None.

    Saves an SVD: most often there are none, behind a layer norm there is one. They are the right ones of the inverse X
    with the greatest singular values; what is left of X without them must be shorter than ``1/bound``.
    """
    eye = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
    x = torch.linalg.solve_triangular(triangle, eye, upper=upper)
    size = float(x.norm()) * bound
    if size < 1 or not math.isfinite(size):
        return eye[:, :0] if size < 1 else None
    few = x[x.norm(dim=1).topk(min(FEW, len(x))).indices].mT
    for turned in (x, x.mT, x, x.mT):
        few = turned @ torch.linalg.qr(few)[0]
    few = torch.linalg.qr(few)[0]
    sent = x @ few
    if float((x - sent @ few.mT).norm()) * bound >= 1:
        return None
    _, s, v = torch.linalg.svd(sent, full_matrices=False)
    return few @ v[s * bound >= 1].mT


def above_rounding(values: Float[Tensor, " k"], floors: Float[Tensor, " k"] | float) -> Bool[Tensor, " k"]:
    """Which eigenvalues of a Gram matrix, computed in float64, are above ``floors``, the squares of singular floors."""
    own = values.max() * (8 * len(values) * EPS64)  # of the products
    return values > torch.as_tensor(floors, dtype=values.dtype, device=values.device).clamp_min(float(own))


def numerical_rank(matrix: Float[Tensor, "n p"]) -> int:
    """How many independent columns a matrix has, beyond the rounding of its numbers.

    >>> wide = torch.randn(50, 3) @ torch.randn(3, 10)      # float32 products: rank 3 and rounding
    >>> numerical_rank(wide), numerical_rank(wide.bfloat16())
    (3, 3)
    """
    h = matrix.detach().double()
    return column_basis(h, Rounding.of(matrix), len(h), h.norm(dim=0)).shape[1]


def singular_floor(matrix: Float[Tensor, "*g m d"], rounding: Rounding) -> Float[Tensor, "*g 1"]:
    """Singular values of a matrix, taken as it is, that are rounding: ``2 (ε + 16 min(ε, ε₃₂))`` of the longest row
    plus the longest column, which bounds the norm of independent errors (Bandeira & van Handel 2016)."""
    longest = matrix.norm(dim=-1).amax(-1) + matrix.norm(dim=-2).amax(-1)
    return 2 * rounding.relative * longest[..., None]


def _holds(dtype: torch.dtype, x: Tensor) -> bool:
    return all(torch.equal(part.to(dtype).to(x.dtype), part) for part in (x[:1], x))  # one row tells most often


def _rounded(some: list[float], eps: float) -> bool:
    """Whether a few numbers show that not all are :func:`_exact`: most often they do."""
    top = math.frexp(max(map(abs, some)))[1] - 1
    last_digit_used = any(math.frexp(v)[0] * (2 / eps) % 2 != 0 for v in some)
    return last_digit_used and any(math.ldexp(v, -top) / eps % 1 != 0 for v in some)


def _exact(x: Tensor, eps: float) -> bool:
    """No number uses the last digit of the dtype; or all are whole multiples of the last digit of the largest.

    Rounded numbers use it in half of the cases, and smaller ones are finer than larger ones.
    """
    size = x.double().abs()
    top = 2.0 ** (math.frexp(float(size.max()))[1] - 1)
    steps = size / (eps * top)
    last_digit_used = bool((torch.frexp(size).mantissa * (2 / eps) % 2 != 0).any())
    if last_digit_used and not bool((steps == steps.round()).all()):
        return False
    return not last_digit_used or bool(((size > 0) & (size < top)).any())
