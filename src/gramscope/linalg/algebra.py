"""What sums, multiples, products and transposes of operators are."""

from collections.abc import Iterator
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from gramscope.base.errors import InputError
from gramscope.linalg.operator import LinearOperator, Scalar, require_same_kind


def are_adjoint(a: LinearOperator, b: LinearOperator) -> bool:
    """Whether ``b`` is known to be ``aᵀ``: one object and its own transpose, not equal numbers."""
    if a is b:
        return a.symmetric
    if isinstance(a, Scaled) and isinstance(b, Scaled):
        return bool(a.scalar == b.scalar) and are_adjoint(a.operator, b.operator)
    if isinstance(a, Composition) and isinstance(b, Composition) and len(a.factors) == len(b.factors):
        return all(are_adjoint(x, y) for x, y in zip(a.factors, reversed(b.factors), strict=True))
    return (isinstance(a, Adjoint) and a.operator is b) or (isinstance(b, Adjoint) and b.operator is a)


def require_operators(operators: tuple[LinearOperator, ...], purpose: str) -> None:
    """Raise unless there is an operator, and all share one dtype and one device."""
    if not operators:
        raise InputError(f"{purpose} needs at least one operator, got none. A zero map is 0.0 * Identity(n).")
    require_same_kind(f"the parts of a {purpose}", *operators)


class Adjoint(LinearOperator):
    """The transpose: ``⟨A x, y⟩ = ⟨x, Aᵀ y⟩``.

    Made by ``A.T``, which also knows when the transpose needs no new object.

    >>> import torch
    >>> from gramscope.linalg import Dense
    >>> A = Dense(torch.ones(2, 3))
    >>> A.T.shape, A.T.T is A
    ((3, 2), True)
    """

    def __init__(self, operator: LinearOperator) -> None:
        super().__init__(
            operator.cols,
            operator.rows,
            dtype=operator.dtype,
            device=operator.device,
            symmetric=operator.symmetric,
        )
        self.operator = operator

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self.operator._adjoint_matmat(x)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return self.operator._matmat(x)

    def adjoint(self) -> LinearOperator:
        return self.operator

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return self.operator.dense(block=block).mT


class Scaled(LinearOperator):
    """A multiple ``c A``.

    >>> import torch
    >>> from gramscope.linalg import Identity
    >>> (3 * Identity(2, dtype=torch.float64)).dense().tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """

    def __init__(self, scalar: Scalar, operator: LinearOperator) -> None:
        super().__init__(
            operator.rows,
            operator.cols,
            dtype=operator.dtype,
            device=operator.device,
            symmetric=operator.symmetric,
        )
        self.scalar = scalar
        self.operator = operator

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return self.scalar * self.operator._matmat(x)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return self.scalar * self.operator._adjoint_matmat(x)

    def adjoint(self) -> LinearOperator:
        return self if self.symmetric else Scaled(self.scalar, self.operator.adjoint())

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return self.scalar * self.operator.dense(block=block)


class Sum(LinearOperator):
    """A sum ``A₁ + ... + A_m`` of operators on the same axes.

    It is symmetric if every term is, or comes with its transpose as in ``A + Aᵀ``.

    >>> import torch
    >>> from gramscope.linalg import Dense
    >>> A = Dense(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    >>> (A + A.T).dense().tolist(), (A + A.T).symmetric
    ([[0.0, 1.0], [1.0, 0.0]], True)
    """

    def __init__(self, *terms: LinearOperator) -> None:
        require_operators(terms, "Sum")
        rows, cols = terms[0].rows, terms[0].cols
        for term in terms[1:]:
            if not (rows.matches(term.rows) and cols.matches(term.cols)):
                raise InputError(
                    f"the terms of a Sum must have the same axes, got rows {rows!r}, cols {cols!r} and then "
                    f"rows {term.rows!r}, cols {term.cols!r}. Transpose (.T) or rename one of them."
                )
            rows, cols = rows.merged(term.rows), cols.merged(term.cols)
        flat = tuple(_flattened(terms, Sum))
        super().__init__(rows, cols, dtype=flat[0].dtype, device=flat[0].device, symmetric=_terms_pair_up(flat))
        self.terms = flat

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        return _added(term._matmat(x) for term in self.terms)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        return _added(term._adjoint_matmat(x) for term in self.terms)

    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        return _added(term.dense(block=block) for term in self.terms)


