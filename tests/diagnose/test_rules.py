"""Each rule names its fault on series written by hand, and is silent on a healthy run and on what is close."""

from dataclasses import replace

import numpy as np
import pytest

from diagnose import histories
from diagnose.histories import BROKEN, CLASSES, TEST_STEPS, batch_losses, history
from gramscope.diagnose import RULES
from gramscope.diagnose.finding import NOTHING_WRONG
from gramscope.diagnose.history import Series
from gramscope.diagnose.progress import removed_in_batches
from gramscope.diagnose.ranking import diagnosis_of


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


@pytest.mark.parametrize("count", [3, 4])
def test_mostly_frozen_is_fine_tuning(count):
    frozen = {f"frozen__{layer}": 1.0 for layer in histories.LAYERS[:count]}
    assert "frozen_layer" not in kinds(change(**frozen))


def test_one_frozen_layer_is_named_however_large():
    run = change(frozen__2=1.0)
    assert kinds(replace(run, sizes=run.sizes | {"2": 10**6}))[0] == "frozen_layer"


def test_a_layer_that_acts_in_training_only_is_not_cut_off():
    assert kinds(change(gradient_norm__2=0.0)) == [NOTHING_WRONG]
    cut = change(gradient_norm__2=0.0)
    silent = {name: s for name, s in cut.measured.items() if name != "effective_lr/2"}
    assert kinds(replace(cut, measured=silent))[0] == "frozen_layer"


def test_a_network_that_was_trained_before_has_learnt():
    low = histories._set(update_ratio__all=1e-5, step__error=1e-4, kernel__drift=1e-3, loss__probe=0.2)
    assert kinds(history(low, losses=np.full(250, 0.2))) == [NOTHING_WRONG]


def test_layers_that_do_not_move_at_all_are_no_division_by_zero():
    still = {
        f"{family}__{layer}": 0.0 for family in ("update_ratio", "effective_lr") for layer in histories.LAYERS[:-1]
    }
    assert "head_only" in kinds(change(**still))


def test_losses_below_zero_fall_too():
    below = history(losses=-0.5 - np.arange(250.0) / 250)
    assert removed_in_batches(below) == pytest.approx((0.95 - 0.024) / 0.524, rel=0.02)


def test_batches_that_were_harder_before_training_are_a_matter_of_the_probe():
    slow = histories._set(loss__probe=histories._bounded, train_mode__loss=histories._bounded)
    own = np.array([histories._bounded(step) for step in range(250)])
    assert kinds(history(slow, np.where(np.arange(250) < 20, own, 1.6 * own)))[0] == "labels"
    assert kinds(history(slow, 1.6 * own)) == [NOTHING_WRONG]


def test_a_network_that_was_trained_before_is_not_lazy():
    still = histories._set(kernel__drift=0.03, richness__initial_similarity=0.999)
    assert kinds(history(still))[0] == "lazy"
    trained = histories._both(still, histories._set(loss__probe=lambda step: 0.9 - step / 400))
    assert "lazy" not in kinds(history(trained, losses=0.9 - np.arange(250.0) / 400))


def test_gradients_that_vanish_and_are_overcome_are_left_alone():
    assert kinds(history(histories._by_layer("gradient_norm", [1e-6, 1e-5, 1e-3, 1e-2, 0.3]))) == [NOTHING_WRONG]


def test_memory_is_told_by_the_first_loss_where_chance_is_not_known():
    rises = histories._set(loss__probe=histories._rising, train_mode__loss=histories._rising)
    worse = history(rises, losses=batch_losses() - 0.3)
    assert kinds(worse.leaving_out(("probe/chance",)))[0] == "memorization"
    better = history(histories._set(loss__probe=2.2), losses=batch_losses() - 0.3)
    assert "memorization" not in kinds(better.leaving_out(("probe/chance",)))


def test_noise_of_batches_that_are_not_small_or_that_is_gone_later_is_not_the_batch_size():
    noisy = {"gradient_overlap": 0.02, "gradient_given": 3.0}
    assert kinds(change(**noisy)) == ["batch_too_small"]
    assert kinds(change(**noisy, noise_scale=1000.0)) == [NOTHING_WRONG], "the batch has some forty examples"
    later = lambda step: 3.0 if step < 20 else 0.5  # noqa: E731
    assert kinds(change(gradient_overlap=0.02, gradient_given=later)) == [NOTHING_WRONG]


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
    losses[36:40], losses[40:] = 40.0, np.nan
    found = diagnosis_of(history(losses=losses))
    assert found[0].kind == "lr_too_large"
    assert found[0].step == 41


