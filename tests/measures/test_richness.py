"""D_LR: the exact cases, random shapes against the definition, corners; the three curves."""

import math
from functools import reduce
from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.measures.eigenfunction_curves import orthonormalised
from gramscope.measures.lazy_or_rich import richness_and_similarity
from references import richness as reference

Undefined = gs.measures.UndefinedMeasureWarning
TARGETS = ("raw", "projection")


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def one_hot(labels, classes=10):
    return nn.functional.one_hot(labels, classes).double()


def rotated(x, p, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return x @ torch.linalg.qr(torch.randn(p, p, generator=rng, dtype=torch.float64)).Q[: x.shape[1]]


class TestExactCases:
    """The table of docs/richness.md; n = 1000, C = 10."""

    labels = torch.arange(1000) % 10
    scales = torch.logspace(0, -2, 10, dtype=torch.float64)

    def both(self, features, outputs):
        return [gs.measures.richness(features, outputs, target) for target in TARGETS]

    def test_collapsed_features_balanced_one_hot(self):
        y = one_hot(self.labels)
        assert self.both(rotated(y, 64), y) == pytest.approx([0, 0], abs=1e-12)

    def test_isotropic_collapse_with_outputs_of_many_scales(self):
        y = one_hot(self.labels)
        assert self.both(rotated(y, 64), y * self.scales) == pytest.approx([0.518, 0], abs=5e-4)

    def test_features_equal_to_those_outputs(self):
        f = one_hot(self.labels) * self.scales
        assert self.both(rotated(f, 64), f) == pytest.approx([0, 0.518], abs=5e-4)

    def test_independent_features(self):
        """One draw. An earlier run gave .628 and .602 without n or seed; of some forty pairs tried this one agrees."""
        rng = torch.Generator().manual_seed(0)
        phi = torch.randn(1000, 64, generator=rng, dtype=torch.float64)
        f = phi @ torch.randn(64, 10, generator=rng, dtype=torch.float64)
        assert self.both(phi, f) == pytest.approx([0.62765, 0.60154], abs=1e-5)

    def test_imbalanced_collapse(self):
        # An earlier run gave .441 and does not state the imbalance. Sizes that halve from class to class come
        # near, by how they are rounded: .4432 for 2⁰ ... 2⁹, .4420 for 1000 halved, .4403 for 2⁰ ... 2⁸ and 489.
        for sizes, expected in (
            (2 ** np.arange(10), 0.4432),
            (np.array([500, 250, 125, 62, 31, 16, 8, 4, 2, 2]), 0.4420),
            (np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 489]), 0.4403),
        ):
            y = one_hot(torch.from_numpy(np.repeat(np.arange(10), sizes)))
            assert self.both(rotated(y, 64), y) == pytest.approx([0, expected], abs=5e-5)


