"""Alignment of any two kernels, matrices or operators, and of a kernel with the targets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.agreement import cosine_of_sums
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows
from gramscope.base.rounding import EPS64, Rounding
from gramscope.base.user_warnings import undefined
from gramscope.kernels.kernel_matrix import Kernel
from gramscope.linalg.operator import LinearOperator
from gramscope.measures.class_moments import class_labels, one_hot
from gramscope.measures.linear_cka import CKA, PairState
from gramscope.measures.measure import Facts, Measure
from gramscope.measures.rows import check_size

COARSEST = 0.3  # no dtype rounds by more, relative to the number: looking closer is needed below only
KernelLike = Tensor | Kernel | LinearOperator


@dataclass(frozen=True)
class AlignmentState:
    """Sums over entries: ⟨A, B⟩, |A|², |B|², ."""

    inner: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0

    def merged(self, other: "AlignmentState") -> "AlignmentState":
        return AlignmentState(self.inner + other.inner, self.square_a + other.square_a, self.square_b + other.square_b)

    def norms(self) -> tuple[float, float]:
        """|A| and |B|."""
        return math.sqrt(self.square_a), math.sqrt(self.square_b)


class Alignment(Measure[AlignmentState, float]):
    """``⟨A, B⟩/(|A| |B|)`` of two kernels given tile by tile: ``update(tile_a, tile_b)`` for disjoint tiles.

    Reference: Cristianini, Shawe-Taylor, Elisseeff & Kandola 2001, definition 1.

    >>> a, b = torch.eye(4), torch.ones(4, 4)
    >>> measure = Alignment()
    >>> measure.over(zip(a.split(2), b.split(2)))
    0.5
    """

    facts: ClassVar[Facts] = Facts(
        name="kernel alignment",
        symbol="A(K, L)",
        bounds=(-1.0, 1.0),
        low="unrelated (0) or opposed (-1)",
        high="equal up to scale",
        reference="Cristianini et al. 2001, definition 1",
    )

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

    facts: ClassVar[Facts] = Facts(
        name="centred kernel-target alignment",
        symbol="A(K, yyᵀ)",
        bounds=(-1.0, 1.0),
        low="the features vary in directions that have nothing to do with the targets",
        high="the features vary with the targets only",
        reference="Cortes et al. 2012 (JMLR 13), eq. 4",
    )

    def __init__(self, *, classes: int | None = None, debiased: bool = False) -> None:
        super().__init__(debiased=debiased)
        self.classes = classes

    def update(self, a: Tensor, b: Tensor) -> PairState:  # type: ignore[override]
        return super().update(a, _targets(b, self.classes))


def alignment(a: KernelLike, b: KernelLike, *, center: bool = False, block: int = 256) -> float:
    """Alignment ``⟨A, B⟩/(|A| |B|)`` of two kernels: matrices, ``Kernel`` objects or operators, in any mixture.

    Operators are multiplied with ``block`` columns of the identity at a time, so neither is ever formed whole. With
    ``center`` both are centred over the examples on either side first (``H A H``), which is CKA for kernels.

    Args:
        a: a matrix (n, m), a kernel (n, C, m, C), a ``Kernel`` or a ``LinearOperator``.
        b: likewise, of the same shape as a matrix.
        center: take out the means over examples.
        block: columns of an operator taken at a time.

    Reference: Cristianini et al. 2001, definition 1; centred: Cortes et al. 2012, eq. 4.

    Example:
        >>> import torch, gramscope as gs
        >>> from gramscope.linalg import Diagonal
        >>> gs.measures.alignment(torch.eye(4, dtype=torch.float64), Diagonal(torch.tensor([1.0, 1.0, 0.0, 0.0])))
        0.7071067811865475
    """
    return _aligned(_Columns(a), _Columns(b), center, block)


def _aligned(first: "_Columns", second: "_Columns", center: bool, block: int = 256) -> float:
    if first.shape != second.shape:
        raise InputError(f"two kernels must have one shape as matrices, got {first.shape} and {second.shape}.")
    measure = Alignment()
    pairs = zip(first.blocks(block, center), second.blocks(block, center), strict=True)
    state = AlignmentState()
    scale_a = scale_b = 0.0
    for (raw_a, cols_a), (raw_b, cols_b) in pairs:
        state = measure.merge(state, measure.update(cols_a, cols_b))
        scale_a, scale_b = math.hypot(scale_a, raw_a), math.hypot(scale_b, raw_b)
    left = zip(("first", "second"), state.norms(), (scale_a, scale_b), (first, second), strict=True)
    for which, norm, scale, kernel in left if center else ():
        if norm < COARSEST * scale and norm <= max(1e3 * EPS64, kernel.rounding.relative) * scale:
            return undefined("the alignment", f"the {which} kernel is constant, so nothing is left once centred")
    return measure.compute(state)


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
    y = as_rows(_targets(targets, classes), "targets")
    check_size(y, "targets")
    columns = _Columns(kernel)
    size = columns.shape[0]
    if size == len(y):
        ideal = y @ y.mT
    elif size == y.numel():
        ideal = torch.outer(y.flatten(), y.flatten()).reshape(*y.shape, *y.shape)
    else:
        raise InputError(
            f"targets must have one row for each of the kernel's {size} examples (or one entry for each example and "
            f"output), got shape {tuple(y.shape)}."
        )
    return _aligned(columns, _Columns(ideal), center)


class _Columns:
    """A kernel read a block of columns at a time, in float64."""

    def __init__(self, kernel: KernelLike) -> None:
        source = kernel.total if isinstance(kernel, Kernel) else kernel
        self.operator = source if isinstance(source, LinearOperator) else None
        self.matrix: Tensor | None = None
        if isinstance(source, LinearOperator):
            self.shape = source.shape
            self.outputs = (
                _outputs(source.rows.shape, source.rows.names),
                _outputs(source.cols.shape, source.cols.names),
            )
            return
        if not isinstance(source, Tensor) or source.dim() not in (2, 4):
            got = tuple(source.shape) if isinstance(source, Tensor) else type(source).__name__
            raise InputError(
                f"a kernel must be a matrix (n, m), (n, C, m, C), a Kernel or a LinearOperator, got {got}."
            )
        self.outputs = (source.shape[1], source.shape[3]) if source.dim() == 4 else (1, 1)
        self.matrix = source.flatten(2).flatten(0, 1) if source.dim() == 4 else source
        self.shape = (self.matrix.shape[0], self.matrix.shape[1])

    @cached_property
    def rounding(self) -> Rounding:
        if self.matrix is not None:
            return Rounding.of(self.matrix)
        assert self.operator is not None
        eps = torch.finfo(self.operator.dtype).eps
        return Rounding(eps, eps)

    def blocks(self, size: int, center: bool) -> Iterator[tuple[float, Tensor]]:
        """For each block its norm before centring, and the columns as (cols, rows), centred if asked."""
        middle = self._mean_columns(size) if center else None
        for start in range(0, self.shape[1], size):
            columns = self._take(start, min(start + size, self.shape[1]))
            raw = float(columns.norm()) if center else 0.0
            if middle is not None:
                places = torch.arange(start, start + columns.shape[1], device=columns.device) % self.outputs[1]
                columns = columns - middle[:, places]
                split = columns.reshape(-1, self.outputs[0], columns.shape[1])
                columns = (split - split.mean(0)).reshape(columns.shape)
            yield raw, columns.mT

    def _take(self, start: int, stop: int) -> Float[Tensor, "rows cols"]:
        if self.matrix is not None:
            return as_rows(self.matrix[:, start:stop], "the kernel")
        assert self.operator is not None
        unit = torch.zeros((self.shape[1], stop - start), dtype=self.operator.dtype, device=self.operator.device)
        unit[start:stop].fill_diagonal_(1.0)
        return as_rows(self.operator.matmat(unit), "the kernel")

    def _mean_columns(self, size: int) -> Float[Tensor, "rows outputs"]:
        """The mean over examples of the columns of each output."""
        total: Tensor | None = None
        examples = self.shape[1] // self.outputs[1]
        step = max(size // self.outputs[1], 1) * self.outputs[1]
        for start in range(0, self.shape[1], step):
            columns = self._take(start, min(start + step, self.shape[1]))
            sums = columns.reshape(columns.shape[0], -1, self.outputs[1]).sum(1)
            total = sums if total is None else total + sums
        assert total is not None
        return total / examples


def _outputs(shape: tuple[int, ...], names: tuple[str, ...]) -> int:
    """How many entries one example has; unnamed axes are all examples."""
    return math.prod(shape[1:]) if names and names[0] == "example" else 1


def _targets(targets: Tensor, classes: int | None) -> Tensor:
    """Labels as one-hot rows of a fixed width; targets as they are."""
    if not isinstance(targets, Tensor):
        raise InputError(f"targets must be a torch.Tensor, got {type(targets).__name__}.")
    if targets.is_floating_point() or (targets.dim() == 2 and targets.shape[1] > 1):
        return targets
    labels = class_labels(targets)
    if classes is not None and len(labels) and int(labels.max()) >= classes:
        raise InputError(f"labels must lie below classes={classes}, got {int(labels.max())}.")
    return one_hot(labels, classes)
