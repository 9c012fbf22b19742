"""One definition each: every notion that had several homes, against a line of brute force."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.base.agreement import cosine, cosine_of_sums, relative_error
from gramscope.base.checks import check_count, check_lr, check_number, check_symmetric
from gramscope.base.effective_rank import effective_rank, participation_ratio, participation_ratio_of
from gramscope.base.errors import InputError
from gramscope.base.json_values import json_values
from gramscope.base.moments import centered_kernel, centered_rows
from gramscope.base.rng import child_seed
from gramscope.base.shares import shares
from gramscope.base.user_warnings import UndefinedMeasureWarning
from gramscope.linalg import Dense
from gramscope.measures.by_weight import ByWeight
from gramscope.measures.weight_matrices import weight_forms
from gramscope.store.files import write_file

TIGHT = 1e-12  # sums of at most 60 float64 numbers


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), p=st.integers(1, 6), power=st.sampled_from([-200, 0, 200]))
def test_how_many_directions(seed, n, p, power):
    x = drawn(seed, n, p)
    values = np.linalg.eigvalsh((x.T @ x).numpy()).clip(min=0)
    shared = values / values.sum()
    entropy = -sum(share * math.log(share) for share in shared if share > 0)
    scaled = torch.tensor(values) * 2.0**power
    assert participation_ratio(scaled) == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=TIGHT)
    assert participation_ratio_of(x @ x.T * 2.0**power) == pytest.approx(participation_ratio(scaled), rel=1e-9)
    assert effective_rank(scaled) == pytest.approx(math.exp(entropy), rel=TIGHT)


def test_the_names_of_the_literature_differ():
    values = torch.tensor([9.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    matrix = torch.diag(values)
    assert participation_ratio(values) == pytest.approx(144 / 84)
    assert gs.Kernel(matrix).participation_ratio() == pytest.approx(144 / 84)
    assert gs.propagators.participation_ratio(Dense(matrix, symmetric=True)).value == pytest.approx(144 / 84)
    assert gs.hierarchy.overlap_rank(matrix.sqrt()) == pytest.approx(144 / 84)
    assert gs.spectra.ranks(values.numpy()).participation == pytest.approx(144 / 84)
    assert gs.measures.effective_rank(values) == pytest.approx(math.exp(-0.75 * math.log(0.75) + 0.25 * math.log(12)))
    assert gs.measures.effective_dimension(values) == pytest.approx(1 + 3)
    assert gs.spectra.stable_rank(values.numpy()) == pytest.approx(12 / 9)
    assert gs.propagators.explained_variance_dimension(matrix.sqrt(), share=0.75) == pytest.approx(1.0)


@pytest.mark.parametrize("measure", [participation_ratio, effective_rank])
def test_directions_of_nothing_and_of_what_is_no_spectrum(measure):
    with pytest.warns(UndefinedMeasureWarning, match="zero"):
        assert math.isnan(measure(torch.zeros(3)))
    for bad in (torch.tensor([1.0, -1.0]), torch.tensor([1.0, math.nan]), torch.ones(0)):
        with pytest.raises(InputError, match=r"eigenvalues must (be|have)"):
            measure(bad)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), power=st.sampled_from([-300, 0, 300]))
def test_cosine_and_relative_error(seed, n, power):
    a, b = drawn(seed, n, n), drawn(seed + 1, n, n)
    x, y = a.flatten().numpy(), b.flatten().numpy()
    wanted = (x @ y) / np.sqrt(x @ x) / np.sqrt(y @ y)
    assert cosine(a * 2.0**power, b, "a cosine") == pytest.approx(wanted, abs=TIGHT)
    assert gs.Kernel(a).alignment(b) == pytest.approx(wanted, abs=TIGHT)
    assert gs.measures.alignment(a, b) == pytest.approx(wanted, abs=TIGHT)
    assert gs.propagators.alignment(Dense(a), Dense(b)).value == pytest.approx(wanted, abs=TIGHT)
    assert relative_error(a, b) == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=TIGHT)


def test_agreement_with_nothing():
    zero, one = torch.zeros(2), torch.ones(2)
    with pytest.warns(UndefinedMeasureWarning, match="a cosine is not defined: one of the two is zero"):
        assert math.isnan(cosine(zero, one, "a cosine"))
    assert float(cosine_of_sums(*torch.tensor([1.0 + 1e-15, 1.0, 1.0], dtype=torch.float64))) == 1.0
    assert math.isnan(relative_error(zero, zero))
    assert relative_error(one, zero) == math.inf
    assert relative_error(zero, one) == 1.0


def test_centering():
    x = drawn(3, 7, 4) + 1e9
    h = torch.eye(7, dtype=torch.float64) - 1 / 7
    small = x - 1e9
    assert torch.allclose(centered_rows(x), small - small.mean(0), atol=1e-7)  # the digits that x itself has there
    k = drawn(4, 7, 7)
    assert torch.allclose(centered_kernel(k), h @ k @ h, atol=1e-13)


def test_shares_sum_to_one():
    parts = {"a": 0.5, "b": -0.25, "c": 1.0}
    assert shares(parts) == {"a": 0.4, "b": -0.2, "c": 0.8}
    with pytest.warns(UndefinedMeasureWarning, match="not defined: nothing moved"):
        assert all(map(math.isnan, shares({"a": 1.0, "b": -1.0}, why="nothing moved").values()))


def test_one_rule_for_learning_rates():
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    fields = gs.hierarchy.Fields([torch.eye(2, dtype=torch.float64)], torch.ones(3, 2, dtype=torch.float64))
    calls = (
        lambda lr: gs.explain_step(model, x, x[:, :1], lr=lr),
        lambda lr: fields.predict_step(torch.ones_like(fields.outputs), lr),
        lambda lr: gs.propagators.predict_states(model, x, lambda f: f.square().sum(), lr),
        lambda lr: gs.measures.gram_step(torch.eye(2), torch.eye(2), lr),
        lambda lr: gs.measures.VirtualCovariance(lr),
        lambda lr: gs.kernels.kink_crossings(model, x, torch.ones(3, 1), lr=lr),
    )
    for call in calls:
        call(0.0)
        for bad in (-0.1, math.nan, math.inf):
            with pytest.raises(InputError, match="lr must be one finite number at least 0"):
                call(bad)


def test_one_rule_for_seeds():
    operator, weight, x = Dense(torch.eye(4, dtype=torch.float64), symmetric=True), drawn(0, 8, 4), drawn(1, 6, 3)
    calls = (
        lambda seed: gs.linalg.eigenvalues_top(operator, 1, seed=seed).vectors.sum(),
        lambda seed: gs.linalg.hutchinson(operator, 4, seed=seed).value,
        lambda seed: gs.measures.target_linearity(x, x[:, 0], permutations=3, seed=seed).permuted,
        lambda seed: gs.measures.held_out_target_linearity(x, x[:, 0], seed=seed),
        lambda seed: gs.propagators.random_modes(5, 2, seed=seed).sum(),
        lambda seed: gs.spectra.shuffled_null(weight, shuffles=2, seed=seed).distance,
        lambda seed: gs.spectra.p_value(np.linspace(1, 5, 40), replicates=5, seed=seed),
        lambda seed: gs.tasks.mlp((2, 3), seed=seed)[0].weight.detach().sum(),
    )
    for call in calls:
        assert float(call(3)) == float(call(3))
        for bad in (-1, True, 2**63):  # other types are refused by annotations under pytest, by the same check else
            with pytest.raises(InputError, match="seed must be a whole number from 0 to"):
                call(bad)
    assert child_seed(np.int64(3), "a") == child_seed(torch.tensor(3), "a") == child_seed(3, "a")
    for bad in (1.5, "x", None):
        with pytest.raises(InputError, match="seed must be a whole number from 0 to"):
            child_seed(bad, "a")


@pytest.mark.parametrize("bad", [True, "1", None, math.nan, math.inf, 1j, torch.tensor([1.0, 2.0]), torch.tensor(True)])
def test_what_is_no_number(bad):
    with pytest.raises(InputError, match="size must be one finite number greater than 0, got"):
        check_number(bad, "size", above=0.0)
    with pytest.raises(InputError, match="k must be a whole number of at least 1, got"):
        check_count(bad, "k")


def test_numbers_of_any_library():
    assert [check_lr(lr) for lr in (1, np.float32(0.5), torch.tensor(0.25), np.int64(2))] == [1.0, 0.5, 0.25, 2.0]
    assert [check_count(k, "k") for k in (1, np.int8(2), torch.tensor(3))] == [1, 2, 3]
    for k in (0, 5, 1.0):
        with pytest.raises(InputError, match="k must be a whole number from 1 to 4"):
            check_count(k, "k", most=4)


def test_symmetry():
    matrix = drawn(5, 3, 3)
    both = matrix + matrix.T
    check_symmetric(both, "it", tol=0.0, remedy="")
    check_symmetric(both.numpy(), "it", tol=0.0, remedy="")
    gap = float((matrix - matrix.T).abs().max() / matrix.abs().max())
    check_symmetric(matrix, "it", tol=gap * 1.001, remedy="")
    with pytest.raises(InputError, match=r"it must be symmetric, but it differs.* Mend it\."):
        check_symmetric(matrix, "it", tol=gap * 0.999, remedy="Mend it.")
    for bad in (torch.ones(2, 3), torch.ones(3), torch.ones(0, 0), both * math.nan):
        with pytest.raises(InputError, match="it must be"):
            check_symmetric(bad, "it", tol=1.0, remedy="")


def test_json_that_every_parser_takes():
    value = {"a": [1, math.nan, -math.inf], 2: np.arange(2), "t": (torch.float32, True, None)}
    for kind, wanted in (("text", ["NaN", "-Infinity"]), ("null", [None, None])):
        found = json.loads(json.dumps(json_values(value, kind), allow_nan=False))
        assert found == {"a": [1, *wanted], "2": [0, 1], "t": ["torch.float32", True, None]}


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    write_file(path, b"first")

    def fails(temporary):
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, fails)
    assert path.read_bytes() == b"first"
    write_file(path, lambda temporary: temporary.write_bytes(b"second"))
    assert path.read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_results_by_weight_are_a_mapping():
    found = ByWeight({"a": 1, "b": 2}, left_out={"c": "a vector"})
    assert dict(found) == {"a": 1, "b": 2}
    assert ("a" in found, "c" in found, found.get("c"), len(found)) == (True, False, None, 2)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (nn.Bilinear(2, 3, 4), {"weight": (1, 4, 6)}),
        (nn.MultiheadAttention(4, 2), {"in_proj_weight": (3, 4, 4)}),
    ],
    ids=["bilinear", "attention"],
)
def test_which_parameters_are_matrices(model, wanted):
    """The rule by modules and that of the spectra agree on which parameters are matrices."""
    forms = weight_forms(model)
    for name, sizes in wanted.items():
        form = forms[name].form
        assert (form.groups, form.fan_out, form.fan_in) == sizes
    frame = gs.spectra.analyze(model, min_size=1)
    cut = {name.split("[")[0].split(".q")[0].split(".k")[0].split(".v")[0] for name in frame["name"]}
    assert set(wanted) <= cut


def test_labels_count_as_one_hot_targets_everywhere():
    x, labels = drawn(5, 30, 4), torch.arange(30) % 3
    hot = torch.nn.functional.one_hot(labels)
    kernel = x @ x.T
    calls = (
        lambda y: float(gs.measures.target_linearity(x, y)),
        lambda y: gs.measures.held_out_target_linearity(x, y),
        lambda y: gs.measures.kernel_target_alignment(kernel, y),
        lambda y: float(gs.Kernel(kernel).target_alignment(y)),
        lambda y: float(gs.measures.richness_curves(x, x, y).quality.sum()),
        lambda y: gs.measures.projections_without_qr(x, x, y).total,
        lambda y: float(gs.measures.linearity_penalty(x, y)),
    )
    for call in calls:
        wanted = call(hot.double())
        assert [call(y) for y in (labels, labels[:, None], labels.int(), hot)] == pytest.approx([wanted] * 4, rel=1e-9)
