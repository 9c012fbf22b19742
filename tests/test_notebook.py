"""What a notebook shows of each object: its numbers, and every name as text."""

import re

import numpy as np
import pytest
import torch

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.base.html import MAX_ROWS, html_table
from gramscope.store import RunWriter

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2)).double()


@pytest.fixture(scope="module")
def x():
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def cells(html):
    return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)[1:]]


def test_a_kernel_shows_the_trace_of_each_parameter(model, x):
    kernel = gs.kernel(model, x)
    rows = cells(kernel._repr_html_())
    assert [row[0] for row in rows] == list(dict(model.named_parameters()))
    for name, trace, _ in rows:
        assert float(trace) == pytest.approx(float(torch.einsum("ncnc->", kernel.sites[name])), rel=1e-3)
    assert sum(float(row[2]) for row in rows) == pytest.approx(1, abs=0.003)
    frame = kernel.to_dataframe()
    assert frame["share of the trace"].sum() == pytest.approx(1)
    assert frame.loc["0.bias", "trace"] == pytest.approx(float(torch.einsum("ncnc->", kernel.sites["0.bias"])))
    other = gs.kernel(model, x, x[:2])
    assert "<table>" not in other._repr_html_(), "between two sets there is no trace"


def test_a_snapshot_shows_shapes_and_rules(model, x):
    rows = cells(gs.capture(model, x)._repr_html_())
    assert [row[:2] for row in rows[:2]] == [["0.weight", "5 x 3"], ["0.bias", "5"]]


def test_a_step_shows_the_shares(model, x):
    step = gs.explain_step(model, x, torch.randn(6, 2, dtype=torch.float64), lr=0.01)
    html = step._repr_html_()
    assert [row[0] for row in cells(html)] == list(step.shares)
    assert [float(row[1].split()[0]) for row in cells(html)] == pytest.approx(
        [100 * share for share in step.shares.values()], abs=0.06
    )
    assert "missed by first order" in html


def test_a_similarity_matrix_shows_its_values():
    found = gs.measures.SimilarityMatrix(torch.tensor([[1.0, 0.25], [0.25, 1.0]]), ("a", HOSTILE), ("a", "b"), 6)
    assert cells(found._repr_html_())[0] == ["a", "1.00", "0.25"]
    assert "<img" not in found._repr_html_()


def test_a_run_shows_first_and_last_and_draws_them(tmp_path):
    with RunWriter.create(tmp_path / "a") as writer:
        for step in range(0, 50, 10):
            shares = {"share/0": 0.25 + step / 100, "share/2": 0.75 - step / 100}
            writer.append(step, {**shares, HOSTILE: 1.0, **({"late": 2.0} if step > 20 else {})})
        writer.log({"loss": (list(range(1, 41)), np.linspace(100.0, 0.5, 40).tolist())})
    run = gs.open_run(tmp_path / "a")
    html = run._repr_html_()
    rows = {row[0]: row[1:] for row in cells(html)}
    assert rows["share/0"] == ["0.25", "0", "0.65", "40"]
    assert rows["late"] == ["2", "30", "2", "40"]
    assert rows["loss"] == ["100", "1", "0.5", "40"]
    assert "<img" not in html
    figure = run.plot(["share/*", "loss"])
    drawn = {axes.get_title(): axes for axes in figure.axes if axes.get_title()}
    assert list(drawn) == ["share", "loss"]
    np.testing.assert_allclose(drawn["share"].lines[1].get_ydata(), [0.75, 0.65, 0.55, 0.45, 0.35])
    np.testing.assert_allclose(drawn["loss"].lines[0].get_xdata(), np.arange(1, 41))
    assert drawn["loss"].get_yscale() == "log"
    with pytest.raises(InputError, match="names must match some of what the run holds, got 'nothing'"):
        run.plot("nothing")


def test_a_picture_of_a_run_has_its_curves_on_the_steps_of_its_schedule(tmp_path):
    with RunWriter.create(tmp_path / "a") as writer:
        for step in (0, 1, 2, 4, 8, 100, 1000):
            writer.append(step, {"richness": 0.5, "skipped": 2.0, "probe/rms": 1.0, "precision": 1.2e-7})
    run = gs.open_run(tmp_path / "a")
    (axes,) = [axes for axes in run.plot().axes if axes.get_title()]
    assert (axes.get_title(), axes.get_xscale()) == ("richness", "symlog")
    assert axes.get_xlim()[0] > -1, "no steps before the first"
    assert [axes.get_title() for axes in run.plot("prec*").axes] == ["precision"], "drawn where it is named"


def test_very_many_rows_are_counted():
    html = html_table("t", ["a"], [[place] for place in range(MAX_ROWS + 3)])
    assert len(cells(html)) == MAX_ROWS
    assert "… and 3 more rows" in html
