"""What every LinearOperator of the project promises, as one assertion."""

import torch
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.base.rng import gaussian, generator
from gramscope.linalg import Dense, Identity, LinearOperator

# Errors are measured against ‖A‖ ‖X‖, the scale of the rounding of a product. A sum of some hundred terms
# in float64 (unit 1e-16) stays well under 1e-12 of that, one in float32 (unit 6e-8) under 1e-5, while a wrong
# sign, index or factor shows at order one.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def assert_operator_conforms(
    op: LinearOperator, dense: Tensor | None = None, *, tol: float | None = None, seed: int = 0
) -> None:
    """Raise AssertionError unless ``op`` keeps every promise of a LinearOperator.

    ``dense`` is the matrix it should be, made independently; without it the operator's own ``dense()`` is
    taken at its word and everything else is compared with that. ``tol`` is relative to ‖A‖ ‖X‖.
    """
    tol = TOLERANCE[op.dtype] if tol is None else tol
    _assert_facts(op)
    own = op.dense()
    _assert_kind(own, op, op.shape, "dense()")
    matrix = own if dense is None else dense
    assert_close(own, matrix, float(matrix.double().norm()), tol, "dense() and the expected matrix")
    _assert_products(op, matrix, tol, seed)
    _assert_adjoint(op, matrix, tol, seed)
    _assert_linear(op, matrix, tol, seed)
    _assert_algebra(op, matrix, tol, seed)
    _assert_refusals(op)
    if op.symmetric:
        assert_close(matrix, matrix.mT, _size(matrix), tol, "A, declared symmetric, and its transpose")
        assert op.adjoint() is op or type(op).__name__ == "Adjoint", "a symmetric operator must be its own adjoint"


def assert_close(got: Tensor, wanted: Tensor, scale: float, tol: float, what: str) -> None:
    """Raise unless ``‖got − wanted‖ <= tol · scale``, NaN included."""
    assert got.shape == wanted.shape, f"{what}: shapes {tuple(got.shape)} and {tuple(wanted.shape)} differ"
    error = float((got.double() - wanted.double()).norm())
    assert error <= tol * scale, f"{what} differ by {error:.3g}, allowed {tol * scale:.3g}"


def _size(x: Tensor) -> float:
    return float(x.double().norm())


def _vectors(axes: Axes, k: int, op: LinearOperator, seed: int) -> Tensor:
    return gaussian(axes.size, k, rng=generator(seed), dtype=op.dtype, device=op.device)


def _assert_kind(x: Tensor, op: LinearOperator, shape: tuple[int, ...], what: str) -> None:
    assert isinstance(x, Tensor), f"{what} must return a Tensor, got {type(x).__name__}"
    assert tuple(x.shape) == shape, f"{what} must have shape {shape}, got {tuple(x.shape)}"
    assert x.dtype == op.dtype, f"{what} must be {op.dtype}, got {x.dtype}"
    assert x.device == op.device, f"{what} must be on {op.device}, got {x.device}"


def _assert_facts(op: LinearOperator) -> None:
    assert isinstance(op, LinearOperator)
    assert isinstance(op.rows, Axes), "rows must be Axes"
    assert isinstance(op.cols, Axes), "cols must be Axes"
    assert op.shape == (op.rows.size, op.cols.size), f"shape {op.shape} must be the sizes of {op.rows}, {op.cols}"
    assert op.dtype in TOLERANCE, f"dtype must be float32 or float64, got {op.dtype}"
    assert not (op.device.type == "cuda" and op.device.index is None), "a CUDA device must carry its index"
    assert isinstance(op.symmetric, bool), "symmetric must be a bool"
    assert type(op).__name__ in repr(op), "repr must name the class"


def _assert_products(op: LinearOperator, matrix: Tensor, tol: float, seed: int) -> None:
    for k in (0, 1, 3):
        x = _vectors(op.cols, k, op, seed + k)
        kept = x.clone()
        product = op.matmat(x)
        _assert_kind(product, op, (op.rows.size, k), f"matmat of {k} columns")
        assert_close(product, matrix @ x, _size(matrix) * _size(x), tol, f"matmat of {k} columns and dense @ x")
        product += 1.0
        assert torch.equal(x, kept), "matmat must neither change its argument nor return a view of it"
        again = op.matmat(x)
        assert_close(again, matrix @ x, _size(matrix) * _size(x), tol, "matmat, called again after its result changed,")
    x = _vectors(op.cols, 3, op, seed)
    scale = _size(matrix) * _size(x)
    _assert_kind(op.matvec(x[:, 0]), op, (op.rows.size,), "matvec")
    assert_close(op.matvec(x[:, 0]), op.matmat(x)[:, 0], scale, tol, "matvec and the column of matmat")
    assert_close(op @ x, op.matmat(x), scale, tol, "A @ X and matmat")
    assert_close(op @ x[:, 0], op.matvec(x[:, 0]), scale, tol, "A @ x and matvec")
    strided = _vectors(op.cols, 6, op, seed)[:, ::2]
    assert_close(op @ strided, op @ strided.contiguous(), _size(matrix) * _size(strided), tol, "strided and packed X")


