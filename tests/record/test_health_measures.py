"""What a diagnosis rests on, against brute force; and that looking at it changes no bit of training."""

import math

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.record.objective import objective_of
from gramscope.record.optimizer_watch import sample
from gramscope.record.probe_facts import (
    are_probabilities,
    chance_duplicates,
    duplicates,
    labels_agree,
    numbers_agree,
    scales,
)
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


@pytest.mark.parametrize("shown", [True, False])
def test_the_mode_is_that_of_the_optimisers_step(shown):
    """The loop evaluates before it tells the watch of the step; without the optimiser only the flags can be seen."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gs.watch(model, probe=(x, y), measures=["setup"], overhead=None) as scope:
        scope.use(optimizer) if shown else None
        for _ in range(4):
            model.train()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            model.eval()
            scope.step()
    assert [r["scalars"]["training_mode"] for r in scope.records] == [1.0, *[float(shown)] * 4]


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


def test_the_steps_of_a_convolution_over_time_are_tokens_and_its_channels_are_not():
    conv, x = nn.Conv1d(3, 5, 2), torch.randn(7, 3, 9)
    with torch.no_grad(), SignalWatch({id(p): "a" for p in conv.parameters()}, 7) as watch:
        out = conv(x).transpose(1, 2)
    within = (out - out.mean(1, keepdim=True)).square().sum() / (out - out.mean((0, 1))).square().sum()
    assert watch.token_variance()["a"] == pytest.approx(float(within), rel=1e-5)


def test_ratio_of_rows_of_copies_is_one_and_of_white_features_their_number():
    column = torch.randn(50, 1, dtype=torch.float64)
    assert float(ratio_of_rows(column.expand(50, 6))) == pytest.approx(1.0)
    assert float(ratio_of_rows(torch.cat([torch.eye(4), -torch.eye(4)]))) == pytest.approx(4.0)
    assert float(ratio_of_rows(torch.ones(5, 3))) == 0.0


@pytest.mark.parametrize(("y", "told"), [([0.0, 1.0, 1.0], 1.0), ([0.0, 1.0, 0.5], 0.0), ([0, 1, 1], None)])
def test_numbers_that_are_zero_or_one_are_told(y, told):
    """Binary cross-entropy takes such floats; the watch judges them by the squared error."""
    model = torch.nn.Linear(2, 1)
    with gs.watch(model, probe=(torch.randn(3, 2), torch.tensor(y)[:, None]), measures=["probe_facts"]) as scope:
        pass
    assert scope.records[0]["scalars"].get("probe/zero_or_one") == told


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


def test_gates_are_those_of_the_recursion_written_out():
    torch.manual_seed(0)
    cell, x = nn.LSTM(3, 4, batch_first=True), torch.randn(5, 6, 3)
    with torch.no_grad():
        for p in cell.parameters():
            p *= 8
        with SignalWatch({id(p): "cell" for p in cell.parameters()}, 5, gates=True) as watch:
            cell(x)
        h, c, flat = torch.zeros(5, 4), torch.zeros(5, 4), []
        for t in range(6):
            u = x[:, t] @ cell.weight_ih_l0.T + cell.bias_ih_l0 + h @ cell.weight_hh_l0.T + cell.bias_hh_l0
            i, f, g, o = u.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            slopes = [4 * s.sigmoid() * (1 - s.sigmoid()) for s in (i, f, o)] + [1 - s.tanh() ** 2 for s in (g, c)]
            flat += [(slope < 0.06).double().mean() for slope in slopes]
    assert watch.saturated_gates()["cell"] == pytest.approx(float(torch.stack(flat).mean()), abs=1e-6)
    assert 0.1 < watch.saturated_gates()["cell"] < 0.9


def test_gates_are_recorded_once_before_training():
    cell = nn.GRU(3, 4, batch_first=True)
    x = torch.randn(8, 5, 3)
    with gs.watch(cell, probe=x, measures=["signals", "probe_facts"], outputs=lambda m, x: m(x)[0][:, -1]) as scope:
        for _ in range(3):
            scope.step()
    told = ["saturated_gates/" in " ".join(record["scalars"]) for record in scope.records]
    assert told[0]
    assert not any(told[1:])


class WrittenGELU(nn.Module):
    """As several published language models write it."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def test_the_tanh_inside_a_gelu_is_no_unit():
    x, y = 9 * torch.randn(32, 3), torch.arange(32) % 2
    found = {}
    for name, unit in (("gelu", WrittenGELU()), ("tanh", nn.Tanh())):
        model = nn.Sequential(nn.Linear(3, 5), unit, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        found[name] = gs.watch(model, (x, y), measures="signals", overhead=None).records[0]["scalars"]
    assert "saturated_units/0" not in found["gelu"]
    assert {"saturated_units/2"} <= found["gelu"].keys(), "a tanh behind the next layer counts"
    assert found["tanh"]["saturated_units/0"] > 0.3


def first_facts(model, x, y, **more):
    with gs.watch(model, probe=(x, y), measures=["probe_facts", "classes", "setup"], **more) as scope:
        scope.step()
    return [record["scalars"] for record in scope.records]


class Affine(nn.Module):
    """Two layers with or without an activation, batch norm, a buffer that is written and a random stream that moves."""

    def __init__(self, act):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), act, nn.Linear(12, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        torch.rand(1)
        return self.body(x)


def test_outputs_are_affine_where_no_activation_lies_between():
    x, y = data()
    for act, affine in ((nn.Identity(), True), (nn.ReLU(), False), (nn.GELU(), False)):
        model = Affine(act)
        stream, before = torch.get_rng_state(), [t.clone() for t in model.state_dict().values()]
        found = first_facts(model, x, y)[0]["outputs/not_affine"]
        assert (found < 1e-5) == affine  # a hundred roundings of float32
        assert affine or found > 0.01
        assert torch.equal(stream, torch.get_rng_state())
        assert all(map(torch.equal, before, model.state_dict().values()))


def test_many_outputs_are_told_affine_too():
    x, y = torch.randn(9, 6), torch.randn(9, 400)
    assert first_facts(nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 400)), x, y)[0]["outputs/not_affine"] < 1e-5


