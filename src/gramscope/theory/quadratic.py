"""The quadratic model: features, meta features, and the training algorithms run on it exactly.

    z_i(x) = Σ_j W_ij φ_j(x) + (ε/2) Σ_jk W_ij W_ik ψ_jk(x)                                                    (11.105)

The least model that learns its representation: the effective features ``φᴱ = ∂z/∂W`` move with W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from gramscope.base.checks import check_choice, check_finite, check_number, check_symmetric
from gramscope.base.errors import InputError
from gramscope.base.rounding import numerical_rank

ALGORITHMS = ("direct", "gradient-descent", "gradient-flow", "minimum-norm", "ridge")
Array = NDArray[Any]
REMEDY = "Check x and the functions."


@dataclass(frozen=True)
class QuadraticModel:
    """``z = W φ + (ε/2) W ψ W`` with feature functions φ (n, f) and symmetric meta-feature functions ψ (n, f, f) of x.

    ``features`` and ``meta_features`` are functions of the examples. A constant feature (the bias, φ_0 = 1) is one of
    them if wanted: none is added.

    Reference: PDLT (arXiv:2106.10165) equations (11.105) to (11.119), (11.121), (11.130).

    Example:
        >>> import numpy as np
        >>> from gramscope.theory.quadratic import QuadraticModel
        >>> model = QuadraticModel(lambda x: x, lambda x: x[:, :, None] * x[:, None, :], epsilon=0.5)
        >>> model(np.array([[1.0, 2.0]]), np.array([[1.0, 1.0]]))            # 3 + 0.5/2 * 9
        array([[5.25]])
    """

    features: Callable[[Array], Array]
    meta_features: Callable[[Array], Array]
    epsilon: float

    def __post_init__(self) -> None:
        check_number(self.epsilon, "epsilon", hint="It is the strength of the quadratic term.")

    def phi(self, x: Array) -> Float[np.ndarray, "n f"]:
        phi = np.asarray(self.features(x), dtype=np.float64)
        if phi.ndim != 2 or len(phi) != len(x):
            raise InputError(f"features(x) must have shape ({len(x)}, f), one row for each example, got {phi.shape}.")
        check_finite(phi, "features(x)", REMEDY)
        return phi

    def psi(self, x: Array) -> Float[np.ndarray, "n f f"]:
        psi = np.asarray(self.meta_features(x), dtype=np.float64)
        if psi.ndim != 3 or psi.shape[1] != psi.shape[2] or len(psi) != len(x):
            raise InputError(f"meta_features(x) must have shape ({len(x)}, f, f), got {psi.shape}.")
        check_finite(psi, "meta_features(x)", REMEDY)
        if psi.size:
            check_symmetric(psi, "meta_features(x)", tol=1e-10, remedy="The model sees no more: pass (ψ + ψᵀ)/2.")
        return psi

    def __call__(self, x: Array, weights: Float[np.ndarray, "i f"]) -> Float[np.ndarray, "n i"]:
        """``z_i(x)`` for weights (outputs, features) (11.105)."""
        phi, psi = self.phi(x), self.psi(x)
        _check_weights(weights, phi, psi)
        quadratic = np.einsum("if,ig,nfg->ni", weights, weights, psi, optimize=True)
        return phi @ weights.T + 0.5 * self.epsilon * quadratic

    def effective_features(self, x: Array, weights: Float[np.ndarray, "i f"]) -> Float[np.ndarray, "n i f"]:
        """``φᴱ_ij = ∂z_i/∂W_ij = φ_j + ε Σ_k W_ik ψ_kj`` (11.107); ``z_i = ½ Σ_j W_ij (φ_j + φᴱ_ij)`` exactly."""
        phi, psi = self.phi(x), self.psi(x)
        _check_weights(weights, phi, psi)
        return phi[:, None, :] + self.epsilon * np.einsum("ig,ngf->nif", weights, psi)

    def kernel(self, x: Array, x2: Array) -> Float[np.ndarray, "n m"]:
        """``k = φ φᵀ`` (11.121)."""
        return self.phi(x) @ self.phi(x2).T

    def meta_kernel(self, x0: Array, x1: Array, x2: Array) -> Float[np.ndarray, "n m l"]:
        """``μ_{012} = ε Σ_jk ψ_jk(x0) φ_j(x1) φ_k(x2)`` (11.126), symmetric in the last two."""
        return self.epsilon * np.einsum("njk,mj,lk->nml", self.psi(x0), self.phi(x1), self.phi(x2), optimize=True)

    def effective_kernel(self, x: Array, x2: Array, weights: Float[np.ndarray, "i f"]) -> Float[np.ndarray, "i n m"]:
        """``kᴱ_ii(x, x2; W) = Σ_j φᴱ_ij(x) φᴱ_ij(x2)`` (11.137)."""
        return np.einsum("nif,mif->inm", self.effective_features(x, weights), self.effective_features(x2, weights))

    def train(
        self,
        x: Array,
        y: Float[np.ndarray, "n i"],
        algorithm: str = "direct",
        step: float | None = None,
        tol: float = 1e-12,
        steps: int = 200_000,
        ridge: float | None = None,
    ) -> Float[np.ndarray, "i f"]:
        """Weights that interpolate (x, y), by running the algorithm itself from W = 0; no expansion in ε.

        "direct": the solution within span{φ(x_a)}, by Newton's method. "minimum-norm": the solution of least |W|.
        "gradient-descent": steps ``W ← W - step Σ_a φᴱ (z - y)`` until the residual is below ``tol`` of y.
        "gradient-flow": its limit for small steps, as a differential equation. "ridge": the minimum of the loss with
        ``½ ridge Σ W²`` added, near that of the linear model; it does not interpolate.
        """
        check_algorithm(algorithm, step)
        x, y = np.asarray(x), np.asarray(y, dtype=np.float64)
        if y.ndim != 2 or len(y) != len(x):
            raise InputError(f"y must have shape ({len(x)}, outputs), got {y.shape}.")
        check_finite(y, "y", REMEDY)
        phi, psi = self.phi(x), self.epsilon * self.psi(x)
        if algorithm == "ridge":
            penalty = check_number(ridge, "ridge", above=0.0, hint="Without one take algorithm='minimum-norm'.")
            return np.stack([_ridge(phi, psi, target, penalty, tol) for target in y.T])
        rank = numerical_rank(torch.from_numpy(np.ascontiguousarray(phi)))
        if rank < len(x):
            raise InputError(
                f"the features of the {len(x)} examples must be linearly independent, but their rank is "
                f"{rank}. Use more features or fewer examples."
            )
        solve: dict[str, Callable[[Array], Array]] = {
            "direct": lambda t: _span(phi, psi, t, tol),
            "minimum-norm": lambda t: _minimum_norm(phi, psi, t, tol),
            "gradient-descent": lambda t: _descent(phi, psi, t, _checked_step(phi, step), tol, steps),
            "gradient-flow": lambda t: _flow(phi, psi, t, tol),
        }
        return np.stack([solve[algorithm](target) for target in y.T])


def _check_weights(weights: Array, phi: Array, psi: Array) -> None:
    if psi.shape[1] != phi.shape[1]:
        raise InputError(
            f"meta_features(x) must have shape (n, f, f) for the f = {phi.shape[1]} features, got {psi.shape}."
        )
    if weights.ndim != 2 or weights.shape[1] != phi.shape[1]:
        raise InputError(
            f"weights must have shape (outputs, {phi.shape[1]}), one column for each feature, got {weights.shape}."
        )


def _residual(phi: Array, psi: Array, y: Array, w: Array) -> tuple[Array, Array]:
    """``z - y`` and φᴱ (n, f) of one output."""
    bent = psi @ w
    return phi @ w + 0.5 * bent @ w - y, phi + bent


def _converged(residual: Array, y: Array, tol: float) -> bool:
    size = float(np.abs(residual).max())
    if not np.isfinite(size):
        raise InputError("training must converge, but it ran away. Lower the step or ε: the quadratic term dominates.")
    return size <= tol * max(float(np.abs(y).max()), 1e-300)


def _span(phi: Array, psi: Array, y: Array, tol: float) -> Array:
    w = np.zeros(phi.shape[1])
    for _ in range(100):
        residual, effective = _residual(phi, psi, y, w)
        if _converged(residual, y, tol):
            return w
        w = w - phi.T @ np.linalg.solve(effective @ phi.T, residual)
    raise InputError("no interpolating solution in the span of the features was found. Lower ε.")


def _minimum_norm(phi: Array, psi: Array, y: Array, tol: float) -> Array:
    """Newton on ``W = Σ_a α_a φᴱ_a(W)``, ``z(W) = y``."""
    n, f = phi.shape
    w, alpha = np.zeros(f), np.zeros(n)
    for _ in range(100):
        residual, effective = _residual(phi, psi, y, w)
        stationary = w - effective.T @ alpha
        if _converged(residual, y, tol) and np.abs(stationary).max() <= tol * max(1.0, np.abs(w).max()):
            return w
        top = np.concatenate([np.eye(f) - np.einsum("a,afg->fg", alpha, psi), -effective.T], axis=1)
        system = np.concatenate([top, np.concatenate([effective, np.zeros((n, n))], axis=1)])
        change = np.linalg.solve(system, -np.concatenate([stationary, residual]))
        w, alpha = w + change[:f], alpha + change[f:]
    raise InputError("no interpolating solution of least norm was found. Lower ε.")


def _ridge(phi: Array, psi: Array, y: Array, ridge: float, tol: float) -> Array:
    """Newton on ``φᴱᵀ (z - y) + ρ W = 0`` from the linear solution."""
    eye = np.eye(phi.shape[1])
    w = phi.T @ np.linalg.solve(phi @ phi.T + ridge * np.eye(len(phi)), y)
    for _ in range(100):
        residual, effective = _residual(phi, psi, y, w)
        gradient = effective.T @ residual + ridge * w
        if np.abs(gradient).max() <= tol * max(1.0, float(np.abs(effective.T @ y).max())):
            return w
        w = w - np.linalg.solve(effective.T @ effective + np.einsum("a,afg->fg", residual, psi) + ridge * eye, gradient)
    raise InputError("no minimum of the loss with this ridge was found. Lower ε.")


def _descent(phi: Array, psi: Array, y: Array, step: float, tol: float, steps: int) -> Array:
    w = np.zeros(phi.shape[1])
    for _ in range(steps):
        residual, effective = _residual(phi, psi, y, w)
        if _converged(residual, y, tol):
            return w
        w = w - step * effective.T @ residual
    raise InputError(f"gradient descent must converge within steps={steps}, but it did not. Allow more steps.")


def _flow(phi: Array, psi: Array, y: Array, tol: float) -> Array:
    from scipy.integrate import solve_ivp

    def slope(_: float, w: Array) -> Array:
        residual, effective = _residual(phi, psi, y, w)
        return -effective.T @ residual

    def settled(_: float, w: Array) -> float:
        return float(np.abs(_residual(phi, psi, y, w)[0]).max() - 1e-11 * max(1.0, float(np.abs(y).max())))

    settled.terminal = True  # type: ignore[attr-defined]
    slowest = np.linalg.eigvalsh(phi @ phi.T)[0]
    found = solve_ivp(
        slope, (0.0, 100.0 / slowest), np.zeros(phi.shape[1]), "DOP853", events=settled, rtol=1e-12, atol=1e-14
    )
    return _nearest(phi, psi, y, found.y[:, -1], tol)


def _nearest(phi: Array, psi: Array, y: Array, w: Array, tol: float) -> Array:
    """The last 1e-11 of the way by least-norm Newton steps, which differ from the flow by their square."""
    for _ in range(5):
        residual, effective = _residual(phi, psi, y, w)
        if _converged(residual, y, tol):
            break
        w = w - np.linalg.pinv(effective) @ residual
    return w


def _checked_step(phi: Array, step: float | None) -> float:
    largest = float(np.linalg.eigvalsh(phi @ phi.T)[-1])
    return check_step(step, largest)


def check_algorithm(algorithm: str, step: float | None) -> None:
    """Raise unless the algorithm is known, and has a step just if it takes some."""
    check_choice(algorithm, "algorithm", ALGORITHMS)
    if (step is not None) != (algorithm == "gradient-descent"):
        raise InputError(
            "step must be given for algorithm='gradient-descent' and only there, got "
            f"algorithm={algorithm!r}, step={step!r}."
        )


def check_step(step: float | None, largest: float) -> float:
    """The step, if gradient descent on a kernel with that largest eigenvalue converges: ``0 < step < 2/λmax``."""
    step = check_number(step, "step", above=0.0, hint="algorithm='gradient-descent' needs one.")
    if step * largest >= 2:
        raise InputError(
            f"step must be below 2/λmax = {2 / largest:.6g} for gradient descent to converge, got {step:.6g}. "
            "Lower it, or use algorithm='gradient-flow'."
        )
    return step
