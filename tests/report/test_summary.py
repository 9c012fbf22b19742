"""The words say what the numbers say."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.diagnose import diagnose, thresholds
from gramscope.report import references, report
from gramscope.report.advice import TOPICS
from gramscope.report.panels import all_panels, kernels, layers, others, richness, spectra
from gramscope.report.regimes import regime
from gramscope.report.run_sources import open_all, views_of
from gramscope.report.summary import compared, in_words
from gramscope.store import RunWriter
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


def test_a_kernel_that_came_back_is_not_said_to_have_done_its_change_early(tmp_path):
    told = [f.text for f in in_words(view(tmp_path, kernel_of_drift=[0.0, 9.0, 2.0, 0.5, 0.5])).findings]
    assert "The kernel's drift was largest at step 10 (9) and became smaller again." in told
    assert not [line for line in told if "of the kernel's change" in line]
    steady = [f.text for f in in_words(view(tmp_path, "b", kernel_of_drift=[0.0, 3.0, 8.0, 9.0, 9.0])).findings]
    assert [line for line in steady if "of the kernel's change" in line]


def test_a_rehearsed_step_that_would_blow_the_network_up_is_no_divergence(tmp_path):
    """The step was tried on a copy, on the probe: weights and loss are finite."""
    write_meta(tmp_path / "a", "a")
    ahead = {"step": "InputError: the output after the step must be finite, but 4 of 4 entries are not."}
    now = {"loss": "InputError: the model's output must be finite, but 4 of 4 entries are not."}
    for step in range(0, 50, 10):
        append(tmp_path / "a", step, {"loss": 1.0, "kernel/drift": 0.01 * step}, failures=ahead)
    assert regime(views_of(open_all(tmp_path / "a"))[0]) == "in between"
    append(tmp_path / "a", 50, {}, failures=ahead | now)
    assert "The run diverged at step 50" in in_words(views_of(open_all(tmp_path / "a"))[0]).verdict.text


def test_what_is_not_defined_is_told_once_and_not_as_a_fault(tmp_path):
    nan = float("nan")
    write_meta(tmp_path / "a", "a")
    reasons = {
        "kernel": "the alignment is not defined: the second kernel is constant. NaN is returned.",
        "collapse": "not defined: the probe must have one class for each example.",
    }
    for step in range(0, 40, 10):
        append(tmp_path / "a", step, {"loss": 1.0, "kernel/alignment": nan}, failures=reasons)
    words = in_words(views_of(open_all(tmp_path / "a"))[0])
    assert not words.warnings
    assert [line.partition(": ")[2] for line in words.undefined] == [
        "the alignment is not defined: the second kernel is constant.",
        "collapse is not defined: the probe must have one class for each example.",
    ]
    append(tmp_path / "a", 40, {"loss": 1.0, "kernel/alignment": nan})  # this one has no reason
    words = in_words(views_of(open_all(tmp_path / "a"))[0])
    assert [line for line in words.warnings if line.startswith("kernel/alignment is not a finite number at step 40")]


def test_a_loss_that_is_not_the_one_trained_on_is_not_said_to_rise(tmp_path):
    """Targets 0.0 and 1.0: their squared error rises while the binary cross-entropy of the batches falls."""
    falling, rising = [0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1], [0.4, 0.5, 0.8, 2.0, 4.0, 5.0, 6.0]
    drift = [0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0]
    write_meta(tmp_path / "a", "a")
    for step in range(7):
        scalars = {"loss/probe": rising[step], "yes_or_no/loss": falling[step], "kernel/drift": drift[step]}
        append(tmp_path / "a", 2 * step, scalars | {"loss": falling[max(step - 1, 0)]})
        append(tmp_path / "a", 2 * step + 1, {"loss": falling[step]})
    words = in_words(views_of(open_all(tmp_path / "a"))[0])
    assert len([line for line in words.warnings if "nearer to a cross-entropy" in line]) == 1
    assert not [line for line in words.warnings if line.startswith("The loss rose")]
    assert "its loss did not fall" not in words.verdict.text
    assert words.verdict.text.startswith("The run is rich")


SIMILAR = "richness_of_initial_similarity"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"kernel_of_drift": [0.0, 0.1, 0.3]}, "lazy"),
        ({"kernel_of_drift": [0.0, 0.1, 0.7]}, "in between"),
        ({"kernel_of_drift": [0.0, 0.1, 9.0]}, "rich"),
        ({"kernel_of_drift": [0.0, 9.0, 0.2]}, "rich"),  # large steps: it grew and shrank again
        ({SIMILAR: [1.0, 0.99, 0.9]}, "lazy"),
        ({SIMILAR: [1.0, 0.99, 0.8]}, "in between"),
        ({SIMILAR: [1.0, 0.8, 0.4]}, "rich"),
        ({SIMILAR: [1.0, 0.8]}, "too short"),
        ({"kernel_of_drift": [0.0, 0.1, 9.0], SIMILAR: [1.0, 1.0, 0.99]}, "lazy"),  # a readout alone moves the kernel
        ({"kernel_of_drift": [0.0, 0.1, 0.2], SIMILAR: [1.0, 0.9, 0.8]}, "lazy"),
        ({"kernel_of_drift": [0.0, 0.1, 0.2], SIMILAR: [1.0, 0.5, 0.4]}, "in between"),  # they disagree
        ({"kernel_of_drift": [0.0, 0.1, 9.0], SIMILAR: [1.0, 0.8, 0.8]}, "rich"),
        ({"kernel_of_drift": [0.0, 0.1, 0.2], SIMILAR: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]}, "rich"),  # its first half only
        ({"kernel_of_drift": [0.0], SIMILAR: [1.0, 0.5, 0.1]}, "rich"),
        ({"richness": [0.7, 0.5, 0.05]}, "unknown"),  # D_LR alone does not tell: docs/calibration.md
        ({"kernel_of_drift": [0.0]}, "too short"),
        ({"kernel_of_drift": [0.0, 9.0]}, "too short"),
        ({"kernel_of_drift": [0.0, 0.1, 9.0], "loss": [1.0, 1.0, 1e18]}, "diverged"),
        ({"kernel_of_drift": [0.0, 0.1, 9.0], "loss": [1.0, 1e18, 1.0]}, "rich"),  # it came back
        ({"kernel_of_drift": [0.0, 0.1, 9.0], "loss_of_probe": [1.0, 1e18, 0.9]}, "rich"),  # it came back, and learnt
        (
            {"kernel_of_drift": [0.0, 9.0, 9.0], "loss_of_probe": [2.3, 1e9, 2.3]},
            "diverged",
        ),  # it came back with nothing
        ({"kernel_of_drift": [float("nan")] * 2}, "unknown"),
        ({"loss": [1.0, 2.0]}, "unknown"),
    ],
)
def test_regime(tmp_path, columns, expected):
    assert regime(view(tmp_path, **columns)) == expected


def said(run):
    words = in_words(run)
    return " ".join([words.verdict.text, *(found.text for found in words.findings), *words.warnings])


def test_the_layer_that_learns_and_the_one_that_stopped(tmp_path):
    busy = [0.1] * 5 + [0.99] * 8
    text = said(view(tmp_path, share_of_0=busy, share_of_2=[1 - share for share in busy]))
    assert "At step 0 layer 2 learns most (90 % of the loss decrease), at step 120 layer 0 (99 %)." in text
    assert "Layer 2 stopped learning at step 50" in text
    assert "The lead in learning passed to layer 0 at step 50." in text
    assert "Layer 0 stopped" not in text


def test_who_leads_at_the_end_agrees_with_where_the_lead_went(tmp_path):
    """A late change is told even if it is young: else one sentence names a layer and the next one another."""
    share = [0.9, *[0.1] * 10, 0.8, 0.8]
    text = said(view(tmp_path, share_of_0=share, share_of_2=[1 - own for own in share]))
    assert "Layer 0 learns most at step 0 (90 % of the loss decrease) and at step 120 (80 %)." in text
    assert "The lead in learning passed to layer 2 at step 10, to layer 0 at step 110." in text


def test_what_is_not_defined_is_no_warning(tmp_path):
    write_meta(tmp_path / "a", "a")
    for step in (0, 10):
        failed = {"richness": "InputError: D_LR is not defined: all outputs are zero.", "mine": "ValueError: broken"}
        append(tmp_path / "a", step, {"loss": 1.0}, failures=failed)
    words = in_words(views_of(open_all(tmp_path / "a"))[0])
    assert words.warnings == ("Measure mine failed at step 0 and 1 more: ValueError: broken",)
    assert words.undefined == ("At step 0 and 1 more: InputError: D_LR is not defined: all outputs are zero.",)


def test_one_quiet_record_is_not_a_stop(tmp_path):
    text = said(view(tmp_path, share_of_0=[0.5] * 9 + [0.0], share_of_2=[0.5] * 9 + [1.0]))
    assert "stopped" not in text
    assert "passed" not in text


def test_idle_layers(tmp_path):
    text = said(view(tmp_path, share_of_0=[0.995] * 4, share_of_2=[0.005] * 4))
    assert "Layer 2 never had 2 % of the learning." in text
    assert "Layer 0 learns most at step 0 (100 % of the loss decrease) and at step 30 (100 %)" in text


def test_grokking_is_named(tmp_path):
    train, test = [0.1] + [1.0] * 11, [0.1] * 9 + [0.9] * 3
    text = said(view(tmp_path, accuracy=train, accuracy_of_test=test))
    assert "train had it by step 10, test only by 90 (grokking)" in text
    assert "grokking" not in said(view(tmp_path, "b", accuracy=train, accuracy_of_test=train))


def test_when_the_kernel_moved(tmp_path):
    text = said(view(tmp_path, kernel_of_drift=[0.0, 0.1, 0.5, 0.75, 0.8]))
    assert "Half of the kernel's change was done by step 20, 90 % between steps 20 and 30." in text


def test_a_run_that_came_back_from_far_above_with_nothing_is_told_so(tmp_path):
    text = said(view(tmp_path, loss_of_probe=[2.0, 1e9, 30.0, 9.0], kernel_of_drift=[0.0, 1e5, 1e5, 1e5]))
    assert "The run diverged at step 10: its loss was over 100 times that at the start, and it ends no lower" in text
    lasting = said(view(tmp_path, "b", loss_of_probe=[2.0, 1e9, 1e9, 1e9], kernel_of_drift=[0.0, 1e5, 1e5, 1e5]))
    assert "The run diverged at step 10: from there on its loss is over 100 times that at the start" in lasting


def test_a_kernel_that_moves_under_still_features_is_not_passed_over(tmp_path):
    columns = {SIMILAR: [1.0, 0.99, 0.97, 0.95]}
    text = said(view(tmp_path, kernel_of_drift=[0.0, 1.0, 9.0, 32.0], **columns))
    assert (
        "its features hardly moved, though its kernel did: larger outputs or the last layer alone can do that" in text
    )
    assert "though its kernel did" not in said(view(tmp_path, "b", kernel_of_drift=[0.0, 0.1, 0.2, 0.3], **columns))


def test_the_largest_drift_is_told_with_its_step(tmp_path):
    run = view(tmp_path, kernel_of_drift=[0.0, 9.0, 0.5, 0.4])
    assert "The run is rich: it changed its features (largest kernel drift 9 at step 10)." in said(run)
    assert kernels.moves([run]).words == ["a: kernel drift 0.4 at step 30 (largest 9 at step 10)."]


def test_rising_loss_is_a_warning(tmp_path):
    assert "The loss rose: 1 at step 0 → 5 at step 20." in said(view(tmp_path, loss=[1.0, 3.0, 5.0]))
    assert "rose" not in said(view(tmp_path, "b", loss=[5.0, 3.0, 1.0]))
    assert "rose" not in said(view(tmp_path, "c", loss=[1.0, 5.0])), "two points are no course"


def test_prediction_in_words(tmp_path):
    changes = {"step_of_predicted_loss_change": [-3.0, -4.0], "step_of_true_loss_change": [-3.0, -2.0]}
    share = round(100 * 2 / 13**0.5)
    assert f"Error of the predicted loss changes (root mean square): {share} %." in said(view(tmp_path, **changes))
    run = view(tmp_path, "b", **changes, step_of_error=[0.1, 0.2, 0.4])
    assert "Median error of the first-order prediction of a step: 20 %." in said(run)


def test_runs_are_compared(tmp_path):
    for name, drift in (("a", 0.6), ("b", 0.02)):
        view(tmp_path, name, kernel_of_drift=[0.0, drift / 2, drift], accuracy=[0.1, 0.1, drift])
    text = " ".join(compared(views_of(open_all([tmp_path / "a", tmp_path / "b"]))))
    assert "Largest kernel drift: a (0.6); smallest: b (0.02)." in text
    assert "The accuracy ends highest in a (60 %) and lowest in b (2 %)." in text


NAN = float("nan")


def test_a_loss_that_explodes_heads_the_run(tmp_path):
    """The first-order error and the kernel's drift of ruined weights look like a rich run that theory predicted."""
    run = view(
        tmp_path,
        loss=[1.13, 1.0, 0.9, 3e18, 3e18, 3.24e18],
        kernel_of_drift=[0.0, 0.1, 0.2, 6.1, 6.1, 6.1],
        step_of_error=[0.03, 0.03, 0.03, 0.0, 0.0, 0.0, 0.0],
    )
    words = in_words(run)
    assert words.verdict.text.startswith("The run diverged at step 30: from there on its loss is over 100 times")
    assert "(1.13 at step 0 → 3.24e+18 at step 50)" in words.verdict.text
    assert "Before it diverged: Median error of the first-order prediction of a step: 3 %." in said(run)
    assert "rich" not in said(run)
    assert not any("The loss rose" in line for line in words.warnings), "said already"


