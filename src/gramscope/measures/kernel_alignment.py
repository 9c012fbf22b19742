"""Alignment of any two kernels, matrices or operators, and of a kernel with the targets."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.agreement import cosine_of_sums
from gramscope.base.checks import shape_or_type
from gramscope.base.class_labels import target_rows
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows
from gramscope.base.rounding import EPS64, Rounding
from gramscope.base.user_warnings import undefined
from gramscope.kernels.kernel_matrix import Kernel
from gramscope.linalg.operator import LinearOperator
from gramscope.measures.hsic import LayerState
from gramscope.measures.linear_cka import CKA
from gramscope.measures.measure import Measure
from gramscope.measures.rows import check_size

COARSEST = 0.3  # no dtype rounds by more, relative to the number: looking closer is needed below only
KernelLike = Tensor | Kernel | LinearOperator


@dataclass(frozen=True)
class AlignmentState:
    """Sums over entries: ⟨A, B⟩, |A|², |B|²."""

    inner: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0

    def merged(self, other: "AlignmentState") -> "AlignmentState":
        return AlignmentState(self.inner + other.inner, self.square_a + other.square_a, self.square_b + other.square_b)


class Alignment(Measure[AlignmentState, float]):
    """``⟨A, B⟩/(|A| |B|)`` of two kernels given tile by tile: ``update(tile_a, tile_b)`` for disjoint tiles.

    Reference: Cristianini, Shawe-Taylor, Elisseeff & Kandola 2001, definition 1.

    >>> a, b = torch.eye(4), torch.ones(4, 4)
    >>> measure = Alignment()
    >>> measure.over(zip(a.split(2), b.split(2)))
    0.5
    """

    def update(self, a: Tensor, b: Tensor) -> AlignmentState:
        rows_a, rows_b = as_rows(a, "a"), as_rows(b, "b")
        if a.shape != b.shape:
            raise InputError(f"two tiles must have one shape, got {tuple(a.shape)} and {tuple(b.shape)}.")
        check_size(rows_a, "a", power=2)
        check_size(rows_b, "b", power=2)
        rows_b = rows_b.to(rows_a.device)
        return AlignmentState(
            float((rows_a * rows_b).sum()), float(rows_a.square().sum()), float(rows_b.square().sum())
        )

    def compute(self, state: AlignmentState) -> float:
        for name, square in (("first", state.square_a), ("second", state.square_b)):
            if square == 0:
                return undefined("the alignment", f"the {name} kernel is zero (constant, if it was centred)")
        sums = (
            torch.tensor(part, dtype=torch.float64, device="cpu")
            for part in (state.inner, state.square_a, state.square_b)
        )
        return float(cosine_of_sums(*sums))


class TargetAlignment(CKA):
    """Centred alignment of the kernel ``ΦΦᵀ`` of features with the targets' ``YYᵀ``, batch by batch.

    ``update(features, targets)``; labels (n,) count as one-hot, and then ``classes`` must be given, since a batch may
    not hold all of them.

    Reference: Cortes, Mohri & Rostamizadeh 2012 (JMLR 13), eq. 4.

    >>> labels = torch.arange(8) % 2
    >>> round(TargetAlignment(classes=2)(torch.eye(2)[labels], labels), 12)
    1.0
    """

    def __init__(self, *, classes: int | None = None, debiased: bool = False) -> None:
        super().__init__(debiased=debiased)
        self.classes = classes

    def update(self, a: Tensor, b: Tensor) -> LayerState:  # type: ignore[override]
        return super().update(a, target_rows(b, self.classes))


def alignment(a: KernelLike, b: KernelLike, *, center: bool = False) -> float:
    """Alignment ``⟨A, B⟩/(|A| |B|)`` of two kernels: matrices, ``Kernel`` objects or operators, in any mixture.

    With ``center`` both are centred over the examples on either side first (``H A H``), which is CKA for kernels.
    Operators are formed as matrices; of kernels that do not fit give tiles to :class:`Alignment`, or take a random
    estimate (``gs.propagators.alignment``).

    Args:
        a: a matrix (n, m), a kernel (n, C, m, C), a ``Kernel`` or a ``LinearOperator``.
        b: likewise, of the same shape as a matrix.
        center: take out the means over examples.

    Reference: Cristianini et al. 2001, definition 1; centred: Cortes et al. 2012, eq. 4.

    Example:
        >>> import torch, gramscope as gs
        >>> from gramscope.linalg import Diagonal
        >>> gs.measures.alignment(torch.eye(4, dtype=torch.float64), Diagonal(torch.tensor([1.0, 1.0, 0.0, 0.0])))
        0.7071067811865475
    """
    kernels = [_as_tensor(a), _as_tensor(b)]
    shapes = [(k.shape[0] * k.shape[1], k.shape[2] * k.shape[3]) for k in kernels]
    if shapes[0] != shapes[1]:
        raise InputError(f"two kernels must have one shape as matrices, got {shapes[0]} and {shapes[1]}.")
    for place, given in enumerate((a, b)) if center else ():
        check_size(kernels[place], "ab"[place], power=2)
        half = kernels[place] - kernels[place].mean(0, keepdim=True)
        scale = float(kernels[place].norm())
        kernels[place] = half - half.mean(2, keepdim=True)
        norm = float(kernels[place].norm())
        if norm < COARSEST * scale and norm <= max(1e3 * EPS64, _rounding(given).relative) * scale:
            which = ("first", "second")[place]
            return undefined("the alignment", f"the {which} kernel is constant, so nothing is left once centred")
    return Alignment()(*(kernel.reshape(shapes[0]) for kernel in kernels))


def kernel_target_alignment(
    kernel: KernelLike, targets: Tensor, *, center: bool = True, classes: int | None = None
) -> float:
    """Alignment of a kernel with the targets, ``⟨K, YYᵀ⟩/(|K| |YYᵀ|)``.

    Args:
        kernel: (n, n), (n, C, n, C), a ``Kernel`` or a ``LinearOperator`` on n or n·C entries.
        targets: (n, C), or labels (n,), which count as one-hot. A kernel with outputs is compared with the YYᵀ of all
            n·C entries.
        center: centre kernel and targets over the examples.
        classes: number of classes, where the labels do not show all.

    Reference: Cristianini et al. 2001, definition 2; centred: Cortes et al. 2012, eq. 4.

    Example:
        >>> import torch, gramscope as gs
        >>> y = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
        >>> round(gs.measures.kernel_target_alignment(y @ y.T, y), 12)
        1.0
    """
    y = as_rows(target_rows(targets, classes), "targets")
    check_size(y, "targets")
    shape = kernel.shape if isinstance(kernel, LinearOperator) else _as_tensor(kernel).shape
    size = shape[0] if len(shape) == 2 else shape[0] * shape[1]
    if size == len(y):
        ideal = y @ y.mT
    elif size == y.numel():
        ideal = torch.outer(y.flatten(), y.flatten()).reshape(*y.shape, *y.shape)
    else:
        raise InputError(
            f"targets must have one row for each of the kernel's {size} examples (or one entry for each example and "
            f"output), got shape {tuple(y.shape)}."
        )
    return alignment(kernel, ideal, center=center)


def _as_tensor(kernel: KernelLike) -> Float[Tensor, "n C m D"]:
    """A kernel with its outputs on axes of their own, in float64."""
    source = kernel.total if isinstance(kernel, Kernel) else kernel
    if isinstance(source, LinearOperator):
        sizes = [axes.shape[0] if axes.names[:1] == ("example",) else axes.size for axes in (source.rows, source.cols)]
        return source.dense().double().unflatten(1, (sizes[1], -1)).unflatten(0, (sizes[0], -1))
    if not isinstance(source, Tensor) or source.dim() not in (2, 4):
        raise InputError(
            "a kernel must be a matrix (n, m), (n, C, m, C), a Kernel or a LinearOperator, got "
            f"{shape_or_type(source)}."
        )
    shape = source.shape if source.dim() == 4 else (len(source), 1, source.shape[1], 1)
    return as_rows(source, "the kernel").reshape(shape)


def _rounding(kernel: KernelLike) -> Rounding:
    if isinstance(kernel, LinearOperator):
        eps = torch.finfo(kernel.dtype).eps
        return Rounding(eps, eps)
    return Rounding.of((kernel.total if isinstance(kernel, Kernel) else kernel).flatten(1))
