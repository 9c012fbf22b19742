"""KernelReLURegressor against plain gradient descent on weights, and against scikit-learn's own checks."""

import inspect
import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_digits, make_friedman1
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.gaussian_process.kernels import Matern
from sklearn.metrics.pairwise import laplacian_kernel, rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

from gramscope.base.errors import InputError
from gramscope.hierarchy.field_training import (
    EarlyStopping,
    activation_step,
    check_gram,
    field_step,
    inverse_root,
    largest_eigenvalue,
    safe_rate,
)
from gramscope.hierarchy.kernel_regressor import KernelReLURegressor
from references.weight_free import field_descent_by_pairs, weight_space_descent

# Two orders of summation of the same float64 numbers, amplified by a hundred steps; a wrong term would show at 1e-2.
ROUNDING = {"rtol": 1e-10, "atol": 1e-10}


def case(seed, n=12, d=4, width=7, outputs=2, new=5):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((n, d)),
        rng.standard_normal((n, outputs)),
        rng.standard_normal((new, d)),
        rng.standard_normal((width, d)),
        rng.standard_normal((outputs, width)) / np.sqrt(width),
    )


def with_one(x):
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def test_a_thousand_steps_on_digits_equal_gradient_descent():
    images, labels = load_digits(return_X_y=True)
    x, y = images / 16.0, np.eye(10)[labels]
    train, test = slice(0, 1500), slice(1500, None)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 65)) / 4.0
    readout = rng.choice([-1.0, 1.0], (10, 24)) / np.sqrt(24)
    model = KernelReLURegressor(24, init=weight, readout=readout, max_iter=1000, tol=None).fit(x[train], y[train])
    final, on_train, on_test = weight_space_descent(
        weight, with_one(x[train]), y[train], readout, model.learning_rate_, 1000, with_one(x[test])
    )
    assert np.abs(model.predict(x[train]) - on_train).max() <= 1e-9
    assert np.abs(model.predict(x[test]) - on_test).max() <= 1e-9
    assert np.abs(model.weights() - final).max() <= 1e-9
    # The claim is about training with flips, and about training that went somewhere.
    assert sum(model.flip_curve_) > 1000
    assert model.loss_curve_[-1] < 0.5 * model.loss_curve_[0]
    assert np.abs(final - weight).max() > 0.1


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 9),
    d=st.integers(1, 5),
    width=st.integers(1, 6),
    outputs=st.integers(1, 3),
    bias=st.booleans(),
    times_safe=st.sampled_from([0.1, 1.0, 1.9]),
    batch=st.sampled_from([None, 1, 2, 100]),
)
def test_linear_kernel_is_weight_space_training(seed, n, d, width, outputs, bias, times_safe, batch):
    x, y, new, weight, readout = case(seed, n, d, width, outputs)
    inputs = with_one(x) if bias else x
    weight = np.random.default_rng(seed).standard_normal((width, d + bias))
    lr = times_safe * safe_rate(inputs @ inputs.T, readout, n)
    rows = None if batch is None else [np.arange(n)[i : i + batch] for i in range(0, n, batch)]
    _, on_train, on_new = weight_space_descent(
        weight, inputs, y, readout, lr, 30, with_one(new) if bias else new, batches=rows
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a width of 1 may die, as it does in weight space
        model = KernelReLURegressor(
            width, bias=bias, init=weight, readout=readout, learning_rate=lr, max_iter=30, tol=None,
            batch_size=batch, shuffle=False,
        ).fit(x, y)  # fmt: skip
    np.testing.assert_allclose(model.predict(x), on_train, **ROUNDING)
    np.testing.assert_allclose(model.predict(new), on_new, **ROUNDING)


def test_a_step_size_far_beyond_stability_is_followed_too():
    x, y, new, weight, readout = case(3, n=20, width=30)
    lr = 20 * safe_rate(x @ x.T, readout, 20)
    model = KernelReLURegressor(30, bias=False, init=weight, readout=readout, learning_rate=lr, max_iter=4, tol=None)
    with pytest.warns(ConvergenceWarning, match=r"the loss rose from .* learning_rate=0\.41 is too large"):
        model.fit(x, y)
    _, on_train, on_new = weight_space_descent(weight, x, y, readout, lr, 4, new)
    assert sum(model.flip_curve_) > 100
    np.testing.assert_allclose(model.predict(x), on_train, rtol=1e-9)
    np.testing.assert_allclose(model.predict(new), on_new, rtol=1e-9)


def test_field_step_against_loops_over_pairs_with_an_rbf_kernel():
    x, y, _, weight, readout = case(0)
    overlap, field = rbf_kernel(x, gamma=0.3), x @ weight.T
    expected = field_descent_by_pairs(field, overlap, readout, y, 0.3, 5)
    for _ in range(5):
        field = field_step(field, overlap, readout, np.maximum(field, 0) @ readout.T - y, 0.3)
    np.testing.assert_allclose(field, expected, **ROUNDING)


@pytest.mark.parametrize("bias", [False, True])
def test_all_ways_to_give_one_kernel_agree(bias):
    x, y, new, _, readout = case(1)
    options = {"n_hidden": 7, "bias": bias, "readout": readout, "max_iter": 40, "tol": None, "random_state": 3}
    gamma = 0.2
    named = KernelReLURegressor(kernel="rbf", gamma=gamma, **options).fit(x, y)
    function = KernelReLURegressor(kernel=lambda a, b: rbf_kernel(a, b, gamma=gamma), **options).fit(x, y)
    given_ = KernelReLURegressor(kernel="precomputed", **options).fit(rbf_kernel(x, gamma=gamma), y)
    # The initial field goes through Q^{-1/2}, whose small eigenvalues enlarge rounding.
    np.testing.assert_allclose(function.predict(new), named.predict(new), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        given_.predict(rbf_kernel(new, x, gamma=gamma)), named.predict(new), rtol=1e-6, atol=1e-6
    )


def test_gram_initial_field_of_the_linear_kernel_is_that_of_weights():
    """From the Gram matrix alone: a field W₀x for some W₀ in the span of the inputs, unseen inputs included."""
    x, y, new, _, readout = case(2, n=9, d=4)
    model = KernelReLURegressor(7, init="gram", readout=readout, max_iter=50, tol=None, random_state=0).fit(x, y)
    start = KernelReLURegressor(
        7, init="gram", readout=readout, max_iter=1, learning_rate=1e-300, tol=None, random_state=0
    )
    first = start.fit(x, y).weights()
    _, _, on_new = weight_space_descent(first, with_one(x), y, readout, model.learning_rate_, 50, with_one(new))
    np.testing.assert_allclose(model.predict(new), on_new, **ROUNDING)


@pytest.mark.parametrize("init", ["weights", "gram"])
def test_the_initial_field_has_the_covariance_of_the_kernel(init):
    x, y, _, _, _ = case(4, n=6, d=3, outputs=1)
    units = 40_000
    model = KernelReLURegressor(
        units, init=init, init_std=0.7, learning_rate=1e-300, max_iter=1, tol=None, random_state=0
    )
    field = model.fit(x, y[:, 0]).field(x)
    expected = 0.49 * (x @ x.T + 1.0)
    spread = 6 * expected.diagonal().max() * np.sqrt(2 / units)  # six standard errors of a covariance
    assert np.abs(field @ field.T / units - expected).max() < spread
    unit_variance = clone(model).set_params(init_std="auto").fit(x, y[:, 0]).field(x)
    assert abs(np.mean(unit_variance**2) - 1.0) < 0.05


def test_the_field_of_an_unseen_input_is_one_function_of_it():
    x, y, new, _, _ = case(5)
    model = KernelReLURegressor(kernel="rbf", max_iter=20, tol=None, random_state=0).fit(x, y)
    together = model.field(np.concatenate([new, x]))
    np.testing.assert_allclose(together[:5], model.field(new), **ROUNDING)
    np.testing.assert_allclose(together[5:], model.field(x), **ROUNDING)
    nudged = model.field(x + 1e-9)
    assert np.abs(nudged - model.field(x)).max() < 1e-5  # continuous from training inputs to unseen ones


def test_augmented_field_and_expansion_agree_in_early_stopping():
    """The held-out loss comes from rows moved step by step; predict sums coefficients. They are one field."""
    X, y = make_friedman1(120, noise=2.0, random_state=0)
    model = KernelReLURegressor(
        50, kernel="rbf", early_stopping=True, validation_fraction=0.25, tol=1e-3, random_state=1
    ).fit(X, y)
    held = np.array([not any(np.array_equal(row, kept) for kept in model.X_fit_) for row in X])
    assert held.sum() == 30
    loss = 0.5 * np.mean((model.predict(X[held]) - y[held]) ** 2)
    assert loss == pytest.approx(min(model.validation_loss_curve_), rel=1e-9)
    assert len(model.validation_loss_curve_) == model.n_iter_ + 1 == len(model.loss_curve_)


def test_early_stopping_keeps_the_best_pass_where_it_is_not_the_last():
    X, y = make_friedman1(80, noise=6.0, random_state=0)
    model = KernelReLURegressor(
        60, kernel="rbf", gamma=2.0, early_stopping=True, validation_fraction=0.25, max_iter=200, tol=None,
        random_state=1,
    ).fit(X, y)  # fmt: skip
    curve = model.validation_loss_curve_
    assert curve[-1] > 1.02 * min(curve), "the case must overfit, or the last pass is the best"
    held = np.array([not any(np.array_equal(row, kept) for kept in model.X_fit_) for row in X])
    assert 0.5 * np.mean((model.predict(X[held]) - y[held]) ** 2) == pytest.approx(min(curve), rel=1e-9)


def test_progress_below_tol_counts_as_none():
    """Each pass takes off 1 %: with tol = 5 % six passes make progress, more than the patience of four."""
    coefficients = np.zeros((1, 1))
    for tol, wanted in ((0.05, 4), (0.005, None), (0.03, None)):
        watch = EarlyStopping(tol, 4, None, 1.0)
        stops = [watch.stop(0.99**k, coefficients) for k in range(1, 30)]
        assert (stops.index(True) + 1 if any(stops) else None) == wanted
    x, y, _, _, _ = case(13)
    passes = [KernelReLURegressor(8, tol=tol, max_iter=3000, random_state=0).fit(x, y).n_iter_ for tol in (0.2, 1e-3)]
    assert passes[0] < passes[1] < 3000


def test_early_stopping_with_a_precomputed_kernel_keeps_the_columns_of_predict():
    X, y = make_friedman1(60, random_state=0)
    options = {"n_hidden": 20, "early_stopping": True, "max_iter": 30, "tol": None, "random_state": 1}
    gram = KernelReLURegressor(kernel="precomputed", bias=False, **options).fit(rbf_kernel(X, gamma=0.1), y)
    named = KernelReLURegressor(kernel="rbf", gamma=0.1, bias=False, **options).fit(X, y)
    assert gram.dual_coef_.shape == (60, 20)
    np.testing.assert_allclose(gram.predict(rbf_kernel(X, gamma=0.1)), named.predict(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["linear", "rbf", "precomputed"])
def test_partial_fit_repeated_is_fit(kernel):
    x, y, _, _, _ = case(6)
    data = x @ x.T if kernel == "precomputed" else x
    options = {"n_hidden": 9, "kernel": kernel, "tol": None, "random_state": 0}
    whole = KernelReLURegressor(max_iter=25, **options).fit(data, y)
    part = KernelReLURegressor(**options)
    for _ in range(25):
        part.partial_fit(data, y)
    assert part.dual_coef_.shape == whole.dual_coef_.shape
    assert part.n_iter_ == 25
    np.testing.assert_allclose(part.predict(data), whole.predict(data), **ROUNDING)
    np.testing.assert_allclose(part.loss_curve_, whole.loss_curve_, rtol=1e-9)
    assert part.flip_curve_ == whole.flip_curve_


def test_partial_fit_on_a_stream_is_stochastic_gradient_descent():
    x, y, new, weight, readout = case(7, n=30)
    lr = 0.02
    model = KernelReLURegressor(7, bias=False, init=weight, readout=readout, learning_rate=lr)
    parts = [np.arange(0, 10), np.arange(5, 20), np.array([29, 3, 29])]
    for rows in parts:
        model.partial_fit(x[rows], y[rows])
    _, _, on_new = weight_space_descent(weight, x, y, readout, lr, 1, new, batches=parts)
    np.testing.assert_allclose(model.predict(new), on_new, **ROUNDING)
    assert len(model.X_fit_) == 21  # rows 0..19 and 29, each once


def test_shuffled_batches_are_seeded_and_leave_the_global_stream_alone():
    x, y, _, _, _ = case(8)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    fits = [KernelReLURegressor(8, batch_size=5, max_iter=9, tol=None, random_state=s).fit(x, y) for s in (0, 0, 1)]
    KernelReLURegressor(8, max_iter=2, tol=None).fit(x, y)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    assert (fits[0].dual_coef_ == fits[1].dual_coef_).all()
    assert not np.allclose(fits[0].dual_coef_, fits[2].dual_coef_)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fits[0])).predict(x), fits[0].predict(x))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), outputs=st.integers(1, 4), batch=st.integers(1, 12))
