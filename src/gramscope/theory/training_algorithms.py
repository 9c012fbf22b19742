"""What distinguishes one training algorithm from another at first order in ε: two matrices over the training set."""

import numpy as np
import torch
from jaxtyping import Float

from gramscope.base.checks import check_count, check_number, check_symmetric
from gramscope.base.errors import InputError
from gramscope.base.rounding import Rounding, singular_floor
from gramscope.theory.meta_kernels import Array
from gramscope.theory.quadratic import check_algorithm, check_step


class Spectrum:
    """``k̃ = Q diag(l) Qᵀ`` without its null modes; refuses what is no kernel.

    Modes below ``10⁻⁹`` of the largest eigenvalue are taken as null, and those that are rounding of the kernel (or of
    the size of negative eigenvalues, which are). No algorithm moves along them at this order, and what is divided by
    them is noise, not the same on two machines. With a ridge ρ > 0 every mode is kept and :meth:`solve` is
    ``(k̃ + ρ)⁻¹``; a ridge of 0 asks for a kernel without null modes.
    """

    def __init__(self, kernel: Float[np.ndarray, "N N"], ridge: float | None = None) -> None:
        what, remedy = "the kernel of the training set", "Check kernel(x, x2), or pass (k + kᵀ)/2."
        check_symmetric(kernel, what, tol=1e-8, remedy=remedy)
        scale = np.abs(kernel).max()
        values, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
        largest = float(values[-1]) if len(values) else 0.0
        if values[0] < -1e-6 * max(largest, scale):
            raise InputError(
                "the kernel of the training set must be positive semi-definite, but its smallest eigenvalue is "
                f"{values[0]:.3g} (largest {largest:.3g}). Check the kernel function."
            )
        # A kernel computed in float32 has eigenvalues of either sign where the exact one has zeros.
        given = torch.from_numpy(np.ascontiguousarray(kernel))
        floor = float(singular_floor(given, Rounding.of(given)))
        kept = values > max(1e-9 * largest, -10 * float(values[0]), floor)
        if ridge is not None and ridge > 0:
            values = np.where(kept, values, 0.0) + ridge
            kept = np.ones_like(kept)
        elif ridge is not None and not kept.all():
            raise InputError(
                f"ridge must be above 0 for a singular kernel: that of the training set has rank {int(kept.sum())} for "
                f"{len(kept)} rows, and without a ridge its inverse does not exist. Pass a positive ridge, remove "
                "repeated examples, or take algorithm='minimum-norm', which leaves the null modes out."
            )
        self.values: Array = values[kept]
        self.vectors: Array = vectors[:, kept]
        self.largest = largest

    def solve(self, y: Float[np.ndarray, "N *k"]) -> Float[np.ndarray, "N *k"]:
        """``(k̃ + ρ)⁻¹ y``, the pseudo-inverse where k̃ has null modes and ρ = 0."""
        components = self.vectors.T @ y
        return self.vectors @ (components.T / self.values).T

    def missed(self, y: Float[np.ndarray, "N k"]) -> float:
        """The share of y, by size, that lies in null modes of k̃; 0 with a ridge."""
        size = float(np.linalg.norm(y))
        return float(np.linalg.norm(y - self.vectors @ (self.vectors.T @ y))) / size if size else 0.0

    def after_steps(self, y: Float[np.ndarray, " N"], step: float, steps: int) -> Float[np.ndarray, " N"]:
        """``k̃⁻¹ (1 - (1 - η k̃)ᵗ) y``: what t steps of gradient descent have summed up of the residuals, times η."""
        eta, count = check_step(step, self.largest), check_count(steps, "steps", least=0)
        # 1 - (1 - ηl)ᵗ loses no digits for small ηl this way; beyond ηl = 1 the power changes its sign.
        decay = eta * self.values
        with np.errstate(divide="ignore"):
            power = np.where(decay < 1, -np.expm1(count * np.log1p(-np.minimum(decay, 1.0))), 1 - (1 - decay) ** count)
        components: Array = power * (self.vectors.T @ y) / self.values
        found: Array = self.vectors @ (components if count else np.zeros_like(components))
        return found


def check_ridge(ridge: object, algorithm: str) -> float | None:
    """The ridge, if one is given for algorithm="ridge" and only there; at least 0."""
    if (ridge is not None) != (algorithm == "ridge"):
        raise InputError(
            "ridge must be given for algorithm='ridge' and only there, got "
            f"algorithm={algorithm!r}, ridge={ridge!r}. With a ridge the minimum is one point, and the way to it does "
            "not matter."
        )
    if ridge is None:
        return None
    return check_number(ridge, "ridge", least=0.0, hint="It is the weight of ½ Σ W² in the loss.")


def algorithm_matrices(
    spectrum: Spectrum, y: Float[np.ndarray, " N"], algorithm: str, step: float | None = None
) -> tuple[Float[np.ndarray, "N N"], Float[np.ndarray, "N N"]]:
    """``Z_A`` and the symmetric part of ``Z_B``, contracted with ``y - z₀``, in O(N³).

    ``Z_B = vv/2`` for all, ``v = k̃⁻¹ y``. ``Z_A`` is 0 for direct optimisation, vv for the interpolant of least norm,
    and for gradient descent with step η ``y_a y_b (1 - η l_a) / (l_a (l_a + l_b - η l_a l_b))`` in the eigenbasis of k̃;
    η = 0 is gradient flow. That is the text's ``yy/(l_a l_b) - X/l_b`` and ``Z_A + (η/2) X`` on common denominators,
    ``X = yy/(l_a + l_b - η l_a l_b)``: the symmetric part of Z_B, all that is felt of it, does not depend on η.
    With a ridge it is vv as for the least norm, ``v = (k̃ + ρ)⁻¹ y``.

    Reference: PDLT (arXiv:2106.10165) equations (11.133) to (11.136); least norm and ridge are not in the text.

    Example:
        >>> import numpy as np
        >>> from gramscope.theory.training_algorithms import Spectrum, algorithm_matrices
        >>> one = Spectrum(np.array([[2.0]]))
        >>> [z.item() for z in algorithm_matrices(one, np.array([4.0]), "gradient-flow")]      # vv/2 both, v = 2
        [2.0, 2.0]
    """
    check_algorithm(algorithm, step)
    v = spectrum.solve(y)
    pairs = np.outer(v, v)
    if algorithm == "direct":
        return np.zeros_like(pairs), pairs / 2
    if algorithm in ("minimum-norm", "ridge"):
        return pairs, pairs / 2
    eta = 0.0 if step is None else check_step(step, spectrum.largest)
    values, basis = spectrum.values, spectrum.vectors
    components = basis.T @ y
    decay = values[:, None] + values[None, :] - eta * np.outer(values, values)
    z_a = np.outer(components * (1 - eta * values) / values, components) / decay
    return basis @ z_a @ basis.T, pairs / 2
