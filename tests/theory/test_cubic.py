"""The cubic model: derivatives of its polynomial, kernels by loops, training seen from the outputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.theory import CubicKernels, CubicModel


def random_cubic(seed, outputs=2, size=5, strength=1.0):
    """Functions of x (n, 3); ψ and Ψ symmetric, of order ``strength`` and its square."""
    rng = np.random.default_rng(seed)
    A, B, C = (rng.normal(size=(3, outputs, *[size] * axes)) for axes in (1, 2, 3))
    B = B + B.swapaxes(2, 3)
    C = sum(C.transpose(0, 1, *[2 + axis for axis in order]) for order in
            ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)))  # fmt: skip
    return CubicModel(
        lambda x: np.tensordot(np.cos(x), A, 1),
        lambda x: strength * np.tensordot(np.sin(x), B, 1) / size,
        lambda x: strength**2 * np.tensordot(x, C, 1) / size**2,
    )


@given(seed=st.integers(0, 1000), n=st.integers(1, 3), outputs=st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_effective_features_are_derivatives(seed, n, outputs):
    model, rng = random_cubic(seed, outputs), np.random.default_rng(seed)
    x, theta = rng.normal(size=(n, 3)), rng.normal(size=5)
    phi, psi, third = (torch.from_numpy(array) for array in model._tensors(x))

    def z(t):
        return (
            torch.einsum("nip,p->ni", phi, t)
            + torch.einsum("nipq,p,q->ni", psi, t, t) / 2
            + torch.einsum("nipqr,p,q,r->ni", third, t, t, t) / 6
        )

    at = torch.from_numpy(theta)
    slopes = torch.func.jacrev(z)
    np.testing.assert_allclose(model(x, theta), z(at), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(model.effective_features(x, theta), slopes(at), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(
        model.effective_meta_features(x, theta), torch.func.jacrev(slopes)(at), rtol=1e-11, atol=1e-11
    )


def test_kernels_against_loops():
    model, rng = random_cubic(1), np.random.default_rng(1)
    x = rng.normal(size=(2, 3))
    phi, psi, third = (array.reshape(4, *array.shape[2:]) for array in model._tensors(x))
    found = model.kernels(x)
    for i, j, k, m in np.ndindex(4, 4, 4, 4):
        assert found.kernel[i, j] == pytest.approx(phi[i] @ phi[j], abs=1e-12)
        assert found.meta[i, j, k] == pytest.approx(phi[j] @ psi[i] @ phi[k], abs=1e-12)
        assert found.first[i, j, k, m] == pytest.approx(third[i] @ phi[m] @ phi[k] @ phi[j], abs=1e-12)
        assert found.second[i, j, k, m] == pytest.approx((psi[i] @ phi[k]) @ (psi[j] @ phi[m]), abs=1e-12)


def test_training_from_the_outputs_is_that_of_the_parameters():
    """Gradient descent on θ itself: the error falls with the third power of the strength, with the second without Ψ."""
    x, y, lr = np.random.default_rng(2).normal(size=(3, 3)), np.array([0.5, -0.3, 0.2, 0.4]), 0.01
    errors, without = [], []
    for strength in (0.04, 0.02):
        model = random_cubic(2, size=12, strength=strength)
        theta = np.zeros(12)
        for _ in range(60):
            residual = model(x[:2], theta).reshape(-1) - y
            theta = theta - lr * residual @ model.effective_features(x[:2], theta).reshape(4, 12)
        real, kernels = model(x, theta).reshape(-1), model.kernels(x)
        rows = [
            kernels,
            CubicKernels(kernels.outputs, kernels.kernel, kernels.meta, 0 * kernels.first, 0 * kernels.second),
        ]
        ends = []
        for now in rows:
            for _ in range(60):
                now = now.step(now.outputs[:4] - y, lr)
            ends.append(np.linalg.norm(now.outputs - real))
        errors.append(ends[0])
        without.append(ends[1])
    assert np.log2(errors[0] / errors[1]) == pytest.approx(3, abs=0.2)
    assert np.log2(without[0] / without[1]) == pytest.approx(2, abs=0.2)


def test_bad_input():
    model, x = random_cubic(3), np.ones((2, 3))
    with pytest.raises(InputError, match=r"parameters must have shape \(5,\)"):
        model(x, np.ones(4))
    with pytest.raises(InputError, match=r"meta_features\(x\) must be symmetric"):
        CubicModel(model.features, lambda x: np.triu(model.meta_features(x)), model.meta_meta_features)(x, np.ones(5))
    with pytest.raises(InputError, match=r"meta_meta_features\(x\) must have shape \(2, 2, 5, 5, 5\)"):
        CubicModel(model.features, model.meta_features, model.meta_features)(x, np.ones(5))
    with pytest.raises(InputError, match=r"features\(x\) must have shape \(2, outputs, parameters\)"):
        CubicModel(lambda x: x, model.meta_features, model.meta_meta_features)(x, np.ones(5))
    with pytest.raises(InputError, match="first must be finite"):
        CubicKernels(np.zeros(1), np.ones((1, 1)), np.zeros((1,) * 3), np.full((1,) * 4, np.nan), np.zeros((1,) * 4))
