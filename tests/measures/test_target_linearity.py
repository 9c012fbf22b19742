"""Target linearity against dense projectors, closed forms, scikit-learn and itself in batches."""

import math
import pickle
from itertools import pairwise

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from torch import nn

from gramscope.base.errors import GramscopeError, InputError
from gramscope.measures.linear_targets import (
    TargetLinearity,
    held_out_target_linearity,
    layer_target_linearity,
    target_linearities,
    target_linearity,
)
from gramscope.measures.measure import UndefinedMeasureWarning
from references.feature_learning import reference_target_linearity

MANY = settings(max_examples=60, deadline=None)


@MANY
@given(
    st.integers(2, 12), st.integers(1, 15), st.integers(1, 6), st.integers(1, 3), st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 10**6),
)  # fmt: skip
def test_against_the_dense_projector(n, p, rank, targets, center, dtype, seed):
    """n below and above p, rank-deficient, any dtype, not contiguous; 1e-10 is the accuracy of the pseudo-inverse."""
    torch.manual_seed(seed)
    factors = torch.randint(-3, 4, (p, rank)).double(), torch.randint(-3, 4, (rank, n)).double()
    h = (factors[0] @ factors[1]).to(dtype).T  # small integers: exact in every dtype, so the rank is known
    y = torch.randn(n, targets).to(dtype)
    found = target_linearity(h, y, center=center)
    assert found == pytest.approx(reference_target_linearity(h, y, center), abs=1e-10)
    centred = h.double() - h.double().mean(0) if center else h.double()
    assert found.rank == int(torch.linalg.matrix_rank(centred, rtol=1e-10))
    assert found.null == found.rank / (n - center)  # centring takes one direction from features and targets
    assert 0 <= found <= 1


@MANY
@given(st.integers(3, 30), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.integers(0, 10**6), st.data())
def test_batches_in_any_split_and_order(n, p, targets, center, seed, data):
    torch.manual_seed(seed)
    h, y = torch.randn(n, p) + 100, torch.randn(n, targets) - 50  # means far from zero
    cuts = sorted(data.draw(st.lists(st.integers(1, n - 1), max_size=4, unique=True)))
    order = data.draw(st.permutations(range(len(cuts) + 1)))
    bounds = [0, *cuts, n]
    measure = TargetLinearity(center=center)
    parts = [measure.update(h[a:b], y[a:b]) for a, b in pairwise(bounds)]
    state = parts[order[0]]
    for place in order[1:]:
        state = measure.merge(parts[place], state)
    whole = target_linearity(h, y, center=center)
    assert measure.compute(state) == pytest.approx(float(whole), abs=1e-10)
    assert measure.compute(state).rank == whole.rank


def test_streaming_keeps_the_digits_that_a_gram_matrix_would_lose():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(200, 6).double())[0]
    h = (
        basis
        * torch.tensor([1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10]).double()
        @ torch.linalg.qr(torch.randn(6, 6).double())[0]
    )
    y = basis[:, 5:] + 0.1 * torch.randn(200, 1).double()
    value = TargetLinearity().over([(h[a : a + 50], y[a : a + 50]) for a in range(0, 200, 50)])
    assert value.rank == 6
    assert value == pytest.approx(float(target_linearity(h, y)), abs=1e-5)  # 1e-10 of relative size, 1e-16 of rounding


def test_with_centred_features_it_is_the_r2_of_least_squares():
    torch.manual_seed(0)
    h, y = torch.randn(40, 5) + 3, torch.randn(40, 2)
    model = LinearRegression().fit(h.double().numpy(), y.double().numpy())
    residual = y.double().numpy() - model.predict(h.double().numpy())
    centred = y.double() - y.double().mean(0)
    assert target_linearity(h, y, center=True) == pytest.approx(1 - (residual**2).sum() / float(centred.square().sum()))


def test_classes_become_one_hot():
    torch.manual_seed(0)
    h, labels = torch.randn(30, 4), torch.randint(3, (30,))
    expected = float(target_linearity(h, nn.functional.one_hot(labels, 3).float()))
    assert target_linearity(h, labels) == pytest.approx(expected, abs=1e-14)
    assert target_linearity(h, labels.to(torch.uint8)) == pytest.approx(expected, abs=1e-14)
    assert target_linearity(h, labels == 1) <= 1
    measure = TargetLinearity(classes=3)
    missing = measure.merge(measure.update(h[:2], labels[:2]), measure.update(h[2:], labels[2:]))
    assert measure.compute(missing) == pytest.approx(expected, abs=1e-10)
    plain = TargetLinearity()
    three, one = plain.update(h, labels), plain.update(h, labels * 0)
    with pytest.raises(InputError, match="classes="):
        plain.merge(three, one)
    with pytest.raises(InputError, match="-100"):
        target_linearity(h, labels - 100)