@pytest.mark.parametrize("name", ["norm_of_parameters", "loss", "loss_of_probe"])
def test_numbers_that_end_not_finite_head_the_run(tmp_path, name):
    columns = {"kernel_of_drift": [0.0, 0.3, 0.6], name: [1.07, 1.0, 0.99, NAN, float("inf")]}
    run = view(tmp_path, **columns)
    assert in_words(run).verdict.text.startswith("The run diverged at step 30: from there on its ")
    assert "between lazy and rich" not in said(run)
    if name.startswith("loss"):
        word = "Loss" if name == "loss" else "Loss on the probe"
        assert f"{word} 1.07 at step 0 → 0.99 at step 20, then not finite" in said(run)


def test_a_batch_without_a_loss_is_no_divergence(tmp_path):
    """A gradient scaler skips the step; the weights stay finite, even where the last loss is not."""
    finite = {"norm_of_parameters": [1.0, 1.0, 1.1], "kernel_of_drift": [0.0, 0.1, 0.3]}
    assert regime(view(tmp_path, loss=[1.0, 0.9, NAN], **finite)) == "lazy"
    assert regime(view(tmp_path, "b", loss=[1.0, NAN, 0.9], kernel_of_drift=[0.0, 0.1, 0.3])) == "lazy"


@pytest.mark.parametrize("state", [{}, {"loss_of_probe": [1.0, 0.9, 0.8, 0.8]}, {"norm_of_parameters": [1.0] * 4}])
def test_a_loss_that_stays_not_finite_is_a_divergence(tmp_path, state):
    """Whatever else is finite: no scaler skips for ever, and "rich" would be no honest heading."""
    run = view(tmp_path, loss=[1.0, 0.9, NAN, NAN], kernel_of_drift=[0.0, 1.0, 2.0, 3.0], **state)
    assert in_words(run).verdict.text == "The run diverged at step 20: from there on its loss is not finite."


