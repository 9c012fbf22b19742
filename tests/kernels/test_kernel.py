"""The Kernel object against closed forms."""

import math
import warnings

import matplotlib as mpl
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.base.user_warnings import UndefinedMeasureWarning

mpl.use("Agg")


@pytest.fixture
def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


@pytest.fixture
def x():
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_sites_sum_to_the_total(network, x):
    kernel = gs.kernel(network, x)
    torch.testing.assert_close(sum(kernel.sites.values()), gs.ntk(network, x), rtol=1e-12, atol=1e-12)
    assert set(kernel.sites) == {name for name, _ in network.named_parameters()}


def test_spectrum_and_participation_ratio(network, x):
    kernel = gs.kernel(network, x)
    matrix = kernel.matrix
    values = kernel.spectrum()
    assert torch.all(values[:-1] >= values[1:])
    torch.testing.assert_close(values.sum(), matrix.trace())
    assert kernel.participation_ratio() == pytest.approx(float(values.sum() ** 2 / (values**2).sum()))


def test_alignment(network, x):
    kernel = gs.kernel(network, x)
    assert kernel.alignment(kernel) == pytest.approx(1.0)
    assert kernel.alignment(gs.Kernel(3 * kernel.total)) == pytest.approx(1.0)
    identity = torch.eye(10, dtype=torch.float64)
    want = float(kernel.matrix.trace() / (kernel.matrix.norm() * 10**0.5))
    assert kernel.alignment(identity) == pytest.approx(want)
    with pytest.raises(InputError, match=r"shape \(10, 10\)"):
        kernel.alignment(torch.eye(3))


def test_target_alignment_of_a_kernel_made_of_the_targets():
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    one_hot = torch.nn.functional.one_hot(y).double()
    centred = one_hot - one_hot.mean(0)
    assert gs.Kernel(centred @ centred.T).target_alignment(y) == pytest.approx(1.0)
    assert gs.Kernel(torch.ones(6, 6)).target_alignment(y) == pytest.approx(0.0, abs=1e-12)


def test_target_alignment_centres_the_targets_alone(network, x):
    """Against the formula, and against the centred one: they share the numerator, so that the norms are the ratio."""
    kernel = gs.kernel(network, x, reduce="trace")
    y = torch.tensor([0, 1, 0, 1, 1])
    ideal = torch.nn.functional.one_hot(y).double()
    ideal = (ideal - ideal.mean(0)) @ (ideal - ideal.mean(0)).T
    K, H = kernel.total, torch.eye(5).double() - 0.2
    assert kernel.target_alignment(y) == pytest.approx(float((K * ideal).sum() / K.norm() / ideal.norm()))
    centred = gs.measures.kernel_target_alignment(kernel, y)
    assert kernel.target_alignment(y) / centred == pytest.approx(float((H @ K @ H).norm() / K.norm()))
    assert centred > 1.1 * kernel.target_alignment(y)


def test_kernel_regression_is_the_linearised_network_after_training(network, x):
    """Ridgeless regression with the tangent kernel interpolates, and equals the minimum-norm linear model in J."""
    new = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    kernel = gs.kernel(network, x)
    torch.testing.assert_close(kernel.predict(kernel, y), y, rtol=1e-8, atol=1e-8)
    here, there = (gs.ntk_operator(network, z).jacobian.dense() for z in (x, new))
    want = there @ torch.linalg.lstsq(here, y.reshape(-1, 1), driver="gelsd").solution
    got = kernel.predict(gs.kernel(network, new, x), y)
    torch.testing.assert_close(got, want.reshape(4, 2), rtol=1e-7, atol=1e-7)
    ridge = kernel.predict(gs.kernel(network, new, x), y, ridge=1e6)
    assert float(ridge.norm()) < 1e-3 * float(got.norm())


def test_shares_are_the_first_order_decrease_of_the_loss(network, x):
    """eᵀ K_site e is the squared norm of the loss gradient of that parameter."""
    y = torch.zeros(5, 2, dtype=torch.float64)
    residual = network(x) - y
    loss = 0.5 * (residual**2).sum()
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    norms = {name: float(g.pow(2).sum()) for (name, _), g in zip(network.named_parameters(), gradients, strict=True)}
    shares = gs.kernel(network, x).share(residual.detach())
    for name, norm in norms.items():
        assert shares[name] == pytest.approx(norm / sum(norms.values()), rel=1e-12)


