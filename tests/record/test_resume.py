"""A resumed run gives the numbers of the one that was never interrupted."""

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
    assert "kernel/effective_rank" in seen["scalars"]
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