def test_a_last_loss_that_nothing_vouches_for_is_a_divergence(tmp_path):
    """The weights were last read before it."""
    run = view(tmp_path, loss=[1.0, 0.9, 0.8, NAN], norm_of_parameters=[1.0, 1.0], kernel_of_drift=[0.0, 1.0, 2.0])
    assert regime(run) == "diverged"


def test_a_run_that_has_not_learnt_is_given_no_advice_on_features(tmp_path):
    still = {"loss_of_probe": [4281.0, 4250.0, 4220.0]}
    for name, columns in (("lazy", {SIMILAR: [1.0, 1.0, 0.99]}), ("rich", {"kernel_of_drift": [0.0, 1.0, 9.0]})):
        run = view(tmp_path, name, **columns, **still)
        words = in_words(run)
        assert words.verdict.text.startswith(f"The run is {name}")
        assert words.verdict.topic == "not learnt"
        assert "loss decrease" not in said(run)


def test_what_stands_still_is_not_said_to_have_changed_most(tmp_path):
    run = view(tmp_path, target_linearity_of_0=[0.943] * 3, target_linearity_of_2=[0.5, 0.5, 0.50001])
    assert "Target linearity changed by less than 0.02 in each layer, step 0 to step 20." in said(run)
    words = "a: target linearity changed by less than 0.02 in each layer, step 0 to step 20."
    assert layers.linearity([run]).words == [words]


