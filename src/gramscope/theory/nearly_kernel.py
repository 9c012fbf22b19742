"""Nearly-kernel machines: what a quadratic model has learnt, from its kernel and meta kernel alone.

To first order in ε every algorithm that interpolates the training set A predicts

    z(b) = z₀(b) + k_bA k̃⁻¹ (y - z₀_A) + Π[ μ_{a . b} Z_A^{ab} ]_b + Π[ μ_{. a b} Z_B^{ab} ]_b
    Π[t]_b = t_b - k_bA k̃⁻¹ t_A

and differs from the others in the two matrices Z_A, Z_B only (:func:`algorithm_matrices`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, validate_data

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError
from gramscope.base.user_warnings import warn
from gramscope.theory.meta_kernels import (
    Array,
    DenseMetaKernel,
    Examples,
    Given,
    Kernel,
    MetaKernelSource,
    Plain,
    Product,
)
from gramscope.theory.training_algorithms import Spectrum, algorithm_matrices, check_ridge

if TYPE_CHECKING:
    from sklearn.utils import Tags

LARGE_MOVEMENT = 0.25  # calibrated on trained networks by benchmarks/nearly_kernel_regime.py
LARGE_MISS = 1e-3  # of the size of the targets

Parameter: TypeAlias = Any  # by scikit-learn's rule anything may be stored; fit says what is wrong with it


class OutsideRegimeWarning(UserWarning):
    """The features move too far: first order in ε does not hold here."""


class NearlyKernelRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Regression by a kernel and a meta kernel: the trained quadratic model to first order in ε.

    ``z(b) = k_bA v + Π[μ_{a . b} Z_A^{ab}]_b + ½ Π[μ_{. ab} v^a v^b]_b`` with ``v = k̃⁻¹ y``; for direct optimisation
    this is (11.132). It interpolates the training data, as kernel regression does, unless there is a ridge; targets
    outside the range of a singular kernel cannot be fitted; a warning says so. Features that move by more than a
    quarter of their size draw an :class:`OutsideRegimeWarning`.

    Args:
        kernel: a name of ``sklearn.metrics.pairwise``, a function (X, X2) -> (n, m), "precomputed", or a network at
            initialisation, ``gramscope.kernels.TangentKernels(model)``, which brings its own meta kernel and z₀.
        meta_kernel: a function (X0, X1, X2) -> (n0, n1, n2) that carries its own ε; "product" for ``ε k_01 k_02``;
            "precomputed" (arrays go to ``fit`` and ``predict``); None for kernel regression. Ignored for a network.
        algorithm: "direct", "gradient-descent" (needs ``step``), "gradient-flow", "minimum-norm" or "ridge" (needs
            ``ridge``).
        step: the step size η of gradient descent on half the summed squared error, below 2/λmax of the kernel.
        epsilon: strength of the "product" meta kernel.
        gamma: width of the named kernels that have one.
        ridge: ρ of the penalty ``½ ρ Σ W²`` (of a network ``½ ρ Σ (θ - θ₀)²/λ``), for algorithm="ridge". 0 is the limit
            of small ridges, for kernels that can be inverted.

    ``feature_movement_`` is ``√(Σ_a |ψ_a W|² / Σ_a |φ_a|²)``: by how much training moves the features of the training
    set, relative to their size. It is exact for a network; a kernel and a meta kernel know of the part within the span
    of the features, so that there it is a lower bound.

    Reference: PDLT (arXiv:2106.10165) equations (11.126), (11.132) to (11.136), footnote 17.

    Example:
        >>> import numpy as np
        >>> from gramscope.theory.nearly_kernel import NearlyKernelRegressor
        >>> x = np.linspace(-1, 1, 6)[:, None]
        >>> model = NearlyKernelRegressor(kernel="rbf", epsilon=0.1, algorithm="gradient-flow").fit(x, x[:, 0] ** 2)
        >>> bool(np.allclose(model.predict(x), x[:, 0] ** 2))
        True
    """

    def __init__(
        self,
        kernel: Parameter = "rbf",
        meta_kernel: Parameter = "product",
        algorithm: Parameter = "direct",
        step: Parameter = None,
        epsilon: Parameter = 0.01,
        gamma: Parameter = None,
        ridge: Parameter = None,
    ) -> None:
        # By scikit-learn's rule anything may be stored here; fit says what is wrong with it.
        self.kernel = kernel
        self.meta_kernel = meta_kernel
        self.algorithm = algorithm
        self.step = step
        self.epsilon = epsilon
        self.gamma = gamma
        self.ridge = ridge

    def fit(self, X: Examples, y: object, meta: object = None) -> "NearlyKernelRegressor":
        """Fit to examples X and targets y (n,) or (n, outputs); ``meta`` is μ_AAA for a precomputed meta kernel."""
        X, y = self._training_set(X, y)
        self._source = self._make_source(X, meta)
        self._single = y.ndim == 1
        targets = y[:, None] if self._single else y
        start = self._initial(X, targets)
        # A network's outputs share one kernel over (example, output); those of a plain kernel are separate problems.
        rows = (targets - start).reshape(-1, 1) if self._of_network else targets - start
        self._spectrum = Spectrum(self._source(X, X), check_ridge(self.ridge, self.algorithm))
        _warn_of_missed(self._spectrum.missed(rows))
        self.dual_coef_ = self._spectrum.solve(rows)
        self._pairs = [algorithm_matrices(self._spectrum, row, self.algorithm, self.step) for row in rows.T]
        self._targets = rows
        self._train = X
        correction = np.stack([self._correction(X, *pairs) for pairs in self._pairs], axis=1)
        self._counter = self._spectrum.solve(correction)
        self.feature_movement_ = max(self._movement(v) for v in self.dual_coef_.T)
        _warn_of_movement(self.feature_movement_)
        return self

    def predict(self, X: Examples, meta: object = None, meta_transport: object = None) -> Array:
        """Outputs on X, after training.

        With a precomputed kernel X is ``k(X, A)``; with a precomputed meta kernel ``meta`` is ``μ(X; A, A)`` and
        ``meta_transport`` is ``μ(A; X, A)``.
        """
        check_is_fitted(self)
        X = self._examples(X)
        source = self._source_for(X, meta, meta_transport)
        correction = np.stack([self._correction(X, *pairs, source=source) for pairs in self._pairs], axis=1)
        change = source(X, self._train) @ (self.dual_coef_ - self._counter) + correction
        if self._of_network:
            start = self.kernel.initial(X)
            change = start + change.reshape(start.shape)
        return change[:, 0] if self._single else change

    def trained_kernel(self, X: Examples, X2: Examples = None, output: int = 0) -> Float[np.ndarray, "n m"]:
        """``k#_de = k_de + ½ Σ_a μ_{d e a} v^a``: ``z(b) = k#_bA (k#_AA)⁻¹ y`` to first order, for direct optimisation.

        Not symmetric: the corrected form of (11.140), (11.142), which as printed holds only without features outside
        the span of the training set. X2 is the training set if None. A precomputed meta kernel is known between
        training examples only, so both must be the training set then.
        """
        check_is_fitted(self)
        X, X2 = self._pair(X, X2)
        return self._source(X, X2) + 0.5 * self._source.applied(X, X2, self._train, self._coefficients(output))

    def effective_kernel(self, X: Examples, X2: Examples = None, output: int = 0) -> Float[np.ndarray, "n m"]:
        """``kᴱ_de = k_de + Σ_a (μ_{d e a} + μ_{e d a}) v^a``: the kernel of the trained effective features (11.138).

        X and X2 as for :meth:`trained_kernel`. At the end of training it is the same for every algorithm to this order,
        as all of them end at ``W = φᵀ v + O(ε)``; on the way see :meth:`effective_kernel_after`.
        """
        check_is_fitted(self)
        return self._effective_kernel(X, X2, self._coefficients(output))

    def effective_kernel_after(
        self, X: Examples, X2: Examples = None, *, steps: int, output: int = 0
    ) -> Float[np.ndarray, "n m"]:
        """``kᴱ`` after so many steps of gradient descent: ``k_de + Σ_a (μ_{d e a} + μ_{e d a}) v_t^a``.

        ``v_t = k̃⁻¹ (1 - (1 - η k̃)ᵗ) (y - z₀)``, the residuals summed up over the steps, is what the weights are made of
        then. For algorithm="gradient-descent"; as t grows it becomes (11.138).

        Reference: PDLT (arXiv:2106.10165) footnote 24.
        """
        check_is_fitted(self)
        if self.algorithm != "gradient-descent":
            raise InputError(
                "the kernel after some steps needs algorithm='gradient-descent' and its step, got "
                f"algorithm={self.algorithm!r}. effective_kernel is that at the end of training."
            )
        self._coefficients(output)
        v = self._spectrum.after_steps(self._targets[:, output], self.step, steps)
        return self._effective_kernel(X, X2, v)

    def _effective_kernel(self, X: Examples, X2: Examples, v: Array) -> Array:
        X, X2 = self._pair(X, X2)
        moved = self._source.applied(X, X2, self._train, v) + self._source.applied(X2, X, self._train, v).T
        return self._source(X, X2) + moved

    def __sklearn_tags__(self) -> "Tags":
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = isinstance(self.kernel, str) and self.kernel == "precomputed"
        return tags

    @property
    def _of_network(self) -> bool:
        return hasattr(self.kernel, "initial") and hasattr(self.kernel, "transport")

    def _training_set(self, X: Examples, y: object) -> tuple[Examples, Array]:
        if self._of_network:
            targets = check_array(y, ensure_2d=False, dtype=np.float64, allow_nd=False)
            check_consistent_length(X, targets)
            return X, targets
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64)
        if self._precomputed and X.shape[0] != X.shape[1]:
            raise InputError(f"a precomputed kernel of the training set must be square, got {X.shape}.")
        return X, np.asarray(y, dtype=np.float64)

    def _examples(self, X: Examples) -> Examples:
        return X if self._of_network else validate_data(self, X, reset=False, dtype=np.float64)

    @property
    def _precomputed(self) -> bool:
        return isinstance(self.kernel, str) and self.kernel == "precomputed"

    def _initial(self, X: Examples, y: Array) -> Array:
        if not self._of_network:
            return np.zeros_like(y)
        start = np.asarray(self.kernel.initial(X))
        if start.shape != y.shape:
            raise InputError(f"y must have the shape {start.shape} of the network's outputs, got {y.shape}.")
        return start

    def _make_source(self, X: Examples, meta: object) -> MetaKernelSource:
        if self._of_network:
            return cast(MetaKernelSource, self.kernel)
        kernel = self._function()
        if self.meta_kernel is None:
            return Plain(kernel)
        if isinstance(self.meta_kernel, str) and self.meta_kernel == "product":
            return Product(kernel, _checked_strength(self.epsilon))
        if isinstance(self.meta_kernel, str) and self.meta_kernel == "precomputed":
            return _given(kernel, len(X), meta, meta, len(X), "fit(K, y, meta=...)")
        if not callable(self.meta_kernel):
            raise InputError(
                "meta_kernel must be a function of (X0, X1, X2), 'product', 'precomputed' or None, got "
                f"{self.meta_kernel!r}."
            )
        if self._precomputed:
            raise InputError(
                "a precomputed kernel must go with meta_kernel='precomputed', 'product' or None: a function would be "
                "given rows of the kernel instead of examples."
            )
        return DenseMetaKernel(kernel, self.meta_kernel)

    def _function(self) -> Kernel:
        if self._precomputed:
            return _rows_as_given
        return self.kernel if callable(self.kernel) else _NamedKernel(self.kernel, self.gamma)

    def _source_for(self, X: Examples, meta: object, meta_transport: object) -> MetaKernelSource:
        source = self._source
        if not (isinstance(self.meta_kernel, str) and self.meta_kernel == "precomputed") or self._of_network:
            return source
        assert isinstance(source, Given)
        where = "predict(K, meta=..., meta_transport=...)"
        return _given(source.kernel, len(self._train), meta, meta_transport, len(X), where)

    def _correction(self, X: Examples, z_a: Array, z_b: Array, source: MetaKernelSource | None = None) -> Array:
        source = self._source if source is None else source
        curvature = source.curvature(X, self._train, z_b)
        return curvature + source.transport(X, self._train, z_a) if z_a.any() else curvature

    def _movement(self, v: Array) -> float:
        if self._of_network and hasattr(self.kernel, "feature_movement"):
            return float(self.kernel.feature_movement(self._train, v))
        moved = self._source.applied(self._train, self._train, self._train, v)  # μ_{d e a} v^a = φ_e · ψ_d W
        total = float(np.trace(self._source(self._train, self._train)))
        return float(np.sqrt(max(0.0, np.sum(moved * self._spectrum.solve(moved.T).T)) / total)) if total > 0 else 0.0

    def _coefficients(self, output: int) -> Array:
        """v of one output; of a network there is one v for all of them."""
        outputs = self.dual_coef_.shape[1]
        if isinstance(output, bool) or not isinstance(output, int | np.integer) or not 0 <= output < outputs:
            reason = " (those of a network share one)" if self._of_network else ""
            raise InputError(f"output must be an integer of 0 ... {outputs - 1}{reason}, got {output!r}.")
        return self.dual_coef_[:, output]

    def _pair(self, X: Examples, X2: Examples) -> tuple[Examples, Examples]:
        if self._precomputed:
            raise InputError(
                "trained and effective kernels between examples need a kernel given as a function, not 'precomputed'."
            )
        return self._examples(X), self._train if X2 is None else self._examples(X2)