class TestClosedForms:
    @settings(max_examples=40, deadline=None)
    @given(sizes=st.lists(st.integers(1, 60), min_size=2, max_size=9), seed=st.integers(0, 10**6))
    def test_imbalanced_collapse(self, sizes, seed):
        """Class shares w: ``1 - (1 - s₂)/√((C-1)(s₂ - 2s₃ + s₂²))``, s_k = Σ w^k, since these are tr G and tr G² of the
        centred Gram matrix G = diag(w) - wwᵀ.
        """
        classes, shares = len(sizes), np.array(sizes) / sum(sizes)
        labels = torch.from_numpy(np.repeat(np.arange(classes), sizes))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        y = one_hot(labels[order], classes)
        s2, s3 = (shares**2).sum(), (shares**3).sum()
        expected = 1 - (1 - s2) / np.sqrt((classes - 1) * (s2 - 2 * s3 + s2**2))
        assert gs.measures.richness(rotated(y, 12), y) == pytest.approx(0, abs=1e-12)
        assert gs.measures.richness(rotated(y, 12), y, "projection") == pytest.approx(expected, abs=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(p=st.integers(1, 20), c=st.integers(1, 20), seed=st.integers(0, 10**6))
    def test_white_features_with_any_readout(self, p, c, seed):
        """ΦᵀΦ = 1 and F = ΦW: raw ``1 - |W|²/(√p |WᵀW|)``, projection ``1 - √(rank W/p)``, whatever W is."""
        rng = torch.Generator().manual_seed(seed)
        phi = torch.randn(50, p, generator=rng, dtype=torch.float64)
        phi = torch.linalg.qr(phi - phi.mean(0)).Q
        w = torch.randn(p, c, generator=rng, dtype=torch.float64)
        raw = 1 - float(w.square().sum() / (w.mT @ w).norm()) / p**0.5
        assert gs.measures.richness(phi, phi @ w) == pytest.approx(raw, abs=1e-12)
        projection = 1 - (min(p, c) / p) ** 0.5
        assert gs.measures.richness(phi, phi @ w, "projection") == pytest.approx(projection, abs=1e-10)

    def test_independent_features_on_average(self):
        """iid features and Gaussian readout, in expectation, with m = n-1 and a = 1 + (p+1)/m from E tr S² = p·a:
        raw ``1 - √(C a/(p + (C+1) a))``, projection ``1 - √(C/p) (1 + (p-C)/m)/√a``.

        For n → ∞: 1 - √(C/(p+C+1)) and 1 - √(C/p). Tolerance: four standard errors of 300 draws (.0007); the formulas
        put the mean inside of roots and fractions, which costs .0005 here.
        """
        n, p, c = 200, 64, 10
        rng = torch.Generator().manual_seed(0)
        found = []
        for _ in range(300):
            phi = torch.randn(n, p, generator=rng, dtype=torch.float64)
            f = phi @ torch.randn(p, c, generator=rng, dtype=torch.float64)
            found.append([gs.measures.richness(phi, f, target) for target in TARGETS])
        a = 1 + (p + 1) / (n - 1)
        expected = [1 - (c * a / (p + (c + 1) * a)) ** 0.5, 1 - (c / p / a) ** 0.5 * (1 + (p - c) / (n - 1))]
        assert np.mean(found, axis=0) == pytest.approx(expected, abs=0.003)  # .635 and .605 for n → ∞ are far off


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(3, 40),
    p=st.integers(1, 60),
    c=st.integers(1, 8),
    rank=st.integers(1, 8),
    target=st.sampled_from(TARGETS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_against_the_definition(n, p, c, rank, target, dtype, seed):
    rng = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, p, generator=rng, dtype=torch.float64).to(dtype)
    f = torch.randn(n, c, generator=rng, dtype=torch.float64)
    if rank < c and dtype == torch.float64:  # rank deficient; in low precision rounding fills the rank up again
        f = f[:, :rank] @ torch.randn(rank, c, generator=rng, dtype=torch.float64)
    f = f.to(dtype)
    values = np.linalg.svd(f.double().numpy() - f.double().numpy().mean(0), compute_uv=False)
    kept = values > 1e-6 * values[0]
    if target == "projection" and (values[kept][-1] < 0.1 * values[0]):
        return  # which directions count as rounding depends on the dtype
    expected = reference.d_lr(phi.double().numpy(), f.double().numpy(), target)
    assert gs.measures.richness(phi, f, target) == pytest.approx(expected, abs=1e-11)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(4, 200),
    p=st.integers(1, 10),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    target=st.sampled_from(TARGETS),
    shift=st.sampled_from([0.0, 50.0]),
    seed=st.integers(0, 10**6),
)
def test_any_split_and_order(n, p, cuts, target, shift, seed):
    rng = torch.Generator().manual_seed(seed)
    phi = torch.randn(n, p, generator=rng, dtype=torch.float64) + shift
    f = phi @ torch.randn(p, 2, generator=rng, dtype=torch.float64)
    f = f + torch.randn(n, 2, generator=rng, dtype=torch.float64)
    measure = gs.measures.Richness(target)
    whole = measure(phi, f)
    order = torch.randperm(n, generator=rng)
    edges = sorted({0, n, *(min(cut, n) for cut in cuts)})
    states = [measure.update(phi[order[a:b]], f[order[a:b]]) for a, b in pairwise(edges)]
    assert measure.compute(reduce(measure.merge, states)) == pytest.approx(whole, abs=1e-10)