def test_measures_that_fail_for_one_nan_are_one_line(tmp_path):
    write_meta(tmp_path / "a", "a")
    (tmp_path / "a" / "scalars.jsonl").touch()
    for step in (0, 10):
        append(tmp_path / "a", step, {"loss": 1.0, "other": 1.0})
    failed = dict.fromkeys(("loss", "shares", "kernel"), "InputError: parameter '0' must be finite.")
    failed |= {"spectra": "InputError: 0 must be finite, but it is not.", "mine": "ValueError: of another kind"}
    for step in (20, 30):
        append(tmp_path / "a", step, {"loss": NAN, "other": NAN}, failures=failed)
    words = in_words(views_of(open_all(tmp_path / "a"))[0])
    assert words.warnings == (
        "loss and other are not finite numbers at 2 records, first at step 20.",
        "Measures loss, shares, kernel and spectra failed at step 20 and 1 more: "
        "InputError: parameter '0' must be finite.",
        "Measure mine failed at step 20 and 1 more: ValueError: of another kind",
    )
    assert words.verdict.text == "The run diverged at step 20: from there on its loss is not finite."


def test_too_little_to_tell_is_said(tmp_path):
    write_meta(tmp_path / "a", "a")
    (tmp_path / "a" / "scalars.jsonl").touch()
    append(tmp_path / "a", 0, {"loss/probe": 1.2, "kernel/drift": 0.0, "richness": 0.6})
    append(tmp_path / "a", 1, {"loss/probe": 1.1, "kernel/drift": 0.03, "richness": 0.6, "loss": 1.18})
    text = said(views_of(open_all(tmp_path / "a"))[0])
    assert "There is not enough to tell lazy from rich" in text
    assert "there are 2 up to step 1." in text
    assert "The run is" not in text
    assert "Loss on the probe 1.1 at step 1 (2 records)." in text
    assert "→" not in text