def _warn_of_missed(share: float) -> None:
    if share > LARGE_MISS:
        warn(
            f"the training targets must be in the range of the kernel to be fitted, but {share:.2g} of their size is "
            "in modes where the kernel is zero, and no algorithm can fit these. Look for repeated examples with "
            "different targets, take a kernel of full rank, or algorithm='ridge'."
        )


def _warn_of_movement(movement: float) -> None:
    if movement > LARGE_MOVEMENT:
        warn(
            f"the features must move little for first order to hold, but they move by {movement:.2f} of their size. "
            f"Above {LARGE_MOVEMENT} most trained networks were predicted worse than by the kernel alone. "
            "Take targets closer to the initial outputs, a wider network or a smaller epsilon, or meta_kernel=None.",
            OutsideRegimeWarning,
        )


def _checked_strength(epsilon: object) -> float:
    return check_number(epsilon, "epsilon", hint="It is the strength of the meta kernel.")


def _rows_as_given(rows: Array, _: Array) -> Array:
    return rows


@dataclass(frozen=True)
class _NamedKernel:
    """A kernel of ``sklearn.metrics.pairwise``; a class, since fitted estimators are pickled."""

    name: str
    gamma: float | None

    def __call__(self, x: Array, x2: Array) -> Array:
        return np.asarray(pairwise_kernels(x, x2, metric=self.name, filter_params=True, gamma=self.gamma))


def _given(kernel: Kernel, n: int, meta: object, transport: object, rows: int, where: str) -> Given:
    if meta is None or transport is None:
        raise InputError(f"a precomputed meta kernel must be passed to {where}.")
    return Given(kernel, n, meta, transport, rows)
