"""Traces over random mixtures of outputs: exact algebra, both ways of computing it, and honest errors."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.kernels import projected
from gramscope.kernels.projected import ProjectedTrace, projected_trace
from references.jacobian import reference_ntk

F64 = torch.float64


def network(outputs=40):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def inputs(n=4, seed=1):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=F64)


def by_hand(full, k, seed):
    """The k estimates of the trace from the kernel of all outputs, (k, n, m)."""
    s = gs.project(k, seed).signs(0, full.shape[1], full)
    return torch.einsum("cj,ncmd,dj->jnm", s, full, s)


@pytest.mark.parametrize("work", [0, 2**60], ids=["k traces", "one kernel"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("k", [2, 5])
def test_exact_algebra(k, cross, work, monkeypatch):
    monkeypatch.setattr(projected, "SMALL_WORK", work)
    net, x, x2 = network(), inputs(), inputs(3, seed=2) if cross else None
    samples = by_hand(reference_ntk(net, x, x2), k, seed=7)
    found = projected_trace(net, x, x2, k=k, seed=7)
    assert torch.allclose(found.kernel, samples.mean(0), rtol=1e-10)
    assert torch.allclose(found.standard_error, samples.std(0) / k**0.5, rtol=1e-8)
    traced = gs.ntk(net, x, x2, outputs=gs.project(k, 7), reduce="trace")
    assert torch.allclose(found.kernel, traced, rtol=1e-10), "the trace of gs.ntk"


def test_standard_errors_and_intervals_are_calibrated():
    """200 seeds: the errors in units of their standard error, and how often a 95 % interval holds the exact trace."""
    net, x, seeds, k = network(), inputs(), 200, 16
    full = reference_ntk(net, x)
    exact = torch.einsum("ncmc->nm", full)
    found = [projected.mean_and_error(iter(by_hand(full, k, seed)), gs.project(k, seed)) for seed in range(seeds)]
    one = projected_trace(net, x, k=k, seed=11)
    assert torch.allclose(one.kernel, found[11].kernel)
    assert torch.allclose(one.standard_error, found[11].standard_error)
    kernels = torch.stack([one.kernel for one in found])
    errors = torch.stack([one.standard_error for one in found])
    # The mean square of the standard errors is the variance over seeds, which 200 of them tell to 10 %, skewed to 20 %.
    ratio = errors.square().mean(0) / kernels.var(0)
    assert 0.7 < float(ratio.min()) <= float(ratio.max()) < 1.4
    within = torch.stack([(one.kernel - exact).abs() <= one.standard_error for one in found]).double().mean(0)
    assert 0.5 < float(within.min()) <= float(within.max()) < 0.8, (
        "68 % for normal samples, less for few and skewed ones"
    )
    inside = torch.stack([(one.interval()[0] <= exact) & (exact <= one.interval()[1]) for one in found])
    assert int(inside.sum(0).min()) >= 0.9 * seeds


def test_the_check_above_would_see_wrong_errors():
    """Of kernels, not of their means: √k too large; or halved."""
    samples = by_hand(reference_ntk(network(), inputs()), 16, 0)
    right = projected.mean_and_error(iter(samples), gs.project(16)).standard_error
    for wrong in (samples.std(0), samples.std(0) / 16):
        ratio = (wrong / right).square()
        assert not ((ratio > 0.7) & (ratio < 1.4)).any()


def test_outputs_that_do_not_interact_are_exact_but_for_rounding():
    """A linear layer: K_{μc,νd} = δ_cd x_μ · x_ν. The error is that of rounding, not zero."""
    model, x = nn.Linear(4, 300, bias=False), inputs().float()
    found = projected_trace(model, x, k=4)
    exact = 300 * x.double() @ x.double().T
    assert found.kernel.dtype == found.standard_error.dtype == torch.float32
    assert torch.allclose(found.kernel.double(), exact, rtol=1e-5, atol=1e-3)
    assert bool((found.standard_error > 0).all())
    assert float((found.standard_error / exact.abs()).max()) < 1e-4


def test_options_and_chosen_outputs():
    net, x = network(), inputs()
    found = projected_trace(net.float(), x.float(), k=3, outputs=slice(0, 9), precision="float64", memory="1GB")
    assert found.kernel.dtype == F64
    samples = by_hand(reference_ntk(net, x.float(), outputs=slice(0, 9)), 3, 0)
    assert torch.allclose(found.kernel, samples.mean(0), rtol=1e-8)


def test_what_it_returns():
    found = gs.kernels.projected_trace(network(), inputs(), k=4, seed=3)
    assert isinstance(found, ProjectedTrace)
    assert (found.k, found.seed) == (4, 3)
    assert torch.equal(found.kernel, found.kernel.T), "symmetric"
    low, high = found.interval(0.5)
    wider = found.interval(0.99)
    assert bool(((wider[0] < low) & (low < found.kernel) & (found.kernel < high) & (high < wider[1])).all())


def test_bad_input():
    net, x = network(), inputs()
    with pytest.raises(InputError, match="k must be at least 2, since one sample has no standard error, got 1"):
        projected_trace(net, x, k=1)
    with pytest.raises(InputError, match="k must be a whole number of at least 1, got 0"):
        projected_trace(net, x, k=0)
    for option in ({"reduce": "none"}, {"by_site": True}):
        with pytest.raises(InputError, match=rf"must be called without {next(iter(option))}.*Use gs\.ntk"):
            projected_trace(net, x, **option)
