"""Empirical spectral densities: the eigenvalues of WᵀW, or of a symmetric operator, in float64."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from gramscope.base.checks import check_finite, check_plain, check_symmetric
from gramscope.base.errors import InputError
from gramscope.linalg import LinearOperator

Eigenvalues: TypeAlias = Tensor | np.ndarray | Sequence[float]
Array: TypeAlias = Float64[np.ndarray, " _"]

# Entries of a tall weight that are float64 at one time: an embedding of 50,000 rows needs no full copy.
_BLOCK_ENTRIES = 1 << 22
# Up to this size LAPACK on one core takes tens of milliseconds, which a GPU's many small steps do not beat.
_SMALL_ON_CPU = 1024
# If the greatest square is below this, rounding beside it is below the least number that has all its digits.
_LEAST = float(np.finfo(np.float64).tiny / np.finfo(np.float64).eps)


@torch.no_grad()
def esd(weight: Shaped[Tensor, "..."] | np.ndarray) -> Float64[Tensor, " m"]:
    """The empirical spectral density of a weight: its squared singular values, ascending.

    ``λ = eig(WᵀW) = σ(W)²``, not divided by a width. They are taken from the smaller of the two Gram matrices, summed
    in float64 whatever the dtype of W: for λ itself that errs by about ``1e-16 λ_max``. Leading axes are a stack of
    matrices whose eigenvalues are pooled. C. H. Martin & M. W. Mahoney, JMLR 22 (2021), section 2.

    ``weight``: a tensor or array (rows, cols) or (..., rows, cols), any floating dtype and device. Returns
    (k · min(rows, cols),) on the CPU, for k matrices.

    >>> esd(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])).tolist()
    [9.0, 16.0]
    """
    return torch.from_numpy(pooled_squared_singular_values(as_stack(weight), "weight"))


@torch.no_grad()
def spectrum(operator: LinearOperator | Shaped[Tensor, "..."] | np.ndarray) -> Float64[Tensor, " n"]:
    """All eigenvalues of a symmetric operator or matrix, ascending, in float64.

    ``A v = λ v``. A pullback metric ``M = Wᵀ P W`` (arXiv:2606.09744), a kernel, a covariance: whatever is symmetric
    can be handed on to :func:`fit_tail` and the ranks. The matrix is formed; for a few eigenvalues of a large operator
    use ``gramscope.linalg.eigenvalues_top``.

    ``operator``: (n, n), declared symmetric, or a dense tensor or array that is. Returns (n,) on the CPU.

    >>> from gramscope.linalg import LowRank
    >>> spectrum(LowRank(torch.tensor([[1.0], [2.0]]))).round(decimals=6).abs().tolist()
    [0.0, 5.0]
    """
    if isinstance(operator, LinearOperator):
        if not operator.symmetric:
            raise InputError(
                f"spectrum needs a symmetric operator, got {operator!r}. Declare it where it is built "
                "(symmetric=True), or take the squared singular values: spectrum(A.T @ A)."
            )
        matrix = operator.dense()
    else:
        matrix = _as_tensor(operator, "operator")
        matrix = matrix if matrix.is_floating_point() else matrix.double()
        rounding = 8 * torch.finfo(matrix.dtype).eps * len(matrix) ** 0.5
        check_symmetric(matrix, "the matrix", rounding, "For a weight use esd(weight); or pass (A + A.T) / 2.")
    check_finite(matrix, "the matrix", "Check what it is made of.")
    double = matrix.to(device="cpu", dtype=torch.float64)
    return torch.from_numpy(np.linalg.eigvalsh(((double + double.mT) / 2).numpy()))


def as_stack(weight: Shaped[Tensor, "..."] | np.ndarray) -> Float[Tensor, "k rows cols"]:
    """A weight as a stack of matrices, once it is known to be one."""
    weight = _as_tensor(weight, "weight")
    if not weight.is_floating_point():
        raise InputError(f"weight must be a floating tensor, got {weight.dtype}. Convert it, e.g. weight.double().")
    if weight.ndim < 2:
        raise InputError(
            f"weight must have shape (rows, cols) or (..., rows, cols), got {tuple(weight.shape)}. "
            "A vector has no spectrum; reshape it to the matrix that it stands for."
        )
    return weight.reshape(math.prod(weight.shape[:-2]), *weight.shape[-2:])


def _as_tensor(matrix: object, what: str) -> Tensor:
    if isinstance(matrix, np.ndarray) and matrix.dtype.kind in "fciub":
        matrix = torch.from_numpy(np.array(matrix))
    if not isinstance(matrix, Tensor):
        got = f"an array of {matrix.dtype}" if isinstance(matrix, np.ndarray) else type(matrix).__name__
        raise InputError(f"{what} must be a torch.Tensor or a numpy array of numbers, got {got}.")
    check_plain(matrix, what)
    return matrix.detach()


def pooled_squared_singular_values(stack: Float[Tensor, "k rows cols"], name: str) -> Array:
    """λ of all matrices of a stack, ascending; rounding below zero is set to zero."""
    if stack.numel() == 0:
        return np.zeros(0)
    # Many small matrices (the slices of a convolution) go in one call, a large one goes in blocks.
    together = len(stack) > 1 and stack.numel() <= _BLOCK_ENTRIES
    grams = [_gram_of_stack(stack)] if together else (_gram(matrix) for matrix in stack)
    pooled = []
    for gram in grams:
        # A NaN or an infinity anywhere in a row of W is one on the diagonal.
        diagonal = gram.diagonal(0, -2, -1)
        if not bool((torch.isfinite(diagonal) if isinstance(diagonal, Tensor) else np.isfinite(diagonal)).all()):
            raise InputError(_say_not_finite(stack, name))
        values = torch.linalg.eigvalsh(gram).cpu().numpy() if isinstance(gram, Tensor) else np.linalg.eigvalsh(gram)
        pooled.append(values.reshape(-1))
    values = np.maximum(np.sort(np.concatenate(pooled)), 0.0)
    # By the entries and not by λ, so that a shuffled weight is refused exactly where the weight itself is.
    if values[-1] < _LEAST * stack.numel() and 0 < float(stack.abs().max()) < math.sqrt(_LEAST):
        raise InputError(_say_out_of_range(stack, name, "vanish in"))
    return values


def as_eigenvalues(eigenvalues: Eigenvalues, purpose: str) -> Array:
    """What a caller passed as eigenvalues: ascending float64, finite, negative only by rounding (then zero)."""
    if isinstance(eigenvalues, Tensor):
        check_plain(eigenvalues, "eigenvalues")
        array = eigenvalues.detach().to(device="cpu", dtype=torch.float64).numpy()
    else:
        array = _as_float64(eigenvalues, purpose)
    if array.ndim != 1:
        raise InputError(
            f"{purpose} needs eigenvalues of shape (n,), got {array.shape}. For a weight matrix pass esd(weight), "
            "for a symmetric operator spectrum(operator)."
        )
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array)).sum())
        raise InputError(f"{purpose} needs finite eigenvalues, but {bad} of {array.size} are not. Find out why first.")
    array = np.sort(array)
    if array.size and array[0] < -relative_cut(array):
        raise InputError(
            f"{purpose} needs eigenvalues >= 0, got values from {array[0]:.3g} to {array[-1]:.3g}. "
            "For an indefinite operator pass the part that you mean, e.g. values[values > 0]."
        )
    return np.maximum(array, 0.0)


def _as_float64(eigenvalues: object, purpose: str) -> np.ndarray:
    try:
        array = np.asarray(eigenvalues)
        if array.dtype.kind not in "cSUmM":  # numpy would drop imaginary parts, and read digits out of strings
            return array.astype(np.float64)
    except (TypeError, ValueError):
        pass
    what = f"{type(eigenvalues).__name__} {eigenvalues!r}"
    raise InputError(
        f"{purpose} needs eigenvalues as real numbers of shape (n,), got {what[:80]}. For a weight matrix pass "
        "esd(weight), for a symmetric operator spectrum(operator)."
    )


def relative_cut(eigenvalues: Array, size: int | None = None) -> float:
    """Below this an eigenvalue is rounding: ``λ_max · n · ε`` with float64's ε, n the greater side of the matrix."""
    if not eigenvalues.size:
        return 0.0
    return float(np.abs(eigenvalues).max() * max(size or 0, eigenvalues.size) * np.finfo(np.float64).eps)


