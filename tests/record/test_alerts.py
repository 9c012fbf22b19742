"""Alerts: which series call for one and which do not, and that each is told once."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.diagnose.alerts import find_alerts
from gramscope.diagnose.finding import Diagnosis, Evidence, Finding
from gramscope.record.findings import AlertLog, FindingLog
from gramscope.record.scope import WatchWarning


def alerts(name, values):
    return [(alert.what, alert.step) for alert in find_alerts({name: (range(1, len(values) + 1), values)})]


def noisy(levels, seed=0):
    return (np.asarray(levels) * np.exp(0.3 * np.random.default_rng(seed).standard_normal(len(levels)))).tolist()


FINE = {
    "falls": ("loss", noisy(np.geomspace(2.3, 1e-4, 400))),
    "noise around a plateau": ("loss", noisy(np.full(400, 0.7))),
    "one odd batch": ("loss", [*noisy(np.full(50, 1.0)), 1e6, *noisy(np.full(5, 1.0))]),
    "back to the start": ("loss", [2.3, *noisy(np.full(50, 1e-3)), *(20 * [2.3])]),
    "negative losses": ("loss", np.linspace(-100, -500, 60).tolist()),
    "too short to tell": ("loss", [1.0, 100.0, 100.0]),
    "zero": ("loss", 40 * [0.0]),
    "gradients that shrink and grow": ("gradient_norm", [5.0, 1.0, 0.01, 0.001, 1.0, 30.0]),
    "a first gradient of zero": ("gradient_norm", [0.0, 1.0, 1.0, 1.0]),
    "half dead": ("dead_units/0", [0.0, 0.5, 0.9]),
    "another name": ("lossless", [1.0, math.nan]),
    "a change of the loss": ("step/true_loss_change", [-1e-4, 1e-4, 0.5]),
    "the scale of mixed precision": ("loss_scale", [1.0, *(10 * [65536.0])]),
    "an accuracy": ("accuracy/probe", [0.1, math.nan]),
}
BAD = {
    "diverges from the start": ("loss", [2.3 * 1.5**i for i in range(20)], [("divergence", 20)]),
    "diverges after a fall": ("train_loss", [*np.linspace(2, 0.1, 50), *(10 * [9.0])], [("divergence", 60)]),
    "negative losses rise": ("loss", [*np.linspace(-100, -500, 50), *(10 * [1000.0])], [("divergence", 60)]),
    "the probe needs no ten": ("loss/probe", [2.0, 1.0, 50.0], [("divergence", 3)]),
    "NaN": ("loss", [1.0, 1.0, math.nan, 1.0, math.nan], [("not finite", 3)]),
    "infinite": ("eval/loss", [1.0, math.inf], [("not finite", 2)]),
    "explodes": ("gradient_norm", [1.0, 2.0, 1.0, 201.0, 1.0], [("gradient explosion", 4)]),
    "the Trainer's name": ("grad_norm", [1.0, 2.0, 1.0, 1e5], [("gradient explosion", 4)]),
    "a layer's gradient": ("gradient_norm/0", [1.0, math.nan], [("not finite", 2)]),
    "NaN among the weights": ("weight_norm/0", [1.0, math.nan], [("not finite", 2)]),
    "dead": ("dead_units/layer.1", [0.2, 0.995, 1.0], [("dead layer", 2)]),
}


@pytest.mark.parametrize("case", FINE)
def test_no_alert(case):
    name, values = FINE[case]
    for end in range(1, len(values) + 1):  # whenever it is looked at
        assert alerts(name, values[:end]) == []


@pytest.mark.parametrize("case", BAD)
def test_alert(case):
    name, values, expected = BAD[case]
    assert alerts(name, values) == expected


def test_an_alert_says_what_it_saw():
    (alert,) = find_alerts({"loss": (range(12), [2.0, 1.0] + 10 * [9.0])})
    assert (alert.value, alert.threshold) == (9.0, 1.0 + 3 * 2.0)
    assert str(alert) == (
        "divergence: 'loss' is 9 (threshold 7) at step 11. Lower the learning rate, warm it up, or clip gradients."
    )


def train(scope, model, lr, steps=30):
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scope.step(loss=loss)
    scope.close()


def watched(measures=("loss", "gradient", "dead_units"), every=5, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    return gs.watch(model, (x, y), every=every, overhead=None, measures=measures, **options), model


@pytest.mark.parametrize(("lr", "expected"), [(30.0, {"divergence"}), (1e4, {"divergence", "not finite"})])
def test_a_run_that_diverges_warns_once_for_each(lr, expected):
    scope, model = watched()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(scope, model, lr)
    told = [str(w.message) for w in said if w.category is WatchWarning and "measure" not in str(w.message)]
    assert told == [str(alert) for alert in scope.alerts]
    assert len({(alert.what, alert.where) for alert in scope.alerts}) == len(scope.alerts)
    assert expected <= {alert.what for alert in scope.alerts}


def test_a_layer_that_dies():
    scope, model = watched(every=1)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    with pytest.warns(WatchWarning, match=r"dead layer: 'dead_units/0' is 1 \(threshold 0\.99\) at step 1"):
        scope.step()
    scope.step()
    assert [(alert.what, alert.where, alert.step) for alert in scope.alerts] == [("dead layer", "dead_units/0", 1)]


def test_a_run_that_learns_has_none():
    scope, model = watched()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        train(scope, model, lr=0.1)
    assert scope.alerts == []


def test_a_function_is_told_in_place_of_a_warning():
    told = []
    scope, _ = watched(on_alert=told.append, measures="norm")
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        scope.step(loss=1.0)
        scope.step(loss=math.nan)
        scope.close()
    assert told == scope.alerts == [gs.Alert("not finite", "loss", 2, told[0].value, math.inf)]


def test_what_the_function_raises_stops_training():
    class Stop(Exception):
        pass

    def stop(alert):
        raise Stop(str(alert))

    scope, _ = watched(on_alert=stop, measures="norm", every=1)
    with pytest.raises(Stop, match="not finite: 'loss' at step 1"), scope:
        scope.step(loss=math.nan)
    assert scope.closed


def test_a_finding_is_not_told_as_if_its_evidence_were_a_number_of_the_layer():
    told = []
    evidence = (Evidence("update_ratio, median", 0.9, "above", 0.3), Evidence("other", 1.0, "above", 0.0))
    found = Finding("lr_too_large", "The steps are too long.", evidence, "", "Lower it.", ("lr 50",), confidence=0.95)
    log = FindingLog(told.append)
    for step in (5, 6, 8):
        log.look(Diagnosis("run", (found,), {}, 8.0), step)
    assert [str(alert) for alert in told] == [
        "lr_too_large: 'lr 50' at step 6. The steps are too long. Try first: Lower it."
    ]
    assert (told[0].value, told[0].threshold) == (0.9, 0.3)


def test_on_alert_must_be_a_function():
    with pytest.raises(InputError, match="on_alert must be a function of an alert, got 'print'"):
        watched(on_alert="print")


def test_what_is_not_finite_is_told_once_and_kept_for_every_series():
    told = []
    log = AlertLog(told.append)
    log.measured(3, {"loss/probe": float("nan"), "weight_norm/0": float("inf")})
    assert [alert.where for alert in told] == ["loss/probe"]
    assert {alert.where for alert in log.alerts} == {"loss/probe", "weight_norm/0"}