def test_what_cannot_be_told_affine_is_not_recorded():
    x, y = data()
    tokens = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 3))
    assert "outputs/not_affine" not in first_facts(tokens, x.abs().long().clamp(max=4), y)[0]
    assert "outputs/not_affine" not in first_facts(nn.Linear(6, 3), x, y)[0]  # one matrix
    constant = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    nn.init.zeros_(constant[1].weight)
    assert "outputs/not_affine" not in first_facts(constant, x, y)[0]


def test_the_loss_behind_one_more_softmax():
    x, y = data()
    logits = nn.Linear(6, 3)
    expected = nn.functional.cross_entropy(logits(x).softmax(-1), y).item()
    assert first_facts(logits, x, y)[0]["outputs/behind_softmax"] == pytest.approx(expected, rel=1e-6)
    one, yes = nn.Linear(6, 1), (y > 0).long()[:, None]
    expected = nn.functional.binary_cross_entropy_with_logits(one(x).sigmoid(), yes.float()).item()
    assert first_facts(one, x, yes)[0]["outputs/behind_softmax"] == pytest.approx(expected, rel=1e-6)
    assert "outputs/behind_softmax" not in first_facts(one, x, x[:, :1])[0]


def test_several_labels_vary_along_several_directions():
    x, _ = data()
    tags = (x[:, :3] > 0).long()
    centred = tags.double() - tags.double().mean(0)
    covariance = centred.T @ centred
    expected = float(covariance.trace() ** 2 / covariance.square().sum())
    assert first_facts(nn.Linear(6, 3), x, tags)[0]["probe/target_rank"] == pytest.approx(expected)
    assert first_facts(nn.Linear(6, 1), x, tags[:, :1])[0]["probe/target_rank"] == 1.0


def test_outputs_that_are_probabilities():
    x, y = data()
    logits = nn.Linear(6, 3)
    assert [r["outputs/probabilities"] for r in first_facts(logits, x, y)] == [0.0, 0.0]
    assert [r["outputs/probabilities"] for r in first_facts(nn.Sequential(logits, nn.Softmax(-1)), x, y)] == [1.0, 1.0]
    sigmoid = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid())
    assert first_facts(sigmoid, x, (y > 0).long())[0]["outputs/probabilities"] == 1.0
    rows = torch.tensor([[0.2, 0.9], [0.5, 0.5]])
    assert are_probabilities(rows, objective_of(torch.tensor([0, 1]), (2,), None)) is False  # they do not sum to one
    assert are_probabilities(rows, objective_of(rows, (2,), None)) is None


def test_targets_and_outputs_before_training_by_hand():
    x = data()[0]
    y = 50 + torch.arange(24.0)[:, None]
    model = nn.Linear(6, 1)
    found = first_facts(model, x, y)[0]
    assert found["probe/targets_rms"] == pytest.approx(float(y.double().square().mean().sqrt()))
    assert found["probe/targets_mean"] == pytest.approx(61.5)
    assert found["outputs/rms"] == pytest.approx(float(model(x).detach().square().mean().sqrt()), rel=1e-6)


def test_numbers_zero_and_one_are_also_judged_by_binary_cross_entropy():
    x, labels = data()
    y, model = (labels > 0).float()[:, None], nn.Linear(6, 1)
    found, f = first_facts(model, x, y)[0], model(x).detach()
    share = float(y.mean())
    assert found["yes_or_no/loss"] == pytest.approx(float(nn.functional.binary_cross_entropy_with_logits(f, y)))
    assert found["yes_or_no/chance"] == pytest.approx(-share * math.log(share) - (1 - share) * math.log(1 - share))
    assert found["yes_or_no/accuracy"] == pytest.approx(float(((f > 0) == (y > 0)).double().mean()))
    assert found["class_recall/1"] == pytest.approx(float((f[y > 0] > 0).double().mean()))
    assert "yes_or_no/loss" not in first_facts(model, x, 2 * y)[0]


def test_the_greatest_dropout_is_recorded():
    x, y = data()
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), block, nn.Flatten(), nn.Dropout(0.7), nn.Linear(6, 3))
    assert first_facts(model, x, y)[0]["dropout"] == 0.7
    assert "dropout" not in first_facts(nn.Linear(6, 3), x, y)[0]