def test_a_loss_that_is_not_finite_without_any_growth_before_is_no_matter_of_the_rate():
    losses = histories.batch_losses()
    losses[40:] = np.nan
    found = diagnosis_of(history(losses=losses))
    assert [f.kind for f in found.findings] == ["not_a_number", "lr_too_large"]
    assert found[0].step == 41
    assert found[1].follows_from == "not_a_number"
    long = diagnosis_of(
        history(histories._set(update_ratio__2=lambda step: 2.0 if step == 32 else 0.01), losses=losses)
    )
    assert long[0].kind == "lr_too_large"  # a layer moved by twice its norm before


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
        scalars["loss/probe"] += 0.006 * step

    assert diagnosis_of(history(missing))[0].where == ("class 3", "class 7")
    assert CLASSES == 10


def test_a_class_is_missing_where_the_others_are_known_in_part_and_the_probe_costs_more_than_the_batches():
    def partly(more):
        def missing(step, scalars):
            scalars |= {f"class_recall/{c}": 0.7 * scalars[f"class_recall/{c}"] for c in range(CLASSES)}
            scalars |= {"class_recall/3": 0.0, "class_predicted/3": 0.0}
            scalars["loss/probe"] += more * step / 250

        return kinds(history(missing))

    assert partly(more=0.35) == ["class_missing"]  # log(10)/10 is 0.23
    assert partly(more=0.1) == [NOTHING_WRONG]


def test_a_class_that_is_merely_late_is_not_called_missing():
    def late(step, scalars):
        scalars["class_recall/3"] = scalars["class_predicted/3"] = 0.0

    assert kinds(history(late)) == [NOTHING_WRONG]  # the probe costs no more than the batches


def slow(drift: float, gone: float):
    """A run with short steps: ``gone`` of the loss of chance at the end, and this kernel drift."""

    def record(step, scalars):
        part = step / 250
        scalars |= {"loss/probe": 2.3 * (1 - gone * part), "kernel/drift": drift * part, "step/error": 1e-3,
                    "richness/initial_similarity": 1 - 0.001 * part}  # fmt: skip
        scalars |= {f"update_ratio/{layer}": 3e-5 for layer in histories.LAYERS}
        scalars["train_mode/loss"] = scalars["loss/probe"]

    return history(record, losses=2.3 * (1 - gone * np.arange(1, 251) / 250))


def test_lazy_is_told_from_a_small_learning_rate_by_how_far_the_kernel_moves_for_what_is_learnt():
    assert kinds(slow(drift=0.01, gone=0.05))[:2] == ["lazy", "lr_too_small"]
    assert kinds(slow(drift=0.05, gone=0.05)) == ["lr_too_small"]
    assert kinds(slow(drift=0.02, gone=0.002)) == ["lr_too_small"]


def test_tokens_that_a_skip_connection_keeps_apart_are_not_called_alike():
    def averaged(last):
        alike = histories._by_layer("token_variance", [0.9, 0.95, 0.95, 0.0002, last])
        return history(histories._both(histories._stuck, alike), losses=histories.FLAT)

    assert "oversmoothing" in kinds(averaged(0.01))
    assert "oversmoothing" not in kinds(averaged(0.95))


def test_tokens_that_become_alike_while_the_task_is_learnt_are_left_alone():
    assert kinds(history(histories._by_layer("token_variance", [0.9, 0.3, 0.05, 0.01, 0.002]))) == [NOTHING_WRONG]


def test_a_loss_that_rose_is_not_called_slow():
    assert "lr_too_small" not in kinds(slow(drift=0.05, gone=-0.9))


def test_fitting_the_mean_of_the_targets_is_not_lazy():
    def mean_only(step, scalars):
        scalars |= {"loss/probe": 2.3 + 1.0 * np.exp(-step / 20), "kernel/drift": 0.01}
        scalars["richness/initial_similarity"] = 1.0

    assert "lazy" not in kinds(history(mean_only))


