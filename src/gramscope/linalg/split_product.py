"""Products of float32 matrices on the fp16 tensor cores of a GPU, at about float32's accuracy.

A float32 number is the sum of two fp16 numbers to about 2^-22 of itself: ``a = high + low``. Then ``a bᵀ`` is ``high
highᵀ + high lowᵀ + low highᵀ`` but for ``low lowᵀ``, which is 2^-22 of it. fp16 has a short range, so each row is
first scaled by a power of two; the scales are undone at the end. Ootomo & Yokota 2022 (arXiv:2203.03341).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float16, Float32, Float64
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.errors import InputError

# Rows are scaled to between 2^3 and 2^4, where a sum of so many products stays far below float32's largest number.
LARGEST_EXPONENT = 4
# Tensor cores round every partial sum down. A sum that long goes to a float32 matrix, which rounds to nearest.
HIGH_COLUMNS = 1024
# Products with a low half are 2^11 times smaller, and so is their rounding: they may be longer sums.
LOW_COLUMNS = 16384
COLUMNS_MULTIPLE = 8  # tensor cores are fed rows of 16 bytes
MAX_ENTRIES_SPLIT = 2**25  # of a matrix that are scaled and split at a time
MAX_ENTRIES_SUMMED = 2**25  # of the product that are accumulated at a time
# GPUs whose tensor cores multiply fp16 more than three times as fast as their other cores multiply float32.
FAST_CHIPS = {(7, 0), (8, 0), (9, 0), (10, 0), (10, 3)}
# Smallest products that are faster so: entries, and terms of each.
LEAST_ENTRIES, LEAST_COLUMNS = 2**22, 1024


@dataclass(frozen=True, eq=False)
class Halves:
    """A float32 matrix as ``scale * (high + low)``; ``halves[rows]`` are those of some rows, without a copy.

    ``columns`` are those of the matrix; the halves have a few more, of zeros.
    """

    high: Float16[Tensor, "n padded"]
    low: Float16[Tensor, "n padded"]
    scale: Float64[Tensor, " n"]
    columns: int

    def __getitem__(self, rows: slice) -> "Halves":
        return Halves(self.high[rows], self.low[rows], self.scale[rows], self.columns)

    def __len__(self) -> int:
        return len(self.high)

    def dense(self) -> Float64[Tensor, "n columns"]:
        """The numbers that the halves stand for."""
        return ((self.high.double() + self.low.double()) * self.scale[:, None])[:, : self.columns]


def split_product_pays(device: torch.device, n: int, m: int, k: int) -> bool:
    """Whether ``add_split_product`` of (n, k) and (m, k) is expected to be faster there than one product in float32.

    Sizes were measured on an H200, time against float32 with the splitting: n = m = 10,240 takes 1.1 at k = 512, 0.65
    at 1,024, 0.32 at 9,216; n = m = 2,560 takes 0.8 at k = 2,048; n = m = 640 takes about 2, even at k = 65,536. The
    other chips are those whose data sheets say so. On GeForce cards fp16 with float32 sums has twice the rate of
    float32, and three products lose.
    """
    if device.type != "cuda" or torch.version.hip is not None or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    large = n * m >= LEAST_ENTRIES and k >= LEAST_COLUMNS
    return large and torch.cuda.get_device_capability(device) in FAST_CHIPS


@torch.no_grad()
@exact_arithmetic()
def split_halves(a: Tensor) -> Halves:
    """A float32 matrix as two of fp16, for use in many products.

    Each entry is kept to 2^-22 of itself or 2^-28 of the largest of its row, whichever is larger. A row with an
    infinity or a NaN gets the scale NaN: all its products are NaN.

    >>> a = torch.tensor([[1 / 3, 3e8, 1e30], [0.0, 0.0, 1e-30]])
    >>> bool(((split_halves(a).dense() - a).abs() <= 2**-22 * a.abs().amax(1, keepdim=True)).all())
    True
    """
    _check_matrix("a", a)
    n, columns = a.shape
    padded = -(-columns // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
    high, low = (torch.zeros(n, padded, dtype=torch.float16, device=a.device) for _ in range(2))
    scale = torch.ones(n, dtype=torch.float64, device=a.device)
    for rows in _slices(n, max(1, MAX_ENTRIES_SPLIT // max(1, columns))) if columns else ():
        scaled, scale[rows] = _scaled(a[rows])
        high[rows, :columns] = scaled
        low[rows, :columns] = scaled.sub_(high[rows, :columns])
    return Halves(high, low, scale, columns)


@torch.no_grad()
@exact_arithmetic()
def add_split_product(out: Tensor, a: Tensor | Halves, b: Tensor | Halves) -> None:
    """``out += a bᵀ`` by three fp16 products; entries are right to about 1e-5 of ``|a_i| |b_j|``, the rows' norms.

    ``out`` (n, m) may be any view of a float32 tensor. ``a`` (n, k) and ``b`` (m, k) are float32 matrices, or halves
    from :func:`split_halves`, which can be sliced: split once what is used in several strips. Without a GPU the halves
    are multiplied in float32: the same numbers but for the order of the sums.

    >>> a, out = torch.ones(2, 3), torch.zeros(2, 2)
    >>> add_split_product(out, a, a)
    >>> out
    tensor([[3., 3.],
            [3., 3.]])
    """
    same = a is b
    a = a if isinstance(a, Halves) else split_halves(a)
    b = a if same else b if isinstance(b, Halves) else split_halves(b)
    _check_shapes(out, a, b)
    if out.numel() == 0:
        return
    with _float32_sums():
        for rows in _slices(len(a), max(1, MAX_ENTRIES_SUMMED // len(b))):
            # In float64 neither scale overflows by itself, and there is one rounding.
            out[rows].addcmul_(_product(a[rows], b) * b.scale, a.scale[rows, None])


def _scaled(a: Float32[Tensor, "n k"]) -> tuple[Float32[Tensor, "n k"], Float64[Tensor, " n"]]:
    """Rows with their largest entry between 8 and 16, and the powers of two that undo it."""
    largest = torch.linalg.vector_norm(a, torch.inf, dim=1).double()
    finite = largest.isfinite()
    exponent = torch.frexp(largest.where(finite, 1.0)).exponent - LARGEST_EXPONENT
    # In float64: 2^150, which the smallest of float32's numbers need, is beyond float32.
    scaled = torch.mul(a, _power(-exponent)[:, None], out=torch.empty_like(a))
    return scaled, _power(exponent).where(finite, torch.nan)


def _power(exponent: Tensor) -> Float64[Tensor, " n"]:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)


def _product(a: Halves, b: Halves) -> Float32[Tensor, "n m"]:
    """``(high + low) (high + low)ᵀ`` less ``low lowᵀ``. Small terms come first, and lose nothing to large ones."""
    total = torch.zeros(len(a), len(b), dtype=torch.float32, device=a.high.device)
    for columns in _slices(a.high.shape[1], LOW_COLUMNS):
        _add_product(total, a.low[:, columns], b.high[:, columns])
        _add_product(total, a.high[:, columns], b.low[:, columns])
    for columns in _slices(a.high.shape[1], HIGH_COLUMNS):
        _add_product(total, a.high[:, columns], b.high[:, columns])
    return total


def _add_product(total: Float32[Tensor, "n m"], a: Float16[Tensor, "n k"], b: Float16[Tensor, "m k"]) -> None:
    if total.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, a, b.T, torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float().T)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


@contextmanager
def _float32_sums() -> Iterator[None]:
    """Sums in float32, also where the user has allowed torch to sum in fp16."""
    flags = torch.backends.cuda.matmul
    before = getattr(flags, "allow_fp16_accumulation", False)  # torch 2.7 has it first
    try:
        if before:
            flags.allow_fp16_accumulation = False
        yield
    finally:
        if before:
            flags.allow_fp16_accumulation = True


def _check_matrix(name: str, matrix: Tensor) -> None:
    if matrix.dim() != 2 or matrix.dtype != torch.float32:
        raise InputError(
            f"{name} must be a float32 matrix, got {matrix.dtype} of shape {tuple(matrix.shape)}. Products in another "
            "dtype need no splitting: use torch.addmm."
        )


def _check_shapes(out: Tensor, a: Halves, b: Halves) -> None:
    _check_matrix("out", out)
    if a.columns != b.columns:
        raise InputError(f"a and b must have the same number of columns, got {a.columns} and {b.columns}.")
    if out.shape != (len(a), len(b)):
        raise InputError(f"out must have shape ({len(a)}, {len(b)}) for this product, got {tuple(out.shape)}.")