def test_float32_outputs_that_sum_to_zero_have_one_rank_less():
    """Rounding must not count as an output: softmax-like outputs have rank C-1 up to 1e-7."""
    rng = torch.Generator().manual_seed(0)
    phi = torch.randn(500, 20, generator=rng, dtype=torch.float64)
    f = phi @ torch.randn(20, 5, generator=rng, dtype=torch.float64)
    f = f - f.mean(1, keepdim=True)
    exact = gs.measures.richness(phi, f, "projection")
    assert gs.measures.richness(phi, f.float(), "projection") == pytest.approx(exact, abs=1e-5)
    assert gs.measures.richness(phi[:30].float(), f[:30].float(), "projection") == pytest.approx(
        gs.measures.richness(phi[:30], f[:30], "projection"), abs=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_outputs_count_in_low_precision(dtype):
    """Rounding is relative to each entry: a column a hundred times smaller keeps as many digits."""
    phi = one_hot(torch.arange(1000) % 10)
    f = (phi * torch.logspace(0, -2, 10, dtype=torch.float64)).to(dtype)
    for part in (slice(None), slice(0, 9), slice(0, 40)):  # moments, fewer examples than outputs, rows
        exact = gs.measures.richness(phi[part], f[part].double(), "projection")
        assert gs.measures.richness(phi[part], f[part], "projection") == pytest.approx(exact, abs=1e-14)
    assert exact == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n", [500, 20, 5])  # moments, rows, fewer examples than outputs
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_outputs_that_are_rounding_do_not_count(n, dtype, error):
    """Probabilities sum to 1 up to rounding: five outputs of six, in any dtype and whatever holds the numbers."""
    rng = torch.Generator().manual_seed(0)
    phi = torch.randn(n, 20, generator=rng, dtype=torch.float64)
    f = (0.2 * phi @ torch.randn(20, 6, generator=rng, dtype=torch.float64)).softmax(1)
    exact = gs.measures.richness(phi, f, "projection")
    found = gs.measures.richness(phi, f.to(dtype), "projection")
    assert found == pytest.approx(exact, abs=error)
    assert gs.measures.richness(phi, f.to(dtype).double(), "projection") == found
    measure = gs.measures.Richness("projection")
    split = measure.merge(measure.update(phi[:3], f[:3].to(dtype)), measure.update(phi[3:], f[3:].to(dtype)))
    assert measure.compute(split) == pytest.approx(found, abs=1e-10)


def test_outputs_that_vary_by_their_rounding_alone():
    """The same outputs for all examples, but for the last digit: no direction is left to compare with."""
    rng = torch.Generator().manual_seed(0)
    phi, noise = torch.randn(50, 4, generator=rng), torch.randn(50, 3, generator=rng)
    for target in TARGETS:
        with pytest.warns(Undefined, match="D_LR"):
            assert math.isnan(gs.measures.richness(phi, 5.0 + 1e-7 * noise, target))
    with pytest.warns(Undefined, match="vary by no more than the rounding"):
        assert math.isnan(gs.measures.richness(phi, 5.0 + 1.2e-5 * noise, "projection"))
    assert gs.measures.richness(phi, 5.0 + 1e-3 * noise, "projection") < 1


def test_more_outputs_than_examples():
    rng = torch.Generator().manual_seed(1)
    phi, f = torch.randn(6, 4, generator=rng).double(), torch.randn(6, 50, generator=rng).double()
    expected = reference.d_lr(phi.numpy(), f.numpy(), "projection")
    assert gs.measures.richness(phi, f, "projection") == pytest.approx(expected, abs=1e-12)


def test_undefined_is_nan_with_a_reason():
    with pytest.warns(Undefined, match="the set of outputs has the same features for all examples"):
        value = gs.measures.richness(torch.randn(9, 3), torch.full((9, 2), 0.3))
    assert value != value
    with pytest.warns(Undefined, match="the set of features has the same"):
        gs.measures.richness(torch.zeros(9, 3), torch.randn(9, 2))
    with pytest.warns(Undefined, match="at least 2 examples, got 1"):
        gs.measures.richness(torch.randn(1, 3), torch.randn(1, 2))


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained():
    with pytest.raises(InputError, match="same examples"):
        gs.measures.richness(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(InputError, match="target must be"):
        gs.measures.richness(torch.ones(3, 2), torch.ones(3, 2), "projected")
    with pytest.raises(InputError, match="finite"):
        gs.measures.richness(torch.ones(3, 2) / 0, torch.ones(3, 2))


def test_of_a_network_with_its_last_layer_found_or_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(1))
    model, x = model.double(), torch.randn(64, 5).double()  # float32 products differ with the size of a batch
    with torch.no_grad():
        phi, f = model[:4](x), model(x)
        early = model[:2](x)
    expected = gs.measures.richness(phi, f)
    assert gs.measures.network_richness(model, x) == pytest.approx(expected, abs=1e-12)
    assert gs.measures.network_richness(model, x.split(10)) == pytest.approx(expected, abs=1e-10)
    named = gs.measures.network_richness(model, x, layer="2", target="projection")
    assert named == pytest.approx(gs.measures.richness(early, f, "projection"), abs=1e-12)


@pytest.mark.parametrize("outputs", [40, 25])
def test_richness_and_initial_similarity_in_one_pass(outputs):
    """Far from zero too, and where only the first examples have outputs."""
    rng = torch.Generator().manual_seed(0)
    initial = torch.randn(40, 5, generator=rng)
    features = initial + torch.randn(40, 5, generator=rng) + 1e3
    f = (features @ torch.randn(5, 3, generator=rng))[:outputs]
    rich, similar = richness_and_similarity(initial, features, f)
    assert rich == pytest.approx(gs.measures.richness(features[:outputs], f), rel=1e-12)
    assert similar == pytest.approx(gs.measures.initial_similarity(initial, features), rel=1e-12)
    with pytest.warns(Undefined, match="'features' has the same features for all examples"):
        assert math.isnan(richness_and_similarity(initial, 0 * features + 1, f[:1].expand(40, 3) + initial[:, :3])[0])


def test_initial_similarity_and_norm():
    x = torch.randn(20, 4)
    assert gs.measures.initial_similarity(x, x) == pytest.approx(1.0, abs=1e-12)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(torch.full((2, 3), 1e-30))
    exact = sum(float(p.detach().double().square().sum()) for p in model.parameters()) ** 0.5
    assert gs.measures.parameter_norm(model) == pytest.approx(exact, rel=1e-14)
    tied = nn.ModuleList([model[0], model[0]])
    assert gs.measures.parameter_norm(tied) == gs.measures.parameter_norm(model[0])
    with pytest.raises(InputError, match="none"):
        gs.measures.parameter_norm(nn.ReLU())


class TestCurves:
    def data(self, n, p, c, seed=0):
        rng = np.random.default_rng(seed)
        mix = rng.standard_normal((p, p)) * np.logspace(0, -1.5, p)
        train, evaluation = rng.standard_normal((n, p)) @ mix + 0.3, rng.standard_normal((n, p)) @ mix + 0.3
        targets = evaluation @ rng.standard_normal((p, c)) + 0.5 * rng.standard_normal((n, c))
        return train, evaluation, targets

    @pytest.mark.parametrize(("n", "p", "c"), [(200, 12, 3), (100, 30, 1), (60, 5, 4)])
    def test_against_gram_schmidt(self, n, p, c):
        train, evaluation, targets = self.data(n, p, c)
        found = gs.measures.richness_curves(*map(torch.tensor, (train, evaluation, targets, targets[:, :1])))
        quality, intensity = reference.curves(train, evaluation, targets)
        utilisation, _ = reference.curves(train, evaluation, targets[:, :1])
        assert found.quality.numpy() == pytest.approx(quality, abs=1e-9)
        assert found.utilisation.numpy() == pytest.approx(utilisation, abs=1e-9)
        assert found.intensity.numpy() == pytest.approx(intensity, abs=1e-11)
        assert found.effective_dimension == pytest.approx(reference.effective_dimension(found.eigenvalues.numpy()))
        assert (found.rank, found.target_rank, found.output_rank) == (p, c, 1)
        assert bool((found.quality.diff() >= -1e-12).all())

    def test_any_split_and_order(self):
        train, evaluation, targets = map(torch.tensor, self.data(150, 10, 3))
        measure = gs.measures.RichnessCurves()
        whole = gs.measures.richness_curves(train, evaluation, targets)
        states = [measure.update(part, part="train") for part in train.split(40)]
        states += [measure.update(a, b) for a, b in zip(evaluation.split(33), targets.split(33), strict=True)]
        order = torch.randperm(len(states), generator=torch.Generator().manual_seed(0)).tolist()
        found = measure.compute(reduce(measure.merge, [states[i] for i in order]))
        assert torch.allclose(found.quality, whole.quality, atol=1e-10, rtol=0)
        assert torch.allclose(found.eigenvalues, whole.eigenvalues, atol=1e-12)

    def test_rich_features_reach_one_after_as_many_steps_as_classes(self):
        labels = torch.arange(90) % 3
        rng = torch.Generator().manual_seed(0)
        phi = rotated(one_hot(labels, 3), 8) + 1e-3 * torch.randn(90, 8, generator=rng, dtype=torch.float64)
        found = gs.measures.richness_curves(phi, phi, labels)
        assert float(found.quality[2]) > 0.999
        assert found.target_rank == 3

    def test_rank_deficient_features_end_early(self):
        train, evaluation, targets = self.data(100, 6, 2)
        wide = np.concatenate([train, train @ np.ones((6, 4))], 1)
        wide_evaluation = np.concatenate([evaluation, evaluation @ np.ones((6, 4))], 1)
        found = gs.measures.richness_curves(torch.tensor(wide), torch.tensor(wide_evaluation), torch.tensor(targets))
        assert found.rank == 6
        assert float(found.quality[-1]) == pytest.approx(
            float(gs.measures.richness_curves(*map(torch.tensor, (train, evaluation, targets))).quality[-1]), abs=1e-9
        )

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_has_the_rank_of_its_numbers(self, dtype):
        train, evaluation, targets = self.data(200, 12, 2)
        scales = torch.logspace(0, -3, 12, dtype=torch.float64)
        train, evaluation = (torch.tensor(x) * scales for x in (train, evaluation))
        low = gs.measures.richness_curves(train.to(dtype), evaluation.to(dtype), torch.tensor(targets))
        same = gs.measures.richness_curves(
            train.to(dtype).double(), evaluation.to(dtype).double(), torch.tensor(targets)
        )
        assert low.rank == same.rank == 12
        assert torch.equal(low.quality, same.quality)
        assert low.notes == ()

    @pytest.mark.parametrize("n", [100, 20])  # moments and rows
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_eigenvalues_that_are_rounding_do_not_count(self, n, dtype):
        """A bottleneck of six directions has six, and thirty columns: their rounding is no eigenfunction."""
        rng = torch.Generator().manual_seed(0)
        mix = torch.randn(6, 30, generator=rng, dtype=torch.float64)
        train, evaluation = (torch.randn(k, 6, generator=rng, dtype=torch.float64) @ mix for k in (n, 100))
        targets = torch.randn(100, 2, generator=rng, dtype=torch.float64)
        exact = gs.measures.richness_curves(train, evaluation, targets)
        found = gs.measures.richness_curves(train.to(dtype), evaluation.to(dtype), targets)
        assert found.rank == exact.rank == 6
        assert torch.allclose(found.quality, exact.quality, atol=0.05 if dtype == torch.bfloat16 else 0.01)
        assert found.effective_dimension == pytest.approx(exact.effective_dimension, rel=0.01)
        assert gs.measures.richness_curves(train, evaluation.to(dtype), targets).rank == 6
        assert gs.measures.richness_curves(train.to(dtype).double(), evaluation, targets).rank == 6

    def test_what_only_training_examples_show_is_no_direction_in_float32(self):
        """A feature that is constant on the evaluation set, but for rounding, must not pick up targets by chance."""
        rng = torch.Generator().manual_seed(0)
        train, evaluation = (torch.randn(200, 3, generator=rng) for _ in range(2))
        evaluation[:, 2] = evaluation[:, 0]  # as in no training example
        mix = torch.randn(3, 3, generator=rng)
        chance = torch.randn(200, 1, generator=rng)
        found = gs.measures.richness_curves(train @ mix, evaluation @ mix, chance)
        assert found.rank == 3
        exact = gs.measures.richness_curves(
            train.double() @ mix.double(), evaluation.double() @ mix.double(), chance.double()
        )
        assert torch.allclose(found.quality, exact.quality, atol=1e-5)

    def test_dependent_columns_are_no_directions(self):
        """Features that vary on the training set but not on the evaluation set must not pick up targets by chance."""
        rng = torch.Generator().manual_seed(0)
        e = torch.randn(30, 5, generator=rng, dtype=torch.float64)
        e[:, 2] = e[:, 0] - e[:, 1]
        q = orthonormalised(e)
        assert float(q[:, 2].abs().max()) == 0
        gram = q.mT @ q
        assert torch.allclose(gram, torch.diag(torch.tensor([1.0, 1, 0, 1, 1]).double()), atol=1e-12)

    def test_too_few_examples_are_said(self):
        rng = torch.Generator().manual_seed(0)
        phi, labels = torch.randn(10, 20, generator=rng), torch.arange(10) % 2
        with pytest.warns(UserWarning, match="reach 1 whatever"):
            found = gs.measures.richness_curves(phi, phi, labels)
        assert float(found.quality[-1]) == pytest.approx(1.0)
        assert any("span everything" in note for note in found.notes)
        assert any("do not determine" in note for note in found.notes)

    def test_undefined_and_wrong_input(self):
        zeros, y = torch.zeros(10, 2), torch.randn(10, 1)
        with pytest.warns(Undefined, match="all training features are zero"):
            gs.measures.richness_curves(zeros, zeros, y)
        x = torch.randn(10, 2)
        with pytest.warns(Undefined, match="all targets are zero"):
            assert bool(gs.measures.richness_curves(x, x, torch.zeros(10, 1)).quality.isnan().all())
        with pytest.raises(InputError, match="need targets"):
            gs.measures.richness_curves(x, x)
        measure = gs.measures.RichnessCurves()
        with pytest.raises(InputError, match="no evaluation set"):
            measure.compute(measure.update(x, part="train"))
        with pytest.raises(InputError, match="no training features"):
            measure.compute(measure.update(x, y))
        with pytest.raises(InputError, match="one width"):
            gs.measures.richness_curves(torch.randn(10, 3), x, y)

    def test_effective_dimension(self):
        assert gs.measures.effective_dimension(torch.tensor([5.0])) == 1.0
        assert gs.measures.effective_dimension(torch.tensor([5.0, 0.0, 0.0])) == 1.0
        assert gs.measures.effective_dimension(torch.tensor([1.0, 9.0, 1.0])) == pytest.approx(3.0)

    def test_effective_dimension_of_nothing_and_of_negative_eigenvalues(self):
        with pytest.warns(gs.measures.UndefinedMeasureWarning, match="all eigenvalues are zero"):
            assert math.isnan(gs.measures.effective_dimension(torch.zeros(3)))
        with pytest.raises(InputError, match="at least 0, got values from -1"):
            gs.measures.effective_dimension(torch.tensor([5.0, -1.0, 2.0]))
        rounded = gs.measures.effective_dimension(torch.tensor([9.0, 1.0, 1.0, -1e-7]))
        assert rounded == gs.measures.effective_dimension(torch.tensor([9.0, 1.0, 1.0, 0.0]))


def test_nystrom_eigenfunctions_approach_the_true_ones():
    """The Nyström test at a tenth of its size: the subspace of the first eigenfunctions from two disjoint samples."""
    rng = torch.Generator().manual_seed(0)
    p, n, k = 100, 1000, 5
    scales = torch.logspace(0, -2, p, dtype=torch.float64)
    a, b = (torch.randn(n, p, generator=rng, dtype=torch.float64) * scales for _ in range(2))
    found = gs.measures.richness_curves(a, b, b[:, :k])
    error = 1 - float(found.quality[k - 1])
    assert error < 0.25
    assert float(found.quality[-1]) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("target", ["raw", "projection"])
@pytest.mark.parametrize("factor", [1e-50, 1e50])
def test_richness_knows_no_size(factor, target):
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double()
    exact = gs.measures.richness(x, x[:, :2] ** 2, target)
    assert gs.measures.richness(factor * x, x[:, :2] ** 2 / factor, target) == pytest.approx(exact, rel=1e-12)


def test_curves_at_the_ends_of_float64():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, generator=rng, dtype=torch.float64), torch.randn(40, 1, generator=rng).double()
    plain = gs.measures.richness_curves(x, x, y)
    for factor in (2.0**-190, 2.0**190):
        scaled = gs.measures.richness_curves(x * factor, x * factor, y)
        assert torch.allclose(scaled.intensity, plain.intensity, rtol=1e-12)
        assert torch.allclose(scaled.quality, plain.quality, rtol=1e-10)
    with pytest.raises(InputError, match="powers of it leave float64"):
        gs.measures.richness_curves(x * 1e160, x, y)
    with pytest.raises(InputError, match="powers of it leave float64"):
        gs.measures.richness_curves(x * 1e-170, x, y)
    assert gs.measures.effective_dimension(torch.full((3,), 1e308, dtype=torch.float64)) == pytest.approx(3)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(InputError, match="eigenvalues must be finite"):
            gs.measures.effective_dimension(torch.tensor([1.0, bad, 2.0]))