def test_a_network_that_is_frozen_as_a_whole_is_told_so():
    """Nothing else is measured then, and the advice to pass targets or more measures would be false."""
    records = [
        (step, {"precision": 1.2e-7, **{f"frozen/{layer}": 1.0 for layer in histories.LAYERS}}) for step in range(9)
    ]
    found = diagnosis_of(histories.history_of_records(records, {}, histories.META))
    assert [f.what for f in found.findings] == ["No layer can train: requires_grad is False for all parameters."]
    assert found.not_judged["labels"] == "not measured, since all parameters are frozen"


def test_few_directions_of_a_language_model_are_no_collapse():
    """Features of a GPT with 500 tokens had an effective rank of 5 after 150 steps; its targets had 349."""
    few = histories._set(feature_rank__all=lambda s: 5.0 if s else 20.0, loss__probe=1.9, probe__target_rank=349.0)
    assert "rank_collapse" not in kinds(history(few, losses=histories.FLAT))
    copies = histories._set(feature_rank__all=lambda s: 1.2 if s else 20.0, loss__probe=1.9, probe__target_rank=349.0)
    assert "rank_collapse" in kinds(history(copies, losses=histories.FLAT))


def test_a_collapse_is_dated_when_it_is_passed():
    def collapsed(step, scalars):
        scalars |= {"loss/probe": 1.9, **{f"feature_rank/{layer}": 1.1 if step >= 50 else 6.0 for layer in "0246"}}

    found = diagnosis_of(history(collapsed, losses=histories.FLAT))
    assert {f.kind: f.step for f in found.findings}["rank_collapse"] == 50


def test_a_branch_that_takes_one_number_is_no_collapse():
    """The time step of a diffusion model: its layers vary along one direction, the outputs along many."""

    def branch(step, scalars):
        scalars |= {"loss/probe": 1.9, f"feature_rank/{histories.LAYERS[-2]}": 1.01}

    def copies(step, scalars):
        branch(step, scalars)
        scalars[f"feature_rank/{histories.LAYERS[-1]}"] = 1.01

    assert "rank_collapse" not in kinds(history(branch, losses=histories.FLAT))
    assert "rank_collapse" in kinds(history(copies, losses=histories.FLAT))


def test_equal_units_are_the_cause_of_signals_that_explode():
    def copies(step, scalars):
        for place, layer in enumerate(histories.LAYERS):
            scalars |= {f"feature_rank/{layer}": 1.0, f"signal/{layer}": 10.0**place}

    assert "exploding_signals" not in kinds(history(copies))
    assert kinds(history(copies))[0] == "rank_collapse"


def test_gates_that_are_closed_before_training_are_saturated():
    def gates(step, scalars):
        if step == 0:
            scalars["saturated_gates/cell"] = 0.3

    found = diagnosis_of(history(gates))
    assert found[0].kind == "saturated_units"
    assert "30 % of the gates of layer cell" in found[0].what


def test_one_class_for_all_is_no_order_where_batches_cost_as_much_as_chance():
    def collapsed(step, scalars):
        histories._stuck(step, scalars)
        scalars |= {f"class_predicted/{c}": float(c == 3) for c in range(CLASSES)}

    assert "classes_in_order" not in kinds(history(collapsed, losses=histories.FLAT))


def test_labels_of_another_code_are_told_by_an_accuracy_below_chance():
    def shifted(step, scalars):
        scalars |= {"loss/probe": 2.3 + step / 50, "accuracy/probe": max(0.0, 0.1 - step / 500)}

    found = diagnosis_of(history(shifted))
    assert found[0].kind == "labels"
    assert "wrong more often than by chance" in found[0].what

    def unlucky(step, scalars):
        scalars |= {"loss/probe": 2.3 + step / 50, "accuracy/probe": 0.06}

    assert "labels" not in kinds(history(unlucky))  # three examples of fifty: chance may do that
    assert "labels" not in kinds(history(histories._both(shifted, histories._set(probe__neighbors_agree=0.1))))


def test_the_mean_of_targets_far_from_zero_is_no_memory_of_the_examples():
    def shifted(step, scalars):
        scalars["loss/probe"] = 1.1 * (2.3 + 100 * np.exp(-step / 20))

    assert "memorization" not in kinds(history(shifted, losses=2.3 + 100 * np.exp(-np.arange(1, 251) / 20)))


