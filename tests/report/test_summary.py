"""The words say what the numbers say."""

import numpy as np
import pytest

from gramscope.report.opening import open_all, views_of
from gramscope.report.panels import kernels
from gramscope.report.summary import compared, in_words, regime
from report.synthetic import append, write_meta


def view(tmp_path, name="a", **columns):
    """A run with one record a value; names use '_of_' for the slash."""
    path = tmp_path / name
    write_meta(path, name, layers=["0", "2"])
    (path / "scalars.jsonl").touch()
    series = {key.replace("_of_", "/"): values for key, values in columns.items()}
    for place in range(max(len(values) for values in series.values())):
        append(path, 10 * place, {key: values[place] for key, values in series.items() if place < len(values)})
    return views_of(open_all(path))[0]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"kernel_of_drift": [0.0, 0.3]}, "lazy"),
        ({"kernel_of_drift": [0.0, 0.7]}, "in between"),
        ({"kernel_of_drift": [0.0, 9.0]}, "rich"),
        ({"kernel_of_drift": [1.0, 0.97]}, "lazy"),  # written as the alignment with the start
        ({"kernel_of_drift": [1.0, 0.8]}, "in between"),
        ({"kernel_of_drift": [1.0, 0.3]}, "rich"),
        ({"richness": [0.7, 0.69]}, "lazy"),
        ({"richness": [0.7, 0.05]}, "rich"),
        ({"richness": [0.7, 0.3]}, "in between"),
        ({"kernel_of_drift": [0.0], "richness": [0.7, 0.1]}, "rich"),
        ({"kernel_of_drift": [0.0]}, "unknown"),
        ({"kernel_of_drift": [float("nan")] * 2}, "unknown"),
        ({"loss": [1.0, 2.0]}, "unknown"),
    ],
)
def test_regime(tmp_path, columns, expected):
    assert regime(view(tmp_path, **columns)) == expected


def test_drift_is_turned_only_where_it_starts_at_one(tmp_path):
    moved = kernels.moved(view(tmp_path, kernel_of_drift=[1.0, 0.75]))
    np.testing.assert_allclose(moved.values, [0.0, 0.25])
    late = kernels.moved(view(tmp_path, "b", kernel_of_drift=[0.4, 0.75]))
    np.testing.assert_allclose(late.values, [0.4, 0.75])


def said(run):
    words = in_words(run)
    return " ".join([words.verdict, *words.findings, *words.warnings])


def test_the_layer_that_learns_and_the_one_that_stopped(tmp_path):
    busy = [0.1] * 5 + [0.99] * 8
    text = said(view(tmp_path, share_of_0=busy, share_of_2=[1 - share for share in busy]))
    assert "At first layer 2 learns most (90 % of the loss decrease), at the end layer 0 (99 %)." in text
    assert "Layer 2 stopped learning at step 50" in text
    assert "The lead in learning passed to layer 0 at step 50." in text
    assert "Layer 0 stopped" not in text


def test_one_quiet_record_is_not_a_stop(tmp_path):
    text = said(view(tmp_path, share_of_0=[0.5] * 9 + [0.0], share_of_2=[0.5] * 9 + [1.0]))
    assert "stopped" not in text
    assert "passed" not in text


def test_idle_layers(tmp_path):
    text = said(view(tmp_path, share_of_0=[0.995] * 4, share_of_2=[0.005] * 4))
    assert "Layer 2 never had 2 % of the learning." in text
    assert "Layer 0 learns most, at first (100 % of the loss decrease) and at the end (100 %)" in text


def test_grokking_is_named(tmp_path):
    train, test = [0.1] + [1.0] * 11, [0.1] * 9 + [0.9] * 3
    text = said(view(tmp_path, accuracy=train, accuracy_of_test=test))
    assert "train had it by step 10, test only by 90 (grokking)" in text
    assert "grokking" not in said(view(tmp_path, "b", accuracy=train, accuracy_of_test=train))


def test_when_the_kernel_moved(tmp_path):
    text = said(view(tmp_path, kernel_of_drift=[0.0, 0.1, 0.5, 0.75, 0.8]))
    assert "Half of the kernel's movement was done by step 20, nine tenths by step 30." in text


def test_rising_loss_is_a_warning(tmp_path):
    assert "The loss rose: 1 → 5." in said(view(tmp_path, loss=[1.0, 5.0]))
    assert "rose" not in said(view(tmp_path, "b", loss=[5.0, 1.0]))


def test_prediction_in_words(tmp_path):
    changes = {"step_of_predicted_loss_change": [-3.0, -4.0], "step_of_true_loss_change": [-3.0, -2.0]}
    share = round(100 * 2 / 13**0.5)
    assert f"First-order theory missed {share} % of the loss changes" in said(view(tmp_path, **changes))
    run = view(tmp_path, "b", **changes, step_of_error=[0.1, 0.2, 0.4])
    assert "First-order theory missed 20 % of the outputs' change in the median." in said(run)


def test_runs_are_compared(tmp_path):
    for name, drift in (("a", 0.6), ("b", 0.02)):
        view(tmp_path, name, kernel_of_drift=[0.0, drift], accuracy=[0.1, drift])
    text = " ".join(compared(views_of(open_all([tmp_path / "a", tmp_path / "b"]))))
    assert "The kernel of a moved most (0.6), of b least (0.02)." in text
    assert "The accuracy ends highest in a (60 %) and lowest in b (2 %)." in text
