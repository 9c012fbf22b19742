"""The quadratic model: identities that hold for any weights, and the solutions of each algorithm."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.theory.quadratic import QuadraticModel, check_step
from references.nearly_kernel import random_quadratic


def case(seed, n=4, outputs=2, epsilon=0.05):
    rng = np.random.default_rng(seed)
    model = QuadraticModel(*random_quadratic(seed), epsilon)
    return model, rng.normal(size=(n, 3)), rng.normal(size=(n, outputs)), rng.normal(size=(outputs, 24))


@given(seed=st.integers(0, 10_000), n=st.integers(1, 5), outputs=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_identities(seed, n, outputs):
    model, x, _, weights = case(seed, n, outputs, epsilon=0.7)
    z, effective = model(x, weights), model.effective_features(x, weights)
    phi, psi = model.phi(x), model.psi(x)
    for i in range(outputs):
        for a in range(n):
            w = weights[i]
            assert z[a, i] == pytest.approx(w @ phi[a] + 0.35 * w @ psi[a] @ w)
            assert z[a, i] == pytest.approx(0.5 * w @ (phi[a] + effective[a, i]))
    shift = 1e-6 * np.eye(24)[3]
    slope = (model(x, weights + shift) - model(x, weights - shift)) / 2e-6
    np.testing.assert_allclose(slope, effective[:, :, 3], atol=1e-7)
    mu = model.meta_kernel(x, x, x)
    np.testing.assert_allclose(mu, mu.transpose(0, 2, 1), atol=1e-12)
    moved = model.effective_kernel(x, x, weights)
    np.testing.assert_allclose(moved[0], effective[:, 0] @ effective[:, 0].T, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["direct", "gradient-descent", "gradient-flow", "minimum-norm"])
def test_solutions_interpolate_and_are_what_they_say(algorithm):
    model, x, y, _ = case(1)
    largest = np.linalg.eigvalsh(model.kernel(x, x))[-1]
    step = 0.9 / largest if algorithm == "gradient-descent" else None
    weights = model.train(x, y, algorithm, step)
    np.testing.assert_allclose(model(x, weights), y, atol=1e-10)
    phi = model.phi(x)
    outside = weights - weights @ np.linalg.pinv(phi) @ phi
    effective = model.effective_features(x, weights)
    off_normal = [w - np.linalg.pinv(e) @ e @ w for w, e in zip(weights, effective.transpose(1, 0, 2), strict=True)]
    if algorithm == "direct":
        assert np.abs(outside).max() < 1e-12
    elif algorithm == "minimum-norm":
        assert np.abs(off_normal).max() < 1e-10  # W is normal to the set of interpolating weights
        assert (weights**2).sum() < (model.train(x, y, "direct") ** 2).sum()
    else:
        assert np.abs(outside).max() > 1e-4
        assert np.abs(off_normal).max() > 1e-6


def test_flow_is_the_limit_of_small_steps():
    model, x, y, _ = case(2, n=2)
    flow = model.train(x, y, "gradient-flow")
    largest = np.linalg.eigvalsh(model.kernel(x, x))[-1]
    near = model.train(x, y, "gradient-descent", 0.05 / largest, tol=1e-7)
    far = model.train(x, y, "gradient-descent", 1.0 / largest)
    assert np.abs(near - flow).max() < 0.1 * np.abs(far - flow).max()


def test_bad_input():
    model, x, y, _ = case(3)
    largest = np.linalg.eigvalsh(model.kernel(x, x))[-1]
    with pytest.raises(InputError, match=r"step must be below 2/λmax"):
        model.train(x, y, "gradient-descent", 2.01 / largest)
    with pytest.raises(InputError, match="step must be one finite number greater than 0"):
        model.train(x, y, "gradient-descent", -1.0)
    with pytest.raises(InputError, match="only there"):
        model.train(x, y, "direct", 0.1)
    with pytest.raises(InputError, match="y must have shape"):
        model.train(x, y[:2])
    with pytest.raises(InputError, match="linearly independent"):
        model.train(np.concatenate([x, x]), np.concatenate([y, y]))
    with pytest.raises(InputError, match="must be symmetric"):
        QuadraticModel(model.features, lambda x: np.triu(np.ones((len(x), 24, 24))), 0.1)(x, np.ones((1, 24)))
    with pytest.raises(InputError, match="features\\(x\\) must have shape"):
        QuadraticModel(lambda x: x[0], model.meta_features, 0.1).phi(x)
    assert check_step(1.0, 1.9) == 1.0


def test_features_that_float32_made_independent_are_refused():
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(size).astype(np.float32) for size in ((6, 3), (3, 9)))
    few = left @ right
    model = QuadraticModel(lambda x: few[: len(x)], lambda x: np.zeros((len(x), 9, 9)), 0.1)
    with pytest.raises(InputError, match="linearly independent, but their rank is 3"):
        model.train(np.zeros((6, 1)), np.ones((6, 1)))
