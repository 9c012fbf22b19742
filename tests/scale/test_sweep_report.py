"""The page of a sweep: a measure against the swept settings, heat maps, best runs."""

import numpy as np
import pytest

from gramscope.report import report, swept
from gramscope.report.page import gather
from gramscope.report.run_sources import open_all, views_of
from gramscope.report.runs_table import runs_table
from gramscope.store import RunWriter


def loss(lr, width, seed):
    return lr * 10 + width + seed / 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two learning rates, three widths, two seeds; one run has diverged."""
    out = tmp_path_factory.mktemp("sweep")
    for lr in (0.001, 0.1):
        for width in (8, 16, 32):
            for seed in (0, 1):
                name = f"lr-{lr}_width-{width}_seed-{seed}"
                config = {
                    "optimiser": {"name": "sgd", "lr": lr},
                    "model": {"width": width},
                    "train": {"seed": seed},
                    "watch": {"out": f"{out}/{name}"},
                }
                with RunWriter.create(out / name, {"config": config}) as writer:
                    writer.append(0, {"loss": 99.0, "accuracy/test": 0.1})
                    end = float("nan") if (lr, width, seed) == (0.1, 32, 1) else loss(lr, width, seed)
                    writer.append(10, {"loss": end, "accuracy/test": 1 / (1 + width)})
    return out


def table(folder):
    return runs_table(views_of(open_all(folder)))


def test_settings_are_what_differs_without_folders_and_seeds(folder):
    found = swept.swept(table(folder))
    assert [(setting.key, list(setting.values)) for setting in found] == [
        ("optimiser.lr", [0.001, 0.1]),
        ("model.width", [8, 16, 32]),
    ]
    assert found[0].log
    assert not found[1].log


def test_lines_are_means_and_heat_maps_are_means_over_seeds(folder):
    panel = swept.panel(table(folder))
    assert panel.control.options[:2] == ["final loss", "final accuracy, test"]
    by_lr, by_width, heat = panel.plots
    points, mean = by_width.frames[0]
    assert len(points.x) == 11, "the run that diverged has no point"
    assert mean.x.tolist() == [8, 16, 32]
    want = np.mean([loss(lr, 8, seed) for lr in (0.001, 0.1) for seed in (0, 1)])
    assert mean.y[0] == pytest.approx(want, rel=1e-3)  # the table rounds to four digits
    assert by_lr.x.log
    z = heat.frames[0][0].z
    assert z.shape == (2, 3)
    assert z[0, 1] == pytest.approx(loss(0.001, 16, 0.5), rel=1e-3)
    assert z[1, 2] == pytest.approx(loss(0.1, 32, 0), rel=1e-3), "of the seed that is finite"
    assert panel.notes == ["1 run that diverged or has no value of final loss: not drawn there."]


def test_a_run_that_diverged_before_it_was_measured_again_has_no_end(tmp_path):
    for lr in (0.1, 0.2, 1e30):
        with RunWriter.create(tmp_path / f"lr-{lr}", {"config": {"optimiser": {"lr": lr}}}) as writer:
            writer.append(0, {"loss": 0.5, "loss/probe": 0.5})
            writer.append(2, {"loss": float("nan")} if lr > 1 else {"loss": 1 + lr, "loss/probe": 1 + lr})
    panel = swept.panel(table(tmp_path))
    assert all(sorted(points.x.tolist()) == [0.1, 0.2] for points, _ in panel.plots[0].frames)
    assert all("1e30" not in line and "1e+30" not in line for line in swept.best_runs(table(tmp_path)))


def test_best_runs_are_named(folder):
    lowest, highest = swept.best_runs(table(folder))
    assert lowest.startswith("Lowest final loss: lr-0.001_width-8_seed-0 (8.01), lr-0.001_width-8_seed-1 (8.02), ")
    assert highest.startswith("Highest final accuracy, test: lr-0.001_width-8_seed-0 (0.111), ")


def test_the_page_has_the_panel_and_its_figures_as_files(folder, tmp_path):
    page = report(folder, tmp_path / "r.html", svg_dir=tmp_path / "svg").read_text(encoding="utf-8")
    assert "Two settings at once" in page
    assert "Swept settings" not in page, "the page of many runs draws any measure against any setting"
    assert "Lowest final loss" in page
    assert [path for path in (tmp_path / "svg").iterdir() if path.name.startswith("swept")]


def test_a_page_of_many_runs_has_the_heat_maps_alone(folder):
    whole, pairs = swept.panel(table(folder)), swept.panel(table(folder), pairs_only=True)
    assert [plot.caption for plot in pairs.plots] == ["means over optimiser.lr and model.width"]
    assert np.array_equal(pairs.plots[0].frames[0][0].z, whole.plots[2].frames[0][0].z)
    one = [path for path in sorted(folder.iterdir()) if "width-8" in path.name]
    assert swept.panel(table(one), pairs_only=True) is None


def test_no_panel_for_few_runs_or_runs_of_one_setting(folder):
    two = gather(open_all(sorted(folder.iterdir())[:2]))
    assert "swept" not in [panel.key for panel in two.panels]
    same = [path for path in sorted(folder.iterdir()) if "lr-0.1_width-8" in path.name] * 2
    assert [setting.key for setting in swept.swept(table(same))] == ["train.seed"], "a seed alone is a setting"
