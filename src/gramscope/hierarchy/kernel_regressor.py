"""``KernelReLURegressor``: a scikit-learn estimator, one hidden ReLU layer trained from a Gram matrix alone."""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float64
from numpy import ndarray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.utils.validation import check_is_fitted, validate_data

from gramscope.base.checks import check_count, check_finite, check_number
from gramscope.base.errors import InputError
from gramscope.base.user_warnings import warn
from gramscope.hierarchy.field_training import (
    EarlyStopping,
    Training,
    batches,
    check_gram,
    inverse_root,
    places,
    safe_rate,
)

if TYPE_CHECKING:
    from sklearn.utils import Tags

# A block of cross overlaps at prediction holds at most this many numbers (128 MiB).
_BLOCK = 2**24

Parameter: TypeAlias = Any  # by scikit-learn's rule anything may be stored; fit says what is wrong with it


class KernelReLURegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """One hidden ReLU layer with a fixed readout, trained by gradient descent in the field of a kernel, no weights.

    ``f(x) = A relu(h(x))``, loss ``½ Σ |f_μ − y_μ|²`` over a batch, and each step
    ``h_μ ← h_μ − η Σ_{ν in batch} Q_{μν} D_ν Aᵀ e_ν``. The same line with cross overlaps ``Q_{*ν}`` moves an unseen
    input, so the trained field is ``h(x) = h₀(x) + Σ_ν Q(x, x_ν) c_ν`` with coefficients ``c_ν`` (``dual_coef_``). With
    the linear kernel this is gradient descent on W, to rounding (after arXiv:2606.09744).

    Parameters
    ----------
    n_hidden : number N of hidden units.
    kernel : "linear" (``x·x'``), "rbf" (``exp(−γ|x−x'|²)``), "precomputed" (X is the Gram matrix: (n, n) to fit, (m, n)
        to predict), or a callable ``kernel(X, Y) -> (n, m)``.
    gamma : γ of "rbf": a positive number, or "scale" for ``1 / (d · Var X)``.
    bias : a constant extra input of 1, which adds 1 to every overlap.
    readout : "signs" (random, balanced ``±1/√N``), "mean" (the paper's ``1/N``: one output, never negative), or an
        array (C, N), or (N,) for one output.
    init : the initial field h₀, one function of x for training and unseen inputs alike. "weights" draws
        ``W₀ ~ N(0, init_std²)`` and takes ``h₀ = W₀x`` (linear kernel); "gram" draws the training rows from the
        Gaussian of covariance ``init_std² Q`` and takes its conditional mean elsewhere; an array (N, d) is W₀ itself,
        its last column for the bias; a callable ``init(X) -> (n, N)`` is h₀. "auto": "weights" if linear, or "gram".
    init_std : standard deviation above; "auto" gives the field unit variance, averaged over the first training set.
    learning_rate : η, for the sum over a batch; "auto" takes ``1 / (λ_max |A|²)``, half of what is stable at fixed
        masks (:func:`~gramscope.hierarchy.field_training.safe_rate`).
    max_iter, batch_size, shuffle : passes over the data; examples a step (None: all); new order for each pass.
    tol, n_iter_no_change : stop when the loss fell by less than the part ``tol`` in so many passes; None: never stop.
    early_stopping, validation_fraction : hold out a part, watch its loss instead, keep the best pass.
    random_state : None, int, RandomState or Generator. None draws fresh entropy; numpy's global stream is left alone.

    Attributes
    ----------
    dual_coef_ : (n_fit, N); X_fit_ : the inputs they belong to (the Gram matrix if precomputed); readout_ : (C, N);
    initial_weights_ : (N, d [+1]) or None; learning_rate_ : the η last used; n_iter_ : passes; loss_curve_ :
    ``½ mean_μ |e_μ|²``, before the first and after each pass; validation_loss_curve_ : the same, held out, or None;
    flip_curve_ : changes of a mask entry in each pass.

    Examples
    --------
    >>> from sklearn.datasets import make_friedman1
    >>> X, y = make_friedman1(300, random_state=0)
    >>> model = KernelReLURegressor(kernel="rbf", max_iter=300, tol=None, random_state=0).fit(X[:200], y[:200])
    >>> bool(model.score(X[200:], y[200:]) > 0.7)
    True
    """

    def __init__(
        self,
        n_hidden: Parameter = 100,
        *,
        kernel: Parameter = "linear",
        gamma: Parameter = "scale",
        bias: Parameter = True,
        readout: Parameter = "signs",
        init: Parameter = "auto",
        init_std: Parameter = "auto",
        learning_rate: Parameter = "auto",
        max_iter: Parameter = 1000,
        batch_size: Parameter = None,
        shuffle: Parameter = True,
        tol: Parameter = 1e-4,
        n_iter_no_change: Parameter = 10,
        early_stopping: Parameter = False,
        validation_fraction: Parameter = 0.1,
        random_state: Parameter = None,
    ) -> None:
        self.n_hidden = n_hidden
        self.kernel = kernel
        self.gamma = gamma
        self.bias = bias
        self.readout = readout
        self.init = init
        self.init_std = init_std
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: object, y: object) -> "KernelReLURegressor":
        """Train from a fresh initial field; stops by ``tol``, by the held-out loss, or after ``max_iter`` passes."""
        X, targets = self._validated(X, y, reset=True)
        # After a failed fit the estimator counts as not fitted, instead of mixing two trainings.
        self.__dict__.pop("dual_coef_", None)
        self._rng = _generator(self.random_state)
        kept, held = self._split(len(X))
        train = X[np.ix_(kept, kept)] if self._precomputed else X[kept]
        gram, readout = self._prepare(train, targets.shape[1])
        coefficients = self._start(train, gram)
        base, overlap = self._base(train), gram
        if len(held):
            rows = X[np.ix_(held, kept)] if self._precomputed else X[held]
            # The augmented field: held-out rows move by their overlaps with the examples trained on.
            base = np.concatenate([base, self._base(rows)])
            overlap = np.concatenate([gram, self._overlap(rows, train)])
        run = Training(overlap, base + overlap @ coefficients, coefficients, readout, targets[np.r_[kept, held]])
        self._iterate(run, self._rate(gram, readout))
        self.readout_, self.dual_coef_, self.X_fit_ = readout, run.coefficients, train
        if self._precomputed:
            # Columns at prediction run over all rows of the Gram matrix; held-out examples carry no coefficient.
            self.dual_coef_, self.X_fit_ = np.zeros((len(X), self.n_hidden)), X
            self.dual_coef_[kept] = run.coefficients
        return self

    def partial_fit(self, X: object, y: object) -> "KernelReLURegressor":
        """One pass over these examples, from where training stands (or from the initial field).

        Rows seen before share their coefficient, so repeated passes over one set do not grow the model. The first call
        sets readout, gamma and initial field ("gram": conditional mean given the first call's inputs). A precomputed
        Gram matrix must be that of the first call: without inputs there are no overlaps with new examples.
        """
        first = not hasattr(self, "dual_coef_")
        X, targets = self._validated(X, y, reset=first)
        if first:
            self._rng = _generator(self.random_state)
            gram, readout = self._prepare(X, targets.shape[1])
            stored, known = X, self._start(X, gram)
        else:
            stored, known, readout = self.X_fit_, self.dual_coef_, self.readout_
            self._require_continuation(X, targets)
            gram = self._overlap(X, X)
        at, fresh = (np.arange(len(X)), X[:0]) if first or self._precomputed else places(stored, X)
        field = self._base(X) + self._expansion(X, stored, known)
        run = Training(gram, field, np.zeros_like(field), readout, targets)
        self._iterate(run, self._rate(gram, readout), single=True)
        coefficients = np.concatenate([known, np.zeros((len(fresh), self.n_hidden))])
        np.add.at(coefficients, at, run.coefficients)
        self.readout_, self.dual_coef_, self.X_fit_ = readout, coefficients, np.concatenate([stored, fresh])
        return self

    def field(self, X: object) -> Float64[ndarray, "m N"]:
        """The trained pre-activations ``h₀(x) + Σ_ν Q(x, x_ν) c_ν`` of any inputs, seen or not."""
        check_is_fitted(self, "dual_coef_")
        return self._field(validate_data(self, X, dtype=np.float64, reset=False))

    def predict(self, X: object) -> Float64[ndarray, "m ..."]:
        """``A relu(h(x))``: (m,) if y was a vector, else (m, C)."""
        outputs = np.maximum(self.field(X), 0.0) @ self.readout_.T
        return outputs[:, 0] if self._vector_target else outputs

    def weights(self) -> Float64[ndarray, "N inputs"]:
        """The weight matrix that the field stands for, ``W₀ + Σ_ν c_ν x_νᵀ`` (bias last); linear kernel only."""
        check_is_fitted(self, "dual_coef_")
        if self.kernel != "linear" or callable(self.init):
            raise InputError(
                'weights exist only for kernel="linear" with an initial field made of weights, got '
                f"kernel={self.kernel!r}, init={self.init!r}. Use field(X) or dual_coef_ instead."
            )
        moved = self.dual_coef_.T @ self._inputs(self.X_fit_)
        return moved if self.initial_weights_ is None else moved + self.initial_weights_

    def __sklearn_tags__(self) -> "Tags":
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = self._precomputed
        tags.target_tags.multi_output = True
        return tags

    @property
    def _precomputed(self) -> bool:
        return isinstance(self.kernel, str) and self.kernel == "precomputed"

    def _validated(self, X: object, y: object, *, reset: bool) -> tuple[ndarray, ndarray]:
        _check_parameters(self)
        rows, targets = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, reset=reset)
        if self._precomputed and rows.shape[0] != rows.shape[1]:
            raise InputError(
                f'with kernel="precomputed" X must be a square matrix of overlaps to fit, got shape {rows.shape}. Pass '
                "K(X_train, X_train) here and K(X_new, X_train) to predict."
            )
        if reset:
            self._vector_target = targets.ndim == 1
        # + 0.0: −0 becomes 0, one key for a row
        return rows + 0.0, np.asarray(targets, dtype=np.float64).reshape(len(rows), -1)

    def _split(self, n: int) -> tuple[ndarray, ndarray]:
        if not self.early_stopping:
            return np.arange(n), np.arange(0)
        held = int(np.ceil(self.validation_fraction * n))
        if held >= n:
            raise InputError(
                f"early stopping needs examples to train on, but holding out validation_fraction="
                f"{self.validation_fraction} of n_samples={n} leaves none. Pass more or early_stopping=False."
            )
        order = self._rng.permutation(n)
        return np.sort(order[held:]), np.sort(order[:held])

    def _prepare(self, X: ndarray, outputs: int) -> tuple[ndarray, ndarray]:
        """What is fixed at the first look at the data: the kernel's scale and the readout; and the Gram matrix."""
        if isinstance(self.kernel, str) and self.kernel == "rbf":
            variance = float(X.var())
            self.gamma_ = self.gamma if self.gamma != "scale" else 1.0 / (X.shape[1] * variance) if variance else 1.0
            # Distances do not change with the origin, but their rounding does.
            self._origin = X.mean(axis=0)
        gram = self._overlap(X, X)
        if self._precomputed or callable(self.kernel):
            what = "the precomputed X" if self._precomputed else "the callable kernel's Gram matrix"
            check_gram(gram - 1.0 if self.bias else gram, what)
        return gram, _readout(self.readout, outputs, self.n_hidden, self._rng)

    def _start(self, X: ndarray, gram: ndarray) -> ndarray:
        """Sets the initial field and returns the coefficients that carry it, zero unless drawn from the Gram matrix."""
        linear = isinstance(self.kernel, str) and self.kernel == "linear"
        init = ("weights" if linear else "gram") if isinstance(self.init, str) and self.init == "auto" else self.init
        size = float(gram.diagonal().mean())
        std = (size**-0.5 if size > 0 else 1.0) if self.init_std == "auto" else self.init_std
        self.initial_weights_ = None
        if isinstance(init, str) and init == "gram":
            return std * inverse_root(gram) @ self._rng.standard_normal((len(X), self.n_hidden))
        if not callable(init):
            if not linear:
                raise InputError(
                    f'initial weights need kernel="linear", got kernel={self.kernel!r}. Use init="gram" or a callable.'
                )
            shape = (self.n_hidden, X.shape[1] + bool(self.bias))
            drawn = isinstance(init, str)
            self.initial_weights_ = std * self._rng.standard_normal(shape) if drawn else _array(init, "init", shape)
        elif self._precomputed:
            raise InputError('a callable init needs inputs, but kernel="precomputed" has none. Use init="gram".')
        return np.zeros((len(X), self.n_hidden))

    def _inputs(self, X: ndarray) -> ndarray:
        return np.concatenate([X, np.ones((len(X), 1))], axis=1) if self.bias else X

    def _base(self, X: ndarray) -> ndarray:
        """The part of the initial field that the coefficients do not carry."""
        if self.initial_weights_ is not None:
            return self._inputs(X) @ self.initial_weights_.T
        if callable(self.init):
            return _array(self.init(X), "init(X)", (len(X), self.n_hidden))
        return np.zeros((len(X), self.n_hidden))

    def _overlap(self, X: ndarray, Y: ndarray) -> ndarray:
        if callable(self.kernel):
            overlap = _array(self.kernel(X, Y), "kernel(X, Y)", (len(X), len(Y)))
        elif self.kernel == "precomputed":
            overlap = X
        elif self.kernel == "rbf":
            overlap = rbf_kernel(X - self._origin, Y - self._origin, gamma=self.gamma_)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                overlap = X @ Y.T
        if not np.isfinite(overlap).all():
            raise InputError("overlaps of the inputs must be finite, but some are not. Scale the inputs down.")
        return overlap + 1.0 if self.bias else overlap

    def _expansion(self, X: ndarray, stored: ndarray, coefficients: ndarray) -> ndarray:
        block = max(1, _BLOCK // max(1, len(stored)))
        parts = [self._overlap(X[i : i + block], stored) @ coefficients for i in range(0, len(X), block)]
        return np.concatenate(parts)

    def _field(self, X: ndarray) -> ndarray:
        return self._base(X) + self._expansion(X, self.X_fit_, self.dual_coef_)

    def _require_continuation(self, X: ndarray, targets: ndarray) -> None:
        if (targets.shape[1], self.n_hidden) != self.readout_.shape:
            raise InputError(
                f"n_hidden and the outputs of y must stay {self.readout_.shape[::-1]} between calls, got "
                f"{(self.n_hidden, targets.shape[1])}. Call fit to start again."
            )
        if self._precomputed and not np.array_equal(X, self.X_fit_):
            raise InputError(
                'with kernel="precomputed" partial_fit continues on the Gram matrix of the first call, but X is not '
                "it. Call fit to start again, or give the kernel as a callable to take in new examples."
            )

    def _rate(self, gram: ndarray, readout: ndarray) -> float:
        if self.learning_rate != "auto":
            return float(self.learning_rate)
        return safe_rate(gram, readout, min(self.batch_size or len(gram), len(gram)))

    def _iterate(self, run: Training, rate: float, single: bool = False) -> None:
        size = min(self.batch_size or run.n, run.n)
        held = run.held_loss()
        losses, held_losses = [run.loss()], [held]
        flips: list[int] = []
        watched = losses[0] if held is None else held
        watch = EarlyStopping(self.tol, self.n_iter_no_change, None if held is None else run.coefficients, watched)
        stopped = False
        while len(flips) < (1 if single else self.max_iter) and not stopped:
            flips.append(run.sweep(batches(run.n, size, self._rng if self.shuffle else None), rate))
            losses.append(run.loss())
            held = run.held_loss()
            held_losses.append(held)
            stopped = watch.stop(losses[-1] if held is None else held, run.coefficients)
        if watch.best is not None:
            run.coefficients = watch.best
        self._record(rate, losses, flips, None if held is None else held_losses, single)
        if not (run.field[: run.n] > 0).any():
            warn(
                "every hidden unit is off on every training example, so no gradient is left. Lower learning_rate, "
                "add a bias, or change random_state.",
                ConvergenceWarning,
            )
        elif losses[-1] > losses[0] and not single:
            warn(
                f"the loss rose from {losses[0]:.3g} to {losses[-1]:.3g}: learning_rate={rate:.3g} is too large. "
                "Lower it, or leave it at 'auto'.",
                ConvergenceWarning,
            )
        elif not (single or stopped or self.tol is None):
            warn(
                f"training did not converge in max_iter={self.max_iter} passes (loss {losses[-1]:.3g}). Raise "
                "max_iter or tol, or pass tol=None if this number of passes is meant.",
                ConvergenceWarning,
            )

    def _record(self, rate: float, losses: list[float], flips: list[int], held: object, single: bool) -> None:
        again = single and hasattr(self, "dual_coef_")
        self.learning_rate_ = rate
        self.loss_curve_: list[float] = [*self.loss_curve_, *losses[1:]] if again else losses
        self.flip_curve_: list[int] = [*self.flip_curve_, *flips] if again else flips
        self.n_iter_ = len(self.flip_curve_)
        if not again:
            self.validation_loss_curve_ = held


def _generator(random_state: Parameter) -> np.random.Generator:
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**32, dtype=np.uint64))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"random_state must be None, a whole number from 0 on, a RandomState or a Generator, got {random_state!r}."
        ) from error


