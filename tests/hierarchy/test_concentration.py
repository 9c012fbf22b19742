"""Concentration measures against loops over pairs, closed forms and the law of random subspaces."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.base.user_warnings import UndefinedMeasureWarning
from gramscope.hierarchy.mask_concentration import (
    class_metric,
    coactivation,
    concentration,
    mean_projector,
    metric_spectrum,
    overlap_rank,
    subspace_overlap,
    update_alignment,
)
from references.weight_free import (
    coactivation_by_pairs,
    mean_metric_by_pairs,
    overlap_by_angles,
    participation,
)

# Sums of at most a few hundred float64 terms, in another order.
ROUNDING = {"rtol": 1e-11, "atol": 1e-12}


def case(seed, n=9, units=6, width=5, smooth=False):
    rng = np.random.default_rng(seed)
    slopes = rng.standard_normal((n, units)) if smooth else (rng.random((n, units)) < 0.6).astype(float)
    slopes[0, 0] = 1.0
    return slopes, rng.standard_normal((units, width)), rng.integers(0, 3, n)


def tensors(*arrays):
    return [torch.as_tensor(array) for array in arrays]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 12), units=st.integers(1, 12), smooth=st.booleans())
def test_participation_ratio_without_the_matrix(seed, n, units, smooth):
    masks, _, _ = case(seed, n, units, smooth=smooth)
    C = coactivation_by_pairs(masks)
    (given_,) = tensors(masks)
    np.testing.assert_allclose(coactivation(given_), C, **ROUNDING)
    assert overlap_rank(given_) == pytest.approx(participation(C), rel=1e-9)
    assert 1 - 1e-9 <= overlap_rank(given_) <= min(n, units) + 1e-9
    middle = masks - masks.mean(0)
    if np.abs(middle).max() > 1e-9:
        expected = participation(coactivation_by_pairs(middle))
        assert overlap_rank(given_, center=True) == pytest.approx(expected, rel=1e-8)
    else:
        assert math.isnan(overlap_rank(given_, center=True))


def test_masks_of_any_dtype_and_the_rank_of_independent_units():
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(400, 2000, generator=generator) < 0.5
    ranks = [overlap_rank(masks.to(dtype)) for dtype in (torch.bool, torch.int64, torch.float32, torch.float16)]
    assert ranks == [ranks[0]] * 4
    assert ranks[0] == pytest.approx(4.0, abs=0.1)  # the common direction, as the docstring warns
    # Marchenko-Pastur: n / (1 + n/N) directions once the common one is gone.
    assert overlap_rank(masks, center=True) == pytest.approx(400 / 1.2, rel=0.02)
    assert math.isnan(overlap_rank(torch.zeros(3, 4)))
    assert overlap_rank(1e-200 * masks[:5].double()) == pytest.approx(overlap_rank(masks[:5]))


def choice(pairs, labels, self_pairs):
    def chosen(mu, nu):
        if mu == nu and not self_pairs:
            return False
        if isinstance(pairs, tuple):
            return labels[mu] == pairs[0] and labels[nu] == pairs[1]
        return pairs == "all" or (labels[mu] == labels[nu]) == (pairs == "same")

    return chosen


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    smooth=st.booleans(),
    self_pairs=st.booleans(),
    pairs=st.sampled_from(["all", "same", "different", (0, 0), (0, 1), (2, 1)]),
)
def test_class_metric_against_loops_over_pairs(seed, smooth, self_pairs, pairs):
    masks, weight, labels = case(seed, smooth=smooth)
    labels[:6] = [0, 0, 1, 1, 2, 2]
    expected = mean_metric_by_pairs(weight, masks, choice(pairs, labels, self_pairs))
    if isinstance(pairs, tuple) and pairs[0] != pairs[1]:
        # D_μ D_ν is diagonal, so the mean over ordered pairs (a, b) is that over (b, a).
        np.testing.assert_allclose(expected, expected.T, **ROUNDING)
    s, w, y = tensors(masks, weight, labels)
    np.testing.assert_allclose(class_metric(w, s, y, pairs, self_pairs=self_pairs), expected, **ROUNDING)
    spectrum = metric_spectrum(w, s, y, pairs, self_pairs=self_pairs)
    np.testing.assert_allclose(spectrum, np.linalg.eigvalsh(expected)[::-1], rtol=1e-9, atol=1e-11)
    if not smooth:
        assert (spectrum >= 0).all()


def test_self_pairs_change_the_answer_and_only_within_a_class():
    masks, weight, labels = case(1)
    s, w, y = tensors(masks, weight, labels)
    with_, without = (class_metric(w, s, y, "same", self_pairs=flag) for flag in (True, False))
    assert float((with_ - without).abs().max()) > 1e-3
    torch.testing.assert_close(
        class_metric(w, s, y, "different"), class_metric(w, s, y, "different", self_pairs=False), rtol=0, atol=0
    )


def test_more_units_than_inputs_and_fewer():
    for units, width in ((3, 8), (8, 3)):
        masks, weight, _ = case(2, units=units, width=width)
        s, w = tensors(masks, weight)
        spectrum = metric_spectrum(w, s)
        assert spectrum.shape == (width,)
        assert int((spectrum > 1e-12).sum()) <= min(units, width)
        np.testing.assert_allclose(spectrum.sum(), class_metric(w, s).trace(), **ROUNDING)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 5), side=st.sampled_from(["input", "output"]))
def test_update_alignment_against_projectors(seed, k, side):
    masks, weight, labels = case(seed, units=9, width=5)
    delta = np.random.default_rng(seed + 1).standard_normal((7, 5))
    metric = mean_metric_by_pairs(weight, masks, lambda mu, nu: True)
    s, w, y, d = tensors(masks, weight, labels, delta)
    found = update_alignment(d if side == "input" else d.T, w, s, y, k=k, side=side)
    if found.gap > 1e-6 and found.undefined is None:
        assert found.overlap == pytest.approx(overlap_by_angles(delta.T @ delta, metric, k), abs=1e-7)
        twin = subspace_overlap(d.T @ d, class_metric(w, s, y), k)
        assert twin.overlap == pytest.approx(found.overlap, abs=1e-7)
        assert twin.gap == pytest.approx(found.gap, abs=1e-9)
    assert found.baseline == k / 5
    if k == 5 and found.undefined is None:
        assert found.overlap == pytest.approx(1.0)
        assert math.isnan(found.excess)


def test_random_subspaces_overlap_at_the_baseline():
    generator = torch.Generator().manual_seed(0)
    overlaps = []
    for _ in range(300):
        a, b = torch.randn(2, 12, 12, generator=generator, dtype=torch.float64)
        overlaps.append(subspace_overlap(a @ a.T, b @ b.T, 3).overlap)
    mean, error = np.mean(overlaps), np.std(overlaps) / math.sqrt(300)
    assert abs(mean - 0.25) < 5 * error
    assert error < 0.01


def test_alignment_says_why_it_is_undefined():
    masks, weight, _ = case(3)
    s, w = tensors(masks, weight)
    still = update_alignment(torch.zeros_like(w), w, s, k=2)
    assert math.isnan(still.overlap)
    assert still.undefined == "a matrix has 0 positive eigenvalues, too few for a top eigenspace of dimension 2"
    one = torch.outer(torch.ones(6), torch.ones(5)).double()
    assert "1 positive" in update_alignment(one, w, s, k=2).undefined
    assert update_alignment(one, w, s, k=1).undefined is None
    assert subspace_overlap(torch.eye(4), torch.diag(torch.arange(4.0)), 2).gap == pytest.approx(0.0)


def test_concentration_is_the_single_functions_layer_by_layer():
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 4), (5, 6), (3, 5)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    now = [w + 0.3 * torch.randn(w.shape, generator=generator) for w in start]
    x, labels = torch.randn(20, 4, generator=generator), torch.arange(20) % 2
    masks, h = [None], x
    for w in now:
        h = h @ w.T
        masks.append(h > 0)
        h = h.relu()
    found = concentration(now, masks, labels, start, k=4, pairs="same")
    assert [c.layer for c in found] == [1, 2, 3]
    for place, c in enumerate(found):
        mask, w, delta = masks[place + 1], now[place], now[place].double() - start[place].double()
        assert c.coactivation_rank == overlap_rank(mask)
        assert c.centred_rank == pytest.approx(overlap_rank(mask, center=True), nan_ok=True)
        torch.testing.assert_close(c.spectrum, metric_spectrum(w, mask, labels, "same"))
        assert c.metric_rank == pytest.approx(participation(class_metric(w, mask, labels, "same").numpy()))
        single = update_alignment(delta, w, mask, labels, "same", k=4)
        assert c.alignment == single or math.isnan(single.overlap)
        if place:
            below = now[place - 1].double() - start[place - 1].double()
            single = update_alignment(below, w, mask, labels, "same", k=4, side="output")
            assert c.incoming_alignment == single or math.isnan(single.overlap)
    assert found[0].incoming_alignment is None
    assert found[0].alignment.undefined is None
    # The third layer is 3 × 5: neither its change nor its metric has four directions.
    assert found[2].alignment.undefined is not None
    assert concentration(now, masks[1:])[0].alignment is None


def test_gradients_and_inputs_are_left_alone():
    masks, weight, labels = case(4)
    s, w, y = tensors(masks, weight, labels)
    w.requires_grad_(True)
    before = w.detach().clone(), s.clone()
    result = class_metric(w, s, y, "same")
    assert not result.requires_grad
    assert w.grad is None
    assert torch.equal(w, before[0])
    assert torch.equal(s, before[1])


def test_bad_input_is_named():
    masks, weight, labels = case(5)
    s, w, y = tensors(masks, weight, labels)
    with pytest.raises(InputError, match="one column for each row of weight"):
        class_metric(w.T, s)
    with pytest.raises(InputError, match="labels must be given"):
        class_metric(w, s, None, "same")
    with pytest.raises(InputError, match="one entry for each of the 9 examples"):
        class_metric(w, s, y[:4], "same")
    with pytest.raises(InputError, match="class 7 must have an example"):
        mean_projector(s, y, (0, 7))
    with pytest.raises(InputError, match="pairs must be"):
        mean_projector(s, y, "others")
    with pytest.raises(InputError, match="must be a pair to average over"):
        mean_projector(s, torch.zeros(9, dtype=torch.long), "different")
    with pytest.raises(InputError, match="must be a pair to average over"):
        mean_projector(s[:1], self_pairs=False)
    with pytest.raises(InputError, match="k must be a whole number from 1 to 5"):
        update_alignment(w, w, s, k=6)
    with pytest.raises(InputError, match="side must be"):
        update_alignment(w, w, s, k=1, side="left")
    with pytest.raises(InputError, match=r"update must have 5 columns"):
        update_alignment(w.T, w, s, k=1)
    with pytest.raises(InputError, match="must be finite"):
        overlap_rank(torch.full((2, 2), float("nan")))
    with pytest.raises(InputError, match="rows and columns"):
        overlap_rank(torch.zeros(0, 3))
    with pytest.raises(InputError, match="must be symmetric"):
        subspace_overlap(torch.triu(torch.ones(3, 3)), torch.eye(3), 1)
    with pytest.raises(InputError, match="one tensor for each of the 1 weights"):
        concentration([w], [s, s])
    with pytest.raises(InputError, match="initial_weights must have the shapes"):
        concentration([w], [s], initial_weights=[w.T])


def test_a_rank_that_is_not_defined_says_why():
    off, same = torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)
    for masks, centred, why in ((off, False, "zero everywhere"), (same, True, "same"), (same[:1], True, "one example")):
        with pytest.warns(UndefinedMeasureWarning, match=why):
            assert math.isnan(overlap_rank(masks, center=centred))


def test_labels_that_do_not_fit_are_refused_for_all_pairs():
    with pytest.raises(InputError, match="labels must have one entry for each of the 3"):
        class_metric(torch.eye(4), torch.ones(3, 4), torch.zeros(5, dtype=torch.long), "all")


def test_a_small_change_of_float32_weights_has_the_rank_of_the_step():
    """A step of rank one, a hundred thousandth of W: the rest of the difference is rounding of W."""
    rng = torch.Generator().manual_seed(0)
    start, up, down = (torch.randn(*size, generator=rng) for size in ((30, 20), (30, 1), (1, 20)))
    now, masks = start + 1e-5 * up @ down, torch.rand(40, 30, generator=rng) > 0.5
    assert concentration([now], [masks], None, [start], k=1)[0].alignment.undefined is None
    assert "1 positive" in concentration([now], [masks], None, [start], k=2)[0].alignment.undefined
    exact = concentration([now.double()], [masks], None, [now.double() - 1e-5 * (up @ down).double()], k=1)[0].alignment
    assert concentration([now], [masks], None, [start], k=1)[0].alignment.overlap == pytest.approx(
        exact.overlap, abs=0.05
    )
