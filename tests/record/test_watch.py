import math
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import WATCHED_MEASURES, MeasuredValues, WatchedMeasure, WatchWarning
from gramscope.record.logged import _floats
from gramscope.record.schedule import due_at

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def train(model, scope, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        if scope is not None:
            scope.step(loss=loss)


def test_numbers_are_those_of_the_library(tmp_path):
    """Each measure against the plain function it stands for."""
    model = network()
    with gs.watch(model, probe=(X, Y), out=tmp_path / "a", every=10, lr=0.1, on_error="raise", overhead=None) as scope:
        train(model, scope, 10)
    seen = scope.records[-1]["scalars"]
    f = model(X).detach()
    residual = (f.softmax(1) - F.one_hot(Y)) / len(Y)
    kernel = gs.kernel(model, X)
    shares = kernel.share(residual)
    assert seen["share/0"] == pytest.approx(shares["0.weight"] + shares["0.bias"], rel=1e-9)
    assert sum(v for k, v in seen.items() if k.startswith("share/")) == pytest.approx(1)
    assert seen["loss/probe"] == pytest.approx(float(F.cross_entropy(f, Y)))
    assert seen["accuracy/probe"] == pytest.approx(float((f.argmax(1) == Y).double().mean()))
    traced = torch.einsum("ncmc->nm", kernel.total)
    start = torch.einsum("ncmc->nm", gs.ntk(network(), X))
    assert seen["kernel/drift"] == pytest.approx(float((traced - start).norm() / start.norm()))
    hidden = model[:4](X).detach()
    assert seen["richness"] == pytest.approx(gs.measures.richness(hidden, f))
    assert seen["target_linearity/4"] == pytest.approx(float(gs.measures.target_linearity(hidden, Y)))
    step = gs.explain_step(model, X, Y, lr=0.1, loss="cross_entropy")
    assert seen["step/error"] == pytest.approx(step.errors["all"])
    assert seen["alpha/2.weight"] == pytest.approx(float(gs.spectra.fit_tail(gs.spectra.esd(model[2].weight)).alpha))
    assert seen["norm/parameters"] == pytest.approx(gs.measures.parameter_norm(model))
    run = gs.open_run(tmp_path / "a")
    order = torch.argsort(Y, stable=True)
    assert torch.allclose(torch.tensor(run.array("kernel", 10)).double(), traced[order][:, order], rtol=1e-6)
    assert run.meta["probe"] == {"examples": 40, "classes": 3}


def test_predictions_of_the_other_theories_by_name():
    """The dNTK and the state operator are expensive, so that they are measured only where they are asked for."""
    model = network()
    assert not {"dntk", "states"} & set(gs.watch(model, (X[:6], Y[:6])).chosen_measures)
    scope = gs.watch(model, (X[:6], Y[:6]), measures=["dntk", "states"], lr=0.01, on_error="raise", overhead=None)
    seen = scope.records[0]["scalars"]

    def loss(f):
        return F.cross_entropy(f, Y[:6])

    step = gs.kernels.crossings.ntk_step(model, X[:6], loss, 0.01)
    assert seen["dntk/error"] == pytest.approx(step.error)
    states = gs.propagators.prediction.predict_states(model, X[:6], loss, 0.01)
    assert seen["states/error"] == pytest.approx(states.relative_error)
    with pytest.raises(InputError, match="needs a learning rate"):
        gs.watch(model, (X, Y), measures="dntk", on_error="raise", overhead=None)


def test_shares_of_every_kind_of_site():
    """Embeddings, shared tables and convolutions: the share is that of the gradient autograd gives."""

    class WatchedMeasure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
            self.norm = nn.LayerNorm(4)

        def forward(self, ids):
            x = self.conv(self.table(ids).mT).mT
            return self.norm(torch.tanh(x)).mean(1) @ self.table.weight.T

    torch.manual_seed(0)
    model = WatchedMeasure().double()
    ids, y = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6,))
    scope = gs.watch(model, probe=(ids, y), measures="shares", on_error="raise", overhead=None)
    F.cross_entropy(model(ids), y).backward()
    sizes = {name: float(p.grad.square().sum()) for name, p in model.named_parameters()}
    total = sum(sizes.values())
    seen = scope.records[0]["scalars"]
    assert seen["share/table"] == pytest.approx(sizes["table.weight"] / total)
    assert seen["share/conv"] == pytest.approx((sizes["conv.weight"] + sizes["conv.bias"]) / total)