def test_the_safe_rate_bounds_the_kernel_of_every_batch_and_mask(seed, n, outputs, batch):
    x, _, _, _, readout = case(seed, n=n, outputs=outputs)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(n)[:batch]
    masks = rng.random((len(rows), readout.shape[1])) < 0.7
    signals = np.einsum("ci,ni->nci", readout, masks)
    kernel = np.einsum("nd,md,nci,mki->ncmk", x[rows], x[rows], signals, signals).reshape(len(rows) * outputs, -1)
    assert np.linalg.eigvalsh(kernel)[-1] * safe_rate(x @ x.T, readout, batch) <= 1 + 1e-9


def test_small_batches_may_take_larger_steps():
    """Ten examples that are all the same have λ_max = 10, but a batch of two of them has 2."""
    readout = np.array([[0.5, 0.0]])
    rates = [safe_rate(np.ones((10, 10)), readout, batch) for batch in (1, 2, 10, 50)]
    np.testing.assert_allclose(rates, [4.0, 2.0, 0.4, 0.4], rtol=1e-12)


def test_the_largest_eigenvalue_beyond_the_dense_size():
    x = np.random.default_rng(0).standard_normal((400, 20))
    exact = np.linalg.eigvalsh(x @ x.T)[-1]
    assert exact * (1 - 1e-9) <= largest_eigenvalue(x @ x.T) <= exact * 1.01