def test_one_class_that_never_changes_may_be_a_data_set_of_one_class():
    def one(step, scalars):
        histories._in_order(step, scalars)
        scalars |= {f"class_predicted/{c}": 0.91 if c == 3 else 0.01 for c in range(CLASSES)}

    found = diagnosis_of(history(one, losses=np.full(250, 0.1)))
    assert found[0].kind == "classes_in_order"
    assert found[0].alternatives == ("nearly all training examples are of class 3",)
    assert not diagnosis_of(BROKEN["classes_in_order"]())[0].alternatives


@pytest.mark.parametrize("kind", ["labels", "memorization", "batch_too_small", "lr_too_small", "lazy"])
def test_a_probe_that_is_judged_by_another_loss_is_not_compared_with_the_batches(kind):
    """A sum over the batch, or binary cross-entropy beside the squared error of the same targets."""
    assert "by another loss" not in diagnosis_of(history()).not_judged.get(kind, "")
    found = diagnosis_of(history(losses=64 * histories.batch_losses()))
    assert [f.kind for f in found.findings] == [NOTHING_WRONG]
    assert "divide a summed loss" in found.not_judged[kind]
    assert np.isnan(found[0].confidence)


def test_a_run_judged_by_another_loss_is_judged_by_its_batches():
    def grows(step, scalars):  # the squared error of logits that rightly grow
        scalars |= {"loss/probe": 0.25 * (1 + step), "step/true_loss_change": 1.0, "step/error": 3.0}
        scalars["train_mode/loss"] = scalars["loss/probe"]

    learns = 0.69 * np.exp(-np.arange(250) / 60)
    learns[:6] = 0.69 * (1 + 5 * np.arange(6))
    assert kinds(history(grows, losses=learns)) == [NOTHING_WRONG]
    stuck = _longer_steps(losses=64 * histories.FLAT * np.linspace(1, 1.3, 250))
    assert kinds(stuck)[0] == "lr_too_large"


def _longer_steps(losses):
    return history(histories._set(update_ratio__all=0.4), losses=losses)


def test_batches_that_are_harder_from_some_later_step_on_are_still_compared():
    losses = histories.batch_losses() + np.where(np.arange(250) < 3, 0.0, 3.0)
    assert kinds(history(losses=losses))[0] == "labels"


def test_features_that_have_widened_again_have_not_collapsed():
    def widened(step, scalars):
        scalars |= {"loss/probe": 1.9, **{f"feature_rank/{layer}": 1.1 if step < 200 else 1.5 for layer in "0246"}}
        scalars |= {f"feature_rank/{layer}": 2.0 for layer in "0246"} if step < 3 else {}

    assert "rank_collapse" not in kinds(history(widened, losses=histories.FLAT))


def test_gradients_that_agree_are_no_noise_however_large():
    """With batch norm the probe's gradient, in evaluation mode, may be far smaller than those of the batches."""
    assert kinds(change(gradient_given=3.0, gradient_overlap=0.4)) == [NOTHING_WRONG]
    assert kinds(change(gradient_given=3.0, gradient_overlap=0.1)) == ["batch_too_small"]


@pytest.mark.parametrize(("numbers", "judged"), [(1.0, False), (0.0, True)])
def test_squared_errors_of_zero_and_one_are_not_taken_for_what_binary_cross_entropy_trains(numbers, judged):
    """Balanced classes: 0.69 for the batches and 0.5 for the probe, before training."""

    def grows(step, scalars):
        scalars |= {"loss/probe": 0.5 + 0.1 * step, "train_mode/loss": 0.5 + 0.1 * step, "accuracy/probe": np.nan}
        scalars |= {"probe/zero_or_one": numbers, "probe/chance": 0.25} if step == 0 else {}

    losses = np.concatenate([0.69 + 0.14 * np.arange(8), 0.6 * np.exp(-np.arange(242) / 60)])
    assert (kinds(history(grows, losses=losses)) != [NOTHING_WRONG]) == judged


def test_units_that_saturate_and_features_that_narrow_while_the_loss_falls_are_left_alone():
    def narrow(scalars, loss):
        scalars |= {"loss/probe": loss, "saturated_units/2": 0.6, **{f"feature_rank/{n}": 1.1 for n in "0246"}}

    def learning(step, scalars):
        narrow(scalars, 2.3 - 0.005 * step) if step > 5 else None

    def stuck(step, scalars):
        narrow(scalars, 2.2) if step > 5 else None

    assert kinds(history(learning, losses=2.3 - 0.005 * np.arange(1, 251))) == [NOTHING_WRONG]
    assert set(kinds(history(stuck, losses=histories.FLAT))) >= {"saturated_units", "rank_collapse"}