def test_all_measures_share_one_forward_pass():
    """With the rehearsed step, which runs on copies of the model, one pass of the model itself.

    But for sharpness, which differentiates twice.
    """
    model, calls = network(), []
    measures = [name for name, measure in WATCHED_MEASURES.items() if measure.by_default and name != "sharpness"]
    scope = gs.watch(model, probe=(X, Y), every=1, lr=0.1, overhead=None, measures=measures)
    model.register_forward_hook(lambda module, *_: calls.append(module is model and len(_[0][0])))
    scope.step()
    # Some examples are run again alone, to see where the weights are.
    assert [count for count in calls if count == len(X)] == [len(X)]


def test_a_failing_measure_never_stops_training(tmp_path, monkeypatch):
    def broken(measurement):
        raise ValueError("no such thing")

    monkeypatch.setitem(WATCHED_MEASURES, "broken", WatchedMeasure("broken", broken, False, ""))
    model = network()
    with (
        pytest.warns(WatchWarning, match="broken"),
        gs.watch(model, (X, Y), tmp_path / "a", every=2, overhead=None) as scope,
    ):
        train(model, scope, 4)
    record = gs.open_run(tmp_path / "a").failures()
    assert "no such thing" in str(record)
    assert scope.count == 4
    with pytest.raises(ValueError, match="no such thing"):
        gs.watch(model, (X, Y), on_error="raise", overhead=None)


def test_a_full_disk_never_stops_training(tmp_path, monkeypatch):
    from gramscope.store import StoreError

    model = network()
    scope = gs.watch(model, (X, Y), tmp_path / "a", every=1, measures="norm", overhead=None)

    def full(*args, **kwargs):
        raise StoreError("No space left on device")

    monkeypatch.setattr(scope._writer, "append", full)
    with pytest.warns(WatchWarning, match="No space left"):
        train(model, scope, 2)
    assert scope.count == 2
    scope.close()


def test_log_and_forward():
    seen = []
    model = network()
    scope = gs.watch(
        model,
        (X, Y),
        every=2,
        overhead=None,
        measures="norm",
        forward=lambda scalars, step: seen.append((step, scalars)),
    )
    train(model, scope, 1)
    scope.log(lr=0.1, note=torch.tensor(2.0))
    train(model, scope, 2)
    assert [step for step, _ in seen] == [0, 2]
    assert seen[-1][1]["loss"] == scope.logged["loss"][2]
    assert "lr" not in seen[-1][1], "it was logged at another step"
    assert scope.logged["lr"] == {1: 0.1}
    assert scope.logged["note"] == {1: 2.0}
    assert list(scope.logged["loss"]) == [1, 2, 3]
    with pytest.raises(InputError, match="one number"):
        scope.log(bad="text")
    with pytest.raises(InputError, match="a number that a float can hold"):
        scope.log(huge=10**400)


