"""Templates for those who carry on: the least code of a new operation, measure, panel, task and experiment, tested.

CONTRIBUTING.md points here. Copy the part that you need into the package and its tests.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import gramscope as gs
from gramscope.capture.node_rules import RULES, rule, summed
from gramscope.cli.main import app
from gramscope.measures.measure import Measure
from gramscope.record.watched_measures import WATCHED_MEASURES, MeasuredValues, watched_measure
from gramscope.report import panels
from gramscope.report.figure import Panel
from gramscope.report.panels.others import drawn_as_recorded
from gramscope.report.view import RunView
from gramscope.store import RunWriter
from gramscope.tasks import Task
from references.jacobian import reference_ntk

# An operation: a rule reads what its backward node saved --------------------------------------------


class Gain(torch.autograd.Function):
    """u = w x for every entry."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, s):
        x, w = ctx.saved_tensors
        return s * w, (s * x).sum(0)


class WithGain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Parameter(torch.tensor([1.0, -0.5, 2.0])), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(torch.tanh(Gain.apply(x, self.w)))


def test_a_new_operation():
    torch.manual_seed(0)
    model, x = WithGain().double(), torch.randn(4, 3, dtype=torch.float64)
    expected = reference_ntk(model, x)
    assert gs.capture(model, x).fallback == ("w",), "exact without a rule, and named as slow"

    @rule("Gain")
    def gain(use):
        x, _ = use.node.saved_tensors
        return summed(use, x, rule="elementwise") if use.slot == 1 else None

    try:
        assert gs.capture(model, x).fallback == ()
        torch.testing.assert_close(gs.ntk(model, x), expected, rtol=1e-12, atol=1e-14)  # float64: rounding only
    finally:
        del RULES["Gain"]


# A measure: a state for each batch, states that merge, and a reader for gs.watch ---------------------


@dataclass(frozen=True)
class Sum:
    total: float
    count: int

    def merged(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total, self.count + other.count)


class MeanSquare(Measure[Sum, float]):
    """``Σ_μi h_μi² / n``, the mean squared norm of features."""

    def update(self, features: Tensor) -> Sum:
        return Sum(float(features.double().square().sum()), len(features))

    def compute(self, state: Sum) -> float:
        return state.total / state.count


def test_a_new_measure():
    features = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    slow = sum(float(row.double() @ row.double()) for row in features) / 50
    assert MeanSquare()(features) == pytest.approx(slow, rel=1e-12)
    assert MeanSquare().over(features.split(7)) == pytest.approx(slow, rel=1e-12), "batches do not matter"


def test_a_new_measure_of_a_watched_run(tmp_path):
    @watched_measure("bias_norm", "Norm of all biases.", needs_targets=False, by_default=False, weights_only=True)
    def measure_bias_norm(measurement):
        biases = [p.norm() for name, p in measurement.subject.model.named_parameters() if name.endswith("bias")]
        return MeasuredValues({"bias_norm": float(torch.stack(biases).norm())})

    model = nn.Linear(3, 2)
    try:
        with gs.watch(model, probe=torch.randn(4, 3), out=tmp_path / "run", measures=["bias_norm"]) as scope:
            scope.step()
    finally:
        del WATCHED_MEASURES["bias_norm"]
    assert scope.records[0]["scalars"]["bias_norm"] == pytest.approx(float(model.bias.norm()))


# A panel: it takes the names it draws, so that they are drawn once ----------------------------------


def bias_panel(views: Sequence[RunView]) -> Panel | None:
    plots, notes = drawn_as_recorded(views, lambda name: name == "bias_norm")
    return Panel("biases", "Biases", "How to read it, in one sentence.", [], plots, notes=notes) if plots else None


def test_a_new_panel(tmp_path, monkeypatch):
    monkeypatch.setattr(panels, "KNOWN", (*panels.KNOWN, panels.Entry("Biases", "bias_norm", bias_panel)))
    with RunWriter.create(tmp_path / "run") as writer:
        for step in range(3):
            writer.append(step, {"bias_norm": 0.5 * step}, {})
    page = gs.report(tmp_path / "run", out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('data-panel="biases"') == 1


# A task: the same for one seed, on any machine, without a download -----------------------------------


def stripes(seed: int = 0, n: int = 40) -> Task:
    """Points in the plane, in two classes of stripes."""
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), device="cpu")
    y = (4 * x[:, 0]).long() % 2
    return Task(x[: n // 2], y[: n // 2], x[n // 2 :], y[n // 2 :])


def test_a_new_task():
    one, again, other = stripes(0), stripes(0), stripes(1)
    assert torch.equal(one.x, again.x)
    assert not torch.equal(one.x, other.x)
    assert one.classes == 2


# An experiment: run.py and expected.toml in a folder of experiments/ ---------------------------------

RUN = """
TITLE = "Stripes"
QUESTION = "Is half of the data in each class?"
def cases(quick):
    return [{"n": 40}]
def run(case, seed, *, quick, device, out):
    import torch
    x = torch.rand(case["n"], generator=torch.Generator().manual_seed(seed))
    return {"share": float(((4 * x).long() % 2).float().mean())}
def figure(table, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots()
    axes.plot(table["seed"], table["share"], "o")
    figure.savefig(path)
    pyplot.close(figure)
"""
EXPECTED = """
[[value]]
case = {n = 40}
name = "share"
published = 0.5
source = "by construction"
tolerance = 0.3
why = "three standard deviations of 40 draws are 0.24"
"""


def test_a_new_experiment(tmp_path):
    folder = tmp_path / "experiments" / "stripes"
    folder.mkdir(parents=True)
    (folder / "run.py").write_text(RUN)
    (folder / "expected.toml").write_text(EXPECTED)
    arguments = ["stripes", "--quick", "--experiments", str(folder.parent), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, ["reproduce", *arguments])
    assert done.exit_code == 0, done.output
    assert [row["verdict"] for row in json.loads(done.stdout.strip().splitlines()[-1])["rows"]] == ["agrees"]