def test_activation_closure_is_exact_until_a_unit_comes_back_on():
    x, y, _, weight, readout = case(9, n=15, width=20)
    overlap = x @ x.T
    field = x @ weight.T
    activations = np.maximum(field, 0.0)
    back, apart = 0, []
    for _ in range(60):
        was_off = field <= 0
        residual = np.maximum(field, 0) @ readout.T - y
        field = field_step(field, overlap, readout, residual, 0.02)
        activations = activation_step(activations, overlap, readout, activations @ readout.T - y, 0.02)
        back += int((was_off & (field > 0)).sum())
        apart.append((back, np.abs(np.maximum(field, 0.0) - activations).max()))
    assert all(gap < 1e-12 for flips, gap in apart if flips == 0)
    assert apart[-1][0] > 0
    assert apart[-1][1] > 1e-3
    assert (activations[x @ weight.T <= 0] == 0).all()  # off for an example once, off there for good


def checked(model, excused=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks run small models to max_iter, and skip what needs the array API
        return check_estimator(model, expected_failed_checks=excused, on_fail=None)


def test_scikit_learn_estimator_checks_pass():
    results = checked(KernelReLURegressor())
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] not in ("passed", "skipped")}
    assert failed == {}
    assert sum(r["status"] == "passed" for r in results) > 40


