"""When a function of three inputs is a meta kernel: those made of features are, and each condition can fail alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.theory import QuadraticModel, meta_kernel_conditions
from references.nearly_kernel import random_quadratic


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), features=st.sampled_from([2, 4, 24]))
@settings(max_examples=25, deadline=None)
def test_meta_kernels_of_features_pass_and_the_bound_is_met(seed, n, features):
    """Also where the features are fewer than the inputs, so that k is singular."""
    rng = np.random.default_rng(seed)
    model = QuadraticModel(*random_quadratic(seed, features), 0.7)
    x, x0 = rng.normal(size=(n, 3)), rng.normal(size=(3, 3))
    k, mu = model.kernel(x, x), model.meta_kernel(x0, x, x)
    found = meta_kernel_conditions(k, mu)
    assert found.holds, found.failures
    assert (found.bounds <= 0.7 * np.abs(np.linalg.eigvalsh(model.psi(x0))).max(1) * (1 + 1e-6)).all()
    for bound, one in zip(found.bounds, mu, strict=True):
        for sign in (1, -1):
            assert np.linalg.eigvalsh(bound * k + sign * one)[0] > -1e-6 * max(1, bound) * np.abs(k).max()
            if bound > 1e-6 and features == 24 and n < 4:  # and no smaller one will do for both signs
                lowest = min(np.linalg.eigvalsh(0.99 * bound * k + s * one)[0] for s in (1, -1))
                assert lowest < 0


def test_each_condition_fails_alone():
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 6))
    k = root @ root.T
    mu = rng.normal(size=(2, 4, 4))
    mu = mu + mu.transpose(0, 2, 1)
    assert meta_kernel_conditions(k, mu).holds  # a kernel that can be inverted allows every symmetric μ
    tilted = mu.copy()
    tilted[1, 0, 2] += 0.5
    cases = {
        "k must be symmetric": (k + np.triu(np.ones((4, 4)), 1), mu),
        "k must be positive semi-definite": (k - 1.01 * np.linalg.eigvalsh(k)[0] * np.eye(4), np.zeros_like(mu)),
        "μ must be symmetric in its last two inputs": (k, tilted),
        "c k ± μ must be positive semi-definite": (root[:, :2] @ root[:, :2].T, mu),
    }
    for words, (kernel, meta) in cases.items():
        found = meta_kernel_conditions(kernel, meta)
        assert not found.holds
        assert len(found.failures) == 1
        assert words in found.failures[0]
        assert words in repr(found)
    assert np.isinf(found.bounds).all()


def test_bad_input():
    with pytest.raises(InputError, match="same n, got \\(2, 2\\) and \\(1, 3, 3\\)"):
        meta_kernel_conditions(np.eye(2), np.zeros((1, 3, 3)))
    with pytest.raises(InputError, match="meta must be finite"):
        meta_kernel_conditions(np.eye(2), np.full((1, 2, 2), np.nan))
    with pytest.raises(InputError, match="tol must be"):
        meta_kernel_conditions(np.eye(2), np.zeros((1, 2, 2)), tol=0.0)