class Composition(LinearOperator):
    """A product ``A₁ A₂ ... A_m``, applied from the right and never multiplied out.

    It is symmetric if, numbers aside, it reads the same transposed: ``A Aᵀ``, ``A S Aᵀ`` with symmetric ``S``.

    >>> import torch
    >>> from gramscope.linalg import Dense, Diagonal
    >>> A, S = Dense(torch.tensor([[1.0, 2.0]])), Diagonal(torch.tensor([3.0, 5.0]))
    >>> (A @ S @ A.T).dense().tolist(), (A @ S @ A.T).symmetric
    ([[23.0]], True)
    """

    def __init__(self, *factors: LinearOperator) -> None:
        require_operators(factors, "Composition")
        flat = tuple(_flattened(factors, Composition))
        for left, right in pairwise(flat):
            _require_composable(left, right)
        symmetric = _reads_same_transposed(flat) and flat[0].rows.matches(flat[-1].cols)
        super().__init__(flat[0].rows, flat[-1].cols, dtype=flat[0].dtype, device=flat[0].device, symmetric=symmetric)
        self.factors = flat

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        for factor in reversed(self.factors):
            x = factor._matmat(x)
        return x

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        for factor in self.factors:
            x = factor._adjoint_matmat(x)
        return x

    def adjoint(self) -> LinearOperator:
        # Factor by factor, so that (A B)(A B)ᵀ is seen to read A B Bᵀ Aᵀ and hence to be symmetric.
        if self.symmetric:
            return self
        return Composition(*(factor.adjoint() for factor in reversed(self.factors)))


def _require_composable(left: LinearOperator, right: LinearOperator) -> None:
    if left.cols.matches(right.rows):
        return
    reason = "sizes differ" if left.cols.size != right.rows.size else "sizes agree but axes differ"
    raise InputError(
        f"A @ B needs the columns of A to be the rows of B, got A.cols = {left.cols!r} and "
        f"B.rows = {right.rows!r} ({reason}; A is {type(left).__name__} {left.shape}, "
        f"B is {type(right).__name__} {right.shape}). Transpose (.T) or rename one of them."
    )


def _reads_same_transposed(factors: tuple[LinearOperator, ...]) -> bool:
    bare = tuple(_without_numbers(factors))
    return all(are_adjoint(a, b) for a, b in zip(bare, reversed(bare), strict=True))


def _without_numbers(factors: tuple[LinearOperator, ...]) -> Iterator[LinearOperator]:
    """The factors without the numbers before them, which may stand anywhere: ``c (A B)`` is A, B."""
    for factor in factors:
        while isinstance(factor, Scaled):
            factor = factor.operator
        if isinstance(factor, Composition):
            yield from _without_numbers(factor.factors)
        else:
            yield factor


def _flattened(operators: tuple[LinearOperator, ...], kind: type[LinearOperator]) -> Iterator[LinearOperator]:
    """Nested sums (products) opened up: fewer layers to walk, and their symmetry becomes visible."""
    for operator in operators:
        if type(operator) is kind and isinstance(operator, Sum):
            yield from operator.terms
        elif type(operator) is kind and isinstance(operator, Composition):
            yield from operator.factors
        else:
            yield operator


def _terms_pair_up(terms: tuple[LinearOperator, ...]) -> bool:
    waiting: list[LinearOperator] = []
    for term in terms:
        if term.symmetric:
            continue
        partner = next((other for other in waiting if are_adjoint(term, other)), None)
        if partner is None:
            waiting.append(term)
        else:
            waiting.remove(partner)
    return not waiting


def _added(tensors: Iterator[Tensor]) -> Tensor:
    # One at a time: a sum over fifty layers must not hold fifty products. Not in place: the first may be
    # an alias of what an operator stores.
    total = next(tensors)
    for tensor in tensors:
        total = total + tensor
    return total
