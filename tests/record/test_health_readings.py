"""What a diagnosis rests on, against brute force; and that looking at it changes no bit of training."""

import math

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.record.given_gradients import sample
from gramscope.record.probe_facts import chance_duplicates, duplicates, labels_agree, numbers_agree, scales
from gramscope.record.signals import SignalWatch, ratio_of_rows, share_in_training

NEW = ["signals", "feature_rank", "classes", "setup", "given_gradients", "probe_facts", "train_mode"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def data(n: int = 24):
    rng = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=rng), torch.randint(0, 3, (n,), generator=rng)


def trained(watched: bool):
    model, (x, y) = network(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scope = gs.watch(model, probe=(x, y), measures=NEW, overhead=None) if watched else None
    if scope is not None:
        scope.use(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scope is not None:
            scope.step(loss=loss)
    return model, scope


def test_training_is_bitwise_the_same_and_every_measure_is_there():
    (watched, scope), (plain, _) = trained(True), trained(False)
    for one, other in zip(watched.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert watched.training
    names = {name for record in scope.records for name in record["scalars"]}
    assert not any(record["failures"] for record in scope.records)
    wanted = "signal/0 saturated_units/1 feature_rank/4 class_recall/0 class_predicted/2 training_mode optimizer/lr"
    for name in (*wanted.split(), "gradient_overlap", "gradient_zeros", "probe/chance", "train_mode/accuracy"):
        assert name in names
    assert "probe/chance" not in scope.records[1]["scalars"]  # facts are told once


def test_signals_are_those_of_a_plain_forward_pass():
    model, (x, _) = network().eval(), data()
    layers = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
    with SignalWatch(layers, len(x)) as watch:
        model(x)
    first = model[0](x).detach()
    states = torch.tanh(model[1](first))
    assert watch.sizes()["0"] == pytest.approx(float(first.square().mean().sqrt()), rel=1e-6)
    assert watch.saturated()["1"] == pytest.approx(float((1 - states**2 < 0.06).double().mean()))
    covariance = torch.cov(first.double().T)
    assert watch.ranks()["0"] == pytest.approx(float(covariance.trace() ** 2 / covariance.square().sum()), rel=1e-6)


def test_tokens_that_are_alike_have_no_variance_between_them():
    linear, tokens = nn.Linear(4, 5), torch.randn(7, 1, 4).expand(7, 3, 4)
    watch = SignalWatch({id(linear.weight): "a"}, 7)
    with watch:
        linear(tokens)
    assert watch.token_variance()["a"] == pytest.approx(0.0, abs=1e-10)
    rows = torch.randn(7, 3, 4)
    with SignalWatch({id(linear.weight): "a"}, 7) as other:
        out = linear(rows)
    within = (out - out.mean(1, keepdim=True)).square().sum() / (out - out.mean((0, 1))).square().sum()
    assert other.token_variance()["a"] == pytest.approx(float(within), rel=1e-5)


def test_ratio_of_rows_of_copies_is_one_and_of_white_features_their_number():
    column = torch.randn(50, 1, dtype=torch.float64)
    assert float(ratio_of_rows(column.expand(50, 6))) == pytest.approx(1.0)
    assert float(ratio_of_rows(torch.cat([torch.eye(4), -torch.eye(4)]))) == pytest.approx(4.0)
    assert float(ratio_of_rows(torch.ones(5, 3))) == 0.0


def test_facts_of_the_probe_by_counting():
    rows = torch.tensor([[0, 1], [0, 1], [1, 1], [1, 0]])
    assert duplicates(rows) == 0.25
    assert chance_duplicates(rows) == pytest.approx(1.5 * 0.5 * (9 + 1) / 16)
    assert chance_duplicates(torch.randn(40, 30)) == 0.0
    assert scales(torch.full((4, 2), 3.0, dtype=torch.float64))["probe/rms"] == 3.0


def test_neighbours_that_share_labels_or_numbers():
    x = torch.tensor([[0.0], [0.1], [5.0], [5.1]], dtype=torch.float64)
    together, apart = torch.tensor([[0], [0], [1], [1]]), torch.tensor([[0], [1], [0], [1]])
    assert labels_agree(x, together) == pytest.approx(1.0)
    assert labels_agree(x, apart) == pytest.approx((0 - 1 / 3) / (1 - 1 / 3))
    assert numbers_agree(x, together.double()) == pytest.approx(1.0)
    assert numbers_agree(x, apart.double()) < 0
    assert math.isnan(labels_agree(x, torch.zeros(4, 1)))


def test_modes_are_those_that_the_loop_left():
    model = network()
    assert share_in_training(model) == 1.0
    model[1].eval()
    assert share_in_training(model) == 0.5
    assert share_in_training(nn.Linear(2, 2)) is None


def test_gradients_that_add_up_overlap():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gs.watch(model, probe=(x, y), measures=["given_gradients", "setup"], overhead=None) as scope:
        scope.use(optimizer)
        for _ in range(8):  # never zeroed
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scope.step()
    assert scope.records[-1]["scalars"]["gradient_overlap"] > 0.95


def test_a_sample_of_gradients_takes_from_each_and_is_the_same_each_time():
    gradients = [torch.randn(3, 4), torch.randn(5), torch.sparse_coo_tensor([[0]], [2.0], (3,), check_invariants=True)]
    assert torch.equal(sample(gradients), sample(gradients))
    assert len(sample(gradients)) == 12 + 5 + 3
    assert sample([]) is None


def test_frozen_and_forgotten_parameters_are_named():
    model, (x, y) = network(), data()
    model[4].requires_grad_(False)
    optimizer = torch.optim.SGD(model[6].parameters(), lr=0.1)
    with gs.watch(model, probe=(x, y), measures=["setup"], overhead=None) as scope:
        scope.use(optimizer)
        scope.step()
    found = scope.records[-1]["scalars"]
    assert found["frozen/4"] == 1.0
    assert found["not_optimized/0"] == 1.0
    assert "not_optimized/4" not in found
    assert "frozen/0" not in found
