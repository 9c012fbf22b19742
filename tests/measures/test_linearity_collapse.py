"""Target linearity and neural collapse on the same features, against weighted least squares."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.measures import layer_linearity_collapse, linearity_collapse
from gramscope.measures.collapse_bounds import collapse_bounds
from references import linearity_collapse as reference


def case(seed, classes, width, per_class, noise=1.0, balanced=True):
    rng = np.random.default_rng(seed)
    sizes = [per_class + (0 if balanced else int(rng.integers(3))) for _ in range(classes)]
    labels = np.repeat(np.arange(classes), sizes)
    features = rng.standard_normal((classes, width))[labels] + noise * rng.standard_normal((len(labels), width))
    return features + 3.0, labels


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(2, 5),
    width=st.integers(1, 6),
    noise=st.sampled_from([0.05, 0.5, 2.0]),
    balanced=st.booleans(),
)
def test_identities_and_bounds(seed, classes, width, noise, balanced):
    features, labels = case(seed, classes, width, 6, noise, balanced)
    found = linearity_collapse(torch.as_tensor(features), torch.as_tensor(labels))
    assert found.target_linearity == pytest.approx(reference.target_linearity(features, labels), rel=1e-10, abs=1e-12)
    assert found.simplex_gap == pytest.approx(reference.simplex_gap(features, labels), rel=1e-9, abs=1e-10)
    assert found.simplex_gap <= (classes - 1) * (1 - found.target_linearity) + 1e-10
    assert found.nc1 == pytest.approx(
        gs.measures.neural_collapse(torch.as_tensor(features), torch.as_tensor(labels)).nc1
    )
    if width < classes - 1:  # some class directions are not there at all
        assert found.fitted_nc1 == math.inf
        assert found.correlations[width:].tolist() == [0] * (classes - 1 - width)
        return
    if float(found.correlations[-1]) > 1e-6:
        assert found.fitted_nc1 == pytest.approx(reference.fitted_nc1(features, labels), rel=1e-8)
    slack = 1 + 1e-9
    assert found.lower <= found.fitted_nc1 * slack
    assert found.fitted_nc1 <= found.upper * slack
    assert found.fitted_nc1 <= found.nc1 * slack
    assert found.cancelled >= -1e-9 * found.nc1
    if balanced:
        plain = gs.measures.target_linearity(torch.as_tensor(features), torch.as_tensor(labels), center=True)
        assert found.target_linearity == pytest.approx(float(plain), rel=1e-10)


def test_both_bounds_are_reached():
    """Equal correlations reach the lower bound; all of the loss in one of them reaches the upper one."""
    angles = torch.linspace(0, 2 * math.pi, 4)[:3]
    means = torch.stack([angles.cos(), angles.sin()], 1).double()
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]).double()

    def spread(by):
        return (means[:, None] + by * corners).flatten(0, 1), torch.arange(3).repeat_interleave(4)

    even = linearity_collapse(*spread(torch.tensor([0.3, 0.3]).double()))
    assert even.fitted_nc1 == pytest.approx(even.lower, rel=1e-12)
    uneven = linearity_collapse(*spread(torch.tensor([0.3, 0.0]).double()))
    assert uneven.fitted_nc1 == pytest.approx(uneven.upper, rel=1e-12)
    assert uneven.fitted_nc1 > 1.05 * uneven.lower


def test_full_linearity_is_collapse_of_the_fit_and_not_of_the_features():
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 2
    noise = torch.randn(30, generator=rng).double()
    found = linearity_collapse(torch.stack([labels + noise, noise], 1), labels)
    assert found.target_linearity == pytest.approx(1.0, abs=1e-12)
    assert found.fitted_nc1 < 1e-20
    assert found.nc1 > 1  # the same noise in both features: a linear map cancels it
    collapsed = linearity_collapse(torch.eye(3)[torch.arange(9) % 3].double(), torch.arange(9) % 3)
    assert (collapsed.target_linearity, collapsed.nc1) == (pytest.approx(1.0), 0.0)


def test_digits_to_many_digits_of_nearly_collapsed_features():
    """Sines are measured: with λ = 1 - 1e-12, 1 - λ from a cosine would have four digits."""
    labels = torch.tensor([0, 0, 1, 1])
    features = torch.tensor([[-1e-6], [1e-6], [1 - 1e-6], [1 + 1e-6]]).double()
    assert linearity_collapse(features, labels).fitted_nc1 == pytest.approx(4e-12, rel=1e-4)


def test_layerwise_training_raises_linearity_and_lowers_collapse():
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 10
    x = torch.randn(10, 20, generator=rng)[y] + 0.8 * torch.randn(300, 20, generator=rng)
    model = gs.tasks.mlp((20, 32, 32, 10))
    before = layer_linearity_collapse(model, x, y, ["1", "3"])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    after = layer_linearity_collapse(model, x, y, ["1", "3"])
    assert after["3"].target_linearity > before["3"].target_linearity
    assert after["3"].nc1 < before["3"].nc1
    assert all(v.lower <= v.nc1 for v in (*before.values(), *after.values()))


def test_bad_input():
    with pytest.raises(InputError, match="two classes at least"):
        linearity_collapse(torch.randn(4, 2), torch.zeros(4).long())
    with pytest.raises(InputError, match=r"4.*3|3.*4"):
        linearity_collapse(torch.randn(4, 2), torch.tensor([0, 1, 1]))
    with pytest.raises(InputError, match=r"\[0, 1\]"):
        collapse_bounds(1.5, 3)
    with pytest.warns(UserWarning, match="NC"):  # features that do not vary: NC1 says so itself
        found = linearity_collapse(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    assert (found.target_linearity, found.lower) == (0.0, math.inf)
