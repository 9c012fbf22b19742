"""Nearly-kernel machines against tensors written out, against training, and against scikit-learn's rules."""

import copy
import math
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from gramscope.base.errors import InputError
from gramscope.kernels.learning_rates import layer_rates
from gramscope.kernels.tangent_kernels import TangentKernels
from gramscope.theory.nearly_kernel import NearlyKernelRegressor, OutsideRegimeWarning
from gramscope.theory.quadratic import QuadraticModel
from gramscope.theory.training_algorithms import Spectrum, algorithm_matrices
from references.dntk import flat_jacobian
from references.nearly_kernel import algorithm_tensors, prediction, random_quadratic, ridge_prediction

ALGORITHMS = {"direct": None, "gradient-descent": 1.5, "gradient-flow": None, "minimum-norm": None}


def data(seed, n=4, m=5, outputs=2):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.normal(size=(m, 3)), rng.normal(size=(n, outputs))


def step_of(algorithm, kernel):
    share = ALGORITHMS[algorithm]
    return None if share is None else share / np.linalg.eigvalsh(kernel)[-1]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize("algorithm", ["direct", "gradient-flow"])
def test_check_estimator(algorithm):
    check_estimator(NearlyKernelRegressor(algorithm=algorithm))


@given(seed=st.integers(0, 10_000), n=st.integers(1, 4), algorithm=st.sampled_from(list(ALGORITHMS)))
@settings(max_examples=25, deadline=None)
def test_matrices_equal_the_tensors_written_out(seed, n, algorithm):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n + 2))
    k, y = root @ root.T, rng.normal(size=n)
    step = step_of(algorithm, k)
    got = algorithm_matrices(Spectrum(k), y, algorithm, step)
    z_a, z_b = algorithm_tensors(k, y, algorithm, step or 0.0)
    want = z_a, (z_b + z_b.T) / 2
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * np.abs(b).max() + 1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_prediction_equals_the_tensors_written_out(algorithm):
    x, x_test, y = data(0)
    model = QuadraticModel(*random_quadratic(0), 0.3)
    k, k_b = model.kernel(x, x), model.kernel(x_test, x)
    mu = [model.meta_kernel(*sets) for sets in ((x, x, x), (x_test, x, x), (x, x_test, x))]
    step = step_of(algorithm, k)
    want = np.stack([prediction(k, k_b, *mu, target, algorithm, step or 0.0) for target in y.T], axis=1)
    as_functions = NearlyKernelRegressor(model.kernel, model.meta_kernel, algorithm, step).fit(x, y)
    np.testing.assert_allclose(as_functions.predict(x_test), want, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(as_functions.predict(x), y, atol=1e-9)
    given = NearlyKernelRegressor("precomputed", "precomputed", algorithm, step).fit(k, y, meta=mu[0])
    np.testing.assert_allclose(given.predict(k_b, meta=mu[1], meta_transport=mu[2]), want, rtol=1e-9, atol=1e-9)
    single = NearlyKernelRegressor(model.kernel, model.meta_kernel, algorithm, step).fit(x, y[:, 1])
    np.testing.assert_allclose(single.predict(x_test), want[:, 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_product_meta_kernel(algorithm):
    x, x_test, y = data(1)
    kernel = QuadraticModel(*random_quadratic(1), 0.0).kernel

    def product(x0, x1, x2):
        return 0.2 * kernel(x0, x1)[:, :, None] * kernel(x0, x2)[:, None, :]

    step = step_of(algorithm, kernel(x, x))
    want = NearlyKernelRegressor(kernel, product, algorithm, step).fit(x, y)
    got = NearlyKernelRegressor(kernel, "product", algorithm, step, epsilon=0.2).fit(x, y)
    np.testing.assert_allclose(got.predict(x_test), want.predict(x_test), rtol=1e-9, atol=1e-9)
    for method in ("trained_kernel", "effective_kernel"):
        np.testing.assert_allclose(getattr(got, method)(x_test), getattr(want, method)(x_test), rtol=1e-9, atol=1e-9)
    plain = NearlyKernelRegressor("precomputed", "product", algorithm, step, epsilon=0.2).fit(kernel(x, x), y)
    np.testing.assert_allclose(plain.predict(kernel(x_test, x)), got.predict(x_test), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_against_training_has_slope_two(algorithm):
    """Each algorithm run on the quadratic model itself; the prediction of another algorithm has slope one."""
    x, x_test, y = data(2)
    step = step_of(algorithm, QuadraticModel(*random_quadratic(2), 0.0).kernel(x, x))
    other, other_step = ("minimum-norm", None) if algorithm == "direct" else ("direct", None)
    errors, wrong = [], []
    for epsilon in (4e-3, 2e-3, 1e-3):
        model = QuadraticModel(*random_quadratic(2), epsilon)
        exact = model(x_test, model.train(x, y, algorithm, step))
        predict = lambda a, s, m=model: NearlyKernelRegressor(m.kernel, m.meta_kernel, a, s).fit(x, y).predict(x_test)  # noqa: E731
        errors.append(np.linalg.norm(predict(algorithm, step) - exact))
        wrong.append(np.linalg.norm(predict(other, other_step) - exact))
    assert math.log2(errors[1] / errors[2]) == pytest.approx(2, abs=0.1)
    assert math.log2(wrong[1] / wrong[2]) == pytest.approx(1, abs=0.1)


def test_trained_and_effective_kernels():
    """k# reproduces the prediction to O(ε²); kᴱ equals that of the trained model to O(ε²); the printed k# does not."""
    x, x_test, y = data(3, outputs=1)
    trained, effective, printed = [], [], []
    for epsilon in (2e-3, 1e-3):
        model = QuadraticModel(*random_quadratic(3), epsilon)
        weights = model.train(x, y, "direct")
        fitted = NearlyKernelRegressor(model.kernel, model.meta_kernel).fit(x, y)
        exact = model(x_test, weights)[:, 0]
        sharp = fitted.trained_kernel(x_test) @ np.linalg.solve(fitted.trained_kernel(x), y[:, 0])
        trained.append(np.linalg.norm(sharp - exact))
        moved = fitted.effective_kernel(x_test) - model.effective_kernel(x_test, x, weights)[0]
        effective.append(np.linalg.norm(moved))
        between = lambda a, b, f=fitted, m=model: 0.5 * (f.effective_kernel(a, b) + m.kernel(a, b))  # noqa: E731
        form = between(x_test, x) @ np.linalg.solve(between(x, x), y[:, 0])
        printed.append(np.linalg.norm(form - exact))
    assert math.log2(trained[0] / trained[1]) == pytest.approx(2, abs=0.1)
    assert math.log2(effective[0] / effective[1]) == pytest.approx(2, abs=0.1)
    assert math.log2(printed[0] / printed[1]) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("method", ["trained_kernel", "effective_kernel"])
def test_a_precomputed_meta_kernel_knows_the_training_set_only(method):
    """As many other examples have entries of the same shape; they were taken for the training set's."""
    x, x_test, y = data(6, n=4, m=4)
    model = QuadraticModel(*random_quadratic(6), 0.3)
    want = NearlyKernelRegressor(model.kernel, model.meta_kernel).fit(x, y)
    given = NearlyKernelRegressor(model.kernel, "precomputed").fit(x, y, meta=model.meta_kernel(x, x, x))
    for output in range(2):
        np.testing.assert_allclose(getattr(given, method)(x, output=output), getattr(want, method)(x, output=output))
    np.testing.assert_allclose(getattr(given, method)(x, x.copy()), getattr(want, method)(x))
    for examples in ((x_test,), (x, x_test), (x_test, x), (x[::-1],), (x[:2],)):
        with pytest.raises(InputError, match="must be those of the training set"):
            getattr(given, method)(*examples)
    metas = [model.meta_kernel(*sets) for sets in ((x_test, x, x), (x, x_test, x))]
    found = given.predict(x_test, meta=metas[0], meta_transport=metas[1])
    np.testing.assert_allclose(found, want.predict(x_test), rtol=1e-9, atol=1e-9)


def test_modes_below_the_cut_are_null():
    """1e-8 of the largest eigenvalue is kept and 1e-10 is not, so that rounding of the kernel is not felt."""
    rng = np.random.default_rng(8)
    basis = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    sizes = 5 * np.array([1, 0.3, 1e-8, 1e-10])
    np.testing.assert_allclose(Spectrum((basis * sizes) @ basis.T).values, sizes[2::-1], rtol=1e-6)
    sizes, parts = 5 * np.array([1, 0.3, 0.1, 1e-12]), np.array([1.0, 2.0, -1.0, 3.0])
    noise = 1e-14 * rng.normal(size=(4, 4))
    for rounding in (0, noise + noise.T):
        found = Spectrum((basis * sizes) @ basis.T + rounding).solve(basis @ parts)
        np.testing.assert_allclose(found, basis[:, :3] @ (parts / sizes)[:3], atol=1e-10)


def network(width, seed, outputs=1, depth=3):
    """A tanh network near criticality, in the parametrisation of the theory."""
    torch.manual_seed(seed)
    sizes = [2, *[width] * (depth - 1), outputs]
    layers = []
    for fan_in, fan_out in pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=math.sqrt(1.6 / fan_in))
        nn.init.normal_(linear.bias, std=math.sqrt(0.1))
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def trained(model, x, y, x_test, rates, step):
    parameters = dict(model.named_parameters())
    for _ in range(20_000):
        residual = model(x) - y
        if residual.abs().max() < 1e-6:  # errors to be compared are above 1e-3
            return model(x_test).detach().numpy()
        gradients = torch.autograd.grad(0.5 * residual.square().sum(), list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                p.sub_(step * rates[name] * g)
    raise AssertionError("training did not converge")


POINTS = torch.tensor([[1.0, 0.2], [-0.6, 1.0], [0.3, -1.1], [-1.0, -0.4]], dtype=torch.float64)


def test_a_network_at_initialisation_is_a_quadratic_model():
    """Dense kernels of a two-output network, flattened over (example, output), give what the contractions give."""
    model, x_test = network(6, 0, outputs=2), torch.randn(3, 2).double()
    y = np.random.default_rng(0).normal(size=(4, 2))
    kernels = TangentKernels(model, metric=layer_rates(model, 0.4, 1.0))
    k, k_b = kernels(POINTS), kernels(x_test, POINTS)
    step = 1.2 / np.linalg.eigvalsh(k)[-1]
    got = NearlyKernelRegressor(kernels, algorithm="gradient-descent", step=step).fit(POINTS, y).predict(x_test)
    mu = [kernels.meta(*sets) for sets in ((POINTS,) * 3, (x_test, POINTS, POINTS), (POINTS, x_test, POINTS))]
    flat = (y - kernels.initial(POINTS)).ravel()
    want = prediction(k, k_b, *mu, flat, "gradient-descent", step).reshape(3, 2) + kernels.initial(x_test)
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(
        NearlyKernelRegressor(kernels).fit(POINTS, y).trained_kernel(x_test),
        k_b + 0.5 * kernels.meta(x_test, POINTS, POINTS) @ Spectrum(k).solve(flat),
        rtol=1e-8,
        atol=1e-8,
    )


def test_trained_networks_are_predicted_better_than_by_the_linear_theory():
    """Widths 32 to 512, real gradient descent: mean error over seeds below the tangent kernel's at every width."""
    x_test = torch.tensor([[0.5, 0.9], [-0.2, -0.7], [1.2, -0.3], [-1.1, 0.5], [0.1, 0.3]], dtype=torch.float64)
    y = torch.sin(2 * POINTS[:, :1]) * torch.cos(POINTS[:, 1:])
    linear, quadratic = [], []
    for width, seeds in ((32, 5), (128, 3), (512, 2)):
        errors = []
        for seed in range(seeds):
            model = network(width, seed)
            rates = layer_rates(model, 0.4, 1.0)
            kernels = TangentKernels(model, metric=rates)
            step = 1.0 / float(np.linalg.eigvalsh(kernels(POINTS))[-1])
            fit = NearlyKernelRegressor(kernels, algorithm="gradient-descent", step=step).fit(POINTS, y.numpy())
            second = fit.predict(x_test)
            first = kernels.initial(x_test) + kernels(x_test, POINTS) @ fit.dual_coef_
            real = trained(model, POINTS, y, x_test, rates, step)
            errors.append([np.linalg.norm(first - real), np.linalg.norm(second - real)])
        means = np.mean(errors, axis=0)
        linear.append(means[0])
        quadratic.append(means[1])
    assert all(b < a for a, b in zip(linear, quadratic, strict=True))
    assert sum(quadratic) < 0.7 * sum(linear)
    assert quadratic[2] < 0.5 * quadratic[0]


def test_pickles_and_null_modes():
    x, x_test, y = data(4)
    twice = np.concatenate([x, x[:1]])
    fitted = NearlyKernelRegressor(epsilon=0.1, algorithm="gradient-flow").fit(twice, np.concatenate([y, y[:1]]))
    once = NearlyKernelRegressor(epsilon=0.1, algorithm="gradient-flow").fit(x, y)
    # A repeated example weighs double along the way, which a flow feels at O(ε); the fit is the same on the data.
    np.testing.assert_allclose(fitted.predict(x), y, atol=1e-6)
    again = pickle.loads(pickle.dumps(once))
    np.testing.assert_array_equal(again.predict(x_test), once.predict(x_test))


def test_bad_input():
    x, _, y = data(5)
    k = x @ x.T
    rbf = NearlyKernelRegressor().fit(x, y)
    largest = rbf._spectrum.largest
    with pytest.raises(InputError, match="step must be below 2/λmax"):
        NearlyKernelRegressor(algorithm="gradient-descent", step=2.1 / largest).fit(x, y)
    with pytest.raises(InputError, match="step must be given"):
        NearlyKernelRegressor(algorithm="gradient-descent").fit(x, y)
    with pytest.raises(InputError, match="step must be given"):
        NearlyKernelRegressor(step=0.1).fit(x, y)
    with pytest.raises(InputError, match="positive semi-definite"):
        NearlyKernelRegressor("precomputed").fit(k - 10 * np.eye(4), y)
    with pytest.raises(InputError, match="must be symmetric"):
        NearlyKernelRegressor("precomputed").fit(k + np.triu(np.ones((4, 4)), 1), y)
    with pytest.raises(InputError, match="must be square"):
        NearlyKernelRegressor("precomputed").fit(k[:, :3], y)
    with pytest.raises(InputError, match="precomputed meta kernel must be passed"):
        NearlyKernelRegressor("precomputed", "precomputed").fit(k, y)
    with pytest.raises(InputError, match="meta must have shape"):
        NearlyKernelRegressor("precomputed", "precomputed").fit(k, y, meta=np.ones((3, 4, 4)))
    given = NearlyKernelRegressor("precomputed", "precomputed").fit(k, y, meta=np.zeros((4, 4, 4)))
    with pytest.raises(InputError, match="meta_transport must have shape \\(4, 2, 4\\)"):
        given.predict(k[:2], meta=np.zeros((2, 4, 4)), meta_transport=np.zeros((2, 4, 4)))
    with pytest.raises(InputError, match="meta must be finite"):
        given.predict(k[:2], meta=np.full((2, 4, 4), np.nan), meta_transport=np.zeros((4, 2, 4)))
    with pytest.raises(InputError, match="rows of the kernel instead"):
        NearlyKernelRegressor("precomputed", lambda *_: None).fit(k, y)
    with pytest.raises(InputError, match="meta_kernel must be a function"):
        NearlyKernelRegressor(meta_kernel=3).fit(x, y)
    with pytest.raises(InputError, match="must have shape \\(4, 4, 4\\)"):
        NearlyKernelRegressor(meta_kernel=lambda a, b, c: np.ones((1, 1, 1))).fit(x, y)
    with pytest.raises(InputError, match="kernel\\(x, x2\\) must have shape"):
        NearlyKernelRegressor(kernel=lambda a, b: np.ones(3)).fit(x, y)
    with pytest.raises(InputError, match="algorithm must be one of"):
        NearlyKernelRegressor(algorithm="magic").fit(x, y)
    with pytest.raises(InputError, match="shape \\(4, 1\\) of the network's outputs"):
        NearlyKernelRegressor(TangentKernels(network(4, 0))).fit(POINTS, y)
    with pytest.raises(InputError, match="given as a function"):
        NearlyKernelRegressor("precomputed", None).fit(k, y).trained_kernel(k)


def test_modes_that_are_rounding_of_float32_are_null():
    """A kernel of rank 3 from float32 features: no other mode, also where none came out negative."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        phi = rng.normal(size=(5, 3)).astype(np.float32)
        assert len(Spectrum((phi @ phi.T).astype(np.float64)).values) == 3


@given(seed=st.integers(0, 10_000), n=st.integers(1, 4), ridge=st.sampled_from([1e-3, 0.7, 30.0]))
@settings(max_examples=20, deadline=None)
def test_a_ridge_against_the_formula_written_out(seed, n, ridge):
    x, x_test, y = data(seed, n)
    model = QuadraticModel(*random_quadratic(seed), 0.3)
    mu = [model.meta_kernel(*sets) for sets in ((x, x, x), (x_test, x, x), (x, x_test, x))]
    want = np.stack(
        [ridge_prediction(model.kernel(x, x), model.kernel(x_test, x), *mu, target, ridge) for target in y.T], axis=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutsideRegimeWarning)
        fit = NearlyKernelRegressor(model.kernel, model.meta_kernel, "ridge", ridge=ridge).fit(x, y)
    np.testing.assert_allclose(fit.predict(x_test), want, rtol=1e-10, atol=1e-10 * np.abs(want).max())


def test_a_ridge_errs_at_second_order():
    """Against the minimum of the penalised loss itself; as the ridge falls it becomes the interpolant of least norm."""
    x, x_test, y = data(2)
    errors = []
    for epsilon in (2e-3, 1e-3):
        model = QuadraticModel(*random_quadratic(2), epsilon)
        exact = model(x_test, model.train(x, y, "ridge", ridge=0.7))
        fit = NearlyKernelRegressor(model.kernel, model.meta_kernel, "ridge", ridge=0.7).fit(x, y)
        errors.append(np.linalg.norm(fit.predict(x_test) - exact))
        assert np.abs(fit.predict(x) - y).max() > 1e-3  # it does not interpolate
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.1)
    limits = [NearlyKernelRegressor(model.kernel, model.meta_kernel, "ridge", ridge=rho).fit(x, y) for rho in (0, 1e-7)]
    least = NearlyKernelRegressor(model.kernel, model.meta_kernel, "minimum-norm").fit(x, y).predict(x_test)
    np.testing.assert_allclose(limits[0].predict(x_test), least, atol=1e-12)
    np.testing.assert_allclose(limits[1].predict(x_test), least, atol=1e-5)


def test_the_product_meta_kernel_with_a_ridge():
    x, x_test, y = data(1)
    kernel = QuadraticModel(*random_quadratic(1), 0.0).kernel

    def product(x0, x1, x2):
        return 0.02 * kernel(x0, x1)[:, :, None] * kernel(x0, x2)[:, None, :]

    want = NearlyKernelRegressor(kernel, product, "ridge", ridge=2.0).fit(x, y)
    got = NearlyKernelRegressor(kernel, "product", "ridge", epsilon=0.02, ridge=2.0).fit(x, y)
    np.testing.assert_allclose(got.predict(x_test), want.predict(x_test), rtol=1e-9, atol=1e-9)


def test_the_effective_kernel_on_the_way():
    """After t steps of gradient descent on the quadratic model itself; the kernel of the end has slope one there."""
    x, x_test, y = data(3, outputs=1)
    errors = []
    for epsilon in (2e-3, 1e-3):
        model = QuadraticModel(*random_quadratic(3), epsilon)
        step = 0.4 / np.linalg.eigvalsh(model.kernel(x, x))[-1]
        weights = np.zeros((1, 24))
        for _ in range(7):
            residual = model(x, weights) - y
            weights = weights - step * np.einsum("nif,ni->if", model.effective_features(x, weights), residual)
        fit = NearlyKernelRegressor(model.kernel, model.meta_kernel, "gradient-descent", step=step).fit(x, y)
        real = model.effective_kernel(x_test, x, weights)[0]
        guesses = fit.effective_kernel_after(x_test, steps=7), fit.effective_kernel(x_test)
        errors.append([np.linalg.norm(guess - real) for guess in guesses])
    np.testing.assert_allclose(np.log2(np.divide(*errors)), [2, 1], atol=0.15)
    np.testing.assert_allclose(fit.effective_kernel_after(x_test, steps=0), model.kernel(x_test, x), atol=1e-14)
    np.testing.assert_allclose(fit.effective_kernel_after(x, steps=10**6), fit.effective_kernel(x), rtol=1e-10)
    with pytest.raises(InputError, match="needs algorithm='gradient-descent'"):
        NearlyKernelRegressor(model.kernel, model.meta_kernel).fit(x, y).effective_kernel_after(x, steps=3)


def test_bad_ridges():
    x, _, y = data(5)
    twice = np.concatenate([x, x[:1]])
    with pytest.raises(InputError, match=r"ridge must be above 0 for a singular kernel.*rank 4 for 5 rows"):
        NearlyKernelRegressor(algorithm="ridge", ridge=0).fit(twice, np.concatenate([y, y[:1]]))
    with pytest.warns(UserWarning, match=r"but 0\.\d+ of their size is in modes where the kernel is zero"):
        NearlyKernelRegressor().fit(twice, np.concatenate([y, y[:1] + 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NearlyKernelRegressor().fit(twice, np.concatenate([y, y[:1]]))
    with pytest.raises(InputError, match="ridge must be one finite number at least 0"):
        NearlyKernelRegressor(algorithm="ridge", ridge=-0.1).fit(x, y)
    with pytest.raises(InputError, match="ridge must be given for algorithm='ridge' and only there"):
        NearlyKernelRegressor(algorithm="ridge").fit(x, y)
    with pytest.raises(InputError, match="ridge must be given for algorithm='ridge' and only there"):
        NearlyKernelRegressor(ridge=0.1).fit(x, y)
    with pytest.raises(InputError, match="ridge must be one finite number greater than 0"):
        QuadraticModel(*random_quadratic(5), 0.1).train(x, y, "ridge", ridge=0.0)
    NearlyKernelRegressor(algorithm="ridge", ridge=0.1).fit(twice, np.concatenate([y, y[:1]]))


def test_far_targets_draw_a_warning():
    model = network(32, 0)
    kernels = TangentKernels(model, metric=layer_rates(model, 0.4, 1.0))
    y = np.array([[1.0], [-1.0], [-1.0], [1.0]])
    near = kernels.initial(POINTS) + 1e-3 * y
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close = NearlyKernelRegressor(kernels).fit(POINTS, near)
        plain = NearlyKernelRegressor(lambda a, b: kernels(torch.as_tensor(a), torch.as_tensor(b)), None).fit(
            POINTS, 8 * y
        )
    with pytest.warns(OutsideRegimeWarning, match="predicted worse than by the kernel alone"):
        far = NearlyKernelRegressor(kernels).fit(POINTS, kernels.initial(POINTS) + 8 * y)
    assert plain.feature_movement_ == 0.0
    # Features move linearly with the targets at this order.
    assert far.feature_movement_ == pytest.approx(8e3 * close.feature_movement_, rel=1e-6)


def test_how_far_features_move():
    """Against Jacobians before and after a short way; from kernels alone, the part within the span of the features."""
    model = network(6, 1, outputs=2)
    rates = layer_rates(model, 0.4, 1.0)
    kernels = TangentKernels(model, metric=rates)
    v = np.random.default_rng(1).normal(size=8)
    flat = torch.cat([torch.full((p.numel(),), rates[name]).double() for name, p in model.named_parameters()])
    J = flat_jacobian(model, POINTS).detach()
    direction = flat * (J.T @ torch.from_numpy(v))
    step, moved = 1e-5, []
    for sign in (1, -1):
        other = copy.deepcopy(model)
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()).detach() + sign * step * direction, other.parameters()
        )
        moved.append(flat_jacobian(other, POINTS).detach())
    change = (moved[0] - moved[1]) / (2 * step)
    want = float(((flat * change**2).sum() / (flat * J**2).sum()).sqrt())
    assert kernels.feature_movement(POINTS, v) == pytest.approx(want, rel=1e-7)
    x, _, y = data(7, outputs=1)
    quadratic = QuadraticModel(*random_quadratic(7), 0.01)
    fit = NearlyKernelRegressor(quadratic.kernel, quadratic.meta_kernel).fit(x, y)
    phi = quadratic.phi(x)
    turned = 0.01 * quadratic.psi(x) @ (phi.T @ fit.dual_coef_[:, 0])
    within = turned @ np.linalg.pinv(phi) @ phi
    assert fit.feature_movement_ == pytest.approx(np.linalg.norm(within) / np.linalg.norm(phi), rel=1e-8)
    assert fit.feature_movement_ < np.linalg.norm(turned) / np.linalg.norm(phi)