def test_one_reading_is_no_change(tmp_path):
    run = view(tmp_path, loss=[1.18], share_of_0=[0.4], share_of_2=[0.6])
    text = said(run)
    assert "Loss 1.18 at step 0 (1 record)." in text
    assert "At step 0 layer 2 learns most (60 % of the loss decrease)." in text
    assert "→" not in text


def test_a_still_loss_is_said_beside_still_features(tmp_path):
    still = {"kernel_of_drift": [0.0, 0.0, 0.01]}
    run = view(tmp_path, loss_of_probe=[1.0, 1.0, 0.99], **still)
    assert "The run is lazy: neither its features nor its loss moved much" in said(run)
    assert "its features hardly moved" in said(view(tmp_path, "b", loss_of_probe=[1.0, 0.5, 0.2], **still))


def test_layers_that_join_the_training_are_no_movement_of_the_kernel(tmp_path):
    run = view(tmp_path, kernel_of_drift=[0.0, 0.0, 0.0, 3.5, 3.5], share_of_2=[1.0, 1.0, 1.0, 0.5, 0.5])
    path = tmp_path / "b"
    write_meta(path, "b", layers=["0", "2"])
    (path / "scalars.jsonl").touch()
    for step in range(5):
        shares = {"share/2": 1.0} if step < 3 else {"share/0": 0.5, "share/2": 0.5}
        append(path, 10 * step, {"kernel/drift": 0.0 if step < 3 else 3.5, **shares})
    unfrozen = views_of(open_all(path))[0]
    assert regime(run) == "rich"
    words = in_words(unfrozen)
    assert words.verdict.text.startswith(
        "Lazy or rich cannot be told: the layers that train changed at step 30 (0 joined)"
    )
    assert not any("kernel's change" in found.text for found in words.findings)
    assert "different parameters" in " ".join(kernels.moves([unfrozen]).notes)


def test_a_drift_that_begins_again_is_not_judged(tmp_path):
    run = view(tmp_path, kernel_of_drift=[0.0, 0.8, 1.5, 0.0, 0.1, 0.2])
    assert regime(run) == "too short"
    assert "measured again from step 30" in said(run)


def test_a_diverged_run_is_not_ranked(tmp_path):
    for name, losses in (("a", [2.0, 1.0, 0.5]), ("b", [2.0, 0.1, NAN]), ("c", [2.0, 1.5, 1.0])):
        view(tmp_path, name, loss=losses, kernel_of_drift=[0.0, 0.1, 0.4])
    text = " ".join(compared(views_of(open_all([tmp_path / name for name in "abc"]))))
    assert "b diverged at step 20 and is not ranked." in text
    assert "The loss ends highest in c (1) and lowest in a (0.5)." in text


def test_runs_that_end_alike_are_not_ranked(tmp_path):
    for name in "ab":
        view(tmp_path, name, loss=[1.0, 0.7, 0.4], kernel_of_drift=[0.0, 0.1, 0.2])
    assert compared(views_of(open_all([tmp_path / name for name in "ab"]))) == []


@pytest.mark.parametrize("names", [("loss_d", "val_acc"), ("train_loss", "val/accuracy"), ("val/loss", "acc")])
def test_losses_and_accuracies_under_names_of_the_user_are_drawn_as_such(tmp_path, names):
    loss, accuracy = names
    drawn, _ = all_panels(
        [view(tmp_path, **{loss: [2.0, 1.5, 1.0], accuracy: [0.1, 0.2, 0.3], "loss_scale": [1.0] * 3})]
    )
    (panel,) = (each for each in drawn if each.key == "training")
    assert [plot.caption for plot in panel.plots] == ["Loss", "Accuracy"]
    assert panel.words == [f"a: {loss} 2 at step 0 → 1 at step 20; {accuracy} 10 % at step 0 → 30 % at step 20."]


def test_a_series_that_is_logged_twice_is_drawn_once(tmp_path):
    drawn, _ = all_panels([view(tmp_path, loss=[2.0, 1.5, 1.0], train_loss=[2.0, 1.5, 1.0])])
    assert [mark.name for panel in drawn for plot in panel.plots for mark in plot.frames[0]] == ["train"]


def test_losses_of_the_user_are_told_where_there_is_no_other(tmp_path):
    run = view(tmp_path, loss_d=[1.4, 1.2, 1.0], loss_g=[0.5, 0.6, 0.7])
    assert "Logged loss_d 1.4 at step 0 → 1 at step 20; logged loss_g 0.5 at step 0 → 0.7 at step 20 (3" in said(run)


def test_a_run_that_was_resumed_says_between_which_steps(tmp_path):
    write_meta(tmp_path / "a", "a")
    for step, attempt in ((0, 0), (10, 0), (13, 1), (20, 1)):
        append(tmp_path / "a", step, {"loss": 1.0}, attempt=attempt)
    assert "The run was resumed between steps 10 and 13." in said(views_of(open_all(tmp_path / "a"))[0])
    assert "resumed" not in said(view(tmp_path, "b", loss=[1.0, 0.5]))


