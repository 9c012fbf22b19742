"""Accumulated flow, shared units and the link of linearity and collapse, as a watched run measures them."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.hierarchy import AccumulatedFlow, coactivation_subspace, shared_activation
from gramscope.record import WatchWarning

MEASURES = ["flow", "sharing", "linearity_collapse"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def data():
    rng = torch.Generator().manual_seed(1)
    y = torch.arange(30) % 3
    return 2 * torch.randn(3, 5, generator=rng).double()[y] + torch.randn(30, 5, generator=rng).double(), y


def masks(model, x):
    return {"0": model[0](x) > 0, "2": model[:3](x) > 0}


def test_three_steps_against_the_definitions():
    (x, y), model, twin = data(), network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flows = {name: {side: AccumulatedFlow() for side in ("input", "output")} for name in ("0", "2")}
    scope = gs.watch(model, (x, y), measures=MEASURES, on_error="raise", overhead=None, every=1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        before = {name: model.get_submodule(name).weight.detach().clone() for name in ("0", "2")}
        spaces = {
            name: {side: coactivation_subspace(before[name], on, side=side) for side in ("input", "output")}
            for name, on in masks(model, x).items()
        }
        optimizer.step()
        scope.step()
        for name, sides in flows.items():
            for side, flow in sides.items():
                flow.add(model.get_submodule(name).weight - before[name], spaces[name][side])
    scope.close()
    first, last = scope.records[0]["scalars"], scope.records[-1]["scalars"]
    assert not any(name.startswith("flow") for name in first)  # nothing has moved yet
    for name, sides in flows.items():
        for side, flow in sides.items():
            assert last[f"flow_share_{side}/{name}"] == pytest.approx(flow.share().path_share, rel=1e-9)
            assert last[f"flow_baseline_{side}/{name}"] == pytest.approx(flow.share().baseline, rel=1e-9)
        found = shared_activation(masks(model, x)[name], y, permutations=100)
        assert last[f"sharing_within/{name}"] == pytest.approx(found.within)
        assert last[f"sharing_z/{name}"] == pytest.approx(found.z)
    hidden = model[:4](x).detach()
    link = gs.measures.linearity_collapse(hidden, y)
    assert last["balanced_linearity/4"] == pytest.approx(link.target_linearity)
    assert last["fitted_nc1/4"] == pytest.approx(link.fitted_nc1)
    assert last["fitted_nc1_lower/4"] <= last["fitted_nc1/4"] <= last["feature_nc1/4"]

    plain = torch.optim.SGD(twin.parameters(), lr=0.1)  # watching leaves the training bitwise unchanged
    for _ in range(3):
        plain.zero_grad()
        torch.nn.functional.cross_entropy(twin(x), y).backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_what_cannot_be_measured_is_named():
    probe = data()[0], torch.randn(30, 3).double()
    with pytest.warns(WatchWarning) as told:
        gs.watch(network(), probe, measures=MEASURES, overhead=None, every=1, loss="mse").close()
    for name in ("sharing", "linearity_collapse"):
        assert any(f"{name} is left out: not defined: the probe must have one class" in str(w.message) for w in told)
    assert not any(gs.record.WATCHED_MEASURES[name].by_default for name in MEASURES)


def test_a_norm_before_the_relu_is_named():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    with pytest.warns(WatchWarning, match=r"flow is left out: not defined for 1: .*a norm"):
        gs.watch(model, data(), measures="flow", overhead=None, every=1).close()


def test_a_resumed_run_has_no_flow_and_says_why(tmp_path):
    model, options = network(), {"measures": "flow", "overhead": None, "every": 1}
    for resume in (False, True):
        scope = gs.watch(model, data(), tmp_path / "a", resume=resume, **options)
        with torch.no_grad():
            model[0].weight += 0.1
        if resume:
            with pytest.warns(WatchWarning, match="flow is left out: .* before this run was resumed"):
                scope.step()
        else:
            scope.step()
        scope.close()
    assert "flow_share_input/0" in gs.open_run(tmp_path / "a").scalars()