def test_a_plateau_on_which_gradients_agree_is_no_matter_of_labels():
    flat = histories.FLAT
    assert "labels" in kinds(history(histories._both(histories._stuck, histories._set(gradient_overlap=0.1)), flat))
    assert "labels" not in kinds(
        history(histories._both(histories._stuck, histories._set(gradient_overlap=0.95)), flat)
    )


def test_batches_of_another_task_make_the_probe_worse():
    def rises(step, scalars):
        scalars |= {"loss/probe": 2.3 + step / 250, "accuracy/probe": 0.1, "outputs/behind_softmax": 2.4}

    part = 1.6 + 0.7 * np.exp(-np.arange(250) / 40)
    assert kinds(history(rises, losses=part))[0] == "labels"
    assert "labels" not in kinds(history(rises, losses=2.3 * np.exp(-np.arange(250) / 60)))  # memorised

    def learns_first(step, scalars):
        scalars["loss/probe"] = scalars["train_mode/loss"] = 2.3 + step / 250 if step > 20 else 1.9

    assert "labels" not in kinds(history(learns_first, losses=part))  # overfitting


def test_the_same_batch_is_told_by_a_loss_that_falls_at_every_step():
    def half(step, scalars):
        scalars["loss/probe"] = scalars["train_mode/loss"] = 2.3 - 0.5 * (1 - np.exp(-step / 20))

    smooth = 2.3 * np.exp(-np.arange(250) / 25)
    noisy = smooth * np.random.default_rng(0).uniform(0.5, 1.5, 250)
    same, other = diagnosis_of(history(half, smooth))[0], diagnosis_of(history(half, noisy))[0]
    assert same.kind == other.kind == "memorization"
    assert same.cause == "The same few examples are shown at every step."
    assert "the same batch at every step" in other.alternatives
    assert kinds(history(losses=smooth)) == [NOTHING_WRONG]  # the probe is learnt as well


def test_outputs_that_are_sure_before_training_are_too_large():
    def sure(step, scalars):
        scalars["loss/probe"] = scalars["train_mode/loss"] = 0.2 + 7.0 * np.exp(-step / 60)

    losses = 0.2 + 7.0 * np.exp(-np.arange(1, 251) / 60)
    assert kinds(history(sure, losses))[0] == "exploding_signals"
    assert kinds(history(histories._both(sure, histories._set(probe__outputs=1000.0)), losses)) == [NOTHING_WRONG]


def test_a_softmax_inside_the_loss_is_told_by_what_the_probe_costs_behind_one():
    bounded = 2.4 - np.exp(-0.2 - 2.1 * np.exp(-np.arange(1, 251) / 60))
    clipped = histories._set(gradient_given=0.4)  # so that the slope of the softmax cannot be seen
    assert kinds(history(clipped, losses=bounded))[0] == "softmax_twice"
    assert kinds(history(losses=bounded))[0] == "labels", "gradients as large as the probe's: no softmax is between"
    assert "softmax_twice" not in kinds(history(clipped))  # the batches fall below the bound
    assert "softmax_twice" not in kinds(history(clipped, losses=bounded + 0.15)), "nor the cost behind a softmax"
    alike = histories._set(loss__probe=lambda step: 2.4 - np.exp(-0.2 - 2.1 * np.exp(-step / 60)))
    assert "softmax_twice" not in kinds(history(histories._both(clipped, alike), bounded)), "the same by itself"


def test_a_softmax_is_told_by_small_gradients_where_nothing_is_known_of_single_classes():
    language = history(histories._set(gradient_given=lambda s: 0.05 + 0.01 * np.sin(s)), losses=np.full(250, 2.0))
    assert kinds(language.leaving_out(("outputs/",)))[0] == "softmax_twice"


def test_small_gradients_of_few_classes_are_a_softmax_only_where_something_is_learnt():
    def three(losses):
        few = histories._set(gradient_given=lambda s: 0.25 + 0.05 * np.sin(s), probe__outputs=3.0, probe__chance=1.1,
                             loss__probe=1.1, train_mode__loss=1.1)  # fmt: skip
        return kinds(history(few, losses))

    assert "softmax_twice" not in three(np.full(250, 1.1))
    assert three(np.linspace(1.1, 0.7, 250))[0] == "softmax_twice"


