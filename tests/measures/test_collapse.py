"""Neural collapse against covariance matrices, and the corners: few examples, missing classes, many classes."""

import warnings
from functools import reduce
from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gramscope as gs
from gramscope.base.errors import InputError
from references import collapse as reference

Undefined = gs.measures.UndefinedMeasureWarning


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def clusters(n, p, classes, seed, spread=0.5, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, p, generator=rng, dtype=torch.float64)
    labels = torch.cat([torch.arange(classes), torch.randint(classes, (n - classes,), generator=rng)])
    noise = torch.randn(n, p, generator=rng, dtype=torch.float64)
    return (centres[labels] + spread * noise).to(dtype), labels


def simplex_features(classes, p, copies):
    """Exact collapse: a rotated simplex, ``copies`` examples on each corner."""
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes
    rotation = torch.linalg.qr(torch.randn(p, p, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    labels = torch.arange(classes * copies) % classes
    return (corners @ rotation[:classes])[labels] + 3.0, labels, corners @ rotation[:classes]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(8, 40),
    p=st.integers(1, 12),
    classes=st.integers(2, 6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_against_covariance_matrices(n, p, classes, dtype, seed):
    features, labels = clusters(n, p, classes, seed, dtype=dtype)
    phi, names = features.double().numpy(), labels.numpy()
    rng = np.random.default_rng(seed)
    weight, bias = rng.standard_normal((classes, p)), rng.standard_normal(classes)
    means, _ = reference.statistics(phi, names)
    singular = np.linalg.svd(np.stack(means) - sum(means) / classes, compute_uv=False)[: min(classes - 1, p)]
    if singular[-1] < 1e-2 * singular[0]:
        return  # the pseudo-inverse of a nearly singular matrix depends on its cut
    found = gs.measures.neural_collapse(features, labels, weight=torch.tensor(weight), bias=torch.tensor(bias))
    # The pseudo-inverse amplifies rounding by at most the square of the condition number, 1e4 here.
    assert found.nc1 == pytest.approx(reference.nc1(phi, names), rel=1e-9)
    values = found.nc2, found.nc2_equinorm, found.nc2_equiangular, found.nc2_maximal_angle
    assert values == pytest.approx(reference.nc2(phi, names), abs=1e-7)
    assert found.nc3 == pytest.approx(reference.nc3(phi, names, weight), rel=1e-10)
    assert found.nc4 == reference.nc4(phi, names, phi @ weight.T + bias)
    assert found.cdnv == pytest.approx(reference.cdnv(phi, names), rel=1e-10)
    ridged = gs.measures.neural_collapse(features, labels, ridge=1e-4).nc1
    assert ridged == pytest.approx(reference.nc1(phi, names, 1e-4), rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(6, 80),
    p=st.integers(1, 8),
    classes=st.integers(2, 5),
    cuts=st.lists(st.integers(0, 80), max_size=6),
    with_outputs=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_split_and_order(n, p, classes, cuts, with_outputs, seed):
    features, labels = clusters(n, p, classes, seed)
    outputs = features @ torch.randn(p, classes, dtype=torch.float64) if with_outputs else None
    measure = gs.measures.Collapse()
    whole = measure(features, labels, outputs)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    edges = sorted({0, n, *(min(cut, n) for cut in cuts)})
    states = []
    for a, b in pairwise(edges):
        at = order[a:b]
        states.append(measure.update(features[at], labels[at], None if outputs is None else outputs[at]))
    split = measure.compute(reduce(measure.merge, states))
    assert split.counts == whole.counts
    assert split.nc4 == whole.nc4
    for name in ("nc1", "nc2", "nc2_equinorm", "nc2_equiangular", "nc2_maximal_angle", "cdnv", "within", "between"):
        assert getattr(split, name) == pytest.approx(getattr(whole, name), rel=1e-10, abs=1e-10), name


def test_full_collapse_is_zero_throughout():
    features, labels, corners = simplex_features(5, 9, 7)
    found = gs.measures.neural_collapse(features, labels, weight=corners, bias=-3 * corners.sum(1))
    for name in ("nc1", "nc2", "nc2_equinorm", "nc2_equiangular", "nc2_maximal_angle", "nc3", "nc4", "cdnv"):
        assert abs(getattr(found, name)) < 1e-13, name
    assert found.notes == ()
    spoilt = features.clone()
    spoilt[0] += 1.0
    assert gs.measures.neural_collapse(spoilt, labels).nc1 > 1e-3


def test_the_ridge_turns_the_order_round():
    """With 1e-4 NC1 is the mean Tr Σ_W times 1e4: larger features look less collapsed, whatever their shape."""
    features, labels = clusters(300, 20, 4, 0, spread=0.3)
    tight, wide = features * 100, clusters(300, 20, 4, 0, spread=0.6)[0] * 0.01
    measure = gs.measures.neural_collapse
    assert measure(tight, labels).nc1 < measure(wide, labels).nc1
    assert measure(tight, labels, ridge=1e-4).nc1 > measure(wide, labels, ridge=1e-4).nc1
    found = measure(tight, labels, ridge=1e-4)
    assert 0.8 < found.nc1 / (found.mean_within * 1e4) < 1.0  # 17 of 20 directions lie outside the class means


@pytest.mark.parametrize("classes", [3, 10])
def test_the_ridge_is_that_of_the_mean_within_class_scatter(classes):
    """The published NC1 of arXiv:2410.04264 fits means over the classes: sums are C times as large."""
    features, labels = clusters(400, 30, classes, 0)
    phi, names = features.numpy(), labels.numpy()
    found = gs.measures.neural_collapse(features, labels, ridge=1e-4)
    traces = [np.trace(c) for c in reference.statistics(phi, names)[1]]
    assert found.mean_within == pytest.approx(np.mean(traces), rel=1e-12)
    assert found.within == pytest.approx(np.sum(traces), rel=1e-12)
    assert found.nc1 == pytest.approx(reference.nc1(phi, names, 1e-4), rel=1e-9)
    few = features[:, : classes - 1]  # no direction lies outside the class means, so a small ridge changes little
    small = gs.measures.neural_collapse(few, labels, ridge=1e-9).nc1
    assert small == pytest.approx(gs.measures.neural_collapse(few, labels).nc1, rel=1e-5)


@pytest.mark.parametrize("n", [60, 3000])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_class_means_have_the_rank_of_their_features(n, dtype, error):
    """Ten classes in five directions, spread over thirty columns: the other four are rounding over rounding."""
    features, labels = clusters(n, 5, 10, 0)
    mix = torch.randn(5, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = gs.measures.neural_collapse(features @ mix, labels).nc1
    low = (features.float() @ mix.float()).to(dtype)
    assert gs.measures.neural_collapse(low, labels).nc1 == pytest.approx(exact, rel=error)
    assert gs.measures.neural_collapse(low.double(), labels).nc1 == gs.measures.neural_collapse(low, labels).nc1
    in_parts = gs.measures.Collapse().over([(low[:25], labels[:25]), (low[25:], labels[25:])])
    assert in_parts.nc1 == pytest.approx(gs.measures.neural_collapse(low, labels).nc1, rel=1e-8)


def test_class_means_that_differ_by_rounding_coincide():
    """One point for all classes in float32, but for the last digit: nothing to measure distances by."""
    labels = torch.arange(60) % 3
    features = torch.randn(4, generator=torch.Generator().manual_seed(0)).repeat(60, 1)
    features[0:15:3] *= 1 + 2**-23
    features[1:30:3] *= 1 - 2**-23
    with pytest.warns(Undefined, match="class means coincide"):
        found = gs.measures.neural_collapse(features, labels)
    assert np.isnan([found.nc1, found.nc2, found.cdnv]).all()


def test_every_class_counts_alike():
    features, labels = clusters(60, 6, 3, 1)
    doubled = torch.cat([features, features[labels == 0]]), torch.cat([labels, labels[labels == 0]])
    assert gs.measures.neural_collapse(*doubled).nc1 == pytest.approx(
        gs.measures.neural_collapse(features, labels).nc1, rel=1e-12
    )


def test_labels_may_be_any_whole_numbers_or_one_hot():
    features, labels = clusters(40, 5, 3, 2)
    whole = gs.measures.neural_collapse(features, labels)
    renamed = torch.tensor([7, 100, 3])[labels]
    for same in (renamed, labels.to(torch.uint8), labels[:, None], labels.float(), torch.eye(3)[labels]):
        found = gs.measures.neural_collapse(features, same)
        assert found.nc1 == pytest.approx(whole.nc1, rel=1e-12)
    assert gs.measures.neural_collapse(features, renamed).counts.keys() == {3, 7, 100}


def test_negative_labels_are_no_classes_unless_said():
    """-100 is torch's label of an example that has none."""
    features, labels = clusters(40, 5, 3, 2)
    for low in (-100, -1):
        with pytest.raises(InputError, match=f"numbered from 0, got {low}. Drop ignored examples"):
            gs.measures.neural_collapse(features, torch.where(labels == 2, low, labels))
        with pytest.raises(InputError, match=f"numbered from 0, got {low}"):
            gs.measures.richness_curves(features, features, torch.where(labels == 2, low, labels))
    signed = torch.where(labels == 0, -1, 1)
    found = gs.measures.neural_collapse(features, signed, classes=(-1, 1))
    assert found.nc1 == gs.measures.neural_collapse(features, (labels > 0).long()).nc1
    assert set(found.counts) == {-1, 1}
    with pytest.raises(InputError, match="among the given classes"):
        gs.measures.neural_collapse(features, torch.where(labels == 2, -100, labels), classes=3)
    with pytest.raises(InputError, match="whole numbers"):
        gs.measures.neural_collapse(features, torch.full((40,), torch.inf))


@pytest.mark.parametrize("factor", [1e200, 1e-200])
def test_features_whose_powers_leave_float64_are_refused(factor):
    features, labels = clusters(40, 4, 3, 2)
    with pytest.raises(InputError, match=r"features must have a largest entry between 2\^-200 and 2\^200"):
        gs.measures.neural_collapse(features * factor, labels)
    assert gs.measures.neural_collapse(features * 0, labels).within == 0


def test_collapsed_features_of_large_size_have_no_within_and_no_note():
    """Their 0 is a true one: nothing has left float64."""
    labels = torch.arange(12) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gs.measures.neural_collapse(torch.eye(3, dtype=torch.float64)[labels] * 2.0**150, labels)
    assert (found.within, found.between, found.notes) == (0.0, pytest.approx(2.0 * 2.0**300), ())


@pytest.mark.parametrize("shape", [(20, 0), (20, 3, 0)])
def test_features_without_a_column_are_refused(shape):
    with pytest.raises(InputError, match="at least one column"):
        gs.measures.neural_collapse(torch.randn(*shape), torch.arange(20) % 3)


@pytest.mark.parametrize("n", [40, 400])
@pytest.mark.parametrize("factor", [2.0**180, 2.0**-180, 1e50, 1e-50])
def test_features_of_any_size(factor, n):
    features, labels = clusters(n, 4, 3, 2)
    weight, bias = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bias = bias[:, 0]
    plain = gs.measures.neural_collapse(features, labels, weight=weight, bias=bias)
    big = features * factor
    scaled = gs.measures.neural_collapse(big, labels, weight=weight / factor, bias=bias)
    measure = gs.measures.Collapse()
    empty = measure.update(features[:3] * 0, labels[:3])
    in_parts = measure.over([(big[:7], labels[:7]), (big[7:], labels[7:])])
    for name in ("nc1", "nc2", "nc2_equinorm", "nc2_equiangular", "nc2_maximal_angle", "cdnv"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
        assert getattr(in_parts, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert (scaled.nc4, scaled.nc3) == (plain.nc4, pytest.approx(plain.nc3, rel=1e-9))
    assert scaled.within == pytest.approx(plain.within * factor**2, rel=1e-12)
    joined = measure.compute(measure.merge(empty, measure.update(big, labels)))
    zeros = torch.cat([features[:3] * 0, features]), torch.cat([labels[:3], labels])
    assert joined.nc1 == pytest.approx(gs.measures.neural_collapse(*zeros).nc1, rel=1e-9)


def test_batches_of_unlike_sizes_merge():
    features, labels = clusters(300, 4, 3, 2)
    size = torch.tensor([1e-20, 1e50], dtype=torch.float64).repeat_interleave(150)[:, None]
    whole = gs.measures.neural_collapse(features * size, labels)
    measure = gs.measures.Collapse()
    parts = [measure.update(features[a : a + 150] * size[a : a + 150], labels[a : a + 150]) for a in (0, 150)]
    for pair in (parts, parts[::-1]):
        assert measure.compute(measure.merge(*pair)).nc1 == pytest.approx(whole.nc1, rel=1e-10)


@pytest.mark.usefixtures("as_users_run_it")
def test_a_classifier_must_be_finite():
    features, labels = clusters(40, 5, 3, 2)
    with pytest.raises(InputError, match="weight must be finite"):
        gs.measures.neural_collapse(features, labels, weight=torch.full((3, 5), torch.nan))
    for bias in (torch.ones(4), torch.ones(3, 3)):
        with pytest.raises(InputError, match=r"each of the weight's 3 rows, got \(\d"):
            gs.measures.Collapse(weight=torch.ones(3, 5), bias=bias)
    with pytest.raises(InputError, match=r"must have shape \(K, 5\)"):
        gs.measures.neural_collapse(features, labels, weight=torch.ones(3))
    with pytest.raises(InputError, match="classes must be a whole number"):
        gs.measures.neural_collapse(features, labels, classes=True)
    with pytest.raises(InputError, match="ridge must be"):
        gs.measures.neural_collapse(features, labels, ridge=float("nan"))


def test_corners_are_handled_and_said():
    features, labels = clusters(30, 4, 3, 3)
    with pytest.warns(UserWarning, match=r"2 of the classes have no example and are left out: \[3, 4\]"):
        found = gs.measures.neural_collapse(features, labels, classes=5)
    assert found.missing == (3, 4)
    assert found.nc1 == gs.measures.neural_collapse(features, labels).nc1
    single = gs.measures.neural_collapse(
        torch.cat([features, features[:1] + 9]), torch.cat([labels, torch.tensor([3])])
    )
    assert single.counts[3] == 1
    assert any("one example" in note and "[3]" in note for note in single.notes)
    many, names = clusters(50, 2, 7, 4)
    crowded = gs.measures.neural_collapse(many, names)
    assert crowded.nc1 == pytest.approx(reference.nc1(many.numpy(), names.numpy()), rel=1e-8)
    assert any("cannot form a simplex" in note for note in crowded.notes)
    two = gs.measures.neural_collapse(*clusters(20, 3, 2, 5))
    assert any("always opposite" in note for note in two.notes)
    assert two.nc2 < 1e-12


def test_undefined_is_nan_with_a_reason():
    features = torch.randn(10, 3)
    with pytest.warns(Undefined, match="all 10 examples are of one class"):
        found = gs.measures.neural_collapse(features, torch.zeros(10, dtype=torch.long))
    assert found.nc1 != found.nc1
    assert found.cdnv != found.cdnv
    constant = torch.full((10, 3), 0.1)
    with pytest.warns(Undefined) as record:
        found = gs.measures.neural_collapse(constant, torch.arange(10) % 2, weight=torch.ones(2, 3))
    said = " ".join(str(w.message) for w in record)
    assert found.nc1 != found.nc1
    for reason in ("NC1 is not defined: all class means coincide", "NC2", "CDNV", "NC3"):
        assert reason in said
    symmetric = torch.tensor([[-1.0], [0.0], [1.0]]).repeat(4, 1)
    with pytest.warns(Undefined, match="the mean of class 1 is the mean of all classes"):
        gs.measures.neural_collapse(symmetric, torch.arange(12) % 3)


def test_without_classifier_nc3_and_nc4_are_absent():
    found = gs.measures.neural_collapse(*clusters(20, 3, 3, 6))
    assert found.nc3 is None
    assert found.nc4 is None


def test_outputs_take_the_place_of_a_classifier():
    features, labels = clusters(40, 4, 3, 7)
    outputs = torch.randn(40, 3, dtype=torch.float64)
    found = gs.measures.neural_collapse(features, labels, outputs)
    assert found.nc4 == reference.nc4(features.numpy(), labels.numpy(), outputs.numpy())


def test_against_scikit_learn():
    """Linear discriminant analysis is NC1 by another name, nearest centroids are NC4."""
    from sklearn.covariance import empirical_covariance
    from sklearn.neighbors import NearestCentroid

    features, labels = clusters(90, 4, 3, 10, spread=2.0)
    outputs = torch.randn(90, 3, dtype=torch.float64)
    found = gs.measures.neural_collapse(features, labels, outputs)
    predicted = NearestCentroid().fit(features.numpy(), labels.numpy()).predict(features.numpy())
    assert found.nc4 == float((torch.tensor(predicted) != outputs.argmax(1)).double().mean())
    within = sum(empirical_covariance(features[labels == c].numpy()) for c in range(3))
    assert found.within == pytest.approx(np.trace(within), rel=1e-12)


def test_wide_features_need_no_square_matrix():
    """100,000 features: a covariance matrix would take 80 GB."""
    features, labels = clusters(30, 100_000, 3, 8, dtype=torch.float32)
    found = gs.measures.neural_collapse(features, labels)
    assert 0 < found.nc1 < 10


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained():
    features, labels = clusters(20, 3, 3, 9)
    cases = {
        "same examples": lambda: gs.measures.neural_collapse(features, labels[:5]),
        "whole numbers": lambda: gs.measures.neural_collapse(features, labels + 0.5),
        "one-hot": lambda: gs.measures.neural_collapse(features, torch.rand(20, 3)),
        "among the given classes": lambda: gs.measures.neural_collapse(features, labels, classes=2),
        "weight must have shape": lambda: gs.measures.neural_collapse(features, labels, weight=torch.ones(3, 4)),
        "numbered from 0": lambda: gs.measures.neural_collapse(features, labels + 5, weight=torch.ones(3, 3)),
        "ridge must be": lambda: gs.measures.neural_collapse(features, labels, ridge=-1.0),
        "bias belongs": lambda: gs.measures.neural_collapse(features, labels, bias=torch.ones(3)),
        "got none": lambda: gs.measures.neural_collapse(features[:0], labels[:0]),
        "finite": lambda: gs.measures.neural_collapse(features / 0, labels),
        "must be a torch.Tensor": lambda: gs.measures.neural_collapse(features, [0, 1]),
    }
    for words, call in cases.items():
        with pytest.raises(InputError, match=words):
            call()
    measure = gs.measures.Collapse()
    with pytest.raises(InputError, match="every batch must have the same entries"):
        measure.merge(measure.update(features, labels), measure.update(features, labels, features))
