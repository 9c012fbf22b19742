"""Numbers and small matrices read off operators on states."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.agreement import cosine, cosine_of_sums
from gramscope.base.axes import Axes
from gramscope.base.checks import check_count, check_finite, check_number, check_tensor
from gramscope.base.effective_rank import ratio_of_traces
from gramscope.base.errors import InputError
from gramscope.base.progress_bar import progress
from gramscope.base.rng import child_seed, gaussian, generator, rademacher
from gramscope.base.user_warnings import undefined
from gramscope.linalg import Dense, LinearOperator, TraceEstimate, contract
from gramscope.linalg.intervals import jackknife_error, rounding_unit

# Operators up to this size are met exactly, by all their columns.
EXACT = 4096
ENTRIES = 2**23  # of vectors over the states that are held at once


@torch.no_grad()
def participation_ratio(op: LinearOperator, *, products: int | None = None, seed: int = 0) -> TraceEstimate:
    """``tr(A)² / tr(A²)`` of a symmetric positive operator: how many directions it acts on, counted by weight.

    Between 1 and the rank; NaN, with a warning, for an operator that is zero. Exact (error 0) from all columns unless
    ``products`` random signs are asked for: then ``tr A = E zᵀAz`` and ``tr A² = E ‖Az‖²`` on the same probes, with a
    jackknife standard error.

    >>> print(participation_ratio(Dense(torch.diag(torch.tensor([1.0, 1.0, 0.0])), symmetric=True)))
    2 ± 0 (exact, 3 products)
    """
    name = "a participation ratio"
    _require_square(op, name)
    n = op.cols.size
    if products is None:
        _require_small(n, "participation_ratio")
        matrix = op.dense().double()
        exact = ratio_of_traces(matrix.trace(), (matrix * matrix.mT).sum(), name, "the operator")
        return TraceEstimate(float(exact), 0.0, n, seed, "exact", "none", op.dtype, op.device)
    check_count(products, "products", least=3)
    rng = generator(child_seed(seed, "effective_rank"))
    z = rademacher(n, products, rng=rng, dtype=op.dtype, device=op.device)
    image = (op @ z).double()
    sums = torch.stack([(z.double() * image).sum(0), (image**2).sum(0)])
    first, second = sums.mean(1)
    value = float(ratio_of_traces(first, second, name, "the operator"))
    return _estimated(value, ratio_of_traces(*_without_each(sums)), op, seed)


def _without_each(sums: Float64[Tensor, "parts m"]) -> Float64[Tensor, "parts m"]:
    """The means over all probes but one, for each of them."""
    return (sums.sum(1, keepdim=True) - sums) / (sums.shape[1] - 1)


def _estimated(value: float, others: Float64[Tensor, " m"], op: LinearOperator, seed: int) -> TraceEstimate:
    """An estimate with the error of those that each leave one probe out, no less than rounding."""
    error = max(float(jackknife_error(others)), rounding_unit(op.dtype, op.cols.size) * abs(value))
    return TraceEstimate(value, error, len(others), seed, "hutchinson", "rademacher", op.dtype, op.device)


def explained_variance_dimension(matrix: Float[Tensor, "n m"], share: float = 0.95) -> float:
    """The interpolated number of principal components that hold ``share`` of the squared sum of singular values.

    Less than 1 where the first alone holds more than that. (Called effective dimension on the poster of
    arXiv:2507.06381; that name has other meanings.)

    >>> explained_variance_dimension(torch.diag(torch.tensor([1.0, 1.0])), share=0.75)
    1.5
    """
    if check_number(share, "share", above=0.0) > 1:
        raise InputError(f"share must lie between 0 and 1, got {share}.")
    if check_tensor(matrix, "matrix").dim() != 2 or matrix.numel() == 0:
        raise InputError(f"matrix must have rows and columns, got shape {tuple(matrix.shape)}.")
    check_finite(matrix, "matrix", "It has no singular values otherwise: look at the step where training diverged.")
    weights = torch.linalg.svdvals(matrix.double()) ** 2
    total = float(weights.sum())
    if total == 0:
        return 0.0
    sums = (weights / total).cumsum(0)
    place = min(int((sums < share - 1e-15).sum()), len(sums) - 1)
    before = float(sums[place - 1]) if place else 0.0
    return place + (share - before) / float(sums[place] - before)


@torch.no_grad()
def alignment(a: LinearOperator, b: LinearOperator, *, products: int | None = None, seed: int = 0) -> TraceEstimate:
    """``tr(A Bᵀ) / (|A| |B|)``, the cosine of two operators; kernel alignment is that of NTK_0 and NTK_t.

    Exact from all columns unless ``products`` random signs are asked for, on which ``E ⟨A z, B z⟩ = tr(A Bᵀ)``. NaN,
    with a warning, where one of them is zero.

    >>> one, half = Dense(torch.eye(2)), Dense(torch.diag(torch.tensor([1.0, 0.0])))
    >>> round(alignment(one, half).value, 6)
    0.707107
    """
    _require_operators(a, b)
    if a.shape != b.shape or not (a.rows.matches(b.rows) and a.cols.matches(b.cols)):
        raise InputError(f"two operators must act on the same axes to be aligned, got {a!r} and {b!r}.")
    n = a.cols.size
    if products is None:
        _require_small(n, "alignment")
        value = cosine(a.dense(), b.dense(), "an alignment", "the operator is zero")
        return TraceEstimate(value, 0.0, n, seed, "exact", "none", a.dtype, a.device)
    check_count(products, "products", least=3)
    rng = generator(child_seed(seed, "alignment"))
    z = rademacher(n, products, rng=rng, dtype=a.dtype, device=a.device)
    left, right = (a @ z).double(), (b @ z).double()
    if not bool(left.any()) or not bool(right.any()):
        nothing = undefined("an alignment", "the operator is zero")
        return TraceEstimate(nothing, nothing, products, seed, "hutchinson", "rademacher", a.dtype, a.device)
    sums = torch.stack([(left * right).sum(0), (left**2).sum(0), (right**2).sum(0)])
    return _estimated(float(cosine_of_sums(*sums.mean(1))), cosine_of_sums(*_without_each(sums)), a, seed)


def representation_alignment(a: Float[Tensor, " N"], b: Float[Tensor, " N"]) -> float:
    """``cos(h_0, h_t)`` of two state vectors; NaN, with a warning, where one of them is zero."""
    if check_tensor(a, "a").shape != check_tensor(b, "b").shape:
        raise InputError(f"two state vectors must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}.")
    for name, vector in (("a", a), ("b", b)):
        check_finite(vector, name, "Look at the step where training diverged.")
    return cosine(a, b, "a representation alignment", "a state vector is zero")


# Reductions over named axes ------------------------------------------------------------------------


@torch.no_grad()
def partial_trace(op: LinearOperator, over: Sequence[str]) -> Dense:
    """The sum of the diagonal blocks over some axes: ``B_ab = Σ_i A_{(i,a),(i,b)}``, i over the axes ``over``.

    Each block is computed exactly from its own columns, a few at a time. Tracing over all axes gives the trace.

    >>> A = Dense(torch.arange(16.0).reshape(4, 4), Axes(trial=2, unit=2), Axes(trial=2, unit=2))
    >>> partial_trace(A, ["trial"]).dense().tolist()       # [[0, 1], [4, 5]] + [[10, 11], [14, 15]]
    [[10.0, 12.0], [18.0, 20.0]]
    """
    kept = _kept_axes(op, over)
    axes = op.rows
    gone = [axes.names.index(name) for name in over]
    stay = [axes.names.index(name) for name in kept]
    result = torch.zeros(kept.size, kept.size, dtype=op.dtype, device=op.device)
    where = torch.arange(axes.size, device=op.device).reshape(axes.shape).permute(*gone, *stay)
    for places in where.reshape(-1, kept.size):
        for start in range(0, kept.size, 256):
            columns = places[start : start + 256]
            unit = torch.zeros(axes.size, len(columns), dtype=op.dtype, device=op.device)
            unit[columns, torch.arange(len(columns), device=op.device)] = 1.0
            result[:, start : start + 256] += (op @ unit)[places]
    return Dense(result, kept, kept, symmetric=op.symmetric)


def partial_average(op: LinearOperator, over: Sequence[str]) -> Dense:
    """The mean of the diagonal blocks over some axes: the partial trace divided by their number."""
    kept = _kept_axes(op, over)
    return Dense(partial_trace(op, over).matrix / (op.rows.size // kept.size), kept, kept, symmetric=op.symmetric)


@torch.no_grad()
def mean_response(op: LinearOperator, over: Sequence[str]) -> Dense:
    """The mean of *all* blocks: ``B_ab = Σ_ij A_{(i,a),(j,b)} / n``, the answer to a probe of ones, averaged.

    ``B = R A Rᵀ`` with R the average over ``over`` scaled to orthonormal rows. It is what the poster of
    arXiv:2507.06381 plots; unlike the partial trace it counts what one trial (unit) does to another.

    >>> A = Dense(torch.ones(4, 4), Axes(trial=2, unit=2), Axes(trial=2, unit=2))
    >>> mean_response(A, ["trial"]).dense().tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    kept, axes = _kept_axes(op, over), op.rows
    gone = [axes.names.index(name) for name in over]
    result = []
    for start in range(0, kept.size, 256):
        columns = torch.eye(kept.size, dtype=op.dtype, device=op.device)[:, start : start + 256]
        spread = columns.reshape([1 if axis in gone else n for axis, n in enumerate(axes.shape)] + [-1])
        image = op @ spread.expand(*axes.shape, -1).reshape(axes.size, -1)
        result.append(image.reshape(*axes.shape, -1).sum(gone).reshape(columns.shape))
    return Dense(torch.cat(result, 1) * kept.size / axes.size, kept, kept, symmetric=op.symmetric)