def _array(value: object, what: str, shape: tuple[int, int]) -> ndarray:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} must be an array of numbers of shape {shape}, got {type(value).__name__}.") from error
    if array.shape != shape:
        raise InputError(
            f"{what} must have shape {shape}, got {array.shape}. Rows and columns are as the docstring says."
        )
    check_finite(array, what, "Look for overflow where it is made.")
    return array


def _readout(readout: object, outputs: int, n_hidden: int, rng: np.random.Generator) -> ndarray:
    if isinstance(readout, str) and readout == "signs":
        balanced = np.where(np.arange(n_hidden) % 2 == 0, 1.0, -1.0) / np.sqrt(n_hidden)
        return np.stack([rng.permutation(balanced) for _ in range(outputs)])
    if isinstance(readout, str):
        if outputs > 1:
            raise InputError(
                f'readout="mean" has one output, the mean over the hidden units, but y has {outputs}. Use "signs" '
                "or an array (outputs, n_hidden)."
            )
        return np.full((1, n_hidden), 1.0 / n_hidden)
    given = np.asarray(readout)
    return _array(given[None] if given.ndim == 1 and outputs == 1 else given, "readout", (outputs, n_hidden))


def _check_parameters(estimator: KernelReLURegressor) -> None:
    """Raise on a parameter out of range; sklearn asks that this waits until fit."""
    for name in ("n_hidden", "max_iter", "n_iter_no_change", "batch_size"):
        value = getattr(estimator, name)
        if not (name == "batch_size" and value is None):
            check_count(value, name)
    for name, word in (("learning_rate", "auto"), ("init_std", "auto"), ("gamma", "scale")):
        value = getattr(estimator, name)
        if not (isinstance(value, str) and value == word):
            check_number(value, name, above=0.0, hint=f"Try {word!r} first.")
    if estimator.tol is not None:
        check_number(estimator.tol, "tol", least=0.0, below=1.0, hint="It is a part of the loss; None: never stop.")
    check_number(estimator.validation_fraction, "validation_fraction", above=0.0, below=1.0)
    _check_word("kernel", estimator.kernel, ("linear", "rbf", "precomputed"), callables=True)
    _check_word("init", estimator.init, ("auto", "weights", "gram"), callables=True, arrays=True)
    _check_word("readout", estimator.readout, ("signs", "mean"), callables=False, arrays=True)


def _check_word(name: str, value: Parameter, words: tuple[str, ...], *, callables: bool, arrays: bool = False) -> None:
    if isinstance(value, str):
        fine = value in words
    else:
        fine = (callables and callable(value)) or (arrays and np.ndim(value) > 0)
    if not fine:
        kinds = [*map(repr, words), *["a callable"] * callables, *["an array"] * arrays]
        raise InputError(f"{name} must be {', '.join(kinds[:-1])} or {kinds[-1]}, got {value!r}.")
