"""Input that was once taken without a word, with a wrong number or an error of torch's: each is told apart now."""

from functools import reduce

import jaxtyping
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gramscope as gs
from gramscope.base.errors import InputError

m = gs.measures
X, LABELS = torch.linspace(-1, 2, 24).reshape(8, 3) ** 2, torch.arange(8) % 2
ANY_LENGTH = nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(4, 2))
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture(autouse=True)
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


REFUSED = {
    "NaN among features, once a projection of 0": (
        lambda: m.projections_without_qr(X, X * torch.nan, LABELS), "features must be finite"),
    "NaN among targets": (lambda: m.projections_without_qr(X, X, X[:, 0] * torch.nan), "targets must be finite"),
    "whole numbers, once a path of whole numbers": (
        lambda: m.interpolate(torch.zeros(1, 2).long(), torch.ones(1, 2).long()), "must be floating"),
    "no evaluation examples": (lambda: m.richness_curves(X, X[:0], X[:0]), "no evaluation set"),
    "features without columns": (lambda: m.richness_curves(X[:, :0], X[:, :0], X), "rows and columns"),
    "a share that is no number": (
        lambda: m.held_out_target_linearity(X, X[:, 0], test_share=float("nan")), "test_share must be"),
    "a dtype by name": (lambda: m.target_linearity(X, LABELS, dtype="float16"), "dtype must be"),
    "a negative AGOP, once taken for zero": (
        lambda: m.ansatz_correlation(torch.eye(3), -torch.eye(3)), "positive semidefinite"),
    "one bound": (lambda: m.ansatz_exponent(torch.eye(3), torch.eye(3), bounds=(1.0,)), "bounds must be"),
    "squares by parameter": (lambda: m.gradient_noise_scale(torch.ones(3, 2), 1.0), "one number for each"),
    "a mean square that is NaN": (lambda: m.gradient_noise_scale(torch.ones(3), float("nan")), "mean_square must be"),
    "no checkpoint, once an influence of 0": (
        lambda: m.tracin(NET, X, LABELS, X, LABELS, checkpoints=[]), "one at least"),
    "a single state dict": (
        lambda: m.tracin(NET, X, LABELS, X, LABELS, checkpoints=NET.state_dict()), "must be state dicts"),
    "test examples of another length": (
        lambda: m.tracin(ANY_LENGTH, X[:, None], LABELS, X[:, None, :2], LABELS), "x and x_test must be of one kind"),
    "labels in a list": (lambda: m.tracin(NET, X, LABELS.tolist(), X, LABELS), "y must be a torch.Tensor"),
    "a reduction that does not exist, once \"unfold\"": (
        lambda: m.LinearityRegularizer(NET, "0", targets=2, reduce="mean"), "reduce must be"),
    "targets that are NaN, once a penalty of NaN": (
        lambda: m.linearity_penalty(X, X[:, 0] * torch.nan), "targets must be finite"),
    "a loss of many numbers": (lambda: m.sharpness(NET(X), NET.parameters()), "loss must be one number"),
    "a loss without a graph": (lambda: m.sharpness(torch.tensor(1.0), NET.parameters()), "loss must be one number"),
    "a loss by name": (lambda: m.feature_learning(NET, X, "mse"), "loss must be a function"),
    "a start that is no list": (
        lambda: m.moving_target(NET, X, LABELS, "cross_entropy", lr=0.1, steps=2, starts=0), "starts must be"),
    "targets of four axes": (
        lambda: m.weight_target_linearity(NET, X, torch.ones(8, 1, 1, 1)), "targets must be labels"),
    "classes as text": (
        lambda: m.kernel_target_alignment(torch.eye(8), LABELS, classes="2"), "classes must be a whole number"),
    "eigenvalues in a list": (lambda: m.effective_rank([1.0, 2.0]), "must be a torch.Tensor"),
    "times in a list": (lambda: m.mode_dynamics(torch.ones(2), torch.ones(2), [0.0]), "t must be a torch.Tensor"),
    "a start of NaN": (
        lambda: m.mode_dynamics(torch.ones(2), torch.ones(2), torch.ones(1), start=torch.ones(2) * torch.nan),
        "start must be finite"),
    "one axis": (lambda: m.nystrom_errors(torch.tensor(1.0), torch.ones(1)), "examples on its first axis"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_words(case):
    call, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        call()


def test_labels_are_one_hot_targets_of_eigenmodes():
    by_label, by_rows = m.eigenmodes(X, LABELS), m.eigenmodes(X, nn.functional.one_hot(LABELS).double())
    assert torch.equal(by_label.coefficients, by_rows.coefficients)
    assert by_label.coefficients.shape[1] == 2


def test_labels_of_one_column_are_labels_of_examples():
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2))
    x = X[:, None]
    rows, column = (m.weight_target_linearity(net, x, y) for y in (LABELS, LABELS[:, None]))
    assert [float(one.inputs) for one in rows.values()] == [float(one.inputs) for one in column.values()]


def test_parameters_of_a_model_as_they_come():
    loss = cross_entropy(NET(X), LABELS)
    assert m.sharpness(loss, NET.parameters()) == m.sharpness(cross_entropy(NET(X), LABELS), list(NET.parameters()))


def test_a_loss_by_its_name():
    by_name, by_function = (
        m.moving_target(NET, X, LABELS, loss, lr=0.1, steps=3) for loss in ("cross_entropy", cross_entropy)
    )
    assert torch.equal(by_name.train_loss, by_function.train_loss)


def test_states_of_training_features_keep_their_examples():
    """Batches of any size in any order; a set that is seen in part only by another batch is named."""
    measure, parts = m.RichnessCurves(), X.split(3)
    states = [measure.update(part, part="train") for part in parts]
    states += [measure.update(part, part[:, :1], part) for part in parts]
    merged = states[3]
    for state in (*states[4:], *states[:3]):
        merged = measure.merge(state, merged)
    whole, found = m.richness_curves(X, X, X[:, :1], X), measure.compute(merged)
    assert torch.allclose(found.quality, whole.quality, atol=1e-10)
    with pytest.raises(InputError, match="every batch must have the same entries"):
        measure.merge(measure.update(X, X[:, :1]), measure.update(X, X[:, :1], X))


def test_many_training_features_are_kept_as_a_triangle():
    """Memory does not grow with the examples, and nothing of the spectrum is lost."""
    measure, rng = m.RichnessCurves(), torch.Generator().manual_seed(0)
    train = torch.randn(400, 3, generator=rng) * torch.tensor([1.0, 1e-3, 1e-5])
    state = reduce(measure.merge, [measure.update(part, part="train") for part in train.split(7)])
    assert state.trained == 400
    assert state.train.n < 20
    evaluation = measure.update(train, train[:, :1])
    found, whole = measure.compute(measure.merge(state, evaluation)), m.richness_curves(train, train, train[:, :1])
    assert found.eigenvalues.tolist() == pytest.approx(whole.eigenvalues.tolist(), rel=1e-6)
    assert found.rank == whole.rank == 3


def test_results_say_the_main_thing():
    found = m.moving_target(NET, X, LABELS, cross_entropy, lr=0.1, steps=3, starts=[0, 2])
    assert repr(found).startswith("MovingTarget(gaps={0: ")
    assert found.gaps[2] == found.gap(2)
    assert found.steps == 3
    with m.LinearityRegularizer(NET, "0", targets=2) as regularizer:
        NET(X)
        regularizer(LABELS)
    assert repr(regularizer).startswith("LinearityRegularizer(target linearity {0: 0.")
    assert "width=4, targets=2" in repr(regularizer.penalties)