def _assert_adjoint(op: LinearOperator, matrix: Tensor, tol: float, seed: int) -> None:
    adjoint = op.adjoint()
    assert adjoint.shape == op.shape[::-1], f"the adjoint of shape {op.shape} has shape {adjoint.shape}"
    assert (adjoint.rows, adjoint.cols) == (op.cols, op.rows), "the adjoint must swap rows and cols"
    assert (adjoint.dtype, adjoint.device) == (op.dtype, op.device), "the adjoint must keep dtype and device"
    assert adjoint.symmetric == op.symmetric, "the adjoint must be symmetric where the operator is"
    x, y = _vectors(op.cols, 3, op, seed), _vectors(op.rows, 3, op, seed + 1)
    scale = _size(matrix) * _size(x) * _size(y)
    left, right = (op @ x).double().mT @ y.double(), x.double().mT @ (op._adjoint_matmat(y)).double()
    assert_close(left, right, scale, tol, "⟨A x, y⟩ and ⟨x, Aᵀ y⟩")
    _assert_kind(op.T @ y, op, (op.cols.size, 3), "A.T @ Y")
    assert_close(op.T @ y, matrix.mT @ y, _size(matrix) * _size(y), tol, "A.T @ Y and dense.T @ Y")
    assert_close(y.mT @ op, y.mT @ matrix, _size(matrix) * _size(y), tol, "Y.T @ A and Y.T @ dense")
    assert_close(y[:, 0] @ op, matrix.mT @ y[:, 0], _size(matrix) * _size(y), tol, "y @ A and dense.T @ y")
    assert_close(op.T.dense(), matrix.mT, _size(matrix), tol, "A.T.dense() and dense.T")
    assert_close(op.T.T @ x, op @ x, _size(matrix) * _size(x), tol, "A.T.T @ X and A @ X")


def _assert_linear(op: LinearOperator, matrix: Tensor, tol: float, seed: int) -> None:
    x, y = _vectors(op.cols, 2, op, seed + 2), _vectors(op.cols, 2, op, seed + 3)
    scale = _size(matrix) * (2.5 * _size(x) + _size(y))
    assert_close(op @ (2.5 * x - y), 2.5 * (op @ x) - op @ y, scale, tol, "A (2.5 x − y) and 2.5 A x − A y")


def _assert_algebra(op: LinearOperator, matrix: Tensor, tol: float, seed: int) -> None:
    other = gaussian(*op.shape, rng=generator(seed + 4), dtype=op.dtype, device=op.device)
    square = gaussian(op.cols.size, 3, rng=generator(seed + 5), dtype=op.dtype, device=op.device)
    named = Dense(other, op.rows, op.cols)
    right = Dense(square, op.cols, Axes(three=3))
    one = Identity(op.cols, dtype=op.dtype, device=op.device)
    expected = {
        "A + B": (op + named, matrix + other),
        "A - B": (op - named, matrix - other),
        "B - A": (named - op, other - matrix),
        "-A": (-op, -matrix),
        "2 * A": (2 * op, 2 * matrix),
        "A * 0.5": (op * 0.5, matrix * 0.5),
        "A / 4": (op / 4, matrix / 4),
        "A @ B": (op @ right, matrix @ square),
        "A @ I": (op @ one, matrix),
        "A @ A.T": (op @ op.T, matrix @ matrix.mT),
        "sum of A, A": (sum([op, op]), 2 * matrix),
    }
    scale = (1 + _size(matrix)) * (1 + _size(matrix) + _size(other) + _size(square))
    for name, (result, wanted) in expected.items():
        _assert_kind(result.dense(), op, tuple(wanted.shape), name)
        assert_close(result.dense(), wanted, scale, tol, f"{name} and its matrix")
        if result.symmetric:
            assert_close(wanted, wanted.mT, scale, tol, f"{name}, held to be symmetric, and its transpose")
    assert (op @ op.T).symmetric, "A @ A.T must be known to be symmetric"
    assert (2 * op).symmetric == op.symmetric, "a multiple must be symmetric where the operator is"


def _assert_refusals(op: LinearOperator) -> None:
    n = op.cols.size
    wrong_size = torch.zeros((n + 1, 2), dtype=op.dtype, device=op.device)
    with _must_refuse(ValueError, "a matrix with a wrong number of rows"):
        op.matmat(wrong_size)
    with _must_refuse(ValueError, "a vector of wrong length"):
        op.matvec(wrong_size[:, 0])
    with _must_refuse(ValueError, "a tensor with three axes"):
        op @ torch.zeros((n, 2, 2), dtype=op.dtype, device=op.device)
    other_dtype = torch.float32 if op.dtype == torch.float64 else torch.float64
    with _must_refuse(TypeError, "another dtype"):
        op @ torch.zeros((n, 2), dtype=other_dtype, device=op.device)
    with _must_refuse(ValueError, "a product with an operator of another size"):
        op @ Identity(n + 1, dtype=op.dtype, device=op.device)
    with _must_refuse(TypeError, "a product with an operator of another dtype"):
        op @ Identity(op.cols, dtype=other_dtype, device=op.device)


class _must_refuse:
    """Like pytest.raises, but a missing or different error is an AssertionError naming what was accepted."""

    def __init__(self, kind: type[Exception], what: str) -> None:
        self.kind, self.what = kind, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"{self.what} must be refused with {self.kind.__name__}, and was accepted"
        assert isinstance(error, self.kind), f"{self.what} must raise {self.kind.__name__}, got {error!r}"
        assert len(str(error)) > 30, f"the error for {self.what} must say what to do, got {error!r}"
        return True