def _kept_axes(op: LinearOperator, over: Sequence[str]) -> Axes:
    _require_square(op, "a reduction over axes")
    unknown = [name for name in over if name not in op.rows]
    if isinstance(over, str) or unknown or not over or len(set(over)) < len(over):
        raise InputError(
            f"over must name some of the axes {op.rows.names} once each, as a list, got {over!r}. For a network with "
            "sites of different shapes take one site's block first: R = g.select(name); R @ g.operator @ R.T."
        )
    return Axes(**{name: size for name, size in op.rows.items() if name not in over})


# Modes ---------------------------------------------------------------------------------------------


@torch.no_grad()
def rayleigh(op: LinearOperator, modes: Float[Tensor, "N k"]) -> Float64[Tensor, " k"]:
    """``qᵀ A q / qᵀ q`` of each column q; a zero column is refused."""
    _require_operators(op)
    if check_tensor(modes, "modes").dim() != 2 or modes.shape[0] != op.cols.size:
        raise InputError(f"modes must have shape ({op.cols.size}, k), got {tuple(modes.shape)}.")
    modes = modes.to(dtype=op.dtype, device=op.device)
    size = contract("n k, n k -> k", modes.double(), modes.double())
    if bool((size == 0).any()):
        raise InputError("each mode must have a length, but a column of modes is zero. Drop it.")
    return contract("n k, n k -> k", modes.double(), (op @ modes).double()) / size