def test_layers_are_in_the_order_of_their_use():
    def head_first(step, scalars):
        order = [*histories.LAYERS[1:], histories.LAYERS[0]]
        for layer in histories.LAYERS:
            del scalars[f"signal/{layer}"]
        scalars |= {f"signal/{layer}": 0.8 for layer in order}

    used = history(head_first)
    assert list(used.layers) == ["2", "4", "6", "8", "0"]
    assert used.head == "0"
    assert list(used.family("update_ratio")) == ["2", "4", "6", "8", "0"]


def test_a_term_that_is_added_to_the_loss_is_no_matter_of_labels():
    slow = histories._set(loss__probe=lambda s: 0.8 + 1.5 * np.exp(-s / 60), train_mode__loss=0.0)
    own = 0.8 + 1.5 * np.exp(-np.arange(1, 251) / 60)
    without = history(slow).leaving_out(("train_mode/", "training_mode", "dropout"))  # a network without these

    def with_losses(losses):
        return kinds(replace(without, logged={"loss": Series(np.arange(1.0, 251.0), losses)}))

    assert with_losses(own + 0.6) == [NOTHING_WRONG]
    assert with_losses(np.where(np.arange(250) < 20, own, own + 0.6))[0] == "labels"


def test_narrow_features_are_told_against_the_directions_of_the_targets():
    narrow = {"feature_rank__all": lambda s: 1.2 if s else 6.0, "loss__probe": 1.9}
    assert kinds(history(histories._set(**narrow), losses=histories.FLAT))[0] == "rank_collapse"
    few = histories._set(**narrow, probe__target_rank=2.0)
    assert "rank_collapse" not in kinds(history(few, losses=histories.FLAT))


def test_copies_in_all_layers_are_named_for_a_single_target_too():
    single = histories._set(probe__target_rank=1.0)
    copies = [history(histories._both(single, histories._by_layer("feature_rank", [*ranks, 1.0])))
              for ranks in ([1.0] * 4, [1.0, 1.2, 1.1, 1.3])]  # fmt: skip
    assert kinds(copies[0])[0] == "rank_collapse"
    assert kinds(copies[1]) == [NOTHING_WRONG], "inputs of one number"


def test_a_run_that_had_learnt_and_lost_it_again_was_not_shown_other_labels():
    flat = histories.FLAT.copy()
    stuck = histories._both(histories._stuck, histories._set(gradient_overlap=0.1))
    assert "labels" in kinds(history(stuck, flat))
    flat[50:80] = 1.2
    assert "labels" not in kinds(history(stuck, flat))


def test_steps_that_are_lost_in_rounding_from_the_start_on_are_named_though_half_is_learnt():
    def half(late):
        lost = {"precision": 7.8e-3, "update_ratio__all": lambda s: 1e-3 if s >= late else 0.05}
        loss = lambda s: 1.0 + 1.3 * np.exp(-s / 60)  # noqa: E731
        return kinds(history(histories._set(**lost, loss__probe=loss, train_mode__loss=loss), 1.0 + batch_losses()))

    assert half(late=0)[0] == "half_precision"
    assert "half_precision" not in half(late=50)


def test_equal_units_are_the_cause_of_units_that_saturate():
    copies = histories._both(histories._by_layer("feature_rank", [1.0] * 5), histories._set(saturated_units__all=0.9))
    assert kinds(history(copies))[0] == "rank_collapse"
    assert "saturated_units" not in kinds(history(copies))


def test_units_that_never_switch_make_outputs_affine():
    affine = histories._both(histories._early("outputs/not_affine", 3e-7), histories._set(dead_units__all=1.0))
    assert kinds(history(affine))[0] == "dead_units"


def test_probabilities_for_a_loss_that_takes_their_logarithm_are_right():
    assert "softmax_twice" not in kinds(history(histories._early("outputs/probabilities", 1.0)))


def test_large_targets_that_are_learnt_are_left_alone():
    large = histories._set(probe__targets_rms=300.0, probe__targets_mean=300.0, probe__chance=25.0)
    assert "targets_not_normalized" not in kinds(history(large))
    far = histories._both(large, histories._set(loss__probe=lambda step: 9e4 - step))
    assert kinds(history(far, 9e4 - np.arange(250.0)))[0] == "targets_not_normalized"


def test_a_rate_of_zero_is_too_small_whatever_the_error_of_first_order():
    assert kinds(history(histories._both(histories._stuck, histories._set(update_ratio__all=0.0)), histories.FLAT)) == [
        "lr_too_small"
    ]


