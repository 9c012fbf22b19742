"""The cubic model: features, meta features and meta-meta features, and its training seen from the outputs alone.

    z_i(x; θ) = Σ_μ θ_μ φ_iμ + ½ Σ_μν θ_μ θ_ν ψ_iμν + ⅙ Σ_μνρ θ_μ θ_ν θ_ρ Ψ_iμνρ                               (11.151)

A network at finite width is such a model up to order 1/n: its kernel moves by the meta kernel (dNTK), and that by the
two meta-meta kernels (ddNTKs), which stand still at this order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from gramscope.base.checks import check_count, check_finite, check_number
from gramscope.base.errors import InputError
from gramscope.base.results import Result, as_column

Array = NDArray[Any]
Features = Callable[[Array], Array]
Numbers: TypeAlias = Any  # an array or a tensor as it is given; held as an array of float64


@dataclass(frozen=True, eq=False, repr=False)
class CubicKernels(Result):
    """A cubic model as its outputs know it: ``outputs`` (U,), kernel, meta kernel and the two meta-meta kernels.

    The index is (example, output), flattened. Of a network: outputs ``f``, ``kernel`` H, ``meta`` dH, ``first`` and
    ``second`` the ddNTKs of ``gramscope.kernels.DDNTK(...).dense()``, all with one learning-rate tensor. Arrays or
    tensors.

    Reference: PDLT (arXiv:2106.10165) equations (11.148), (11.149), (11.153).

    Example:
        >>> import numpy as np
        >>> from gramscope.theory.cubic import CubicKernels
        >>> plain = CubicKernels(np.zeros(1), np.ones((1, 1)), *(np.zeros((1,) * k) for k in (3, 4, 4)))
        >>> plain.train(np.array([2.0]), lr=1.0).outputs                              # a kernel that stands still
        array([2.])
    """

    outputs: Numbers
    kernel: Numbers
    meta: Numbers
    first: Numbers
    second: Numbers

    def __post_init__(self) -> None:
        given = {name: np.asarray(as_column(getattr(self, name)), np.float64) for name in self.__dataclass_fields__}
        size = given["outputs"].size
        for name, axes in (("outputs", 1), ("kernel", 2), ("meta", 3), ("first", 4), ("second", 4)):
            array = given[name] if name != "outputs" else given[name].reshape(-1)
            if array.shape != (size,) * axes:
                raise InputError(
                    f"{name} must have shape {(size,) * axes}, the {size} outputs on each axis, got {array.shape}. "
                    "Flatten (example, output) to one axis."
                )
            check_finite(array, name, "Check how it was computed.")
            object.__setattr__(self, name, array)

    def step(self, residual: Float[np.ndarray, " t"], lr: float) -> "CubicKernels":
        """All five after a gradient step, ``residual`` = ∂loss/∂z of the first t outputs, on which it is taken.

        ``z ← z - η H ε + ½ η² dH εε - ⅙ η³ ddI εεε``,
        ``H_12 ← H_12 - η (dH_12j + dH_21j) ε_j + ½ η² (ddI_12jk + ddI_21jk + 2 ddII_12jk) ε_j ε_k``,
        ``dH_012 ← dH_012 - η (ddI_012j + ddII_012j + ddII_021j) ε_j``; the ddNTKs stay.
        """
        residual = np.asarray(residual, dtype=np.float64)
        e, t = lr * residual, len(residual)
        first = self.first[..., :t] @ e  # (0, 1, 2)
        second = self.second[..., :t] @ e
        twice = first[..., :t] @ e
        z = self.outputs - self.kernel[:, :t] @ e + 0.5 * (self.meta[:, :t, :t] @ e) @ e - twice[:, :t] @ e / 6
        velocity = self.meta[..., :t] @ e
        kernel = self.kernel - velocity - velocity.T + 0.5 * (twice + twice.T) + second[..., :t] @ e
        meta = self.meta - first - second - second.transpose(0, 2, 1)
        return CubicKernels(z, (kernel + kernel.T) / 2, meta, self.first, self.second)

    def train(self, y: Numbers, lr: float, steps: int = 100_000, tol: float = 1e-12) -> "CubicKernels":
        """Gradient descent on ``½ Σ (z - y)²`` of the first ``len(y)`` outputs, until they are within ``tol`` of y.

        The other outputs are the prediction. This is the answer to order 1/n for a trained network: the terms that are
        left out are of the order of a fourth derivative of the outputs.
        """
        lr, tol = check_number(lr, "lr", above=0.0), check_number(tol, "tol", above=0.0)
        check_count(steps, "steps")
        y = np.asarray(y, dtype=np.float64).reshape(-1)
        if not 1 <= len(y) <= len(self.outputs):
            raise InputError(f"y must hold 1 to {len(self.outputs)} targets, those of the first outputs, got {len(y)}.")
        now = self
        for _ in range(steps):
            residual = now.outputs[: len(y)] - y
            size = float(np.abs(residual).max())
            if size <= tol:
                return now
            if not size < 1e6 * (1 + float(np.abs(y).max())):
                raise InputError(f"training must converge, but it ran away with lr={lr:g}. Lower lr.")
            now = now.step(residual, lr)
        raise InputError(
            f"gradient descent must come within tol={tol:g} of y in steps={steps}, but the error is still {size:.3g}. "
            "Allow more steps, or a larger lr."
        )


@dataclass(frozen=True)
class CubicModel:
    """``z = θ φ + ½ θ ψ θ + ⅙ Ψ θ θ θ`` with functions φ (n, i, p), ψ (n, i, p, p) and Ψ (n, i, p, p, p) of x.

    ψ and Ψ must be symmetric in their parameter axes. The small parameter is inside them, as in the text.

    Reference: PDLT (arXiv:2106.10165) equations (11.151), (11.152).

    Example:
        >>> import numpy as np
        >>> from gramscope.theory.cubic import CubicModel
        >>> cube = CubicModel(*[lambda x, k=k: x.reshape(-1, 1, *[1] * k) for k in (1, 2, 3)])
        >>> cube(np.array([[6.0]]), np.array([1.0]))                                  # 6 + 3 + 1
        array([[10.]])
    """

    features: Features
    meta_features: Features
    meta_meta_features: Features

    def _tensors(self, x: Array) -> tuple[Array, Array, Array]:
        found = tuple(
            np.asarray(function(x), dtype=np.float64)
            for function in (self.features, self.meta_features, self.meta_meta_features)
        )
        if found[0].ndim != 3 or len(found[0]) != len(x):
            raise InputError(f"features(x) must have shape ({len(x)}, outputs, parameters), got {found[0].shape}.")
        n, outputs, p = found[0].shape
        for name, array, axes in (("meta_features", found[1], 2), ("meta_meta_features", found[2], 3)):
            if array.shape != (n, outputs, *[p] * axes):
                raise InputError(f"{name}(x) must have shape {(n, outputs, *[p] * axes)}, got {array.shape}.")
            swapped = [array.swapaxes(2, axis) for axis in range(3, 2 + axes)]
            if any(np.abs(array - other).max() > 1e-10 * np.abs(array).max() for other in swapped):
                raise InputError(f"{name}(x) must be symmetric in its {axes} parameter axes. Pass its symmetric part.")
        return found[0], found[1], found[2]

    def __call__(self, x: Array, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, "n i"]:
        """``z_i(x; θ)`` (11.151)."""
        phi, psi, third = self._tensors(x)
        theta = _checked_parameters(parameters, phi)
        return (phi + 0.5 * psi @ theta + third @ theta @ theta / 6) @ theta

    def effective_features(self, x: Array, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, "n i p"]:
        """``∂z/∂θ = φ + ψ θ + ½ Ψ θ θ``: they move as a quadratic model does."""
        phi, psi, third = self._tensors(x)
        theta = _checked_parameters(parameters, phi)
        return phi + psi @ theta + 0.5 * third @ theta @ theta

    def effective_meta_features(self, x: Array, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, "n i p p"]:
        """``∂²z/∂θ∂θ = ψ + Ψ θ``: they move as a linear model does."""
        phi, psi, third = self._tensors(x)
        return psi + third @ _checked_parameters(parameters, phi)

    def kernels(self, x: Array) -> CubicKernels:
        """Kernel, meta kernel and meta-meta kernels at θ = 0 over (example, output), flattened."""
        phi, psi, third = self._tensors(x)
        rows = phi.shape[0] * phi.shape[1]
        phi, psi, third = (array.reshape(rows, *array.shape[2:]) for array in (phi, psi, third))
        turned = psi @ phi.T  # (i, p, j)
        meta = np.einsum("jp,ipk->ijk", phi, turned)
        first = np.einsum("ipqr,jp,kq,lr->ijkl", third, phi, phi, phi, optimize=True)
        return CubicKernels(np.zeros(rows), phi @ phi.T, meta, first, np.einsum("ipk,jpl->ijkl", turned, turned))


def _checked_parameters(parameters: object, phi: Array) -> Array:
    theta = np.asarray(parameters, dtype=np.float64)
    if theta.shape != phi.shape[2:]:
        raise InputError(f"parameters must have shape {phi.shape[2:]}, one for each feature, got {theta.shape}.")
    return theta