@torch.no_grad()
def interference(
    op: LinearOperator,
    groups: Mapping[str, Sequence[int] | Tensor] | Any,  # checked below, by name
    axis: str = "trial",
    *,
    products: int | None = None,
    seed: int = 0,
) -> tuple[tuple[str, ...], Float64[Tensor, "g g"]]:
    """How far learning in one group of trials moves another: cosines of the blocks of an operator, by group.

    ``groups`` gives each name its places along ``axis``, as whole numbers or as a mask. ``I_ab = |A_ab| / √(|A_aa|
    |A_bb|)`` in Frobenius norms, A_ab the block from group b to group a. One on the diagonal; zero where two groups
    (tasks) do not touch. For a positive A it is at most one.

    A is never formed: exact from all columns of the groups, a few at a time; or, faster, from ``products`` random signs
    z for each group, ``E ‖A_ab z_b‖² = |A_ab|²``: with 64 it errs by some ten per cent at most.

    >>> A = Dense(torch.diag(torch.tensor([1.0, 2.0])), Axes(trial=2), Axes(trial=2), symmetric=True)
    >>> interference(A, {"a": [0], "b": [1]})[1].round(decimals=12).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    _require_square(op, "interference between groups")
    if axis not in op.rows:
        raise InputError(f"axis must be one of {op.rows.names}, got {axis!r}.")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError(
            f"groups must give places along {axis!r} by name, as {{'a': [0, 1], 'b': [2]}}, got "
            f"{'none' if isinstance(groups, Mapping) else type(groups).__name__}. From labels: {{'a': labels == 0}}."
        )
    if products is not None:
        check_count(products, "products")
    names = tuple(groups)
    squares = block_squares(op, axis, [_places(name, groups[name], op, axis) for name in names], products, seed)
    return names, by_diagonal(squares.mean(-1).sqrt())


def by_diagonal(matrix: Float64[Tensor, "a b"]) -> Float64[Tensor, "a b"]:
    """``M_ab / √(M_aa M_bb)``."""
    scale = matrix.diagonal().clamp_min(0).sqrt()
    return matrix / (scale[:, None] * scale).clamp_min(torch.finfo(torch.float64).tiny)


@torch.no_grad()
def block_squares(
    op: LinearOperator, axis: str, groups: Sequence[Tensor], products: int | None, seed: int
) -> Float64[Tensor, "a b probe"]:
    """``‖(A z_b)_a‖²`` of random signs z_b on the places of b along ``axis``, whose mean over probes is ``|A_ab|²``.

    Without ``products`` one entry, ``|A_ab|²`` itself. Symmetric in a and b where A is.
    """
    at, n = op.rows.names.index(axis), op.cols.size
    where = torch.arange(n, device=op.device).reshape(op.rows.shape).movedim(at, 0).reshape(op.rows[axis], -1)
    entries = [where[places.to(op.device)].flatten() for places in groups]
    rng, few = generator(child_seed(seed, "interference")), max(1, ENTRIES // n)
    result = torch.zeros(len(groups), len(groups), products or 1, dtype=torch.float64, device="cpu")
    with progress("groups", len(groups)) as advance:
        for b, columns in enumerate(entries):
            count = products or len(columns)
            for start in range(0, count, few):
                some = slice(start, min(start + few, count))
                k = some.stop - start
                probe = torch.zeros(n, k, dtype=op.dtype, device=op.device)
                if products is None:
                    probe[columns[some], torch.arange(k, device=op.device)] = 1.0
                else:
                    probe[columns] = rademacher(len(columns), k, rng=rng, dtype=op.dtype, device=op.device)
                image = (op @ probe).double().square()
                for a, rows in enumerate(entries):
                    sums = image[rows].sum(0).cpu()
                    result[a, b, some if products else 0] += sums if products else sums.sum()
            advance()
    return (result + result.transpose(0, 1)) / 2 if op.symmetric else result


def _places(name: object, given: object, op: LinearOperator, axis: str) -> Tensor:
    size = op.rows[axis]
    try:
        index = torch.as_tensor(given, device=op.device)
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(0, device="cpu")
    if index.dtype == torch.bool and tuple(index.shape) == (size,):
        index = index.nonzero()[:, 0]
    whole = index.dim() == 1 and index.numel() > 0 and not index.is_floating_point() and index.dtype != torch.bool
    if not whole or int(index.min()) < 0 or int(index.max()) >= size:
        raise InputError(
            f"group {name!r} must hold places between 0 and {size - 1} of {axis!r}, not none, as whole numbers or as a "
            f"mask of length {size}, got {given!r}."
        )
    return index.long()


# Of the whole network ------------------------------------------------------------------------------


def random_modes(
    n: int, k: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Float[Tensor, "n k"]:
    """``k`` random orthonormal modes of length ``n``, to compare others with; there are at most n.

    >>> modes = random_modes(5, 2)
    >>> torch.allclose(modes.T @ modes, torch.eye(2).double())
    True
    """
    check_count(n, "n")
    check_count(k, "k", most=n, why="the length of a mode")
    rng = generator(child_seed(seed, "random_modes"))
    modes: Tensor = torch.linalg.qr(gaussian(n, k, rng=rng, dtype=dtype, device=device)).Q
    return modes


def _require_operators(*operators: object) -> None:
    for op in operators:
        if not isinstance(op, LinearOperator):
            raise InputError(
                f"an operator must be a LinearOperator, got {type(op).__name__}. Of a matrix make one with "
                "gramscope.linalg.Dense(matrix)."
            )


def _require_square(op: LinearOperator, purpose: str) -> None:
    _require_operators(op)
    if not op.rows.matches(op.cols):
        raise InputError(f"{purpose} needs an operator with the same axes on both sides, got {op!r}.")


def _require_small(n: int, name: str) -> None:
    if n > EXACT:
        raise InputError(
            f"{name} of an operator of size {n} needs all its columns, more than {EXACT}. Pass products=..., or reduce "
            "it first (partial_trace, g.select)."
        )
