"""Each rule names its fault on series written by hand, and is silent on a healthy run and on what is close."""

import numpy as np
import pytest

from diagnose import histories
from diagnose.histories import BROKEN, CLASSES, TEST_STEPS, history
from gramscope.diagnose import RULES
from gramscope.diagnose.finding import NOTHING_WRONG
from gramscope.diagnose.history import Series
from gramscope.diagnose.judge import diagnosis_of


def kinds(found) -> list[str]:
    return [finding.kind for finding in diagnosis_of(found).findings]


def test_every_rule_has_a_broken_run():
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize("kind", BROKEN)
def test_the_fault_is_named_first(kind):
    found = diagnosis_of(BROKEN[kind]())
    assert found[0].kind == kind
    assert not found.healthy
    assert found[0].evidence
    assert found[0].remedy.endswith(".")
    assert found[0].page.startswith("docs/diagnosis.md#")


@pytest.mark.parametrize("kind", BROKEN)
def test_evidence_lies_beyond_its_threshold(kind):
    for evidence in diagnosis_of(BROKEN[kind]())[0].evidence:
        beyond = {
            "above": evidence.value > evidence.threshold or np.isclose(evidence.value, evidence.threshold),
            "below": evidence.value < evidence.threshold,
            "equal to": evidence.value == evidence.threshold or np.isnan(evidence.threshold),
        }
        assert beyond[evidence.relation], evidence


def test_a_healthy_run_has_no_finding():
    assert kinds(history()) == [NOTHING_WRONG]


def test_a_healthy_run_has_no_finding_at_any_step():
    whole = history()
    for step in whole.steps:
        assert kinds(whole.until(step)) == [NOTHING_WRONG], step


def change(**values):
    return history(histories._set(**values))


@pytest.mark.parametrize(
    "close",
    [
        change(gradient_overlap=0.99),  # full-batch training
        change(dead_units__all=0.5),
        change(optimizer__weight_decay=0.01),
        change(kernel__drift=0.4),
        change(probe__rms=3.0),
        change(update_ratio__all=0.05),
        change(step__error=1e-3, update_ratio__all=1e-4),  # short steps that learn all the same
        change(precision=7.8e-3),  # 16 bits that learn
        change(probe__duplicates=0.3, probe__chance_duplicates=0.25),  # few possible examples
        change(probe__discrete=1.0, probe__neighbors_agree=0.0),
        change(saturated_units__all=lambda step: 0.3 if step else 0.02),
        change(feature_rank__all=lambda step: 1.05 if step > 5 else 3.0),  # and the loss is gone
    ],
)
def test_what_is_close_to_a_fault_is_left_alone(close):
    assert kinds(close) == [NOTHING_WRONG]


def test_mostly_frozen_is_fine_tuning():
    frozen = {f"frozen__{layer}": 1.0 for layer in histories.LAYERS[:-1]}
    assert "frozen_layer" not in kinds(change(**{k.replace("__", "__"): v for k, v in frozen.items()}))


def test_units_that_die_later_follow_from_long_steps():
    stuck = histories._both(
        histories._stuck,
        histories._set(step__true_loss_change=3.0, step__error=4.0),
        histories._set(dead_units__2=lambda step: min(1.0, step / 20)),
    )
    found = diagnosis_of(history(stuck, losses=histories.FLAT))
    assert [f.kind for f in found.findings][:2] == ["lr_too_large", "dead_units"]
    assert found[1].follows_from == "lr_too_large"
    assert "died while training" in found[1].cause


def test_an_evaluation_in_training_mode_is_told_from_the_two_accuracies():
    def gap(step, scalars):
        scalars["train_mode/accuracy"] = scalars["accuracy/probe"] - 0.15

    def accuracy(step):
        return 0.1 + 0.85 * (1 - np.exp(-step / 60))

    wrong = Series(TEST_STEPS, accuracy(TEST_STEPS) - 0.15)
    right = Series(TEST_STEPS, accuracy(TEST_STEPS))
    assert kinds(history(gap, logged={"test_accuracy": wrong})) == ["wrong_mode"]
    assert kinds(history(gap, logged={"test_accuracy": right})) == [NOTHING_WRONG]


def test_a_loss_that_is_not_finite_is_named_at_its_step():
    losses = histories.batch_losses()
    losses[40:] = np.nan
    found = diagnosis_of(history(losses=losses))
    assert found[0].kind == "lr_too_large"
    assert found[0].step == 41


def test_noise_that_both_probe_and_batches_share_leaves_related_labels_alone():
    assert "labels" not in kinds(history(histories._stuck, losses=histories.batch_losses()))


def test_the_batches_are_harder_than_the_probe():
    found = diagnosis_of(history(losses=histories.batch_losses() + 1.2))
    assert found[0].kind == "labels"
    assert "harder" in found[0].what


def test_two_missing_classes_are_both_named():
    def missing(step, scalars):
        for c in (3, 7):
            scalars[f"class_recall/{c}"] = scalars[f"class_predicted/{c}"] = 0.0

    assert diagnosis_of(history(missing))[0].where == ("class 3", "class 7")
    assert CLASSES == 10
