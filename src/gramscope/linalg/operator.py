"""The linear operator: a matrix known by its products.

Its arithmetic makes the classes of ``algebra``, which derive from it; hence those imports inside methods.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Union, overload

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.axes import Axes
from gramscope.base.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator

Scalar = int | float | Tensor


class LinearOperator(ABC):
    """A real matrix ``A`` of shape (rows, cols), known by ``X ↦ A X`` and ``Y ↦ Aᵀ Y``.

    A subclass defines :meth:`_matmat` and, unless it is symmetric, :meth:`_adjoint_matmat`, which may rely on checked
    arguments, and overrides :meth:`dense` where a closed form exists. ``dtype`` and ``device`` are facts of the
    operator: a product with anything else is refused, never cast. ``symmetric`` is declared, and sums,
    products and adjoints carry it on; the solvers that need symmetry ask for it.

    >>> import torch
    >>> from gramscope.linalg import Dense
    >>> A = Dense(torch.tensor([[2.0, 0.0], [1.0, 3.0]]))
    >>> (A.T @ A).symmetric
    True
    >>> ((2 * A - A @ A) @ torch.tensor([1.0, 0.0])).tolist()
    [0.0, -3.0]
    """

    # Without this numpy would take an operator for a number and multiply entry by entry.
    __array_ufunc__ = None

    def __init__(
        self,
        rows: Axes | int,
        cols: Axes | int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        symmetric: bool = False,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UnsupportedError(
                f"a LinearOperator must have dtype torch.float32 or torch.float64, got {dtype}. "
                "Convert what it is made of, e.g. matrix.double()."
            )
        self.rows = Axes.of(rows)
        self.cols = Axes.of(cols)
        self.dtype = dtype
        # "cuda" and "cuda:0" compare unequal although they are one device; an allocation names the index.
        self.device = torch.empty(0, device=device).device
        self.symmetric = symmetric
        if symmetric and not self.rows.matches(self.cols):
            raise InputError(
                f"a symmetric {type(self).__name__} must have the same axes on both sides, "
                f"got rows {self.rows!r} and cols {self.cols!r}. Pass the same axes, or symmetric=False."
            )

    @abstractmethod
    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        """``A x`` for checked ``x``."""

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        """``Aᵀ x`` for checked ``x``; to be defined unless A is symmetric."""
        if not self.symmetric:
            raise NotImplementedError(f"{type(self).__name__} is not symmetric and has no product with its transpose.")
        return self._matmat(x)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.size, self.cols.size)

    @property
    def T(self) -> "LinearOperator":
        return self.adjoint()

    def adjoint(self) -> "LinearOperator":
        """``Aᵀ``; a symmetric operator is its own."""
        if self.symmetric:
            return self
        from gramscope.linalg.algebra import Adjoint

        return Adjoint(self)

    @exact_arithmetic()
    def matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        """``A x`` for ``k >= 0`` columns at once."""
        self._check_operand(x, ndim=2)
        return self._matmat(x)

    @exact_arithmetic()
    def matvec(self, x: Float[Tensor, " cols"]) -> Float[Tensor, " rows"]:
        """``A x`` for one vector."""
        self._check_operand(x, ndim=1)
        return self._matmat(x[:, None])[:, 0]

    @exact_arithmetic()
    def dense(self, *, block: int = 256) -> Float[Tensor, "rows cols"]:
        """The matrix itself, from products with ``block`` columns of the identity at a time."""
        rows, cols = self.shape
        matrix = torch.zeros((rows, cols), dtype=self.dtype, device=self.device)
        for start in range(0, cols, block):
            matrix[:, start : start + block] = self._matmat(self._identity_columns(start, start + block))
        return matrix

    def to_scipy(self) -> "ScipyLinearOperator[np.floating]":
        """The same operator for scipy's solvers, reading and returning numpy arrays."""
        # scipy takes half a second to import, which only those who ask for it should pay.
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def products(operator: "LinearOperator", x: "npt.NDArray[np.floating]") -> "npt.NDArray[np.floating]":
            # numpy code casts freely (scipy hands float64 to float32 operators), so this border must.
            columns = torch.from_numpy(np.ascontiguousarray(x)).to(device=self.device, dtype=self.dtype)
            product = operator.matmat(columns.reshape(len(columns), -1))
            return product.reshape(-1, *columns.shape[1:]).detach().cpu().numpy()

        forward, backward = partial(products, self), partial(products, self.adjoint())
        dtype: np.dtype[np.floating] = np.dtype(str(self.dtype).removeprefix("torch."))
        return ScipyOperator(
            self.shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=dtype
        )

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: "LinearOperator") -> "LinearOperator": ...
    def __matmul__(self, other: object) -> Union[Tensor, "LinearOperator"]:
        if isinstance(other, LinearOperator):
            from gramscope.linalg.algebra import Composition

            return Composition(self, other)
        if isinstance(other, Tensor):
            self._check_operand(other, ndim=1 if other.ndim == 1 else 2)
            return self.matvec(other) if other.ndim == 1 else self.matmat(other)
        _refuse_array(other)
        return NotImplemented

    def __rmatmul__(self, other: object) -> Tensor:
        if not isinstance(other, Tensor):
            _refuse_array(other)
            return NotImplemented
        return self.adjoint().matvec(other) if other.ndim == 1 else self.adjoint().matmat(other.mT).mT

    def __add__(self, other: "LinearOperator") -> "LinearOperator":
        if not isinstance(other, LinearOperator):
            return NotImplemented
        from gramscope.linalg.algebra import Sum

        return Sum(self, other)

    def __radd__(self, other: object) -> "LinearOperator":
        # Python's sum() starts from the number 0; any other number plus an operator has no meaning.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: "LinearOperator") -> "LinearOperator":
        if not isinstance(other, LinearOperator):
            return NotImplemented
        return self + (-other)

    def __neg__(self) -> "LinearOperator":
        return self * -1.0

    def __mul__(self, scalar: Scalar) -> "LinearOperator":
        if not _is_scalar(scalar):
            return NotImplemented
        from gramscope.linalg.algebra import Scaled

        return Scaled(scalar, self)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Scalar) -> "LinearOperator":
        return self * (1.0 / scalar) if _is_scalar(scalar) else NotImplemented

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        facts = f"{dtype}, {self.device}" + (", symmetric" if self.symmetric else "")
        return f"{type(self).__name__}(rows={self.rows!r}, cols={self.cols!r}, {facts})"

    def _identity_columns(self, start: int, stop: int) -> Float[Tensor, "cols block"]:
        size = self.cols.size
        columns = torch.zeros((size, min(stop, size) - start), dtype=self.dtype, device=self.device)
        columns[start:stop].fill_diagonal_(1.0)
        return columns

    def _check_operand(self, x: Tensor, ndim: int) -> None:
        """Refuse what would otherwise be broadcast, cast or moved without a word."""
        wanted = f"({self.cols.size},)" if ndim == 1 else f"({self.cols.size}, k)"
        if x.ndim != ndim or x.shape[0] != self.cols.size:
            advice = "For the transposed product use A.T."
            if tuple(x.shape[: len(self.cols)]) == self.cols.shape and len(self.cols) > 1:
                advice = "Flatten its named axes first: A.cols.flatten(x)."
            raise InputError(
                f"x must have shape {wanted} to match the columns {self.cols!r} of {type(self).__name__}, "
                f"got {tuple(x.shape)}. {advice}"
            )
        if x.dtype != self.dtype or x.device != self.device:
            raise UnsupportedError(
                f"x must be {self.dtype} on {self.device} like {type(self).__name__}, "
                f"got {x.dtype} on {x.device}. "
                "Convert one of them yourself, e.g. x.to(dtype=A.dtype, device=A.device)."
            )


def require_same_kind(what: str, *parts: Tensor | LinearOperator) -> None:
    """Raise unless all share one dtype and one device."""
    if len({(part.dtype, part.device) for part in parts}) > 1:
        got = ", ".join(f"{part.dtype} on {part.device}" for part in parts)
        raise UnsupportedError(f"{what} must share one dtype and device, got {got}. Nothing is cast silently: convert.")


def _refuse_array(other: object) -> None:
    if hasattr(other, "__array__"):
        raise UnsupportedError(
            f"an operator is multiplied with a torch.Tensor, got {type(other).__name__}. Convert it yourself: "
            "torch.as_tensor(x, dtype=A.dtype, device=A.device); or hand A.to_scipy() to numpy code."
        )


def _is_scalar(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