def test_null_baseline_and_permutations():
    """Unrelated targets reach rank/n; the permutations say so, with their spread, and a seed fixes them."""
    torch.manual_seed(0)
    h, y = torch.randn(100, 30).double(), torch.randn(100, 2).double()
    found = target_linearity(h, y, permutations=300, seed=3)
    # E over permutations is exactly (rank - 1ᵀP1/n)/(n-1).
    ones = torch.ones(100, 1).double() / 10
    exact = (30 - float((torch.linalg.qr(h)[0].T @ ones).square().sum())) / 99
    assert found.permuted == pytest.approx(exact, abs=5 * found.permuted_std / math.sqrt(300))
    assert found.permuted == pytest.approx(found.null, abs=0.02)
    assert abs(found - found.permuted) < 5 * found.permuted_std
    again = target_linearity(h, y, permutations=300, seed=3)
    other = target_linearity(h, y, permutations=300, seed=4)
    assert again.permuted == found.permuted != other.permuted
    signal = target_linearity(h, h[:, :1] + 0.1 * y[:, :1], permutations=20)
    assert signal > signal.permuted + 10 * signal.permuted_std
    assert signal.excess > 0.9
    assert math.isnan(target_linearity(h, y).permuted)


@pytest.mark.parametrize("center", [False, True])
def test_more_features_than_examples_fit_anything_and_the_null_says_so(center):
    torch.manual_seed(0)
    found = target_linearity(torch.randn(10, 50), torch.randn(10), center=center)
    assert found == pytest.approx(1)
    assert found.null == 1
    assert math.isnan(found.excess)


def test_held_out():
    torch.manual_seed(0)
    h, noise = torch.randn(400, 20), torch.randn(400)
    truth = h[:, 0] + 2 * h[:, 1]
    assert held_out_target_linearity(h, truth, center=True) > 1 - 1e-10
    assert held_out_target_linearity(h, truth) > 0.9  # without an offset the mean of the targets is out of reach
    assert held_out_target_linearity(h, noise) < 0.05
    assert target_linearity(h[:25], noise[:25]) > 0.6  # the same noise looks learnt where it was fitted
    assert held_out_target_linearity(h[:25], noise[:25], h[25:], noise[25:]) < 0
    by_hand = LinearRegression().fit(
        h[:300].double().numpy(), truth[:300].double().numpy() + noise[:300].double().numpy()
    )
    y_test = (truth + noise)[300:].double()
    residual = y_test.numpy() - by_hand.predict(h[300:].double().numpy())
    total = float((y_test - (truth + noise)[:300].double().mean()).square().sum())
    found = held_out_target_linearity(h[:300], (truth + noise)[:300], h[300:], (truth + noise)[300:], center=True)
    assert found == pytest.approx(1 - (residual**2).sum() / total, abs=1e-6)
    assert held_out_target_linearity(h, noise, seed=1) != held_out_target_linearity(h, noise, seed=2)
    labels = torch.randint(3, (400,))
    assert held_out_target_linearity(h[:300], labels[:300], h[300:], labels[300:].clamp(max=1)) < 0.1


def test_undefined_and_refused():
    h = torch.randn(6, 2)
    for constant in (torch.full((6,), 0.1), torch.zeros(6, 2), torch.full((6,), 1e8)):
        with pytest.warns(UndefinedMeasureWarning, match="do not vary"):
            assert math.isnan(target_linearity(h, constant))
    with pytest.warns(UndefinedMeasureWarning, match="do not vary"):
        assert math.isnan(held_out_target_linearity(h, torch.ones(6)))
    with pytest.warns(UndefinedMeasureWarning, match="do not vary"):
        assert math.isnan(target_linearity(h[:1], torch.randn(1)))
    assert target_linearity(torch.zeros(6, 2), torch.randn(6)) == 0
    assert target_linearity(torch.full((6, 2), 0.3), torch.randn(6), center=True) == 0  # constant features
    for bad in (
        lambda: target_linearity(h, torch.randn(5)),
        lambda: target_linearity(h * math.nan, torch.randn(6)),
        lambda: target_linearity(h, torch.full((6,), math.inf)),
        lambda: target_linearity(h[:0], torch.randn(0)),
        lambda: target_linearity(h[:, :0], torch.randn(6)),
        lambda: target_linearity(h, torch.randn(6, dtype=torch.complex64)),
        lambda: target_linearity(h, torch.randn(6), tol=2.0),
        lambda: held_out_target_linearity(h, torch.randn(6), test_features=h),
        lambda: held_out_target_linearity(h, torch.randn(6), h[:, :1], torch.randn(6)),
        lambda: held_out_target_linearity(h, torch.randn(6), test_share=1.0),
        lambda: TargetLinearity().over([]),
    ):
        with pytest.raises(GramscopeError):
            bad()


