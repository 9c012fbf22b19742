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
    """Kernel and contracted meta kernel between any examples and the training set."""

    def kernel(self, x: Examples, x2: Examples) -> Array: ...
    def curvature(self, x: Examples, pairs: Array) -> Array: ...
    def transport(self, x: Examples, pairs: Array) -> Array: ...
    def applied(self, x: Examples, x2: Examples, vector: Array) -> Array: ...


@runtime_checkable
class NetworkKernels(Protocol):
    """The kernels of a network, as :class:`gramscope.kernels.TangentKernels` has them."""

    def initial(self, x: Examples) -> Array: ...
    def __call__(self, x: Examples, x2: Examples) -> object: ...
    def curvature(self, x: Examples, train: Examples, pairs: Array) -> object: ...
    def transport(self, x: Examples, train: Examples, pairs: Array) -> object: ...
    def applied(self, x: Examples, x2: Examples, train: Examples, vector: Array) -> object: ...


class Plain:
    """A kernel without a meta kernel: kernel regression."""

    def __init__(self, kernel: Kernel, train: Examples) -> None:
        self._kernel, self.train = kernel, train

    def kernel(self, x: Examples, x2: Examples) -> Array:
        found = np.asarray(self._kernel(x, x2), dtype=np.float64)
        if found.shape != (len(x), len(x2)):
            raise InputError(f"kernel(x, x2) must have shape ({len(x)}, {len(x2)}), got {found.shape}.")
        return found

    def curvature(self, x: Examples, pairs: Array) -> Array:
        return np.zeros(len(x))

    def transport(self, x: Examples, pairs: Array) -> Array:
        return np.zeros(len(x))

    def applied(self, x: Examples, x2: Examples, vector: Array) -> Array:
        return np.zeros((len(x), len(x2)))


class Product(Plain):
    """``μ_{012} = ε k_01 k_02``, the meta kernel of ``ψ_jk = φ_j φ_k``: a linear model bent by ``z + ε z²/2``."""

    def __init__(self, kernel: Kernel, train: Examples, epsilon: float) -> None:
        super().__init__(kernel, train)
        self.epsilon = epsilon

    def curvature(self, x: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        k = self.kernel(x, self.train)
        return self.epsilon * ((k @ pairs) * k).sum(axis=1)

    def transport(self, x: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        # k(x, A) times a vector: Π takes all of that away again, but for a ridge.
        within = (self.kernel(self.train, self.train) * pairs).sum(axis=1)
        found: Array = self.epsilon * self.kernel(x, self.train) @ within
        return found

    def applied(self, x: Examples, x2: Examples, vector: Float[np.ndarray, " N"]) -> Float[np.ndarray, "n m"]:
        return self.epsilon * self.kernel(x, x2) * (self.kernel(x, self.train) @ vector)[:, None]


class DenseMetaKernel(Plain):
    """A meta kernel given as a function; its entries are computed for some examples at a time."""

    def __init__(self, kernel: Kernel, train: Examples, meta_kernel: MetaKernel) -> None:
        super().__init__(kernel, train)
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

    def curvature(self, x: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        a = self.train
        some = [np.einsum("nab,ab->n", self._meta(part, a, a), pairs) for part in self._parts(x, len(a) ** 2)]
        return np.concatenate(some)

    def transport(self, x: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        a = self.train
        some = [np.einsum("anb,ab->n", self._meta(a, part, a), pairs) for part in self._parts(x, len(a) ** 2)]
        return np.concatenate(some)

    def applied(self, x: Examples, x2: Examples, vector: Float[np.ndarray, " N"]) -> Float[np.ndarray, "n m"]:
        parts = self._parts(x, len(x2) * len(self.train))
        return np.concatenate([self._meta(part, x2, self.train) @ vector for part in parts])


class Given(Plain):
    """A precomputed meta kernel of some examples: ``μ(x; A, A)`` and ``μ(A; x, A)``, A the training set."""

    def __init__(self, kernel: Kernel, train: Examples, open_first: object, open_second: object, rows: int) -> None:
        super().__init__(kernel, train)
        n = len(train)
        self.open_first = _entries("meta", open_first, (rows, n, n))
        self.open_second = _entries("meta_transport", open_second, (n, rows, n))

    def curvature(self, x: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        found: Array = np.einsum("nab,ab->n", self.open_first, pairs)
        return found

    def transport(self, x: Examples, pairs: Float[np.ndarray, "N N"]) -> Float[np.ndarray, " n"]:
        found: Array = np.einsum("anb,ab->n", self.open_second, pairs)
        return found

    def applied(self, x: Examples, x2: Examples, vector: Float[np.ndarray, " N"]) -> Float[np.ndarray, "n m"]:
        # Other examples of the same number have entries of the same shape, so only values can tell them apart.
        if not all(np.array_equal(given, self.train) for given in (x, x2)):
            raise InputError(
                "with meta_kernel='precomputed' the trained and effective kernels must be those of the training set, "
                "whose meta kernel fit was given; got other examples. Give meta_kernel as a function for these."
            )
        found: Array = self.open_first @ vector
        return found


def _entries(name: str, given: object, shape: tuple[int, int, int]) -> Array:
    found = np.asarray(given, dtype=np.float64)
    if found.shape != shape:
        raise InputError(f"{name} must have shape {shape}, got {found.shape}.")
    check_finite(found, name, "Check how it was computed.")
    return found


class TangentMetaKernel:
    """A network at initialisation (``gramscope.kernels.TangentKernels``): rows are (example, output) flattened."""

    def __init__(self, kernels: NetworkKernels, train: Examples) -> None:
        self.kernels, self.train = kernels, train

    def kernel(self, x: Examples, x2: Examples) -> Array:
        return np.asarray(self.kernels(x, x2))

    def curvature(self, x: Examples, pairs: Array) -> Array:
        return np.asarray(self.kernels.curvature(x, self.train, pairs)) if pairs.any() else self._zeros(x)

    def transport(self, x: Examples, pairs: Array) -> Array:
        return np.asarray(self.kernels.transport(x, self.train, pairs)) if pairs.any() else self._zeros(x)

    def applied(self, x: Examples, x2: Examples, vector: Array) -> Array:
        return np.asarray(self.kernels.applied(x, x2, self.train, vector))

    def _zeros(self, x: Examples) -> Array:
        return np.zeros(self.kernels.initial(x).size)