def _gram(matrix: Float[Tensor, "rows cols"]) -> np.ndarray | Tensor:
    """The smaller of WᵀW and WWᵀ in float64, as a numpy array on the CPU or a tensor on a GPU."""
    rows, cols = matrix.shape
    tall = matrix if rows >= cols else matrix.mT
    if matrix.device.type == "cuda":
        total = torch.zeros((tall.shape[1],) * 2, dtype=torch.float64, device=matrix.device)
        for block in _blocks(tall):
            part = block.to(torch.float64)
            total.addmm_(part.mT, part)
        return total if len(total) > _SMALL_ON_CPU else total.cpu().numpy()
    gram: np.ndarray | None = None
    for block in _blocks(tall):
        rectangle = _float64_array(block)
        # numpy sees that both factors are one array and computes half of the products (syrk). What overflows here is
        # infinite on the diagonal, and named by the caller.
        with np.errstate(over="ignore", invalid="ignore"):
            product: np.ndarray = rectangle.T @ rectangle
        gram = product if gram is None else np.add(gram, product, out=gram)
    assert gram is not None
    return gram


def _gram_of_stack(stack: Float[Tensor, "k rows cols"]) -> np.ndarray:
    tall = _float64_array(stack if stack.shape[1] >= stack.shape[2] else stack.mT)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.matmul(tall.swapaxes(1, 2), tall)


def _blocks(tall: Float[Tensor, "rows cols"]) -> Iterator[Tensor]:
    return iter(tall.split(max(tall.shape[1], _BLOCK_ENTRIES // tall.shape[1])))


def _float64_array(block: Float[Tensor, "*k rows cols"]) -> np.ndarray:
    """float64 in the memory order of the tensor: a transposed weight is not reordered."""
    cpu = block.cpu()
    if cpu.dtype not in (torch.float64, torch.float32, torch.float16):
        cpu = cpu.to(torch.float32)  # bfloat16 and float8, which numpy does not know, fit exactly
    return cpu.numpy().astype(np.float64, order="K", copy=False)


def _say_not_finite(matrix: Tensor, name: str) -> str:
    bad = int((~torch.isfinite(matrix)).sum())
    if bad:
        return (
            f"{name} must be finite, but {bad} of {matrix.numel()} entries are NaN or infinite. "
            "Find the step that made them so."
        )
    return _say_out_of_range(matrix, name, "overflow")


def _say_out_of_range(matrix: Tensor, name: str, how: str) -> str:
    return (
        f"{name} has entries up to {float(matrix.abs().max()):.3g}, whose squares {how} float64. "
        "Rescale it; α and the ranks do not depend on the scale."
    )
