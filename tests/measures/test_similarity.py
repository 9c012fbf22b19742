"""CKA, debiased CKA in one pass, kernel CKA and alignments against full matrices."""

import subprocess
import sys
import warnings
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
from gramscope.linalg import Dense, Diagonal
from gramscope.measures import hsic
from gramscope.measures.hsic import LayerMoments, LayerState, tiled_products
from references import similarity as reference

Undefined = gs.measures.UndefinedMeasureWarning


@pytest.fixture
def as_users_run_it():
    # Wrong arguments reach our own checks only where the runtime type checker of the test suite is off.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pair(n, p, q, seed, *, shared=0.5, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=rng, dtype=torch.float64)
    y = torch.randn(n, q, generator=rng, dtype=torch.float64) + shared * x[:, :1]
    return x.to(dtype), y.to(dtype)


def assert_close(value, expected, tolerance=1e-12):
    assert abs(value - expected) <= tolerance, f"{value} is not {expected}"


def test_references_agree():
    x, y = pair(7, 3, 4, 0)
    k, l = reference.gram(x), reference.gram(y)  # noqa: E741
    by_matrices = reference.hsic_unbiased(k, l)
    assert_close(float(reference.hsic_by_quadruples(k, l)), float(by_matrices))
    assert_close(float(reference.hsic_one_pass(x, y)), float(by_matrices))
    with pytest.raises(AssertionError):
        assert_close(float(by_matrices), float(reference.hsic_biased(k, l)))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(4, 40),
    p=st.integers(1, 50),
    q=st.integers(1, 20),
    rank=st.integers(1, 50),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    debiased=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_cka_of_random_shapes(n, p, q, rank, dtype, debiased, seed):
    x, y = pair(n, p, q, seed)
    if rank < p:  # rank deficient
        x = x[:, :rank] @ torch.randn(rank, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x, y = x.to(dtype), y.to(dtype)
    k, l = (reference.gram(a.double() - a.double().mean(0)) for a in (x, y))  # noqa: E741
    hsic_of = reference.hsic_unbiased if debiased else reference.hsic_biased
    scale = float((k.norm() * l.norm()) / (n * (n - 3) if debiased else 1))
    own = float(hsic_of(k, k) * hsic_of(l, l)) ** 0.5
    if own < 1e-6 * scale:
        return  # the quotient of two roundings; tested for its warning elsewhere
    # Both computations round at 1e-15 of |K||L|, and the quotient divides that by what is left after debiasing.
    tolerance = 1e-13 * scale / own + 1e-13
    assert_close(gs.measures.cka(x, y, debiased=debiased), reference.cka(k, l, debiased), tolerance)


@pytest.mark.parametrize(("n", "p", "q"), [(8, 3, 2), (40, 200, 7), (500, 6, 5), (60, 30, 30)])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_one_pass_hsic_is_that_of_the_full_matrices(n, p, q, shift):
    x, y = pair(n, p, q, n)
    x, y = x + shift, y - 2 * shift
    # HSIC₁ does not change under shifts; centred, the reference keeps its digits.
    full = reference.hsic_unbiased(reference.gram(x - x.mean(0)), reference.gram(y - y.mean(0)))
    for state in (LayerState.of({"x": x, "y": y}), _from_batches(x, y, 3)):
        found = state.products().hsic(debiased=True)[0, 1] / (n * (n - 3))
        assert_close(float(found / full), 1.0, 1e-12)
    # Uncentred sums cancel: they lose (|mean|²/variance)² digits, which ours do not.
    assert_close(float(reference.hsic_one_pass(x, y) / full), 1.0, 1e-12 * (1 + p * shift**4))


def _from_batches(x, y, size):
    states = [LayerState.of({"x": a, "y": b}) for a, b in zip(x.split(size), y.split(size), strict=True)]
    return reduce(lambda a, b: a.merged(b), states)


def test_two_routes_to_the_same_products():
    torch.manual_seed(0)
    layers = {str(i): torch.randn(50, p) + i for i, p in enumerate([3, 700, 1, 20, 400])}
    rows = LayerState.of(layers).rows
    whole = torch.cat([x.double() for x in layers.values()], 1)
    moments = LayerMoments.of(whole, tuple(x.shape[1] for x in layers.values()))
    tiles, by_moments = tiled_products(rows), moments.products()
    for name in ("inner", "diagonals", "traces"):
        assert torch.allclose(getattr(tiles, name), getattr(by_moments, name), rtol=1e-12)


def test_small_tiles_cover_every_pair(monkeypatch):
    x, y = pair(101, 30, 200, 5)
    whole = gs.measures.cka(x, y, debiased=True)
    monkeypatch.setattr(hsic, "TILE_BYTES", 1)
    assert_close(gs.measures.cka(x, y, debiased=True), whole)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(5, 60),
    p=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    debiased=st.booleans(),
    shift=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 10**6),
)
def test_any_split_and_order(n, p, cuts, debiased, shift, seed):
    x, y = pair(n, p, 3, seed)
    x = x + shift
    measure = gs.measures.CKA(debiased=debiased)
    whole = measure(x, y)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    edges = sorted({0, n, *(min(cut, n) for cut in cuts)})
    states = [measure.update(x[order][a:b], y[order][a:b]) for a, b in pairwise(edges)]
    left = reduce(measure.merge, states)
    right = reduce(lambda a, b: measure.merge(b, a), states)
    assert_close(measure.compute(left), whole, 1e-10)
    assert_close(measure.compute(right), whole, 1e-10)