@pytest.mark.parametrize(
    ("options", "excused"),
    [
        ({"kernel": "rbf"}, {}),
        ({"early_stopping": True}, {}),
        (
            {"kernel": "precomputed"},
            {
                "check_positive_only_tag_during_fit": "feeds a matrix that is no Gram matrix",
                "check_estimators_dtypes": "casts a Gram matrix to integers, so that it is none",
            },
        ),
    ],
)
def test_scikit_learn_estimator_checks_pass_with_other_settings(options, excused):
    model = KernelReLURegressor(10, max_iter=100, tol=1e-3, **options)
    results = checked(model, excused)
    assert {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"} == {}


def test_it_learns_and_fits_into_pipelines():
    X, y = make_friedman1(400, random_state=0)
    search = GridSearchCV(
        KernelReLURegressor(40, kernel="rbf", max_iter=150, tol=None, random_state=0), {"gamma": [1e-3, 0.5]}, cv=2
    ).fit(X[:200], y[:200])
    assert search.best_params_ == {"gamma": 0.5}
    assert search.score(X[200:], y[200:]) > 0.7
    for kernel in (laplacian_kernel, Matern(nu=2.5)):
        model = KernelReLURegressor(40, kernel=kernel, max_iter=150, tol=None, random_state=0).fit(X[:200], y[:200])
        assert model.score(X[200:], y[200:]) > 0.5


def test_output_shapes_follow_the_targets():
    x, y, new, _, _ = case(10)
    options = {"n_hidden": 6, "max_iter": 3, "tol": None, "random_state": 0}
    assert KernelReLURegressor(**options).fit(x, y).predict(new).shape == (5, 2)
    assert KernelReLURegressor(**options).fit(x, y[:, :1]).predict(new).shape == (5, 1)
    assert KernelReLURegressor(**options).fit(x, y[:, 0]).predict(new).shape == (5,)
    mean = KernelReLURegressor(readout="mean", **options).fit(x, y[:, 0])
    assert (mean.readout_ == 1 / 6).all()
    assert (mean.predict(new) >= 0).all()


def test_prediction_in_blocks_is_prediction_at_once(monkeypatch):
    x, y, new, _, _ = case(11)
    model = KernelReLURegressor(6, kernel="rbf", max_iter=5, tol=None, random_state=0).fit(x, y)
    once = model.predict(new)
    monkeypatch.setattr("gramscope.hierarchy.kernel_regressor._BLOCK", 2 * len(x))
    np.testing.assert_allclose(model.predict(new), once, **ROUNDING)


def test_rbf_distances_survive_a_far_origin():
    x, y, new, _, _ = case(12)
    near = KernelReLURegressor(6, kernel="rbf", max_iter=20, tol=None, random_state=0).fit(x, y).predict(new)
    far = KernelReLURegressor(6, kernel="rbf", max_iter=20, tol=None, random_state=0).fit(x + 1e6, y).predict(new + 1e6)
    np.testing.assert_allclose(far, near, rtol=1e-3, atol=1e-3)  # inputs themselves are rounded at 1e-10


def test_warnings_say_what_happened():
    x, y, _, _, _ = case(13)
    with pytest.warns(ConvergenceWarning, match=r"did not converge in max_iter=2 passes .* tol=None"):
        KernelReLURegressor(5, max_iter=2, random_state=0).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KernelReLURegressor(5, max_iter=2, tol=None, random_state=0).fit(x, y)
        KernelReLURegressor(5, max_iter=2, tol=None, random_state=0).partial_fit(x, y)
    with pytest.warns(ConvergenceWarning, match="every hidden unit is off"):
        KernelReLURegressor(5, bias=False, max_iter=2, tol=None).fit(np.zeros((4, 2)), y[:4])
    done = KernelReLURegressor(5, tol=0.5, n_iter_no_change=3, random_state=0).fit(x, y)
    assert done.n_iter_ < 1000


BAD_PARAMETERS = [
    ({"learning_rate": 0.0}, "learning_rate must be one finite number greater"),
    ({"learning_rate": -1.0}, "learning_rate must be one finite number greater"),
    ({"learning_rate": float("nan")}, "learning_rate must be one finite number greater"),
    ({"learning_rate": float("inf")}, "learning_rate must be one finite number greater"),
    ({"learning_rate": "fast"}, "learning_rate must be one finite number greater"),
    ({"learning_rate": True}, "learning_rate must be one finite number greater"),
    ({"gamma": 0}, "gamma must be one finite number greater"),
    ({"init_std": -0.1}, "init_std must be one finite number greater"),
    ({"n_hidden": 0}, "n_hidden must be a whole number"),
    ({"batch_size": 2.5}, "batch_size must be a whole number"),
    ({"max_iter": 0}, "max_iter must be a whole number"),
    ({"tol": 1.0}, "tol must be one finite number"),
    ({"validation_fraction": 1.0}, "validation_fraction must be one finite number"),
    ({"kernel": "poly"}, "kernel must be 'linear', 'rbf', 'precomputed' or a callable"),
    ({"kernel": None}, "kernel must be"),
    ({"init": "zeros"}, "init must be"),
    ({"readout": 3}, "readout must be"),
    ({"readout": "mean"}, "one output"),
    ({"readout": np.ones((3, 7))}, r"readout must have shape \(2, 5\), got \(3, 7\)"),
    ({"init": np.ones((5, 4))}, r"init must have shape \(5, 5\), got \(5, 4\)"),
    ({"init": np.full((5, 5), np.nan)}, "init must be finite"),
    ({"init": lambda X: X}, r"init\(X\) must have shape \(12, 5\)"),
    ({"kernel": "rbf", "init": "weights"}, "initial weights need"),
    ({"kernel": lambda a, b: np.ones(3)}, r"kernel\(X, Y\) must have shape \(12, 12\)"),
    ({"kernel": lambda a, b: "no"}, r"kernel\(X, Y\) must be an array"),
    ({"kernel": lambda a, b: a[:, :1] + 0 * b[:, 0]}, "must be symmetric"),
    ({"kernel": lambda a, b: -a @ b.T}, "must be positive semi-definite"),
    ({"random_state": -1}, "random_state must be"),
    ({"early_stopping": True, "validation_fraction": 0.99}, "early stopping needs"),
    ({"learning_rate": 1e6, "max_iter": 500, "tol": None, "n_hidden": 50}, r"diverged with learning_rate=1e\+06"),
]


@pytest.mark.parametrize(("options", "message"), BAD_PARAMETERS)
def test_bad_parameters_are_named(options, message):
    x, y, _, _, _ = case(14)
    with pytest.raises(InputError, match=message):
        KernelReLURegressor(**{"n_hidden": 5, "random_state": 0, **options}).fit(x, y)


def test_bad_data_is_named():
    x, y, _, _, _ = case(15)
    model = KernelReLURegressor(5, max_iter=2, tol=None)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.where(x > 1, np.nan, x), y)
    with pytest.raises(ValueError, match="NaN"):
        model.fit(x, np.where(y > 1, np.nan, y))
    with pytest.raises(ValueError, match="0 sample"):
        model.fit(x[:0], y[:0])
    with pytest.raises(InputError, match="overlaps of the inputs must be finite"):
        model.fit(x * 1e200, y)
    with pytest.raises(InputError, match=r"square matrix of overlaps to fit, got shape \(12, 4\)"):
        KernelReLURegressor(5, kernel="precomputed").fit(x, y)
    with pytest.raises(InputError, match="must be symmetric"):
        KernelReLURegressor(5, kernel="precomputed").fit(np.triu(np.ones((12, 12))), y)
    with pytest.raises(InputError, match=r"smallest eigenvalue is -1"):
        KernelReLURegressor(5, kernel="precomputed").fit(np.diag(np.r_[-1.0, np.ones(11)]), y)
    with pytest.raises(InputError, match='Use init="gram"'):
        KernelReLURegressor(5, kernel="precomputed", init=np.tanh).fit(x @ x.T, y)
    with pytest.raises(InputError, match="weights exist only"):
        KernelReLURegressor(5, kernel="rbf", max_iter=1, tol=None).fit(x, y).weights()


