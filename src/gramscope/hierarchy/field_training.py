"""Gradient descent in the pre-activation field of one hidden ReLU layer; arrays in, arrays out.

A weight-space step ``W ← W − η Σ_ν b_ν e_ν x_νᵀ`` moves the field ``h_μ = W x_μ`` by inner products of inputs only,

    h_μ ← h_μ − η Σ_ν Q_{μν} D_ν Aᵀ e_ν,      Q_{μν} = x_μ·x_ν,      e = A relu(h) − y,

for any step size and whatever the masks do (after arXiv:2606.09744; the page on weight-free training derives it).
Arrays are numpy float64; a field has examples in rows and hidden units in columns.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64, Int
from numpy import ndarray

from gramscope.base.checks import check_count, check_finite, check_lr, check_symmetric
from gramscope.base.errors import InputError
from gramscope.base.rounding import Rounding, singular_floor
from gramscope.linalg import Dense, eigenvalues_top

# Eigenvalues below this part of the largest count as rounding: Gram matrices often come from float32 features.
_PSD_TOLERANCE = 1e-6
# Up to this size the whole spectrum costs less than the overhead of an iteration.
_SMALL = 256

Rows: TypeAlias = slice | ndarray  # which examples a batch has


def drive(
    field: Float64[ndarray, "n N"], readout: Float64[ndarray, "C N"], residual: Float64[ndarray, "n C"]
) -> Float64[ndarray, "n N"]:
    """What each example sends into the field: ``D_ν Aᵀ e_ν``, the gradient of ``½ Σ e²`` at the pre-activations.

    >>> drive(np.array([[1.0, -1.0]]), np.array([[0.5, 0.5]]), np.array([[2.0]])).tolist()
    [[1.0, 0.0]]
    """
    return (residual @ readout) * (field > 0)


def field_step(
    field: Float64[ndarray, "n N"],
    overlap: Float64[ndarray, "n n"],
    readout: Float64[ndarray, "C N"],
    residual: Float64[ndarray, "n C"],
    lr: float,
) -> Float64[ndarray, "n N"]:
    """One gradient step of ``½ Σ e²`` in the pre-activation field: ``h_μ − η Σ_ν Q_{μν} D_ν Aᵀ e_ν``; exact for any η.

    A unit that is off for μ still moves there, by what the other examples send, and can come back on.

    >>> h, Q = np.array([[1.0], [-0.25]]), np.ones((2, 2))
    >>> field_step(h, Q, np.ones((1, 1)), np.array([[-1.0], [0.0]]), 0.5).tolist()
    [[1.5], [0.25]]
    """
    _check_step(field, overlap, readout, residual, lr)
    return field - lr * (overlap @ drive(field, readout, residual))


def activation_step(
    activations: Float64[ndarray, "n N"],
    overlap: Float64[ndarray, "n n"],
    readout: Float64[ndarray, "C N"],
    residual: Float64[ndarray, "n C"],
    lr: float,
) -> Float64[ndarray, "n N"]:
    """One step of the paper's activation-only closure, ``relu(x_μ − η Σ_ν Q_{μν} P_{μν} Aᵀ e_ν)`` with ``P = D_μ D_ν``.

    These are the activation dynamics at fixed masks (arXiv:2606.09744), with masks read off ``x > 0``. An
    activation of 0 does not say how far below threshold the unit is, so a unit once off for an example stays off there
    for good. Until the first unit comes back on it equals :func:`field_step`.

    >>> x, Q = np.array([[1.0], [0.0]]), np.ones((2, 2))
    >>> activation_step(x, Q, np.ones((1, 1)), np.array([[-1.0], [0.0]]), 0.5).tolist()
    [[1.5], [0.0]]
    """
    _check_step(activations, overlap, readout, residual, lr)
    moved = activations - lr * (activations > 0) * (overlap @ drive(activations, readout, residual))
    return np.maximum(moved, 0.0)


def safe_rate(gram: Float64[ndarray, "n n"], readout: Float64[ndarray, "C N"], batch: int) -> float:
    """A step size at half of what is stable at fixed masks, for every batch of ``batch`` examples: ``1 / (λ |A|²)``.

    The kernel of a batch is ``Σ_i D_i Q D_i ⊗ a_i a_iᵀ ≤ λ_max(Q) |A|²`` whatever the masks, |A| the spectral norm,
    and ``λ_max`` of a batch is at most ``λ = min(λ_max(Q), batch · max_μ Q_{μμ})``.

    >>> safe_rate(np.diag([1.0, 4.0]), np.array([[0.5]]), batch=2)
    1.0
    """
    _check_array(gram, "gram", "(n, n)")
    _check_array(readout, "readout", "(C, N)")
    if gram.shape[0] != gram.shape[1]:
        raise InputError(f"gram must be square, the overlaps of n examples with themselves, got shape {gram.shape}.")
    check_count(batch, "batch")
    top = min(largest_eigenvalue(gram), batch * float(gram.diagonal().max()))
    bound = top * float(np.linalg.norm(readout, 2)) ** 2
    return 1.0 / bound if bound > 0 else 1.0


def _check_step(field: ndarray, overlap: ndarray, readout: ndarray, residual: ndarray, lr: float) -> None:
    given = (("field", field), ("overlap", overlap), ("readout", readout), ("residual", residual))
    for (name, array), wanted in zip(given, ("(n, N)", "(n, n)", "(C, N)", "(n, C)"), strict=True):
        _check_array(array, name, wanted)
    (n, width), outputs = field.shape, len(readout)
    sizes = {"overlap": (n, n), "readout": (outputs, width), "residual": (n, outputs)}
    for name, array in given[1:]:
        if array.shape != sizes[name]:
            raise InputError(
                f"{name} must have shape {sizes[name]} for a field of {n} examples and {width} units with {outputs} "
                f"outputs, got {array.shape}. A field has examples in rows and hidden units in columns."
            )
    check_lr(lr)


def _check_array(array: object, name: str, wanted: str) -> None:
    if not isinstance(array, ndarray) or array.ndim != 2 or array.size == 0:
        got = f"shape {array.shape}" if isinstance(array, ndarray) else type(array).__name__
        raise InputError(f"{name} must be a numpy array of shape {wanted} with entries, got {got}.")
    check_finite(array, name, "Lower lr, or clean the data.")


def largest_eigenvalue(gram: Float64[ndarray, "n n"]) -> float:
    if len(gram) <= _SMALL:
        return float(np.linalg.eigvalsh(gram)[-1])
    top = eigenvalues_top(Dense(torch.from_numpy(np.ascontiguousarray(gram)), symmetric=True), 1, tol=1e-3)
    # A Ritz value lies below the eigenvalue by no more than its residual.
    return float(top.values[0] + top.residuals[0])


def check_gram(gram: Float64[ndarray, "n n"], what: str) -> None:
    """Raise unless ``gram`` is symmetric and positive semi-definite, up to rounding."""
    same_order = "Pass the overlaps of the training examples with themselves, in one order for rows and columns."
    check_symmetric(gram, what, _PSD_TOLERANCE, same_order)
    slack = _PSD_TOLERANCE * max(largest_eigenvalue(gram), 0.0)
    try:
        # A Cholesky factor exists just if no eigenvalue lies below -slack; it costs a tenth of the spectrum.
        np.linalg.cholesky(gram + max(slack, np.finfo(float).tiny) * np.eye(len(gram)))
    except np.linalg.LinAlgError:
        least = float(np.linalg.eigvalsh(gram)[0])
        if least < -slack:
            raise InputError(
                f"{what} must be positive semi-definite, but its smallest eigenvalue is {least:.3g}. Use a positive "
                "kernel (distances are none), or clip the negative eigenvalues first."
            ) from None


def inverse_root(gram: Float64[ndarray, "n n"]) -> Float64[ndarray, "n n"]:
    """``Q^{-1/2}`` on the range of Q: with z standard normal, ``Q Q^{-1/2} z`` is Gaussian with covariance Q.

    Directions that are rounding carry no initial field: their coefficients would be rounding.
    """
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    matrix = torch.from_numpy(np.ascontiguousarray(gram))
    kept = values > max(1e-12 * values[-1], float(singular_floor(matrix, Rounding.of(matrix))))
    return (vectors[:, kept] / np.sqrt(values[kept])) @ vectors[:, kept].T


def places(
    stored: Float64[ndarray, "n d"], rows: Float64[ndarray, "m d"]
) -> tuple[Int[ndarray, " m"], Float64[ndarray, "fresh d"]]:
    """Where each of ``rows`` stands once those not yet stored are appended, and the appended rows, each once.

    >>> at, fresh = places(np.array([[1.0], [2.0]]), np.array([[2.0], [5.0], [5.0]]))
    >>> at.tolist(), fresh.tolist()
    ([1, 2, 2], [[5.0]])
    """
    n, both = len(stored), np.concatenate([stored, rows])
    _, first, inverse = np.unique(both, axis=0, return_index=True, return_inverse=True)
    at = first[inverse.reshape(-1)][n:]  # where each row stands for the first time
    fresh = np.unique(at[at >= n])
    return np.where(at < n, at, n + np.searchsorted(fresh, at)), both[fresh]


@dataclass
class Training:
    """A field under training: n examples trained on, then, where there are any, held-out rows that move along."""

    overlap: Float64[ndarray, "rows n"]
    field: Float64[ndarray, "rows N"]
    coefficients: Float64[ndarray, "n N"]
    readout: Float64[ndarray, "C N"]
    targets: Float64[ndarray, "rows C"]

    @property
    def n(self) -> int:
        return self.overlap.shape[1]

    def residual(self, rows: Rows) -> Float64[ndarray, "batch C"]:
        return np.maximum(self.field[rows], 0.0) @ self.readout.T - self.targets[rows]

    def loss(self) -> float:
        return self._mean_loss(slice(0, self.n))

    def held_loss(self) -> float | None:
        return self._mean_loss(slice(self.n, None)) if len(self.field) > self.n else None

    def sweep(self, batches: list[Rows], rate: float) -> int:
        """One pass, a step for each batch (indices or slices of the n examples); returns the number of mask flips."""
        flips = 0
        before = self.field[: self.n] > 0
        for rows in batches:
            residual = self.residual(rows)
            if not np.isfinite(residual).all():
                raise InputError(
                    f"training diverged with learning_rate={rate:.3g}: the outputs are no longer finite. Lower it; "
                    f"{safe_rate(self.overlap[: self.n], self.readout, self.n):.3g} is stable while no mask flips."
                )
            with np.errstate(over="ignore", invalid="ignore"):
                pull = rate * drive(self.field[rows], self.readout, residual)
                self.coefficients[rows] -= pull
                self.field -= self.overlap[:, rows] @ pull
            after = self.field[: self.n] > 0
            flips += int(np.count_nonzero(before != after))
            before = after
        return flips

    def _mean_loss(self, rows: slice) -> float:
        residual = self.residual(rows)
        return float(np.einsum("nc,nc->", residual, residual) / (2 * len(residual)))


def batches(n: int, size: int, rng: np.random.Generator | None) -> list[Rows]:
    """The examples of one pass in batches, in a new order if ``rng`` is given; slices where the order is kept."""
    if rng is None or size >= n:
        return [slice(start, min(start + size, n)) for start in range(0, n, size)]
    order = rng.permutation(n)
    return [order[start : start + size] for start in range(0, n, size)]


class EarlyStopping:
    """Says when a loss no longer falls, and keeps the coefficients of the best pass if asked to.

    The loss must fall below ``(1 − tol)`` times its value at the last progress within ``patience`` passes, so slow but
    steady progress is not cut off and the scale of y does not matter.
    """

    def __init__(self, tol: float | None, patience: int, best: Float64[ndarray, "n N"] | None, loss: float) -> None:
        self.tol, self.patience = tol, patience
        self.best = None if best is None else best.copy()
        self._least = self._reference = loss
        self._since = 0

    def stop(self, loss: float, coefficients: Float64[ndarray, "n N"]) -> bool:
        if self.best is not None and loss < self._least:
            self._least = loss
            self.best[...] = coefficients
        if self.tol is None:
            return False
        if loss < (1.0 - self.tol) * self._reference:
            self._reference, self._since = loss, 0
            return False
        self._since += 1
        return self._since >= self.patience