def test_minibatch_averages_are_what_it_is_not():
    """What packages report for a loader depends on the batch size; the one-pass value does not."""
    x, y = pair(200, 10, 10, 1, shared=1.0)
    whole = gs.measures.cka(x, y, debiased=True)

    def averaged(size):
        terms = torch.zeros(3, dtype=torch.float64)
        for a, b in zip(x.split(size), y.split(size), strict=True):
            k, l = reference.gram(a), reference.gram(b)  # noqa: E741
            terms += torch.stack([reference.hsic_unbiased(*two) for two in ((k, l), (k, k), (l, l))])
        return float(terms[0] / (terms[1] * terms[2]).sqrt())

    measure = gs.measures.CKA(debiased=True)
    for size in (8, 20, 50):
        assert abs(averaged(size) - whole) > 1e-4
        assert_close(measure.over(zip(x.split(size), y.split(size), strict=True)), whole, 1e-12)


def test_what_cka_does_not_see_and_what_it_does():
    x, y = pair(30, 5, 4, 3)
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    assert_close(gs.measures.cka(x, 4 * x @ rotation + 7), 1.0)
    assert_close(gs.measures.cka(x, y), gs.measures.cka(y, x))
    stretched = x * torch.tensor([10.0, 1, 1, 1, 1])
    assert gs.measures.cka(x, stretched) < 0.9


def test_debiasing_matters_for_few_examples():
    x, y = pair(20, 500, 500, 4, shared=0.0)
    assert gs.measures.cka(x, y) > 0.9
    assert abs(gs.measures.cka(x, y, debiased=True)) < 0.2  # noise of 190 pairs


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e8, -3.3])
@pytest.mark.parametrize("n", [6, 5000])
def test_constant_features_are_named(debiased, value, n):
    x = torch.randn(n, 3)
    with pytest.warns(Undefined, match=r"'b' has the same features for all examples"):
        assert gs.measures.cka(x, torch.full((n, 2), value, dtype=torch.float64), debiased=debiased) != 0.0


def test_undefined_is_nan_with_a_reason():
    with pytest.warns(Undefined, match="at least 4 examples, got 3"):
        value = gs.measures.cka(torch.randn(3, 2), torch.randn(3, 2), debiased=True)
    assert value != value
    with pytest.warns(Undefined, match="at least 2 examples, got 1"):
        gs.measures.cka(torch.randn(1, 2), torch.randn(1, 2))
    with pytest.warns(Undefined, match="at least 2 examples, got 0"):
        gs.measures.cka(torch.randn(0, 2), torch.randn(0, 2))
    with pytest.warns(Undefined, match="constant off its diagonal"):
        gs.measures.cka(torch.eye(6), torch.randn(6, 2), debiased=True)


