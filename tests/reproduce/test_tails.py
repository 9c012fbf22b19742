"""The experiment on heavy tails in its quick version, from the command line, without any data."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gramscope.cli.main import app
from gramscope.reproduce.writing import MARKER, read_table

COMMITTED = Path(__file__).parents[2] / "experiments" / "tails" / "result.csv"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("tails") / "out"
    told = CliRunner().invoke(app, ["reproduce", "tails", "--quick", "--out", str(out)])
    torch.set_num_threads(threads)
    assert told.exit_code == 0, told.output
    return out


def test_controls_are_what_they_are_called(result):
    """Frozen masks and linear networks keep their co-activation, ReLU masks do not; wrong labels do not generalize."""
    table = read_table(result / "result.csv").set_index("network")
    assert list(table.index) == ["relu", "frozen", "linear", "shuffled", "frozen-shuffled"]
    for network in ("frozen", "linear", "frozen-shuffled"):
        assert table.loc[network, "coactivation_ratio_3"] == 1
    assert table.loc["relu", "coactivation_ratio_3"] < 0.95
    assert table.loc["relu", "test_accuracy"] > 0.8 > 0.4 > table.loc["shuffled", "test_accuracy"]
    assert (table["moved_3"] > 0.1).all()
    assert list(read_table(result / "result.csv").columns) == list(read_table(COMMITTED).columns)


def test_the_text_has_what_holds_over_all_jobs(result):
    generated, _, _ = (result / "RESULT.md").read_text(encoding="utf-8").partition(MARKER)
    assert "Spearman correlations over all jobs" in generated
    assert "Spearman" in (result / "page.html").read_text(encoding="utf-8")
    assert (result / "figure.png").stat().st_size > 10_000
