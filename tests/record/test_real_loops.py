"""Loops that people write: foreign optimisers, closures, layers replaced on the way, targets of another loss."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.diagnose.alerts import find_alerts
from gramscope.record.scope import WatchWarning

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def train(model, scope, optimizer, steps, y=Y, loss_of=F.cross_entropy):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(X), y)
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)


@pytest.mark.parametrize("call", ["use", "attach"])
def test_an_optimizer_of_another_model_is_refused(call):
    model = network()
    scope = gs.watch(model, (X, Y), measures="norm")
    foreign = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"this SGD holds none of them.*Pass the one that moves it"):
        getattr(scope, call)(foreign)
    assert scope.subject.optimizers == ()
    getattr(scope, call)(torch.optim.SGD(model.parameters(), lr=0.1))  # the refusal left nothing behind


def test_each_of_several_optimizers_must_move_a_part():
    model = network()
    parts = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
    scope = gs.watch(model, (X, Y), measures="norm").use(*parts)
    assert scope.subject.optimizers == tuple(parts)
    with pytest.raises(InputError, match="holds none of them"):
        scope.use(parts[0], torch.optim.SGD(network().parameters(), lr=0.1))
    assert scope.subject.optimizers == tuple(parts)


def test_a_watch_that_saw_no_step_says_so():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(WatchWarning, match="saw no step of the optimiser"):
        gs.watch(model, (X, Y), measures="norm").attach(optimizer).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gs.watch(model, (X, Y), measures="norm").close()  # one measurement is all that was asked for
        gs.watch(model, (X, Y), measures="norm").attach(optimizer).close(measure=False)  # it was interrupted


def test_an_optimizer_that_was_replaced_is_missed():
    model = network()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    with gs.watch(model, (X, Y), measures="update", every=1, overhead=None) as scope:
        scope.use(first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, scope, first, 3)
            scope.step()  # one that a gradient scaler skipped
            scope.step()
        with pytest.warns(WatchWarning, match=r"update is left out: the optimiser that was shown .* no step") as said:
            train(model, scope, torch.optim.SGD(model.parameters(), lr=0.1), 3)
        assert len(said) == 1
        train(model, scope, first, 1)
    assert ["update_size" in record["scalars"] for record in scope.records[1:]] == [True] * 3 + [False] * 5 + [True]
    assert ["update" in record["failures"] for record in scope.records[1:]] == [False] * 5 + [True] * 3 + [False]


def test_parameters_that_are_added_end_the_drift_of_the_kernel():
    class Added(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.low = layer, nn.Parameter(torch.zeros(8, 6))

        def forward(self, x):
            return self.layer(x) + x @ self.low.T

    model = network()
    options = {"measures": ["kernel", "richness"], "every": 1, "overhead": None}
    with gs.watch(model, (X, Y), **options) as scope:
        train(model, scope, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        model[0] = Added(model[0])
        with pytest.warns(WatchWarning, match=r"kernel/drift is left out.*0\.weight, 0\.bias, 0\.low") as said:
            train(model, scope, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert len(said) == 1
    assert ["kernel/drift" in record["scalars"] for record in scope.records] == [True] * 3 + [False] * 2
    assert all("kernel/alignment" in record["scalars"] for record in scope.records)
    assert all("richness/initial_similarity" in record["scalars"] for record in scope.records[1:])


def test_outputs_of_another_number_are_told_in_words():
    model = network()
    with gs.watch(model, (X, Y), measures=["loss", "norm"], every=1, overhead=None) as scope:
        model[2] = nn.Linear(8, 5)
        with pytest.warns(WatchWarning, match="must give 3 outputs for each example.* got 5"):
            scope.step()
    assert "norm/parameters" in scope.records[1]["scalars"]


def test_pairs_of_a_contrastive_loss_are_no_classes():
    """Labels that only the loss understands: 24 pairs, 3 outputs."""

    def pairs(z, labels):
        return F.cross_entropy(z @ z.T, labels)

    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gs.watch(model, (X, torch.arange(24)), loss=pairs, every=1, overhead=None) as scope:
            scope.step()
    assert scope.records[-1]["scalars"]["loss/probe"] == pytest.approx(float(pairs(model(X), torch.arange(24))))
    assert "accuracy/probe" not in scope.records[-1]["scalars"]
    with gs.watch(model, (X, Y), loss=F.cross_entropy, measures="loss") as scope:
        assert "accuracy/probe" in scope.records[0]["scalars"], "labels that are outputs stay classes"


def test_what_overflowed_fails_all_measures_for_one_reason():
    model = network()
    options = {"measures": ["loss", "step", "sharpness", "norm"], "every": 1, "overhead": None, "lr": 0.1}
    with gs.watch(model, (X, Y), **options) as scope:
        with torch.no_grad():
            model[0].weight.mul_(float("inf"))
        with pytest.warns(WatchWarning, match="the measures 'loss', 'step', 'sharpness' failed"):
            scope.step()
    assert len({scope.records[1]["failures"][name] for name in ("loss", "step", "sharpness")}) == 1


def of_two_targets():
    model, y = network(2), torch.stack([X[:, 0] > 0, X[:, 1] > 0], 1)
    return model, y, torch.optim.Adam(model.parameters(), lr=0.03)


def test_a_probe_that_is_judged_by_another_loss_raises_no_false_alarm():
    """The logits of 0.0 and 1.0 grow, and with them their squared error: that is no divergence."""
    model, y, optimizer = of_two_targets()
    with gs.watch(model, (X, y.float()), every=1, measures=["loss", "classes", "probe_facts"], overhead=None) as scope:
        scope.use(optimizer)
        with pytest.warns(WatchWarning, match="squared error.*nearer to a cross-entropy") as said:
            train(model, scope, optimizer, 80, y.float(), F.binary_cross_entropy_with_logits)
    losses = [record["scalars"]["loss/probe"] for record in scope.records]
    assert find_alerts({"loss/probe": (range(len(losses)), losses)}), "which would be called a divergence"
    assert len(said) == 1
    assert scope.alerts == []


def test_a_probe_that_is_judged_by_the_loss_of_the_batches_raises_none_either():
    model, y, optimizer = of_two_targets()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gs.watch(model, (X, y), every=1, measures=["loss", "classes", "probe_facts"], overhead=None) as scope:
            train(model, scope, optimizer, 20, y.float(), F.binary_cross_entropy_with_logits)