def test_tensorboard_takes_the_forwarded_numbers(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(tmp_path)
    model = network()

    def forward(scalars, step):
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    train(model, gs.watch(model, (X, Y), every=2, overhead=None, measures="norm", forward=forward), 2)
    writer.close()
    assert list(tmp_path.glob("events*"))


def test_resume_after_a_restart(tmp_path):
    model = network()
    with gs.watch(model, (X, Y), tmp_path / "a", every=2, overhead=None, measures="norm") as scope:
        train(model, scope, 6)
    with gs.watch(model, (X, Y), tmp_path / "a", every=2, overhead=None, measures="norm", resume=4) as scope:
        assert scope.count == 4
        train(model, scope, 4)
    assert list(gs.open_run(tmp_path / "a").scalars().index) == [0, 2, 4, 6, 8]
    with gs.watch(model, (X, Y), tmp_path / "a", every=2, overhead=None, measures="norm", resume=True) as scope:
        assert scope.count == 8


def test_unlabelled_and_regression_probes():
    model = network()
    scope = gs.watch(model, X, on_error="raise", overhead=None)
    assert "norm/parameters" in scope.records[0]["scalars"]
    assert "loss/probe" not in scope.records[0]["scalars"]
    scope = gs.watch(model, (X, torch.randn(40, 3).double()), on_error="raise", overhead=None)
    assert "accuracy/probe" not in scope.records[0]["scalars"]
    assert math.isfinite(scope.records[0]["scalars"]["kernel/alignment"])


def test_layers_by_glob():
    scope = gs.watch(network(), (X, Y), layers=["0", "4"], on_error="raise", overhead=None)
    named = {name.split("/")[1] for name in scope.records[0]["scalars"] if name.startswith("target_linearity/")}
    assert named == {"0", "4"}


def test_schedules():
    assert [s for s in range(10) if due_at(3)(s)] == [0, 3, 6, 9]
    assert [s for s in range(10) if due_at([2, 5])(s)] == [0, 2, 5]
    assert [s for s in range(10) if due_at(lambda s: s == 7)(s)] == [0, 7]
    for wrong in (0, -1, "linear", "log:0", True):
        with pytest.raises(InputError, match="every must be"):
            due_at(wrong)


def test_bad_input():
    model = network()
    with pytest.raises(InputError, match="one target for each"):
        gs.watch(model, (X, Y[:3]))
    with pytest.raises(InputError, match="measures must name some of"):
        gs.watch(model, (X, Y), measures="nothing")
    with pytest.raises(InputError, match="on_error must be"):
        gs.watch(model, (X, Y), on_error="ignore")
    with pytest.raises(InputError, match="overhead must be"):
        gs.watch(model, (X, Y), overhead=2.0)
    with pytest.raises(InputError, match="holds none of them"):
        gs.watch(model, (X, Y), measures="norm").attach(torch.optim.SGD(network().parameters(), lr=0.1))


def test_no_warning_reaches_the_user():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        scope = gs.watch(model, (X, Y), every=1, lr=0.1, overhead=None)
        train(model, scope, 1)
    assert [record["step"] for record in scope.records] == [0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "hinge"}, "loss must be one of mse, half_squared, cross_entropy, or a function"),
        ({"loss": 3}, "loss must be one of mse, half_squared, cross_entropy, or a function"),
        ({"loss": "mse"}, "y must be a floating tensor of the output's shape"),
        ({"loss": lambda f, y: f - y}, "loss must take the outputs of the probe and its y, but it failed with"),
        ({"loss": lambda f, y: f.sum(1)}, r"loss must return one number .*got a tensor of \(40,\)"),
        ({"loss": lambda f, y: 1.0}, r"loss must return one number .*got float"),
        ({"lr": -1}, "lr must be one finite number at least 0"),
        ({"lr": "a"}, "lr must be one finite number at least 0"),
        ({"lr": math.nan}, "lr must be one finite number at least 0"),
        ({"forward": 3}, "forward must be a function"),
        ({"out": 3}, "out must be the path of a directory, or None, got 3"),
        ({"out": "a\0b"}, "out must name a directory, got 'a.x00b'"),
        ({"layers": 0}, "layers must be a name or glob, .*got 0 of type int"),
        ({"layers": [nn.Linear]}, "layers must be a name or glob"),
        ({"measures": 7}, "measures must be a name or glob"),
        ({"probe": (X, Y, Y)}, "A probe of 3 entries is taken for 3 arguments of the model"),
        ({"start": 2.5}, "start must be a whole number"),
        ({"start": -1}, "start must be a whole number"),
        ({"probe": (X[:5, :4], Y[:5])}, r"got \(5, 4\). The model said: mat1"),
        ({"probe": (X[:5] * math.nan, Y[:5])}, "x has NaN in it"),
    ],
)
def test_what_is_wrong_is_said_before_training(tmp_path, options, words):
    with pytest.raises(InputError, match=words):
        gs.watch(network(), **{"probe": (X, Y), "out": tmp_path / "a", **options})
    assert not (tmp_path / "a").exists()