def test_what_a_kernel_cannot_answer(network, x):
    traced = gs.kernel(network, x, reduce="trace")
    with pytest.raises(InputError, match="traced over outputs"):
        traced.share(torch.ones(5, 2))
    with pytest.raises(InputError, match="by_site=True"):
        gs.kernel(network, x, by_site=False).share(torch.ones(5, 2))
    with pytest.warns(UserWarning, match="is the residual zero"):
        assert all(math.isnan(share) for share in gs.kernel(network, x).share(torch.zeros(5, 2)).values())
    with pytest.raises(InputError, match="with themselves"):
        gs.kernel(network, x, x[:2]).spectrum()
    with pytest.raises(InputError, match="one row for each of the 5 examples"):
        traced.target_alignment(torch.tensor([1, 2]))


def test_plots_draw_what_they_say(network, x):
    kernel = gs.kernel(network, x)
    picture = kernel.plot(order=torch.tensor([4, 3, 2, 1, 0])).axes[0].images[0].get_array()
    assert picture[0, 0] == pytest.approx(float(torch.einsum("ncnc->n", kernel.total)[4]))
    line = kernel.plot_spectrum().axes[0].lines[0].get_ydata()
    assert line[0] == pytest.approx(float(kernel.spectrum()[0]))
    bars = kernel.plot_shares(torch.ones(5, 2)).axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(100)


def test_regression_refuses_what_it_cannot_solve(network, x):
    kernel, y = gs.kernel(network, x), torch.ones(5, 2, dtype=torch.float64)
    for ridge in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="ridge must be one finite number at least 0"):
            kernel.predict(kernel, y, ridge)
    with pytest.raises(InputError, match="targets must be finite"):
        kernel.predict(kernel, y * float("nan"))
    with pytest.raises(InputError, match="one row for each of the kernel's 5 examples"):
        kernel.predict(kernel, y[:4])
    with pytest.raises(InputError, match="residual must be finite"):
        kernel.share(y * float("nan"))
    with pytest.raises(InputError, match="the kernel must be finite"):
        gs.Kernel(torch.full((2, 2), float("nan"))).spectrum()


@pytest.mark.parametrize("reduce", ["none", "trace"])
def test_alignments_that_are_not_defined_say_why(network, x, reduce):
    kernel = gs.kernel(network, x, reduce=reduce)
    for y in (torch.zeros(5, 2), torch.full((5, 2), 0.1)):
        with pytest.warns(UndefinedMeasureWarning, match="targets are the same for all examples"):
            assert math.isnan(kernel.target_alignment(y))
    with pytest.warns(UndefinedMeasureWarning, match="other kernel is zero"):
        assert math.isnan(kernel.alignment(0 * kernel.total))
    with pytest.warns(UndefinedMeasureWarning, match="kernel is zero"):
        assert math.isnan(gs.Kernel(0 * kernel.total).participation_ratio())
    with pytest.raises(InputError, match="targets must be finite"):
        kernel.target_alignment(torch.full((5, 2), float("nan")))


def test_pictures_make_no_warning(network, x):
    kernel = gs.kernel(network, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (kernel.plot(), kernel.plot_spectrum()):
            figure.canvas.draw()
            mpl.pyplot.close(figure)


def test_regression_without_a_ridge_inverts_no_rounding():
    """Twelve parameters, thirty examples: the kernel has rank 12, and in float32 eighteen more by rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1, bias=False))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    x, new, y = torch.randn(30, 3), torch.randn(8, 3), torch.randn(30, 1)
    fine = model.double()
    want = gs.kernel(fine, x.double()).predict(gs.kernel(fine, new.double(), x.double()), y.double())
    model = model.float()
    got = gs.kernel(model, x).predict(gs.kernel(model, new, x), y)
    assert float((got - want).norm() / want.norm()) < 1e-2  # least squares: the conditioning is 1e4


def test_the_unit_of_a_kernel_does_not_matter(network, x):
    """Eigenvalues are rounding relative to the kernel, however small its numbers are."""
    y = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kernel = gs.kernel(network, x)
    small = gs.Kernel(1e-20 * kernel.total)
    for t, later in ((3.0, 3e20), (None, None)):
        expected = kernel.predict(kernel, y, t=t)
        torch.testing.assert_close(small.predict(small, y, t=later), expected, rtol=1e-9, atol=1e-9)
