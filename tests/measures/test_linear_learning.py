"""Learnability, predicted loss, modes over time, errors of sampled eigenfunctions, numbers of the richness curves."""

import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from references import linear_learning as reference
from references import richness as curves_reference

m = gs.measures
EXACT = 1e-10  # float64 all the way; the reference sums in another order


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def spectrum(p, decay, seed=0):
    rng = np.random.default_rng(seed)
    return np.arange(1, p + 1.0) ** -decay, rng.standard_normal(p)


@settings(max_examples=25, deadline=None)
@given(
    p=st.integers(2, 30), decay=st.floats(0, 4), share=st.floats(0.05, 0.95), ridge=st.sampled_from([0.0, 1e-3, 2.0]),
    noise=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_learnability_and_loss_against_a_root_finder(p, decay, share, ridge, noise, seed):
    rho, target = spectrum(p, decay, seed)
    n = max(1, min(p - 1, round(share * p)))
    order = np.random.default_rng(seed).permutation(p)
    found = m.learnability(torch.tensor(rho[order]), n, ridge=ridge)
    kappa = reference.kappa(rho, n, ridge)
    assert math.isclose(found.kappa, kappa, rel_tol=EXACT)
    assert np.allclose(found.values, rho[order] / (rho[order] + kappa), rtol=EXACT)
    assert math.isclose(float(found.values.sum()) + ridge / kappa, n, rel_tol=EXACT)
    both = np.stack([target, 2 * target[::-1]], 1)
    for f in (target, both):
        loss = m.predicted_loss(torch.tensor(rho), torch.tensor(f), n, ridge=ridge, noise=noise)
        assert math.isclose(loss, reference.loss(rho, f, n, ridge, noise), rel_tol=1e-9)  # 1 - ΣL²/n cancels there


@pytest.mark.parametrize(("ridge", "noise"), [(0.0, 0.0), (0.5, 0.3)])
def test_predicted_loss_is_that_of_sampled_regressions(ridge, noise):
    rho, target = spectrum(120, 1.5)
    losses = reference.sampled_losses(rho, target, 40, ridge, noise, 300, np.random.default_rng(1))
    predicted = m.predicted_loss(torch.tensor(rho), torch.tensor(target), 40, ridge=ridge, noise=noise)
    error = losses.std() / math.sqrt(len(losses))
    # The formula is for many examples: allow 3 % beside four standard errors of the sample.
    assert abs(losses.mean() - predicted) < 4 * error + 0.03 * predicted


def test_more_examples_than_modes_leave_only_what_is_outside():
    rho, target = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 3.0])
    assert m.learnability(rho, 5).values.tolist() == [1.0, 1.0, 0.0]
    assert m.predicted_loss(rho[:2], target[:2], 2) == 0.0
    assert m.predicted_loss(rho[:2], target[:2], 2, noise=1.0) == math.inf
    assert math.isclose(m.predicted_loss(rho, target, 8), 9 / (1 - 2 / 8))


def test_modes_over_time_against_the_flow_of_the_weights():
    rng = np.random.default_rng(0)
    root = rng.standard_normal((5, 5))
    w_true, w_start = rng.standard_normal((5, 2)), rng.standard_normal((5, 2))
    rho, u = np.linalg.eigh(root @ root.T)

    def as_modes(w):
        return torch.tensor(np.sqrt(rho)[:, None] * (u.T @ w))

    times = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    found = m.mode_dynamics(torch.tensor(rho), as_modes(w_true), times, start=as_modes(w_start))
    for t, now in zip(times.tolist(), found, strict=True):
        assert torch.allclose(now, as_modes(reference.flow(root @ root.T, w_true, w_start, t)), rtol=EXACT, atol=EXACT)


def test_eigenmodes_hold_the_target_and_the_constant():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=rng, dtype=torch.float64)
    phi = torch.cat([torch.full((200, 1), 5.0, dtype=torch.float64), x, x[:, :1] + x[:, 1:2]], 1)
    f = x @ torch.randn(3, 2, generator=rng, dtype=torch.float64) + 1
    found = m.eigenmodes(phi, f)
    assert len(found.eigenvalues) == 4
    assert found.constant > 0.95
    values = torch.linalg.eigvalsh(phi.mT @ phi / 200).flip(0)[:4]
    assert torch.allclose(found.eigenvalues, values, rtol=EXACT)
    assert math.isclose(float(found.coefficients.square().sum()), float(f.square().sum() / 200), rel_tol=EXACT)
    assert found.outside < EXACT
    half = m.eigenmodes(phi[:, :2], f)
    left = f - phi[:, :2] @ torch.linalg.lstsq(phi[:, :2], f).solution
    assert math.isclose(half.outside, float(left.square().sum() / 200), rel_tol=1e-10)
    # With two modes and 50 examples all is learnt but what lies outside, which acts as noise.
    assert math.isclose(half.predicted_loss(50), half.outside / (1 - 2 / 50), rel_tol=EXACT)