def test_two_classes_in_order_are_named():
    def sorted_by_class(step, scalars):
        for c in range(2, CLASSES):
            del scalars[f"class_predicted/{c}"], scalars[f"class_recall/{c}"]
        scalars |= {"loss/probe": 3.0, "class_predicted/0": float(step < 100), "class_predicted/1": float(step >= 100)}

    found = diagnosis_of(history(sorted_by_class, np.full(250, 0.1)))
    assert found[0].kind == "classes_in_order"
    assert found[0].where == ("class 0", "class 1")


def test_binary_cross_entropy_takes_the_place_of_squared_errors_that_are_not_trained_on():
    def binary(step, scalars):
        fall = np.exp(-step / 60)
        scalars |= {
            "loss/probe": 0.5 + 0.1 * step,
            "train_mode/loss": 0.5 + 0.1 * step,
            "yes_or_no/loss": 0.1 + 0.6 * fall,
        }
        scalars |= {"probe/zero_or_one": 1.0, "probe/chance": 0.25, "yes_or_no/chance": 0.69} if step == 0 else {}

    found = diagnosis_of(history(binary, losses=0.1 + 0.6 * np.exp(-np.arange(250) / 60)))
    assert found.healthy
    assert not found.not_judged

    def stuck(step, scalars):
        binary(step, scalars)
        scalars |= {"loss/probe": 0.5, "train_mode/loss": 0.5, "yes_or_no/loss": 0.69}

    assert kinds(history(stuck, losses=0.3 * histories.FLAT))[0] == "labels"


@pytest.mark.parametrize(
    "close",
    [change(dropout=0.5), change(optimizer__momentum=0.99), history(histories._early("outputs/not_affine", 1e-3))],
)
def test_usual_settings_are_no_fault(close):
    assert kinds(close) == [NOTHING_WRONG]


def test_a_probe_without_any_spread_or_without_any_finite_loss_is_judged_without_an_error():
    assert kinds(change(probe__chance=0.0, probe__classes=1.0))[0] == "constant_probe"
    nothing = history(lambda step, scalars: scalars.update({"loss/probe": np.nan}))
    assert kinds(nothing)[0] in ("not_a_number", "lr_too_large")


def test_a_first_batch_that_is_not_finite_is_no_matter_of_the_learning_rate():
    def ruined(step, scalars):
        scalars |= {"loss/probe": np.nan, "norm/parameters": np.nan} if step else {}

    found = diagnosis_of(history(ruined, losses=np.full(250, np.nan)))
    assert found[0].kind == "not_a_number"
    assert "from the first batch on" in found[0].what
    assert found[1].follows_from == "not_a_number"


def test_the_nearer_of_two_losses_is_taken_where_they_begin_alike():
    """63 % of ones: the squared error of zero outputs is 0.63, binary cross-entropy 0.69."""

    def begins_alike(step, scalars):
        fall = np.exp(-step / 60)
        scalars |= {"loss/probe": 0.63 + 2.0 * step, "yes_or_no/loss": 0.1 + 0.6 * fall, "train_mode/loss": 0.63}
        scalars |= {"probe/zero_or_one": 1.0, "probe/chance": 0.23, "yes_or_no/chance": 0.66} if step == 0 else {}

    falls = 0.1 + 0.6 * np.exp(-np.arange(250) / 60)
    assert kinds(history(begins_alike, losses=falls)) == [NOTHING_WRONG]
    assert kinds(history(begins_alike, losses=0.63 + 2.0 * np.arange(250)))[0] == "lr_too_large"


def test_outputs_of_a_sigmoid_may_be_sure():
    assert kinds(change(saturated_units__8=0.9)) == [NOTHING_WRONG]
    assert kinds(change(saturated_units__6=0.9)) == ["saturated_units"]


def test_units_that_were_saturated_before_the_steps_grew_are_the_cause_and_later_ones_the_consequence():
    rough = histories._both(histories._stuck, histories._set(step__true_loss_change=3.0, step__error=4.0))
    start = histories._both(rough, histories._early("saturated_units/2", 0.9), histories._set(saturated_units__2=0.9))
    assert kinds(history(start, histories.FLAT))[:2] == ["saturated_units", "lr_too_large"]
    leap = histories._set(update_ratio__all=lambda step: 2.0 if step == 1 else 0.01,
                          loss__probe=lambda step: 2.6 if step else 2.3,
                          saturated_units__2=lambda step: 0.9 if step else 0.0)  # fmt: skip
    assert kinds(history(leap, histories.FLAT))[:2] == ["lr_too_large", "saturated_units"]