def test_many_diverged_runs_are_told_in_one_line(tmp_path):
    names = [f"lr0.{place}" for place in range(1, 7)]
    for name in names:
        view(tmp_path, name, loss=[2.0, 0.1, NAN])
    (text,) = compared(views_of(open_all([tmp_path / name for name in names])))
    at = "at step 20"
    assert text == (f"6 runs diverged and are not ranked: lr0.1 {at}, lr0.2 {at}, lr0.3 {at}, lr0.4 {at} and 2 more.")


def test_a_kernel_that_moves_at_one_stroke_is_told_once(tmp_path):
    text = said(view(tmp_path, kernel_of_drift=[0.0, 0.1, 5.0, 5.0]))
    told = "90 % of the kernel's change was done between steps 10 and 20."
    assert told in text
    assert "Half of the kernel" not in text


CHANGES = ("→", "done by", "Half of", "rose", "fell", "at first", "At first", "changed", "moved", "stopped", "passed")


def everything(run):
    panels, _ = all_panels([run])
    return " ".join([said(run), *(word for panel in panels for word in panel.words)])


def falling(count):
    return {
        "loss": np.linspace(3, 1, count),
        "loss_of_probe": np.linspace(3, 1, count),
        "accuracy_of_probe": np.linspace(0.1, 0.9, count),
        "accuracy_of_test": np.linspace(0.1, 0.9, count),
        "kernel_of_drift": np.linspace(0, 3, count),
        "kernel_of_alignment": np.linspace(0.1, 0.8, count),
        "richness": np.linspace(0.9, 0.1, count),
        "share_of_0": np.linspace(0.9, 0.0, count),
        "share_of_2": np.linspace(0.1, 1.0, count),
        "target_linearity_of_0": np.linspace(0.1, 0.8, count),
    }


@pytest.mark.parametrize("count", [1, 2])
def test_two_points_are_no_change(tmp_path, count):
    text = everything(view(tmp_path, **falling(count)))
    assert not [word for word in CHANGES if word in text], text
    assert f"Loss on the probe {3 if count == 1 else 1} at step {10 * (count - 1)}" in text


def test_what_begins_after_the_start_tells_no_change(tmp_path):
    """It may have fallen before: nobody looked."""
    late = {name: [NAN, NAN, *values] for name, values in falling(6).items()}
    text = everything(view(tmp_path, norm_of_parameters=[1.0] * 8, **late))
    assert not [word for word in CHANGES if word in text], text
    assert "Loss on the probe 1 at step 70" in text
    assert "D_LR 0.1 at step 70" in text


def test_three_points_from_the_start_tell_a_change(tmp_path):
    text = everything(view(tmp_path, **falling(3)))
    for words in (
        "Loss on the probe 3 at step 0 → 1 at step 20",
        "90 % of the loss decrease",
        "D_LR 0.9 at step 0 → 0.1 at step 20",
        "changed most in layer 0",
    ):
        assert words in text, text


def test_what_a_loop_logged_from_its_first_step_on_begins_at_the_start(tmp_path):
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"norm/parameters": 1.0})
        writer.log({"loss": (range(1, 101), np.linspace(3, 1, 100).tolist()), "late": (range(50, 101), [1.0] * 51)})
        writer.append(60, {"norm/parameters": 1.0, "loss": 9.0})
    run = views_of(open_all(tmp_path / "a"))[0]
    assert run.end == 100
    assert run.series["loss"].values[59] == pytest.approx(3 - 2 * 59 / 99), "what was logged counts"
    assert "Loss 3 at step 1 → 1 at step 100 (2 records)." in said(run)
    assert "90 % of the loss decrease was done by step 91." in said(run)


def test_a_noisy_loss_has_fallen_where_it_stays_low(tmp_path):
    noisy = [3.0, 1.0, 3.0, 2.9, 1.2, 1.1, 1.0]
    text = said(view(tmp_path, loss=noisy))
    assert "90 % of the loss decrease was done between steps 30 and 40." in text


def test_one_value_just_short_of_it_does_not_undo_a_fall(tmp_path):
    """The loss of the demo had 92 % of its fall at step 40 and 89.9 % once more at step 190."""
    losses = [1.0, 0.5, 0.2, 0.1, 0.08, *[0.05] * 14, 0.101, 0.05, *[0.0] * 2]
    assert "90 % of the loss decrease was done by step 30." in said(view(tmp_path, loss=losses))


def test_a_fine_series_needs_no_second_step(tmp_path):
    losses = np.exp(-np.arange(100) / 10)
    text = said(view(tmp_path, loss=losses))
    assert "was done by step 240." in text