def test_scale_does_not_matter_until_squares_leave_float64():
    torch.manual_seed(0)
    h, y = torch.randn(30, 4).double(), torch.randn(30, 2).double()
    expected = float(target_linearity(h, y))
    with pytest.raises(GramscopeError, match="powers of it leave float64"):
        target_linearity(1e200 * h, y)
    for scale in (1e-100, 1e100):
        assert target_linearity(scale * h, y / scale) == pytest.approx(expected, abs=1e-12)
        held_out = held_out_target_linearity(scale * h, y / scale)
        assert held_out == pytest.approx(held_out_target_linearity(h, y), abs=1e-10)
        streamed = TargetLinearity().over([(scale * h[:9], y[:9] / scale), (scale * h[9:], y[9:] / scale)])
        assert streamed == pytest.approx(expected, abs=1e-12)


def test_rank_cut_can_be_set():
    torch.manual_seed(0)
    h = torch.randn(50, 3) @ torch.randn(3, 10)  # float32 products: rank 3 and rounding
    y = torch.randn(50)
    assert target_linearity(h, y, tol=0.0).rank == 10
    assert target_linearity(h, y, tol=1e-5).rank == target_linearity(h, y).rank == 3


def bottleneck(n=240, seed=0):
    """Inputs, features of rank 20 in 160 columns by float32 products, the same in float64, and targets."""
    rng = torch.Generator().manual_seed(seed)
    x, a, b = (torch.randn(*size, generator=rng) for size in ((n, 64), (64, 20), (20, 160)))
    y = torch.randn(n, 3, generator=rng) + 0.12 * x @ torch.randn(64, 3, generator=rng)
    return x, (x @ a) @ b, x.double() @ a.double() @ b.double(), y


@pytest.mark.parametrize("center", [False, True])
def test_float32_products_have_the_rank_of_their_factors(center):
    """Rounding filled all 160 directions, which held 0.7 of any targets, and was inverted for unseen examples."""
    _, h, exact, y = bottleneck()
    found, wanted = target_linearity(h, y, center=center), target_linearity(exact, y, center=center)
    assert found.rank == wanted.rank == 20
    assert float(found) == pytest.approx(float(wanted), abs=1e-6)
    assert held_out_target_linearity(h, y, center=center) == pytest.approx(
        held_out_target_linearity(exact, y, center=center), abs=1e-5
    )
    batches = TargetLinearity(center=center).over([(h[:7], y[:7]), (h[7:100], y[7:100]), (h[100:], y[100:])])
    assert batches.rank == 20
    assert float(batches) == pytest.approx(float(found), abs=1e-10)
    low = target_linearity(h.bfloat16(), y, center=center)
    assert low.rank == 20
    assert float(low) == pytest.approx(float(wanted), abs=5e-3)
    assert target_linearity(h.bfloat16().float(), y, center=center) == low


@MANY
@given(
    st.integers(20, 150), st.lists(st.integers(2, 60), min_size=2, max_size=5), st.booleans(), st.booleans(),
    st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_a_linear_map_never_raises_it(n, widths, relu, center, targeted, seed):
    """Layer after layer in float32, also for targets that are the very rounding of the last one.

    1e-4: a direction just above the floor is turned by its rounding, which is ten times smaller.
    """
    rng = torch.Generator().manual_seed(seed)
    h = torch.randn(n, widths[0], generator=rng)
    layers = [h.relu() if relu else h]
    for width in widths[1:]:
        w = torch.randn(layers[-1].shape[1], width, generator=rng) / math.sqrt(width)
        layers.append(layers[-1] @ w)
    y = torch.randn(n, 2, generator=rng).double()
    if targeted:
        y = layers[-1].double() - layers[-2].double() @ w.double() + 1e-9 * y[:, :1]
    found = [target_linearity(layer, y, center=center) for layer in layers]
    for before, after in pairwise(found):
        assert after.rank <= before.rank
        assert float(after) <= float(before) + 1e-4


def test_linear_layers_do_not_raise_it():
    x, _, _, y = bottleneck()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20, bias=False), nn.Linear(20, 160, bias=False), nn.Linear(160, 90, bias=False))
    found = layer_target_linearity(model, x[:180], y[:180], test=(x[180:], y[180:]))
    assert [value.rank for value in found.values()] == [64, 20, 20, 20]
    assert found["1"] == pytest.approx(float(found["0"]), abs=1e-6)
    assert found["2"] == pytest.approx(float(found["0"]), abs=1e-6)
    assert found["2"].held_out == pytest.approx(found["1"].held_out, abs=1e-5)


