"""Modes of the last features and the rank of the global kernel, as a watched run measures them."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.propagators import GlobalNTK, participation_ratio, structural_rank_bound


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def watched(x, y, measures):
    model = network()
    scope = gs.watch(model, (x, y), measures=measures, on_error="raise", overhead=None, every=1)
    scope.close()
    return model, scope.records[-1]


def test_what_a_run_records_is_what_the_functions_say():
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=rng).double(), torch.arange(24) % 3
    model, record = watched(x, y, ["modes", "state_rank"])
    found, phi = record["scalars"], model[:2](x).detach()
    curves = gs.measures.richness_curves(phi[:12], phi[12:], y[12:], model(x).detach()[12:])
    assert found["modes/utilisation_dimension"] == pytest.approx(gs.measures.utilisation_dimension(curves))
    assert found["modes/quality_intensity"] == pytest.approx(gs.measures.curve_correlation(curves).quality_intensity)
    e = phi @ torch.linalg.svd(phi, full_matrices=False)[2][0]
    assert found["modes/constant"] == pytest.approx(abs(float(e.mean())) / float(e.square().mean().sqrt()))
    g = GlobalNTK(model, x)
    wanted = participation_ratio(g.operator, products=8)
    assert found["state_rank/participation_ratio"] == pytest.approx(wanted.value)
    assert found["state_rank/standard_error"] == pytest.approx(wanted.standard_error)
    assert found["state_rank/bound"] == structural_rank_bound(g) == 5 * 5 + 3 * 6


def test_too_few_examples_are_said():
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(8) % 3
    with pytest.warns(gs.record.WatchWarning, match="larger probe"):
        record = watched(x, y, ["modes"])[1]
    assert not any(name.startswith("modes") for name in record["scalars"])