def test_advice_goes_with_what_was_found(tmp_path):
    def topics(**columns):
        words = in_words(view(tmp_path, str(len(list(tmp_path.iterdir()))), **columns))
        return {words.verdict.topic, *(found.topic for found in words.findings)} - {""}

    assert topics(kernel_of_drift=[0.0, 0.1, 0.2]) == {"lazy"}
    assert topics(kernel_of_drift=[0.0, 0.1, 9.0]) == {"rich"}
    assert topics(loss=[1.0, NAN, NAN]) == set(), "what to do about it, the diagnosis says"
    assert topics(dead_units_of_0=[0.0, 0.2, 0.9], dead_units_of_2=[0.0] * 3) == set(), "a finding of the diagnosis"
    assert all(topic.means and topic.todo and Path(topic.page).name for topic in TOPICS.values())


def test_the_pages_that_are_named_exist():
    for topic in TOPICS.values():
        assert (Path(__file__).parents[2] / topic.page).is_file(), topic.page


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"loss_of_test": [2.0, 1.0, 1.5]},
            "The test loss was lowest at step 10 (1) and ends higher (1.5 at step 20).",
        ),
        ({"loss_of_test": [2.0, 1.0, 1.05]}, None),
        ({"loss_of_test": [2.0, 1.5]}, None),
        ({"accuracy": [0.1, 0.9, 1.0], "accuracy_of_test": [0.1, 0.7, 0.8]}, "test accuracy at 80 % (step 20)."),
        ({"accuracy": [0.1, 0.9, 1.0], "accuracy_of_test": [0.1, 0.9, 0.95]}, None),
    ],
)
def test_overfitting_is_told_with_its_step(tmp_path, columns, expected):
    found = [found.text for found in in_words(view(tmp_path, **columns)).findings if found.topic == "overfitting"]
    assert found == [] if expected is None else expected in found[0]


def test_the_thresholds_are_those_of_the_calibration():
    """And its table is that of its rows."""
    results = json.loads((Path(__file__).parents[2] / "benchmarks/results/calibration.json").read_text("utf-8"))
    assert results["thresholds"]["feature_change"] == [thresholds.LAZY_FEATURES, thresholds.RICH_FEATURES]
    assert results["thresholds"]["kernel_drift"] == [thresholds.LAZY_KERNEL, thresholds.RICH_KERNEL]
    assert len(results["held_out"]) == 60
    assert not {row["seed"] for row in results["held_out"]} & {row["seed"] for row in results["fitted_on"]}
    counts = Counter((row["truth"], row["verdict"]) for row in results["held_out"])
    assert {(t, v): n for t, row in results["confusion"].items() for v, n in row.items() if n} == counts


def test_the_change_of_the_features_begins_where_they_were_taken(tmp_path):
    write_meta(tmp_path / "a", "a")
    append(tmp_path / "a", 0, {"richness": 0.5}, {"start/features": np.eye(3)})
    for step in (20, 40, 60):
        append(tmp_path / "a", step, {"richness/initial_similarity": 1 - step / 100})
    run = views_of(open_all(tmp_path / "a"))[0]
    np.testing.assert_allclose(richness.feature_change(run).steps, [0, 20, 40, 60])
    np.testing.assert_allclose(richness.feature_change(run).values, [0, 0.2, 0.4, 0.6])
    assert regime(run) == "rich"


def test_references_from_the_sizes_of_the_run(tmp_path):
    """D_LR of white features, measured here; the null of target linearity, as recorded. Both are drawn."""
    rng = np.random.default_rng(0)
    features, examples, outputs = 64, 4000, 10
    phi = rng.standard_normal((examples, features))
    f = np.linalg.qr((phi - phi.mean(0)) @ rng.standard_normal((features, outputs)))[0]  # the projection form
    phi = phi - phi.mean(0)
    true = 1 - np.linalg.norm(phi.T @ f) ** 2 / np.linalg.norm(phi.T @ phi) / np.linalg.norm(f.T @ f)
    meta = {"parameters": {"0.weight": [64, 64], "2.weight": [10, 64]}, "probe": {"examples": 100, "classes": 10}}
    write_meta(tmp_path / "a", "a", **meta)
    for step in (0, 10, 20):
        append(tmp_path / "a", step, {"richness": 0.5, "target_linearity/2": 0.9, "target_linearity_null/2": 0.64})
    run = views_of(open_all(tmp_path / "a"))[0]
    assert references.lazy_richness(run) == pytest.approx(true, abs=0.02)
    drawn = [mark for mark in richness.panel([run]).plots[0].frames[0] if mark.run is None]
    assert [mark.y.tolist() for mark in drawn] == [[references.lazy_richness(run)] * 2]
    nulls = [mark for mark in layers.linearity([run]).plots[0].frames[0] if mark.dash == "dot"]
    assert [mark.y.tolist() for mark in nulls] == [[0.64, 0.64, 0.64]]