def test_a_failed_fit_leaves_no_half_fitted_model():
    x, y, _, _, _ = case(16)
    model = KernelReLURegressor(5, max_iter=3, tol=None, random_state=0).fit(x, y)
    with pytest.raises(InputError, match="diverged"):
        model.set_params(n_hidden=50, learning_rate=1e9, max_iter=500).fit(x, y)
    with pytest.raises(NotFittedError):
        model.predict(x)
    model.set_params(learning_rate="auto", max_iter=3).fit(x, y)
    kept = model.predict(x)
    with pytest.raises(InputError, match="between calls"):
        model.partial_fit(x, y[:, :1])
    np.testing.assert_array_equal(model.predict(x), kept)
    gram = KernelReLURegressor(5, kernel="precomputed", max_iter=3, tol=None).fit(x @ x.T, y)
    with pytest.raises(InputError, match="Gram matrix of the first call"):
        gram.partial_fit(2 * x @ x.T, y)


def test_the_gram_check_admits_rounding_and_singular_kernels():
    x = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)
    check_gram((x @ x.T).astype(np.float64), "K")
    check_gram(np.zeros((4, 4)), "K")
    check_gram(np.ones((4, 4)) * 1e-200, "K")
    with pytest.raises(InputError, match="positive semi-definite"):
        check_gram(-1e-200 * np.eye(3), "K")