def test_warning_points_at_the_users_line(tmp_path):
    # In a process of its own: under pytest the frames of the runtime type checker lie in between.
    script = tmp_path / "users_script.py"
    script.write_text("import torch, gramscope as gs\ngs.measures.cka(torch.ones(5, 2), torch.randn(5, 2))\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "users_script.py:2: UndefinedMeasureWarning: CKA is not defined where a layer 'a' has the same" in run.stderr


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained():
    x = torch.randn(5, 2)
    with pytest.raises(InputError, match="same examples"):
        gs.measures.cka(x, x[:4])
    with pytest.raises(InputError, match="finite"):
        gs.measures.cka(x / 0, x)
    with pytest.raises(InputError, match="two tensors"):
        gs.measures.cka({"a": x}, x)
    with pytest.raises(InputError, match="two tensors, or two dicts"):
        gs.measures.CKA()(x, {"b": x})
    with pytest.raises(InputError, match="two tensors, or two dicts"):
        gs.measures.CKA()(x)
    with pytest.raises(InputError, match="empty"):
        gs.measures.CKA()({})
    measure = gs.measures.CKA()
    with pytest.raises(InputError, match="merged"):
        measure.merge(measure.update({"a": x}), measure.update({"b": x}))
    with pytest.raises(InputError, match="empty iterable"):
        measure.over([])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_at_the_ends_of_bfloat16(size):
    x, y = pair(12, 5, 3, 8)
    tiny, y = (x * size).bfloat16(), y.bfloat16()
    expected = gs.measures.cka((tiny.double() / size), y)
    assert_close(gs.measures.cka(tiny, y), expected)
    assert_close(gs.measures.cka(tiny, tiny, debiased=True), 1.0)
    assert_close(gs.measures.richness(tiny, tiny), 0.0)


def test_features_of_no_width_and_of_float8():
    x = torch.randn(8, 3)
    with pytest.warns(Undefined, match="zero variance"):
        gs.measures.cka(torch.zeros(8, 0), x)
    small = x.to(torch.float8_e4m3fn)
    assert_close(gs.measures.cka(small, x), gs.measures.cka(small.float(), x))
    assert_close(gs.measures.cka(x > 0, x), gs.measures.cka((x > 0).float(), x))


def test_state_does_not_follow_the_users_tensor():
    x, y = pair(10, 3, 3, 6)
    measure = gs.measures.CKA()
    whole = measure(x, y)
    state = measure.update(x, y)
    x.zero_()
    assert_close(measure.compute(state), whole)


def test_layers_that_are_not_contiguous_or_have_many_axes():
    x = torch.randn(6, 2, 3, 4).permute(3, 2, 1, 0)
    y = torch.randn(8, 4).t()
    expected = reference.cka(reference.gram(x - x.mean(0)), reference.gram(y - y.mean(0)), False)
    assert_close(gs.measures.cka(x, y), expected, 1e-6)  # the reference centres in float32


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


def test_all_pairs_of_layers_of_one_model_and_of_two():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), *(Residual(8) for _ in range(4))).double()
    other = nn.Sequential(nn.Linear(6, 5), *(Residual(5) for _ in range(2))).double()
    x = torch.randn(90, 6, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, torch.zeros(90)), batch_size=32, shuffle=True
    )
    found = gs.measures.layer_similarity(model, loader, ["?"])
    features = gs.measures.features(model, x, ["?"])
    assert found.rows == found.columns == ("0", "1", "2", "3", "4")
    assert found.examples == 90
    for a in found.rows:
        for b in found.columns:
            expected = gs.measures.cka(features[a], features[b], debiased=True)
            assert_close(found[a, b], expected, 1e-10)
    both = gs.measures.layer_similarity(model, loader, ["?"], other=other, other_layers=["1", "2"], debiased=False)
    others = gs.measures.features(other, x, ["1", "2"])
    assert both.to_dataframe().shape == (5, 2)
    assert_close(both["3", "2"], gs.measures.cka(features["3"], others["2"]), 1e-10)


