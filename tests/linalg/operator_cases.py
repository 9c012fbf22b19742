"""One small example of every concrete operator, each with its matrix made another way."""

from collections.abc import Callable

import torch
from torch import Tensor

from gramscope.base.axes import Axes
from gramscope.base.rng import gaussian, generator
from gramscope.linalg import (
    Dense,
    Diagonal,
    Function,
    HadamardGram,
    Identity,
    Kronecker,
    LinearOperator,
    LowRank,
)

Case = Callable[[torch.dtype, str], tuple[LinearOperator, Tensor]]


def matrix(rows: int, cols: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    return gaussian(rows, cols, rng=generator(seed), dtype=dtype, device=device)


def with_spectrum(values: Tensor, seed: int = 100) -> Dense:
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    n = len(values)
    basis = torch.linalg.qr(matrix(n, n, torch.float64, seed=seed)).Q
    whole = (basis * values.double()) @ basis.mT
    return Dense(((whole + whole.mT) / 2).to(values.dtype), symmetric=True)


def _dense(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a = matrix(6, 4, dtype, device)
    return Dense(a, Axes(example=3, output=2), Axes(parameter=4)), a


def _dense_symmetric(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a = matrix(5, 5, dtype, device)
    return Dense(a + a.mT, Axes(example=5), symmetric=True), a + a.mT


def _identity(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    return Identity(Axes(unit=4), dtype=dtype, device=device), torch.eye(4, dtype=dtype, device=device)


def _zero(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    left, right = (torch.ones(n, 0, dtype=dtype, device=device) for n in (3, 5))
    return LowRank(left, right, cols=Axes(unit=5)), torch.zeros((3, 5), dtype=dtype, device=device)


def _zero_square(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    return 0.0 * Identity(3, dtype=dtype, device=device), torch.zeros((3, 3), dtype=dtype, device=device)


def _diagonal(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    d = matrix(5, 1, dtype, device)[:, 0]
    return Diagonal(d, Axes(unit=5)), torch.eye(5, dtype=dtype, device=device) * d


def _low_rank(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    u, v = matrix(6, 2, dtype, device), matrix(4, 2, dtype, device, seed=1)
    return LowRank(u, v), u @ v.mT


def _low_rank_symmetric(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    u, s = matrix(6, 2, dtype, device), matrix(2, 1, dtype, device, seed=1)[:, 0]
    return LowRank(u, weights=s, rows=Axes(example=6)), (u * s) @ u.mT


def _kronecker_two(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a, b = matrix(3, 2, dtype, device), matrix(2, 4, dtype, device, seed=1)
    op = Kronecker(Dense(a, Axes(out=3), Axes(unit=2)), Dense(b, Axes(time=2), Axes(lag=4)))
    return op, torch.kron(a, b)


def _kronecker_three(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a, b, u = (matrix(3, 2, dtype, device, seed=s) for s in range(3))
    op = Kronecker(a, Dense(b).T, LowRank(u))
    return op, torch.kron(torch.kron(a, b.mT.contiguous()), u @ u.mT)


def _kronecker_symmetric(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    u, s = matrix(3, 2, dtype, device), matrix(2, 1, dtype, device)[:, 0]
    return Kronecker(LowRank(u), Diagonal(s)), torch.kron(u @ u.mT, torch.diag(s))


def _hadamard_dense(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    v, u, a = matrix(5, 2, dtype, device), matrix(4, 2, dtype, device, 1), matrix(5, 4, dtype, device, 2)
    return HadamardGram(v, a, u, block=2), (v @ u.mT) * a


def _hadamard_thin(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    v, s = matrix(9, 2, dtype, device), matrix(9, 3, dtype, device, seed=1)
    return HadamardGram(v, LowRank(s, rows=Axes(example=9)), block=4), (v @ v.mT) * (s @ s.mT)


def _hadamard_thick(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    v, u = matrix(4, 7, dtype, device), matrix(5, 7, dtype, device, seed=1)
    s, t = matrix(4, 2, dtype, device, seed=2), matrix(5, 2, dtype, device, seed=3)
    return HadamardGram(v, LowRank(s, t), u, block=3), (v @ u.mT) * (s @ t.mT)


def _function(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    op = Function(lambda x: x.cumsum(0), lambda y: y.flip(0).cumsum(0).flip(0), 5, 5, dtype=dtype, device=device)
    return op, torch.ones((5, 5), dtype=dtype, device=device).tril()


def _function_symmetric(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    op = Function(lambda x: x.flip(0), None, 4, 4, dtype=dtype, device=device, symmetric=True)
    return op, torch.eye(4, dtype=dtype, device=device).flip(0)


def _sum(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    (a, a_matrix), (b, b_matrix) = _dense(dtype, device), (_low_rank(dtype, device))
    return a + b - 3 * a, b_matrix - 2 * a_matrix


def _sum_with_transpose(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a = Dense(matrix(4, 4, dtype, device))
    return 0.5 * a + Identity(4, dtype=dtype, device=device) + 0.5 * a.T, (
        torch.eye(4, dtype=dtype, device=device) + (a.matrix + a.matrix.mT) / 2
    )


def _scaled(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a, a_matrix = _dense(dtype, device)
    return torch.tensor(-1.5, dtype=dtype, device=device) * a, -1.5 * a_matrix


def _composition(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a, b, c = (Dense(matrix(3, 3, dtype, device, seed=s)) for s in range(3))
    return a @ b.T @ c, a.matrix @ b.matrix.mT @ c.matrix


def _composition_symmetric(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    (a, a_matrix), (s, s_matrix) = _dense(dtype, device), _diagonal(dtype, device)
    head = Dense(matrix(4, 5, dtype, device, seed=7), a.cols, s.rows)
    product = a_matrix @ head.matrix
    return (a @ head) @ s @ (a @ head).T, product @ s_matrix @ product.mT


def _adjoint(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    a, a_matrix = _kronecker_two(dtype, device)
    return a.T, a_matrix.mT


def _empty(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    return Dense(matrix(0, 3, dtype, device)), torch.zeros((0, 3), dtype=dtype, device=device)


def _kronecker_empty(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    return Kronecker(matrix(2, 3, dtype, device), matrix(2, 0, dtype, device)), torch.zeros(
        (4, 0), dtype=dtype, device=device
    )


def _hadamard_empty(dtype: torch.dtype, device: str) -> tuple[LinearOperator, Tensor]:
    v, s = matrix(3, 0, dtype, device), matrix(3, 2, dtype, device)
    return HadamardGram(v, LowRank(s)), torch.zeros((3, 3), dtype=dtype, device=device)


CASES: dict[str, Case] = {
    name.removeprefix("_"): case
    for name, case in list(globals().items())
    if name.startswith("_") and not name.startswith("__") and callable(case)
}