def test_steps_of_a_field_say_what_does_not_fit():
    field, overlap, readout, residual = np.ones((3, 2)), np.eye(3), np.ones((1, 2)), np.ones((3, 1))
    for name, arrays in {
        "field must be finite": (field * np.nan, overlap, readout, residual, 0.1),
        r"overlap must have shape \(3, 3\)": (field, np.eye(2), readout, residual, 0.1),
        r"readout must have shape \(1, 2\)": (field, overlap, np.ones((1, 3)), residual, 0.1),
        r"residual must have shape \(3, 1\)": (field, overlap, readout, residual[:2], 0.1),
        "residual must be a numpy array of shape": (field, overlap, readout, residual[:, 0], 0.1),
        "lr must be one finite number": (field, overlap, readout, residual, float("nan")),
    }.items():
        for step in (field_step, activation_step):
            with pytest.raises(InputError, match=name):
                inspect.unwrap(step)(*arrays)


def test_a_safe_rate_needs_a_kernel_and_a_batch():
    gram, readout = np.eye(3), np.ones((1, 2))
    with pytest.raises(InputError, match="gram must be finite"):
        safe_rate(gram * np.nan, readout, 3)
    for batch in (0, -3):
        with pytest.raises(InputError, match="batch must be a whole number of at least 1"):
            safe_rate(gram, readout, batch)
    with pytest.raises(InputError, match="gram must be square"):
        inspect.unwrap(safe_rate)(gram[:2], readout, 2)


def test_an_initial_field_leaves_the_rounding_of_a_float32_kernel_alone():
    """Thirty examples in three dimensions: 27 directions of the float32 Gram matrix are rounding."""
    phi = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    found = inverse_root((phi @ phi.T).astype(np.float64))
    exact = inverse_root(phi.astype(np.float64) @ phi.T.astype(np.float64))
    assert np.linalg.matrix_rank(found, rtol=1e-4) == 3
    assert np.linalg.norm(found - exact) < 1e-4 * np.linalg.norm(exact)