def test_a_constant_layer_spoils_only_its_own_pairs():
    x = {"a": torch.randn(20, 3), "dead": torch.zeros(20, 4), "b": torch.randn(20, 2)}
    with pytest.warns(Undefined, match="'dead' has the same"):
        found = gs.measures.CKA()(x)
    assert found.values.isnan().tolist() == [[False, True, False], [True, True, True], [False, True, False]]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(4, 25), p=st.integers(1, 30), debiased=st.booleans(), seed=st.integers(0, 10**6))
def test_gaussian_kernel(n, p, debiased, seed):
    x, y = pair(n, p, 4, seed)
    expected = reference.cka(reference.rbf_gram(x, 1.7), reference.rbf_gram(y, 1.7), debiased)
    grams = [reference.rbf_gram(a, 1.7) for a in (x, y)]
    if any(float(reference.hsic_unbiased(k, k)) < 1e-9 for k in grams):
        return
    assert_close(gs.measures.kernel_cka(x, y, bandwidth=1.7, debiased=debiased), expected, 1e-7)
    measure = gs.measures.KernelCKA(debiased=debiased)
    split = measure.over(list(zip(x.split(3), y.split(3), strict=True))[::-1])
    assert_close(split, measure(x, y), 1e-10)


@pytest.mark.usefixtures("as_users_run_it")
def test_gaussian_kernel_corner_cases():
    x = torch.randn(12, 3, dtype=torch.float64)
    assert_close(gs.measures.kernel_cka(x, 1e3 * x + 5), 1.0, 1e-9)
    assert_close(gs.measures.kernel_cka(x, x, lambda rows: rows @ rows.mT), gs.measures.cka(x, x))
    classes = torch.eye(3)[torch.arange(12) % 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gs.measures.kernel_cka(classes, x) >= 0  # the median distance is not zero here
        halves = torch.zeros(12, 2)
        halves[0] = 1.0  # more than half of the distances are zero
        assert 0 <= gs.measures.kernel_cka(halves, x) <= 1
    with pytest.warns(Undefined, match="kernel of b is constant"):
        gs.measures.kernel_cka(x, torch.ones(12, 2))
    with pytest.raises(InputError, match="kernel must be"):
        gs.measures.kernel_cka(x, x, "cosine")
    with pytest.raises(InputError, match="must return a matrix"):
        gs.measures.kernel_cka(x, x, lambda rows: rows)
    with pytest.raises(InputError, match="greater than 0"):
        gs.measures.kernel_cka(x, x, bandwidth=0.0)


def test_against_scikit_learn():
    from sklearn.metrics.pairwise import linear_kernel, rbf_kernel
    from sklearn.preprocessing import KernelCenterer

    x, y = pair(60, 7, 4, 11)

    def aligned(a, b):
        a, b = KernelCenterer().fit_transform(a), KernelCenterer().fit_transform(b)
        return float((a * b).sum() / ((a * a).sum() * (b * b).sum()) ** 0.5)

    assert_close(gs.measures.cka(x, y), aligned(linear_kernel(x.numpy()), linear_kernel(y.numpy())))
    sigma = 2.3
    grams = [rbf_kernel(a.numpy(), gamma=1 / (2 * sigma**2)) for a in (x, y)]
    assert_close(gs.measures.kernel_cka(x, y, bandwidth=sigma), aligned(*grams))
    given = [torch.tensor(gram) for gram in grams]
    assert_close(gs.measures.alignment(*given, center=True), aligned(*grams))
    assert all(torch.equal(g, torch.tensor(gram)) for g, gram in zip(given, grams, strict=True))  # not written to


def test_alignment_of_matrices_kernels_and_operators():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    kernel, operator = gs.kernel(model, x), gs.ntk_operator(model, x)
    other = torch.randn(10, 10, dtype=torch.float64)
    other = other @ other.mT
    expected = float((kernel.matrix * other).sum() / (kernel.matrix.norm() * other.norm()))
    for a in (kernel, kernel.total, kernel.matrix, operator, Dense(kernel.matrix)):
        for b in (other, Dense(other)):
            assert_close(gs.measures.alignment(a, b), expected)
    assert_close(kernel.alignment(other), expected)
    # H ⊗ 1 over (example, output) pairs
    h = torch.kron(torch.eye(5) - 1 / 5, torch.eye(2)).double()
    left, right = h @ kernel.matrix @ h, h @ other @ h
    expected = float((left * right).sum() / (left.norm() * right.norm()))
    four = other.reshape(5, 2, 5, 2)
    assert_close(gs.measures.alignment(kernel, four, center=True), expected)
    assert_close(gs.measures.alignment(operator, four, center=True), expected)


def test_alignment_tile_by_tile_and_its_limits():
    a, b = torch.randn(9, 7), torch.randn(9, 7)
    measure = gs.measures.Alignment()
    tiles = [(a[:4, :3], b[:4, :3]), (a[:4, 3:], b[:4, 3:]), (a[4:], b[4:])]
    assert_close(measure.over(tiles), gs.measures.alignment(a, b))
    with pytest.warns(Undefined, match="first kernel is zero"):
        gs.measures.alignment(torch.zeros(3, 3), torch.eye(3))
    with pytest.warns(Undefined, match="second kernel is constant"):
        gs.measures.alignment(torch.eye(3), torch.full((3, 3), 0.3), center=True)
    with pytest.raises(InputError, match="one shape"):
        gs.measures.alignment(torch.eye(3), torch.eye(4))
    with pytest.raises(InputError, match="a kernel must be"):
        gs.measures.alignment(torch.ones(3), torch.eye(3))
    with pytest.raises(InputError, match="one shape"):
        gs.measures.Alignment()(torch.ones(2, 3), torch.ones(3, 2))


def test_kernel_target_alignment():
    labels = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    features = torch.randn(7, 4, dtype=torch.float64)
    one_hot = nn.functional.one_hot(labels).double()
    kernel = features @ features.mT
    h = torch.eye(7, dtype=torch.float64) - 1 / 7
    left, right = h @ kernel @ h, h @ one_hot @ one_hot.mT @ h
    expected = float((left * right).sum() / (left.norm() * right.norm()))
    assert_close(gs.measures.kernel_target_alignment(kernel, labels), expected)
    assert_close(gs.measures.kernel_target_alignment(kernel, one_hot), expected)
    assert_close(gs.measures.TargetAlignment(classes=3)(features, labels), expected)
    batches = zip(features.split(2), labels.split(2), strict=True)
    assert_close(gs.measures.TargetAlignment(classes=3).over(batches), expected)
    raw = float((kernel * (one_hot @ one_hot.mT)).sum() / (kernel.norm() * (one_hot @ one_hot.mT).norm()))
    assert_close(gs.measures.kernel_target_alignment(kernel, labels, center=False), raw)
    model = nn.Linear(4, 3).double()
    full = gs.kernel(model, features)
    assert_close(gs.measures.kernel_target_alignment(full, one_hot, center=False),
                 full.alignment(torch.outer(one_hot.flatten(), one_hot.flatten())))  # fmt: skip
    with pytest.raises(InputError, match="one row for each"):
        gs.measures.kernel_target_alignment(Diagonal(torch.ones(5)), labels)
    with pytest.raises(InputError, match="between 0 and"):
        gs.measures.TargetAlignment(classes=2)(features, labels)
    with pytest.raises(InputError, match="numbered from 0"):
        gs.measures.kernel_target_alignment(kernel, labels - 1)
    with pytest.raises(InputError, match="without large gaps"):
        gs.measures.kernel_target_alignment(kernel, labels * 10**9)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_bandwidth_is_the_median_of_an_even_number_of_pairs_too(n):
    """Beside numpy's median; 4 examples have 6 pairs, 3 have 3."""
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((n, 4)), rng.standard_normal((n, 2))

    def gaussian(x):
        squares = ((x[:, None] - x[None]) ** 2).sum(-1)
        k = np.exp(-squares / (2 * np.median(np.sqrt(squares[np.triu_indices(n, 1)])) ** 2))
        return k - k.mean(0) - k.mean(1)[:, None] + k.mean()

    k, m = gaussian(a), gaussian(b)
    expected = (k * m).sum() / np.linalg.norm(k) / np.linalg.norm(m)
    assert gs.measures.kernel_cka(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected, rel=1e-12)
    measure = gs.measures.KernelCKA()
    state = measure.merge(
        measure.update(*map(torch.tensor, (a[:1], b[:1]))), measure.update(*map(torch.tensor, (a[1:], b[1:])))
    )
    assert measure.compute(state) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("debiased", [False, True])
@pytest.mark.parametrize("factor", [1e-55, 1e55])
def test_features_of_any_size(factor, debiased):
    """CKA knows no size; rows at once, and moments of batches, some of them ordinary zeros."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=rng).double()
    y = torch.randn(300, 2, generator=rng).double() + x[:, :2]
    x[:10] = 0
    y[:10] = 0
    exact = gs.measures.cka(x, y, debiased=debiased)
    assert gs.measures.cka(factor * x, y / factor, debiased=debiased) == pytest.approx(exact, rel=1e-12)
    measure = gs.measures.CKA(debiased=debiased)
    states = [measure.update(factor * x[i : i + 5], y[i : i + 5] / factor) for i in range(0, 300, 5)]
    merged = reduce(measure.merge, states)
    assert merged.moments is not None
    assert measure.compute(merged) == pytest.approx(exact, rel=1e-12)
    assert measure.compute(reduce(measure.merge, states[::-1])) == pytest.approx(exact, rel=1e-12)


def test_batches_of_very_different_size():
    """What is 1e-50 beside the rest is nothing, in whatever order the two come."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    whole, measure = torch.cat([1e-50 * x, x[:7] ** 2]), gs.measures.CKA()
    exact = gs.measures.cka(torch.cat([0 * x, x[:7] ** 2]), torch.cat([0 * x, x[:7] ** 2])[:, :2])
    parts = [measure.update(part, part[:, :2]) for part in (whole[:20], whole[20:40], whole[40:])]
    for order in (parts, parts[::-1]):
        assert measure.compute(reduce(measure.merge, order)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("factor", [1e-50, 1e50])
def test_kernel_cka_of_any_size(factor):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=rng).double(), torch.randn(20, 2, generator=rng).double()
    assert gs.measures.kernel_cka(factor * x, y) == pytest.approx(gs.measures.kernel_cka(x, y), rel=1e-12)
    narrow = gs.measures.kernel_cka(x, y, lambda rows: torch.exp(-(torch.cdist(rows, rows) ** 2) / 18))
    assert gs.measures.kernel_cka(factor * x, factor * y, bandwidth=3 * factor) == pytest.approx(narrow, rel=1e-10)
    with pytest.warns(Undefined, match="constant"):  # all within a width that is out of range
        gs.measures.kernel_cka(1e-50 * x, y, bandwidth=1e200)


@pytest.mark.parametrize("factor", [1e-55, 1e55])
def test_kernels_of_any_size(factor):
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(8, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    a, b, labels = a @ a.mT + 1, b @ b.mT, torch.arange(8) % 2
    for centred in (False, True):
        exact = gs.measures.alignment(a, b, center=centred)
        for one, two in ((a * factor, b), (a, b * factor), (a * factor, b * factor)):
            assert gs.measures.alignment(one, two, center=centred) == pytest.approx(exact, rel=1e-12)
        with_targets = gs.measures.kernel_target_alignment(a, labels, center=centred)
        assert gs.measures.kernel_target_alignment(a * factor, labels, center=centred) == pytest.approx(with_targets)
        y = torch.randn(8, 1, generator=rng, dtype=torch.float64)
        assert gs.measures.kernel_target_alignment(a, y * factor, center=centred) == pytest.approx(
            gs.measures.kernel_target_alignment(a, y, center=centred), rel=1e-12
        )
    measure = gs.measures.Alignment()
    mixed = torch.cat([a[:4] * factor, a[4:]])  # tiles of unlike sizes, in either order, and one of zeros
    state = [measure.update(mixed[i : i + 4], mixed[i : i + 4]) for i in (0, 4)]
    zeros = measure.update(mixed[:2] * 0, mixed[:2] * 0)
    for order in ((*state, zeros), (zeros, *state[::-1])):
        assert measure.compute(reduce(measure.merge, order)) == pytest.approx(1.0, abs=1e-14)
    with pytest.warns(Undefined, match="the first kernel is constant"):
        gs.measures.alignment(torch.full((8, 8), factor, dtype=torch.float64), b, center=True)
    too_large = r"a must have a largest entry between 2\^-400 and 2\^400"
    for kernel, centred in ((a * factor**3, False), ((a + 1e9) * 1e146, True)):  # of the second only the mean is
        with pytest.raises(InputError, match=too_large):
            gs.measures.alignment(kernel, b, center=centred)


def test_a_similarity_names_the_layers_it_has():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    found = gs.measures.layer_similarity(model, torch.randn(9, 4), ["0", "1"])
    assert found["0", "1"] == pytest.approx(found["1", "0"])
    with pytest.raises(InputError, match=r"one of those compared, \['0', '1'\], got 'nope'"):
        found["0", "nope"]


def test_a_similarity_is_read_by_two_layers(as_users_run_it):
    found = gs.measures.CKA()({"0": torch.randn(5, 2), "1": torch.randn(5, 2)})
    for wrong in ("0", "01", ("0",), ("0", "1", "1")):
        with pytest.raises(InputError, match="needs the names of two layers"):
            found[wrong]


def test_arrays_are_told_to_become_tensors(as_users_run_it):
    x = np.random.default_rng(0).normal(size=(6, 3))
    with pytest.raises(InputError, match=r"got ndarray and ndarray. Convert arrays: torch.as_tensor"):
        gs.measures.cka(x, x)
    with pytest.raises(InputError, match="layer_similarity"):
        gs.measures.cka({"a": torch.ones(3, 2)}, {"a": torch.ones(3, 2)})
    for pair_ in ((x, x), (torch.from_numpy(x), x), (x, None), ({"a": torch.from_numpy(x)}, x)):
        with pytest.raises(InputError, match="Convert arrays"):
            gs.measures.CKA()(*pair_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_that_vary_by_rounding_alone_have_no_similarity(dtype):
    """A large offset has eaten the features: what is left of them is the last digit of the offset."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    eaten = (100 + x * (1e-5 if dtype == torch.float32 else 0.3)).to(dtype)
    assert not bool((eaten == eaten[0]).all())
    for measure in (gs.measures.cka, gs.measures.kernel_cka, gs.measures.initial_similarity):
        with pytest.warns(Undefined, match="not defined"):
            assert np.isnan(measure(eaten, x))
        assert measure((100 + 10 * x).to(dtype), x) > 0.9


def test_a_kernel_that_is_constant_up_to_rounding_is_not_aligned():
    y = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    kernel = 3.3 + 1e-7 * torch.randn(20, 20, generator=torch.Generator().manual_seed(1))
    assert not bool((kernel == kernel[0, 0]).all())
    for same in (kernel, Dense(kernel)):
        with pytest.warns(Undefined, match="first kernel is constant"):
            assert np.isnan(gs.measures.kernel_target_alignment(same, y))
    assert gs.measures.kernel_target_alignment(kernel + 1e-3 * y @ y.T, y) > 0.9
