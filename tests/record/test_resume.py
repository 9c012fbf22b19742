"""A resumed run gives the numbers of the one that was never interrupted."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import WatchWarning
from gramscope.store import RunWriter, StoreError

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(1))
OPTIONS = {"every": 5, "overhead": None, "measures": ["kernel", "richness"], "on_error": "raise"}


def train(model, scope, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        scope.step()


def run(out, parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    for i, steps in enumerate(parts):
        with gs.watch(model, (X, Y), out, resume=bool(i), **OPTIONS) as scope:
            train(model, scope, steps)
    return gs.open_run(out).scalars().drop(columns="overhead")


def test_the_same_bits_as_without_interruption(tmp_path):
    whole, parts = run(tmp_path / "whole", [20]), run(tmp_path / "parts", [10, 10])
    assert whole.equals(parts)
    assert whole["kernel/drift"].iloc[-1] > whole["kernel/drift"].iloc[1] > 0


def test_what_was_not_stored_is_left_out_with_the_reason(tmp_path):
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(10, {"loss": 1.0})
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    with (
        pytest.warns(WatchWarning, match="kernel/drift is left out"),
        pytest.warns(WatchWarning, match="richness/initial_similarity is left out"),
        gs.watch(model, (X, Y), tmp_path / "a", resume=True, **OPTIONS) as scope,
    ):
        train(model, scope, 10)
    seen = scope.records[-1]
    assert "kernel/drift" not in seen["scalars"]
    assert "kernel/participation_ratio" in seen["scalars"]
    assert "not in its folder" in seen["failures"]["kernel/drift"]
    assert "not in its folder" in seen["failures"]["richness/initial_similarity"]


def test_resume_where_there_is_nothing_starts_a_run(tmp_path):
    with gs.watch(nn.Linear(5, 3), (X, Y), tmp_path / "new", resume=True, **OPTIONS) as scope:
        assert scope.count == 0
    assert gs.open_run(tmp_path / "new").steps == [0]
    with pytest.raises(StoreError, match="resume=True"):
        gs.watch(nn.Linear(5, 3), (X, Y), tmp_path / "new")
    with pytest.raises(InputError, match="out must name a directory"):
        gs.watch(nn.Linear(5, 3), (X, Y), "")


def test_numbers_after_the_last_record_are_kept(tmp_path):
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    with gs.watch(model, (X, Y), tmp_path / "a", **OPTIONS) as scope:
        train(model, scope, 5)
        scope.log(late=2.0)
    run = gs.open_run(tmp_path / "a")
    assert run.scalars().loc[5, "late"] == 2.0 == scope.records[-1]["scalars"]["late"]
    assert run.scalars().loc[5, "kernel/drift"] > 0
    assert run.array("kernel", 5).shape == (24, 24)
    with gs.watch(model, (X, Y), tmp_path / "a", resume=True, **OPTIONS) as scope:
        scope.log(later=3.0)
    run = gs.open_run(tmp_path / "a")
    assert run.scalars().loc[5, ["late", "later"]].tolist() == [2.0, 3.0]
    assert run.verify() == []


def test_a_new_run_numbered_from_a_later_step():
    scope = gs.watch(nn.Linear(5, 3), (X, Y), start=7, every=5, measures="norm")
    scope.step()
    assert scope.count == 8
    assert [record["step"] for record in scope.records] == [7]


def resumed(out, model, x, y=None):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with gs.watch(model, x if y is None else (x, y), out, resume=True, **OPTIONS) as scope:
            train(model, scope, 10)
    return scope.records[-1], " ".join(str(w.message) for w in said)


def begun(out):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    with gs.watch(model, (X[:9], Y[:9]), out, **OPTIONS) as scope:
        train(model, scope, 10)
    return model


def test_another_probe_of_the_same_size_is_not_compared(tmp_path):
    model = begun(tmp_path / "a")
    seen, said = resumed(tmp_path / "a", model, X[12:21], Y[12:21])
    for name in ("kernel/drift", "richness/initial_similarity"):
        assert name not in seen["scalars"]
        assert "not defined: the run began with another probe" in seen["failures"][name]
        assert f"{name} is left out" in said
    # The first probe is still the run's own; other targets change neither kernel nor features.
    seen, said = resumed(tmp_path / "a", model, X[:9].double(), Y[:9].flip(0))
    assert seen["scalars"]["kernel/drift"] > 0
    assert not seen["failures"]
    assert not said


def test_another_model_is_not_compared(tmp_path):
    begun(tmp_path / "a")
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    seen, _ = resumed(tmp_path / "a", other, X[:9], Y[:9])
    assert "the run began with another model" in seen["failures"]["kernel/drift"]
    assert "richness/initial_similarity" not in seen["scalars"]


def test_a_run_begun_anew_is_compared_with_its_own_start(tmp_path):
    model = begun(tmp_path / "a")
    with gs.watch(model, (X[12:21], Y[12:21]), tmp_path / "a", resume=0, **OPTIONS) as scope:
        train(model, scope, 5)
    seen, _ = resumed(tmp_path / "a", model, X[12:21], Y[12:21])
    assert seen["scalars"]["kernel/drift"] > 0
    seen, _ = resumed(tmp_path / "a", model, X[:9], Y[:9])
    assert "another probe" in seen["failures"]["kernel/drift"]


def test_runs_from_before_the_fingerprint_go_on_as_they_did(tmp_path, monkeypatch):
    from gramscope.record import watched_measures

    def without(measurement, name, values):
        return {f"start/{name}": values.numpy()}

    with monkeypatch.context() as old:
        old.setattr(watched_measures, "_first_measurement", without)
        model = begun(tmp_path / "a")
    assert "start/fingerprint" not in gs.open_run(tmp_path / "a").array_names(0)
    seen, said = resumed(tmp_path / "a", model, X[:9], Y[:9])
    assert seen["scalars"]["kernel/drift"] > 0
    assert not said
    seen, _ = resumed(tmp_path / "a", model, X[:10], Y[:10])
    assert "another probe" in seen["failures"]["kernel/drift"]


@pytest.mark.parametrize("wrong", [3.7, "yes", -5, None, [1]])
def test_resume_must_be_a_step(tmp_path, wrong):
    with pytest.raises(InputError, match="resume must be True, False or a whole number of steps >= 0, got"):
        gs.watch(nn.Linear(5, 3), (X, Y), tmp_path / "a", resume=wrong)
    assert not (tmp_path / "a").exists()


def test_resume_from_a_checkpoint_after_the_last_record(tmp_path):
    """Not every step has a record, so that a checkpoint may be later than all of them."""
    model = begun(tmp_path / "a")
    with gs.watch(model, (X[:9], Y[:9]), tmp_path / "a", resume=np.int64(13), **OPTIONS) as scope:
        train(model, scope, 2)
    assert gs.open_run(tmp_path / "a").steps == [0, 5, 10, 15]


def test_what_to_do_with_a_folder_that_is_taken(tmp_path):
    model = begun(tmp_path / "a")
    with pytest.raises(StoreError, match=r"holds one\. Pass resume=True to go on with it, choose another directory"):
        gs.watch(model, (X, Y), tmp_path / "a")
    with gs.watch(model, (X, Y), tmp_path / "b", **OPTIONS):
        for resume in (False, True):
            with pytest.raises(StoreError, match=r"one writer, but .* Call close\(\) on the other") as caught:
                gs.watch(model, (X, Y), tmp_path / "b", resume=resume)
            assert "resume=True" not in str(caught.value)
    (tmp_path / "c").write_text("mine")
    for resume in (False, True):
        with pytest.raises(StoreError, match="is a file") as caught:
            gs.watch(model, (X, Y), tmp_path / "c", resume=resume)
        assert "resume=True" not in str(caught.value)
    assert (tmp_path / "c").read_text() == "mine"


def test_resume_before_the_first_record_begins_there(tmp_path):
    model = nn.Linear(5, 3)
    with gs.watch(model, (X, Y), tmp_path / "a", start=7, **OPTIONS):
        pass
    with gs.watch(model, (X, Y), tmp_path / "a", resume=3, **OPTIONS) as scope:
        assert scope.count == 3
    assert gs.open_run(tmp_path / "a").steps == [3]