class Mixed(nn.Module):
    """A bfloat16 layer whose rounding a float32 layer carries on, as under autocast."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(20, 100, bias=False).bfloat16()
        self.high = nn.Linear(100, 100, bias=False)

    def forward(self, x):
        return self.high(self.low(x.bfloat16()).float())


def test_rounding_of_an_earlier_layer_stays_rounding():
    torch.manual_seed(0)
    model, x, y = Mixed(), torch.randn(300, 20), torch.randn(300)
    found = layer_target_linearity(model, x, y)
    assert [value.rank for value in found.values()] == [20, 20, 20]
    h = model(x)
    assert target_linearity(h, y).rank > 90  # float32 numbers, and nothing in them tells
    assert target_linearity(h, y, dtype=torch.bfloat16).rank == 20
    assert TargetLinearity(dtype=torch.bfloat16).over([(h[:9], y[:9]), (h[9:], y[9:])]).rank == 20
    with pytest.raises(InputError, match="dtype must be a floating one"):
        target_linearity(h, y, dtype=torch.int32)


class OneByOne(nn.Module):
    """Calls the children of containers, never the containers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.more = nn.ModuleList([nn.Linear(8, 3)])
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        for layer in (*self.layers, *self.more):
            x = layer(x)
        return x


def test_layers_of_a_model_that_iterates_over_its_containers():
    torch.manual_seed(0)
    model, x, y = OneByOne(), torch.randn(30, 4), torch.randn(30)
    found = layer_target_linearity(model, x, y, test=(x, y))
    assert list(found) == ["(input)", "layers.0", "layers.1", "more.0"]
    assert float(found["layers.1"]) == float(target_linearity(model.layers(x), y))
    with pytest.raises(InputError, match=r"'layers' \(Sequential\) must run .* or the children"):
        layer_target_linearity(model, x, y, "layers")
    with pytest.raises(InputError, match="'unused'"):
        layer_target_linearity(model, x, y, ["layers.*", "unus*"])


def test_the_value_is_a_float_that_pickles():
    found = target_linearity(torch.randn(9, 2), torch.randn(9), permutations=3)
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found == found.value
    assert (copied.rank, copied.permuted, copied.examples) == (found.rank, found.permuted, 9)


