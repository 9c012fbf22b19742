"""Where a nearly-kernel machine gets its kernel and meta kernel from, and how the meta kernel is contracted.

A prediction needs of ``μ_{012}`` three contractions, and never the tensor itself:

    curvature(x, Z) = Σ_ab μ(x; a, b) Z^ab
    transport(x, Z) = Σ_ab μ(a; x, b) Z^ab
    applied(x, x', v) = Σ_a μ(x; x', a) v^a

with a, b over the training set.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from gramscope.base.checks import check_finite
from gramscope.base.errors import InputError

Array: TypeAlias = NDArray[Any]  # float64 in all we make; a user's kernel may give another dtype
Examples: TypeAlias = Any  # whatever the user's kernel takes: rows of an array, or inputs of a network
Kernel = Callable[[Examples, Examples], Array]
MetaKernel = Callable[[Examples, Examples, Examples], Array]
ENTRIES = 2**24  # of a dense meta kernel held at a time


@runtime_checkable
class MetaKernelSource(Protocol):
    """Kernel and contracted meta kernel; of a network ``gramscope.kernels.TangentKernels`` is one.

    Its rows are (example, output), flattened.
    """

    def __call__(self, x: Examples, x2: Examples) -> Array: ...
    def curvature(self, x: Examples, train: Examples, pairs: Array) -> Array: ...
    def transport(self, x: Examples, train: Examples, pairs: Array) -> Array: ...
    def applied(self, x: Examples, x2: Examples, train: Examples, vector: Array) -> Array: ...


class Plain:
    """A kernel without a meta kernel: kernel regression."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, x: Examples, x2: Examples) -> Array:
        found = np.asarray(self.kernel(x, x2), dtype=np.float64)
        if found.shape != (len(x), len(x2)):
            raise InputError(f"kernel(x, x2) must have shape ({len(x)}, {len(x2)}), got {found.shape}.")
        return found

    def curvature(self, x: Examples, train: Examples, pairs: Array) -> Array:
        return np.zeros(len(x))

    def transport(self, x: Examples, train: Examples, pairs: Array) -> Array:
        return np.zeros(len(x))

    def applied(self, x: Examples, x2: Examples, train: Examples, vector: Array) -> Array:
        return np.zeros((len(x), len(x2)))


class Product(Plain):
    """``μ_{012} = ε k_01 k_02``, the meta kernel of ``ψ_jk = φ_j φ_k``: a linear model bent by ``z + ε z²/2``."""

    def __init__(self, kernel: Kernel, epsilon: float) -> None:
        super().__init__(kernel)
        self.epsilon = epsilon

    def curvature(self, x: Examples, train: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        k = self(x, train)
        return self.epsilon * ((k @ pairs) * k).sum(axis=1)

    def transport(self, x: Examples, train: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        # k(x, A) times a vector: Π takes all of that away again, but for a ridge.
        within = (self(train, train) * pairs).sum(axis=1)
        found: Array = self.epsilon * self(x, train) @ within
        return found

    def applied(
        self, x: Examples, x2: Examples, train: Examples, vector: Float[np.ndarray, " N"]
    ) -> Float[np.ndarray, "n m"]:
        return self.epsilon * self(x, x2) * (self(x, train) @ vector)[:, None]


class DenseMetaKernel(Plain):
    """A meta kernel given as a function; its entries are computed for some examples at a time."""

    def __init__(self, kernel: Kernel, meta_kernel: MetaKernel) -> None:
        super().__init__(kernel)
        self._meta_kernel = meta_kernel

    def _meta(self, x0: Examples, x1: Examples, x2: Examples) -> Array:
        found = np.asarray(self._meta_kernel(x0, x1, x2), dtype=np.float64)
        shape = (len(x0), len(x1), len(x2))
        if found.shape != shape:
            raise InputError(f"meta_kernel(x0, x1, x2) must have shape {shape}, got {found.shape}.")
        check_finite(found, "meta_kernel(x0, x1, x2)", "Check the function.")
        return found

    def _parts(self, x: Examples, others: int) -> Iterator[Examples]:
        size = max(1, ENTRIES // max(1, others))
        for start in range(0, len(x), size):
            yield x[start : start + size]

    def curvature(self, x: Examples, train: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        parts = self._parts(x, len(train) ** 2)
        return np.concatenate([np.einsum("nab,ab->n", self._meta(part, train, train), pairs) for part in parts])

    def transport(self, x: Examples, train: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        parts = self._parts(x, len(train) ** 2)
        return np.concatenate([np.einsum("anb,ab->n", self._meta(train, part, train), pairs) for part in parts])

    def applied(
        self, x: Examples, x2: Examples, train: Examples, vector: Float[np.ndarray, " N"]
    ) -> Float[np.ndarray, "n m"]:
        parts = self._parts(x, len(x2) * len(train))
        return np.concatenate([self._meta(part, x2, train) @ vector for part in parts])


class Given(Plain):
    """A precomputed meta kernel of some examples: ``μ(x; A, A)`` and ``μ(A; x, A)``, A the training set."""

    def __init__(self, kernel: Kernel, n: int, open_first: object, open_second: object, rows: int) -> None:
        super().__init__(kernel)
        self.open_first = _entries("meta", open_first, (rows, n, n))
        self.open_second = _entries("meta_transport", open_second, (n, rows, n))

    def curvature(self, x: Examples, train: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        found: Array = np.einsum("nab,ab->n", self.open_first, pairs)
        return found

    def transport(self, x: Examples, train: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        found: Array = np.einsum("anb,ab->n", self.open_second, pairs)
        return found

    def applied(
        self, x: Examples, x2: Examples, train: Examples, vector: Float[np.ndarray, " N"]
    ) -> Float[np.ndarray, "n m"]:
        # Other examples of the same number have entries of the same shape, so only values can tell them apart.
        if not all(np.array_equal(given, train) for given in (x, x2)):
            raise InputError(
                "with meta_kernel='precomputed' the trained and effective kernels must be those of the training set, "
                "because fit received only their meta kernel; got other examples. Give meta_kernel as a function for "
                "these."
            )
        found: Array = self.open_first @ vector
        return found


def _entries(name: str, given: object, shape: tuple[int, int, int]) -> Array:
    found = np.asarray(given, dtype=np.float64)
    if found.shape != shape:
        raise InputError(f"{name} must have shape {shape}, got {found.shape}.")
    check_finite(found, name, "Check how it was computed.")
    return found