def test_large_gradients_that_do_not_point_the_same_way_later_do_not_add_up():
    grows = {"gradient_given": lambda step: 0.5 * step}
    assert kinds(change(**grows, gradient_overlap=0.98))[0] == "gradients_not_zeroed"
    late = kinds(change(**grows, gradient_overlap=lambda step: 0.98 if step < 32 else 0.2))
    assert "gradients_not_zeroed" not in late


def test_hard_batches_that_cost_less_than_constant_outputs_are_no_spikes():
    low = 0.1 * batch_losses()
    low[[61, 99, 140, 203]] = 1.5
    fine_tuned = histories._set(loss__probe=0.2, train_mode__loss=0.2)
    assert "loss_spikes" not in kinds(history(fine_tuned, low))
    low[[61, 99, 140, 203]] = 2.5
    assert "loss_spikes" in kinds(history(fine_tuned, low))


def test_batches_that_are_bad_at_equal_distances_need_not_cost_thrice_as_much():
    rises = histories.FLAT.copy()
    rises[[60, 100, 180]] = 4.5
    named = diagnosis_of(history(histories._stuck, rises))
    assert {f.kind: f.what for f in named.findings}["loss_spikes"].endswith("every 40 steps.")
    rises[101], rises[100] = rises[100], rises[101]
    assert "loss_spikes" not in kinds(history(histories._stuck, rises))


def test_evaluation_mode_from_some_step_on_is_named_however_late():
    late = diagnosis_of(change(training_mode=lambda step: float(step < 150)))
    assert late[0].kind == "wrong_mode"
    assert late[0].step == 158
    assert kinds(change(training_mode=lambda step: float(step < 250))) == [NOTHING_WRONG], "an evaluation at the end"
    assert kinds(change(training_mode=lambda step: float(step not in (63, 79, 100)))) == [NOTHING_WRONG]


def test_weights_that_grow_while_the_loss_falls_do_not_explain_a_loss_that_is_not_finite():
    losses = histories.batch_losses()
    losses[90:] = np.nan
    heavier = change(norm__parameters=lambda step: 9.0 + step / 10, loss__probe=lambda s: np.nan if s > 90 else 2.0)
    assert kinds(replace(heavier, logged={"loss": Series(np.arange(1.0, 251.0), losses)}))[0] == "not_a_number"


def test_classes_in_order_are_named_where_the_network_follows_slowly():
    assert kinds(history(histories._in_order, losses=np.full(250, 1.8)))[0] == "classes_in_order"
    assert "classes_in_order" not in kinds(history(histories._in_order, losses=np.full(250, 2.4)))


def test_features_that_move_little_for_what_is_learnt_are_lazy():
    def changed(by):
        return kinds(change(kernel__drift=0.05, richness__initial_similarity=lambda step: 1 - by * step / 250))

    assert changed(0.06)[0] == "lazy", "a fifteenth of the part of the loss that is gone"
    assert "lazy" not in changed(0.12)


def test_batches_that_stay_above_chance_while_they_fall_towards_it_were_shown_other_labels():
    down = np.linspace(2.55, 2.32, 250)
    quiet = histories._both(histories._stuck, histories._set(gradient_overlap=0.1))
    assert "labels" in kinds(history(quiet, down))
    assert "labels" not in kinds(history(quiet, down - 0.2)), "it falls below chance"


def test_what_dropout_costs_the_batches_must_be_known():
    harder = history(losses=batch_losses() + np.where(np.arange(250) < 20, 0.0, 1.2))
    assert kinds(harder)[0] == "labels"
    assert "labels" not in kinds(harder.leaving_out(("train_mode/",)))
    plain = harder.leaving_out(("train_mode/", "training_mode", "dropout"))
    assert kinds(plain)[0] == "labels"


def test_a_probe_that_is_learnt_in_training_mode_is_not_taken_for_one_that_is_not_learnt():
    """Batch norm: one batch of another size spoils the running means, and with them evaluation mode alone."""
    lost = history(histories._set(loss__probe=histories._rising), losses=batch_losses() - 0.15)
    assert "memorization" not in kinds(lost)