def test_features_that_changed_for_nothing(tmp_path):
    """A learning rate that kills the network: the kernel moved far, and the loss is that of the start."""
    write_meta(tmp_path / "a", "a")
    for step, loss in ((0, 2.32), (10, 4.2), (20, 2.33)):
        append(tmp_path / "a", step, {"loss/probe": loss, "kernel/drift": step / 2})
    told = said(views_of(open_all(tmp_path / "a"))[0])
    assert "The run is rich: it changed its features, but its loss did not fall (largest kernel drift 10" in told


def test_an_estimated_kernel_says_so_and_facts_of_the_set_up_are_not_drawn(tmp_path):
    write_meta(tmp_path / "a", "a")
    for step in (0, 10):
        facts = {"outputs/probabilities": 0.0, "dropout": 0.1, "kernel/standard_error": 0.04}
        append(tmp_path / "a", step, {"kernel/drift": step / 10, "mine": 1.0, **facts})
    views = views_of(open_all(tmp_path / "a"))
    assert any("its standard error is 4 % of |K| at step 10" in note for note in kernels.moves(views).notes)
    assert [plot.caption for plot in others.scalars(views).plots] == ["mine"]


def test_a_probe_smaller_than_a_layer_is_named(tmp_path):
    write_meta(tmp_path / "a", "a")
    append(tmp_path / "a", 0, {"target_linearity/2": 1.0, "target_linearity_null/2": 1.0, "target_linearity/9": 1.0})
    notes = layers.linearity(views_of(open_all(tmp_path / "a"))).notes
    assert "the inputs of layer 2 have as many independent directions as the probe has rows" in notes[0]
    assert "the null of layer 9 is not known" in notes[1]


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (10.7, "a: no tail is heavier than that of its shuffled weight: α is nowhere below its null."),
        (2.1, "a: α is furthest below that of the shuffled weight in 0: 2.1 against 9.6."),
    ],
)
def test_a_tail_is_heavier_only_below_its_null(tmp_path, alpha, expected):
    run = view(
        tmp_path, alpha_of_0=[9.0, alpha], alpha_null_of_0=[9.0, 9.6], alpha_of_2=[9, 30], alpha_null_of_2=[9, 9]
    )
    assert spectra.panel([run]).words == [expected]


VALUES = st.sampled_from([0.0, 0.01, 0.2, 0.5, 1.0, 1.9, 2.3, 40.0, 500.0, 1e9, NAN, float("inf")])
NAMES = ("loss", "loss/probe", "norm/parameters", "kernel/drift", SIMILAR.replace("_of_", "/"), "dead_units/0")


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(VALUES, min_size=7, max_size=7), min_size=1))
@settings(max_examples=60, deadline=None)
def test_the_verdict_never_contradicts_the_diagnosis(tmp_path_factory, columns):
    """A run that diverged has a finding that says so; one that the diagnosis calls lazy is lazy by the verdict."""
    tmp_path = tmp_path_factory.mktemp("runs")
    run = view(tmp_path, **{name.replace("/", "_of_"): values for name, values in columns.items()})
    named = {finding.kind for finding in diagnose(tmp_path / "a").findings}
    kind = regime(run)
    assert kind != "diverged" or "lr_too_large" in named
    assert "lazy" not in named or kind in ("lazy", "diverged")


def test_a_lazy_run_is_lazy_in_both(tmp_path):
    columns = {"loss_of_probe": [2.3, 2.2, 2.0, 1.5, 1.0, 0.8], "probe_of_chance": [2.3] * 6, SIMILAR: [1.0] * 6}
    run = view(tmp_path, kernel_of_drift=[0.0, 0.01, 0.01, 0.02, 0.03, 0.04], **columns)
    assert regime(run) == "lazy"
    assert [finding.kind for finding in diagnose(tmp_path / "a").findings] == ["lazy"]


def test_advice_of_the_words_gives_way_to_that_of_the_findings(tmp_path):
    """A run that is lazy and blew up would else be told to raise and to lower its learning rate."""
    view(tmp_path, "well", kernel_of_drift=[0.0, 0.1, 0.2], loss=[1.0, 0.9, 0.8])
    dead = {"dead_units_of_0": [1.0] * 3, "signal_of_0": [1.0] * 3}
    view(tmp_path, "broken", kernel_of_drift=[0.0, 0.1, 0.2], loss=[1.0, 0.9, 0.8], **dead)
    pages = {name: report(tmp_path / name, tmp_path / f"{name}.html").read_text("utf-8") for name in ("well", "broken")}
    todo = "For more feature learning: a larger learning rate"
    assert todo in pages["well"]
    assert todo not in pages["broken"]
    assert "Try first:" in pages["broken"]
    assert "The run is lazy" in pages["broken"]