def test_several_layers_at_once_have_the_values_of_each():
    """Also those far from zero, in less than float64, of less than full rank, and of more columns than examples."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(30, 6, generator=rng)
    layers = {"far": x.double() + 1e6, "short": x.bfloat16(), "rank": x[:, :2] @ x[:2], "wide": x.repeat(1, 6) ** 3}
    targets = torch.randn(30, 2, generator=rng) + 100
    found = target_linearities(layers, targets)
    assert list(found) == list(layers)
    for name, rows in layers.items():
        alone = target_linearity(rows, targets)
        assert found[name].rank == alone.rank
        assert float(found[name]) == pytest.approx(float(alone), rel=1e-12)
    exact = reference_target_linearity(layers["short"].double(), targets)
    assert float(found["short"]) == pytest.approx(float(exact), rel=1e-10)
    with pytest.warns(UndefinedMeasureWarning, match="do not vary"):
        assert math.isnan(target_linearities(layers, 0 * targets)["far"])
    with pytest.raises(InputError, match="got 30 and 29 rows"):
        target_linearities(layers, targets[1:])


def test_layers_one_after_another():
    """A trained network is more linear in its targets from layer to layer; an untrained one is not."""
    torch.manual_seed(0)
    x = torch.randn(400, 8).double()
    y = (x[:, :1] * x[:, 1:2]) + x[:, 2:3].square() - 1
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    at_start = layer_target_linearity(model, x[:200], y[:200], ["1", "3"], test=(x[200:], y[200:]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        (model(x[:200]) - y[:200]).square().mean().backward()
        optimizer.step()
    found = layer_target_linearity(model, x[:200], y[:200], ["1", "3"], test=(x[200:], y[200:]), permutations=5)
    assert list(found) == ["(input)", "1", "3"]
    assert found["(input)"] < 0.15
    assert found["(input)"] < found["1"] < found["3"]
    assert found["3"].held_out > found["1"].held_out > found["(input)"].held_out
    assert found["3"].held_out > at_start["3"].held_out + 0.3
    assert found["3"].permuted == pytest.approx(found["3"].null, abs=0.05)
    with pytest.raises(InputError, match="rows"):
        layer_target_linearity(nn.Conv1d(8, 2, 1).double(), x[:, :, None].repeat(1, 1, 3), y, "", reduce="unfold")


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("rank", [5, 12])
def test_more_features_than_examples(rank, center):
    """The small factor of a wide matrix stands for it: same rank, same span, same held-out map."""
    rng = torch.Generator().manual_seed(rank)
    h = torch.randn(12, rank, generator=rng).double() @ torch.randn(rank, 70, generator=rng).double()
    y, h_test, y_test = (torch.randn(*size, generator=rng).double() for size in ((12, 2), (6, 70), (6, 2)))
    mean = h.mean(0) if center else torch.zeros(70).double()
    u, s, v = torch.linalg.svd(h - mean, full_matrices=False)
    kept = s > 1e-10 * s[0]
    centred = y - y.mean(0)
    found = target_linearity(h, y, center=center)
    assert found.rank == int(kept.sum())
    exact = (u[:, kept].mT @ centred).square().sum() / centred.square().sum()
    assert float(found) == pytest.approx(float(exact), rel=1e-12)
    coefficients = v[kept].mT @ ((u[:, kept].mT @ centred) / s[kept, None])
    truth = y_test - y.mean(0)
    missed = (truth - (h_test - mean) @ coefficients).square().sum() / truth.square().sum()
    held_out = held_out_target_linearity(h, y, h_test, y_test, center=center)
    assert held_out == pytest.approx(1 - float(missed), rel=1e-10)


def test_labels_with_gaps_are_the_classes_that_occur():
    """Hash values as labels: one column for each number up to the largest would be terabytes."""
    rng = torch.Generator().manual_seed(0)
    h, labels = torch.randn(60, 5, generator=rng), torch.arange(60) % 10
    whole = target_linearity(h, labels)
    assert float(target_linearity(h, labels * 10**9)) == pytest.approx(float(whole), rel=1e-12)
    assert float(target_linearity(h, labels.to(torch.uint16))) == float(whole)
    held_out = held_out_target_linearity(h[:40], labels[:40], h[40:], labels[40:])
    assert held_out_target_linearity(
        h[:40], labels[:40] * 10**9, h[40:], labels[40:] * 10**9
    ) == pytest.approx(held_out, rel=1e-12)  # fmt: skip
    with pytest.raises(InputError, match="without large gaps, but these need one-hot targets of 60 x 9000000001"):
        TargetLinearity().update(h, labels * 10**9)
    with pytest.raises(InputError, match="label -100"):
        target_linearity(h, labels - 100)


@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_empty_batch_adds_nothing(classes, at):
    torch.manual_seed(0)
    h, y = torch.randn(9, 2), torch.randint(3, (9,)) if classes else torch.randn(9, 2)
    measure = TargetLinearity(classes=classes)
    batches = [(h[:4], y[:4]), (h[4:], y[4:])]
    whole = measure.over(batches)
    batches.insert(at, (h[:0], y[:0]))
    assert measure.over(batches) == whole
    assert measure.over(batches).examples == 9
    with pytest.raises(InputError, match="needs examples"):
        measure(h[:0], y[:0])
    with pytest.raises(InputError, match="same widths"):
        measure.merge(measure.update(torch.randn(0, 5), y[:0]), measure.update(h, y))


def test_labels_of_no_examples_fit_any_number_of_classes():
    measure, h, y = TargetLinearity(), torch.randn(8, 2), torch.arange(8) % 3
    assert measure.over([(h[:0], y[:0]), (h, y)]) == measure(h, y) == measure.over([(h, y), (h[:0], y[:0])])


@pytest.mark.parametrize("permutations", [-1, 2.5])
def test_a_number_of_permutations_that_is_none_is_refused(permutations):
    jaxtyping.config.update("jaxtyping_disable", True)  # the tests' type checker would refuse 2.5 first
    try:
        with pytest.raises(InputError, match="permutations must be a whole number"):
            target_linearity(torch.randn(6, 2), torch.randn(6), permutations=permutations)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