def test_weights_can_be_watched_without_a_forward_pass():
    class Headless(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

    scope = gs.watch(Headless(), X, measures=["norm", "spectra"], on_error="raise", overhead=None)
    assert "norm/parameters" in scope.records[0]["scalars"]
    with pytest.raises(InputError, match=r"failed with NotImplementedError.*got \(40, 5\) of torch"):
        gs.watch(Headless(), X)


def test_a_name_that_cannot_be_stored_is_refused_when_it_is_logged(tmp_path):
    with gs.watch(network(), (X, Y), tmp_path / "a", every=1, measures="norm", overhead=None) as scope:
        for name in ("", "\ud800"):
            with pytest.raises(InputError, match="the name of a number that is logged"):
                scope.log(**{name: 1.0})
            with pytest.raises(InputError, match="the name of a number that is logged"):
                scope.step(**{name: 1.0})
        scope.step()
    assert gs.open_run(tmp_path / "a").steps == [0, 3]


@pytest.mark.parametrize(
    "measured", [MeasuredValues({"": 1.0}), MeasuredValues(arrays={"a": [1j]}), MeasuredValues(arrays={"a": ["text"]})]
)
def test_a_reader_whose_numbers_cannot_be_stored_never_stops_training(tmp_path, monkeypatch, capsys, measured):
    monkeypatch.setitem(WATCHED_MEASURES, "odd", WatchedMeasure("odd", lambda measurement: measured, False, ""))
    options = {"out": tmp_path / "a", "every": 1, "measures": "odd", "overhead": None}
    with pytest.warns(WatchWarning, match="was not written") as said:
        scope = gs.watch(network(), (X, Y), **options)
    for _ in range(2):
        scope.step()
    scope.close()
    assert len(said) == 1, "one warning for one reason, not one for each step"
    assert scope.count == 2
    assert "3 of the measurements were not written to the disk" in capsys.readouterr().err


def test_a_raising_schedule_never_stops_training():
    def every(step):
        raise ZeroDivisionError("bad schedule")

    model = network()
    scope = gs.watch(model, (X, Y), every=every, measures="norm", overhead=None)
    with pytest.warns(WatchWarning, match=r"every failed at step 1: .*bad schedule") as said:
        train(model, scope, 3)
    assert not scope.due_next()
    assert len(said) == 1
    assert scope.count == 3
    with pytest.raises(ZeroDivisionError):
        gs.watch(model, (X, Y), every=every, measures="norm", on_error="raise").step()


def test_an_attached_watch_counts_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = gs.watch(model, (X, Y), every=1, measures="norm", overhead=None).attach(optimizer)
    with pytest.warns(WatchWarning, match="only records its numbers") as said:
        train(model, scope, 4, optimizer)
    assert len(said) == 1
    assert scope.count == 4
    assert [record["step"] for record in scope.records] == [0, 1, 2, 3, 4]
    assert "loss" in scope.records[-1]["scalars"], "it came after the record of its step"
    assert list(scope.logged["loss"]) == [1, 2, 3, 4]


def test_the_last_step_is_measured(tmp_path):
    model = network()
    with gs.watch(model, (X, Y), tmp_path / "a", every=5, measures=["loss", "norm"], overhead=None) as scope:
        train(model, scope, 7)
    assert gs.open_run(tmp_path / "a").steps == [0, 5, 7]
    assert scope.records[-1]["scalars"]["loss/probe"] == pytest.approx(float(F.cross_entropy(model(X), Y).detach()))
    assert "loss" in scope.records[-1]["scalars"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = gs.watch(model, (X, Y), every=5, measures="norm", overhead=None).attach(optimizer)
    train(model, None, 2, optimizer)
    attached.close()
    assert [record["step"] for record in attached.records] == [0, 2]
    assert "norm/parameters" in attached.records[-1]["scalars"]


def test_a_resumed_watch_without_a_step_adds_nothing(tmp_path):
    model = network()
    with gs.watch(model, (X, Y), tmp_path / "a", every=2, measures="norm", overhead=None) as scope:
        train(model, scope, 2)
    gs.watch(model, (X, Y), tmp_path / "a", every=2, measures="norm", overhead=None, resume=5).close()
    assert gs.open_run(tmp_path / "a").steps == [0, 2]


def test_what_was_interrupted_is_not_measured():
    model = network()
    scope = gs.watch(model, (X, Y), every=5, measures="norm", overhead=None)
    train(model, scope, 2)
    scope.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [record["step"] for record in scope.records] == [0]
    assert list(scope.logged["loss"]) == [1, 2]


def test_every_weight_has_its_shuffled_null():
    """Parts of packed weights and convolutions too; of a plain matrix it is the public function's."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.attention = nn.Conv1d(5, 6, 3, padding=1), nn.MultiheadAttention(6, 2, batch_first=True)
            self.cell, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            z = self.conv(x[:, :, None].expand(-1, -1, 4)).mT
            return self.head(self.cell(self.attention(z, z, z)[0])[0][:, -1])

    torch.manual_seed(0)
    model = Mixed().double()
    seen = gs.watch(model, X, measures="spectra", on_error="raise", overhead=None).records[0]["scalars"]
    weights = {name.partition("/")[2] for name in seen if name.startswith("alpha/")}
    assert {"conv.weight", "attention.in_proj_weight[q]", "cell.weight_hh_l0[f]", "head.weight"} <= weights
    assert {name.partition("/")[2] for name in seen if name.startswith("alpha_null/")} == weights
    null = gs.spectra.shuffled_null(model.head.weight.detach(), shuffles=1, seed=0)
    assert seen["alpha_null/head.weight"] == pytest.approx(float(null.alpha[0]), nan_ok=True)
    kernel = model.conv.weight.detach().permute(2, 0, 1)
    pooled = gs.spectra.shuffled_null(kernel, shuffles=1, seed=0)
    assert seen["alpha_null/conv.weight"] == pytest.approx(float(pooled.alpha[0]), nan_ok=True)


@pytest.mark.parametrize("out", ["file/x", "link", "x" * 300, "/proc/nowhere/run"])
def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(gs.store.StoreError, match=r"the run .* failed: "):
        gs.watch(network(), (X, Y), out, measures="norm")


def test_warnings_point_at_the_users_line(tmp_path, monkeypatch):
    def broken(measurement):
        raise ValueError(f"no such thing at step {measurement.step}")  # each reason is told once

    monkeypatch.setitem(WATCHED_MEASURES, "broken", WatchedMeasure("broken", broken, False, ""))
    model = network()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scope = gs.watch(model, (X, Y), every=1, measures=["broken"], overhead=None)
        scope.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scope.attach(optimizer)
        optimizer.step()
    assert len(said) == 3
    assert {warning.filename for warning in said} == {__file__}


def test_after_close_nothing_is_measured(tmp_path):
    with gs.watch(network(), (X, Y), tmp_path / "a", every=1, measures="norm", overhead=None) as scope:
        scope.step()
        assert repr(scope) == f"Scope(Sequential, step 1, 2 records in {str(tmp_path / 'a')!r}, open)"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scope.step(loss=1.0)
        scope.log(lr=0.1)
        scope.step()
    assert [str(w.message).partition(",")[0] for w in said] == ["this watch was closed at step 1"]
    assert scope.count == 1
    assert repr(scope).endswith("closed)")
    assert gs.open_run(tmp_path / "a").steps == [0, 1]


class Wrapper:
    """Stands for an optimiser by its attributes, as many packages have it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        return self.optimizer.step()


class HalfAnOptimizer(torch.optim.Optimizer):
    """A subclass that was never set up as one, as accelerate's is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", [Wrapper, HalfAnOptimizer, lambda o: Wrapper(HalfAnOptimizer(o))])
def test_the_optimiser_inside_a_wrapper_is_watched(wrap):
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped = wrap(inner)
    scope = gs.watch(model, (X, Y), every=1, measures="step", overhead=None, on_error="raise").attach(wrapped)
    assert scope.subject.optimizer is inner
    for _ in range(3):
        F.cross_entropy(model(X), Y).backward()
        wrapped.step()
    assert scope.count == 3
    assert "step/error" in scope.records[-1]["scalars"]
    assert gs.watch(model, (X, Y), measures="norm").use(wrapped).subject.optimizer is inner


def test_an_optimiser_with_another_inside_is_itself():
    """Its own step is the one that is taken: that of the inner one would be rehearsed wrongly."""
    model = network()
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer.optimizer = torch.optim.Adam(model.parameters())
    assert gs.watch(model, (X, Y), measures="norm").attach(outer).subject.optimizer is outer


def test_accelerate_is_watched():
    accelerate = pytest.importorskip("accelerate")
    results = []
    for watched in (True, False):
        model = network()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if watched:
            options = {"every": 1, "measures": ["loss", "step"], "overhead": None, "on_error": "raise"}
            scope = gs.watch(model, (X, Y), **options).attach(optimizer)
        for x, y in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert scope.count == 3  # five batches, two for each step, and the rest
    assert "step/error" in scope.records[-1]["scalars"]


@pytest.mark.parametrize("wrong", [None, "adam", torch.optim.SGD, Wrapper(None), Wrapper("adam")])
def test_what_is_no_optimiser_is_refused(wrong):
    for name in ("attach", "use"):
        with pytest.raises(InputError, match=r"optimizer must be a torch.optim.Optimizer, or hold one as .optimizer"):
            getattr(gs.watch(network(), (X, Y), measures="norm"), name)(wrong)


def test_every_number_stands_at_its_own_step(tmp_path):
    """Also one that comes after the record of its step, and at steps without a record."""
    model = network()
    with gs.watch(model, (X, Y), tmp_path / "a", every=5, measures="norm", overhead=None) as scope:
        for step in range(1, 13):
            train(model, scope, 1)
            if step % 5 == 0 or step == 7:
                scope.log(eval_loss=float(step))
    run = gs.open_run(tmp_path / "a")
    assert run.logged()["eval_loss"].to_dict() == {5: 5.0, 7: 7.0, 10: 10.0}
    assert list(run.logged()["loss"].index) == list(range(1, 13))
    assert run.scalars()["eval_loss"].dropna().to_dict() == {5: 5.0, 10: 10.0}
    assert run.steps == [0, 5, 10, 12]
    assert scope.records[1]["scalars"]["eval_loss"] == 5.0
    assert scope.logged == {name: series.to_dict() for name, series in run.logged().items()}


def test_a_disk_that_is_full_for_a_while_loses_no_number(tmp_path, monkeypatch):
    from gramscope.store import StoreError

    model = network()
    scope = gs.watch(model, (X, Y), tmp_path / "a", every=100, measures="norm", overhead=None)
    real = scope._writer.log

    def full(numbers):
        raise StoreError("No space left on device")

    monkeypatch.setattr(scope._writer, "log", full)
    monkeypatch.setattr(sys.modules[WatchWarning.__module__], "FLUSH", 0.0)
    scope._flush_at = 0.0
    with pytest.warns(WatchWarning, match="what was logged up to step 1 is not written yet: No space left") as said:
        train(model, scope, 3)
    assert len(said) == 1
    monkeypatch.setattr(scope._writer, "log", real)
    train(model, scope, 1)
    scope.close()
    assert gs.open_run(tmp_path / "a").logged()["loss"].to_dict() == scope.logged["loss"]
    assert list(scope.logged["loss"]) == [1, 2, 3, 4]


def test_a_resumed_run_goes_on_with_its_numbers(tmp_path):
    model = network()
    with gs.watch(model, (X, Y), tmp_path / "a", every=4, measures="norm", overhead=None) as scope:
        train(model, scope, 6)
        scope.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert gs.open_run(tmp_path / "a").steps == [0, 4]
    with gs.watch(model, (X, Y), tmp_path / "a", every=4, measures="norm", overhead=None, resume=True) as scope:
        assert scope.count == 6, "the last step that is known of"
        train(model, scope, 2)
    with gs.watch(model, (X, Y), tmp_path / "a", every=4, measures="norm", overhead=None, resume=5) as scope:
        train(model, scope, 2)
    run = gs.open_run(tmp_path / "a")
    assert list(run.logged()["loss"].index) == [1, 2, 3, 4, 5, 6, 7]
    assert run.logged()["loss"][6] == scope.logged["loss"][6]
    assert run.steps == [0, 4, 7]


def test_tensors_that_wait_are_read_together():
    """As a GPU's do; of one kind in one transfer, of several each by itself."""
    one, two = torch.tensor(1.5), torch.tensor(2.5)
    assert _floats([one, two]) == [1.5, 2.5]
    assert _floats([one.half(), two.double(), 3.5, torch.tensor(True)]) == [1.5, 2.5, 3.5, 1.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_of_a_gpu_are_read_together():
    scope = gs.watch(network(), (X, Y), every=100, measures="norm", overhead=None)
    total = torch.zeros((), device="cuda")
    for _ in range(3):
        total += 1
        scope.step(loss=total, half=total.half(), mixed=total if scope.count else 0.5)
    assert scope.logged == {n: {1: a, 2: 2.0, 3: 3.0} for n, a in (("loss", 1.0), ("half", 1.0), ("mixed", 0.5))}