def test_sampled_eigenfunctions_against_loops():
    rng = np.random.default_rng(3)
    modes = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    rho = np.arange(1, 7.0) ** -1
    train = rng.standard_normal((40, 6)) * np.sqrt(rho) @ modes.T
    found = m.nystrom_errors(torch.tensor(train), torch.tensor(rho), torch.tensor(modes))
    ours_by_kind = (found.eigenvalues, found.eigenvectors, found.spans)
    for ours, theirs in zip(ours_by_kind, reference.nystrom(train, rho, modes), strict=True):
        assert np.allclose(ours, theirs, rtol=1e-10, atol=EXACT)
    assert abs(float(found.spans[-1])) < EXACT
    evaluation = rng.standard_normal((30, 6)) * np.sqrt(rho) @ modes.T
    labels = torch.arange(30) % 3
    basis = np.eye(3)[labels] / math.sqrt(10)
    plain = m.projections_without_qr(torch.tensor(train), torch.tensor(evaluation), labels)
    assert np.allclose(plain.cumulative, reference.projections_without_qr(train, evaluation, basis), rtol=1e-10)
    with_qr = m.richness_curves(torch.tensor(train), torch.tensor(evaluation), labels).quality
    assert math.isclose(float(plain.cumulative[0]), float(with_qr[0]), rel_tol=1e-10)


def test_without_qr_the_curve_can_exceed_one():
    rng = torch.Generator().manual_seed(0)
    evaluation = torch.randn(60, 1, generator=rng).double() @ torch.ones(1, 8).double()
    evaluation += 0.1 * torch.randn(60, 8, generator=rng).double()
    plain = m.projections_without_qr(torch.randn(40, 8, generator=rng).double(), evaluation, evaluation[:, :1])
    assert plain.total > 1.5
    assert plain.largest_overlap > 0.5


@pytest.fixture(scope="module")
def network():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(90, 5, generator=rng, dtype=torch.float64)
    model = nn.Sequential(gs.tasks.mlp((5, 7, 6, 3)), nn.Identity()).double()
    return model, x[:50], x[50:], torch.arange(40) % 3


def test_curves_of_every_layer_and_their_numbers(network):
    model, train, x, labels = network
    found = m.layer_curves(model, train, x, labels, layers=["0.1", "0.3"])
    inner, one_hot = model[0], np.eye(3)[labels]
    for name, end in (("0.1", 2), ("0.3", 4)):
        with torch.no_grad():
            phi_train, phi, outputs = inner[:end](train).numpy(), inner[:end](x).numpy(), inner(x).numpy()
        quality, intensity = curves_reference.curves(phi_train, phi, one_hot)
        used, _ = curves_reference.curves(phi_train, phi, outputs)
        curves = found[name]
        assert np.allclose(curves.quality, quality, atol=1e-10)
        assert np.allclose(curves.utilisation, used, atol=1e-10)
        q, u = np.diff(quality, prepend=0)[1:], np.diff(used, prepend=0)[1:]
        wanted = 1 + math.exp(-sum(v * math.log(v) for v in u / u.sum() if v > 0))
        assert math.isclose(m.utilisation_dimension(curves), wanted, rel_tol=1e-7)
        by_rank, plain = m.curve_correlation(curves), m.curve_correlation(curves, method="pearson")
        rho = intensity[1 : len(quality)]
        assert math.isclose(by_rank.quality_intensity, spearmanr(q, rho)[0], abs_tol=1e-10)
        assert math.isclose(by_rank.quality_utilisation, spearmanr(q, u)[0], abs_tol=1e-10)
        assert math.isclose(plain.utilisation_intensity, np.corrcoef(u, rho)[0, 1], abs_tol=1e-7)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: m.learnability(torch.tensor([1.0, -1.0]), 1), "at least 0"),
        (lambda: m.learnability(torch.ones(3), 0), "n must be a whole number"),
        (lambda: m.learnability(torch.ones(3), 1, ridge=-1.0), "ridge must be"),
        (lambda: m.learnability(torch.tensor([math.nan]), 1), "finite"),
        (lambda: m.predicted_loss(torch.ones(3), torch.ones(2), 1), "one row for each of the 3"),
        (lambda: m.mode_dynamics(torch.ones(2), torch.ones(2), torch.tensor([-1.0])), "at least 0"),
        (lambda: m.mode_dynamics(torch.ones(2), torch.ones(2), torch.ones(1), start=torch.ones(2, 1)), "shape"),
        (lambda: m.eigenmodes(torch.zeros(3, 2), torch.ones(3)), "not all be zero"),
        (lambda: m.eigenmodes(torch.ones(3, 2), torch.ones(4)), "same examples"),
        (lambda: m.nystrom_errors(torch.ones(3, 2), torch.tensor([1.0, 2.0])), "largest first"),
        (lambda: m.projections_without_qr(torch.ones(3, 2), torch.ones(3, 2), torch.zeros(3, 1)), "span nothing"),
        (
            lambda: m.utilisation_dimension(m.richness_curves(torch.eye(2), torch.eye(2), torch.arange(2))),
            "utilisation",
        ),
        (lambda: m.regression_accuracy(torch.ones(3, 2), torch.ones(3).long()), "argmax"),
        (lambda: m.regression_accuracy(torch.ones(3), torch.ones(2).long()), "same examples"),
    ],
)
@pytest.mark.filterwarnings("ignore:richness curves")
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input(call, match):
    with pytest.raises(InputError, match=match):
        call()


def test_a_boundary_is_not_within_half():
    assert m.regression_accuracy(torch.tensor([[0.5], [1.49]]), torch.tensor([0, 1])) == 0.5


def test_features_without_rows_or_without_size_have_no_modes():
    for call in (m.eigenmodes, lambda phi, y: m.richness_curves(phi, torch.ones(4, 3), torch.arange(4) % 2)):
        with pytest.raises(InputError, match="features must have rows"):
            call(torch.zeros(0, 3), torch.zeros(0))
    with pytest.raises(InputError, match="must not all be zero"):
        m.eigenmodes(torch.zeros(4, 3), torch.zeros(4))
