"""AGOP against loops over examples and outputs, the ansatz against closed forms of deep linear networks."""

import math

import jaxtyping
import numpy
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conformance import assert_operator_conforms
from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.measures.ansatz import ansatz_correlation, ansatz_exponent, matrix_power, neural_feature_ansatz
from gramscope.measures.feature_learning_equation import FeatureLearning, feature_learning, stationarity
from gramscope.measures.gradient_outer_product import AGOP, LayerAGOP, agop, agop_operator, layer_agop
from gramscope.measures.measure import UndefinedMeasureWarning
from references.feature_learning import reference_agop
from references.fingerprint import assert_same_fingerprint, fingerprint
from zoo import attention, convolutions, layers, recurrent

ZOO = {**convolutions.CASES, **layers.CASES, **attention.CASES, **recurrent.CASES}
CHOSEN = [
    "conv_deep", "pooling_max_average_adaptive", "conv_transpose2d_stride_padding", "batch_norm2d_eval",
    "encoder_layer", "gru_two_layers", "mlp_relu",
]  # fmt: skip


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.fixture
def as_users_run_it():
    # The runtime type checker of the test suite draws from Python's random stream; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# AGOP ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOSEN)
def test_input_agop_over_the_zoo(name):
    model, x, _ = ZOO[name].build()
    expected = reference_agop(model, x)
    found = agop(model, x)
    assert relative(found, expected) < 1e-12
    assert relative(agop(model, x, batch_size=2), expected) < 1e-12
    product = agop_operator(model, x) @ torch.ones(len(found), dtype=torch.float64)
    assert relative(product, expected.sum(1)) < 1e-11


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6))
def test_layer_agop_is_the_input_agop_of_the_network_above(n, d, width, outputs, seed):
    """``Wᵀ K W`` against Jacobians of what stands above each layer's input."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(d, width), nn.Tanh(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs))
    model, x = model.double(), torch.randn(n, d).double()
    found = layer_agop(model, x)
    for start in (0, 2, 4):
        expected = reference_agop(model[start:], model[:start](x).detach())
        assert float((found[f"{start}.weight"][0] - expected).norm()) < 1e-12 * max(1.0, float(expected.norm()))


def test_convolutions_sum_over_patches():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 4, 2, stride=2, groups=2).double()  # patches do not overlap: unfolding is a permutation
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3).double())
    x = torch.randn(5, 2, 4, 4).double()
    found = layer_agop(model, x)["0.weight"]
    whole = reference_agop(model, x)
    places = torch.arange(32).reshape(2, 2, 2, 2, 2)  # channel, row of patch, row in patch, column of patch, in patch
    for group in range(2):
        total = 0
        for a in range(2):
            for b in range(2):
                index = places[group, a, :, b, :].reshape(-1)
                total = total + whole[index][:, index]
        assert relative(found[group], total) < 1e-12


def test_residual_branches_count_only_the_part_through_the_weight():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x + torch.tanh(self.inner(x)))

    torch.manual_seed(0)
    model, x = Residual().double(), torch.randn(4, 3).double()
    skip = x.clone()

    class Branch(nn.Module):
        def forward(self, h):
            row = next(s for s in skip if torch.equal(s, h[0].detach()))
            return model.head(row + torch.tanh(model.inner(h)))

    assert relative(layer_agop(model, x)["inner.weight"][0], reference_agop(Branch(), x)) < 1e-12


def test_operator_conforms():
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
        operator = agop_operator(model, torch.randn(6, 4).to(dtype))
        with torch.no_grad():
            model[0].weight.mul_(2)  # later training does not change it
        assert_operator_conforms(operator)


def test_streams_in_any_order_and_notices_training():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(9, 3)
    for measure in (AGOP(model), LayerAGOP(model)):
        parts = [measure.update(x[a:b]) for a, b in ((5, 9), (0, 1), (1, 5))]
        found = measure.compute(measure.merge(measure.merge(parts[0], parts[1]), parts[2]))
        whole = measure(x)
        pairs = [(found, whole)] if isinstance(whole, torch.Tensor) else [(found[k], whole[k]) for k in whole]
        assert all(relative(a, b) < 1e-6 for a, b in pairs)  # float32 signals, batched differently
    measure = LayerAGOP(model)
    before = measure.update(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    after = measure.update(x)
    with pytest.raises(InputError, match="weights differ"):
        measure.merge(before, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype), torch.randn(6, 3).to(dtype)
    exact = reference_agop(nn.Sequential(*model).double(), x.double())
    model = model.to(dtype)
    assert relative(agop(model, x, precision="float64"), exact) < 1e-12
    assert relative(agop(model, x), exact) < 0.05
    assert relative(layer_agop(model, x, precision="float64")["0.weight"][0], exact) < 1e-12


def test_inputs_of_every_kind():
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    ids = torch.randint(5, (4, 2))
    with pytest.raises(InputError, match="layer_agop"):
        agop(embedding, ids)
    assert list(layer_agop(embedding, ids)) == ["2.weight"]

    class Two(nn.Module):
        def forward(self, x, scale):
            return x * scale

    x, scale = torch.randn(3, 2), torch.full((3, 2), 2.0)
    assert torch.allclose(agop(Two(), (x, scale)), 4 * torch.eye(2).double())
    assert torch.allclose(agop(Two(), {"x": x, "scale": scale}), 4 * torch.eye(2).double())
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    assert agop(image, torch.randn(2, 1, 4, 4)).shape == (16, 16)
    assert agop(image, torch.randn(2, 1, 4, 4), outputs=0).shape == (16, 16)
    with pytest.raises(InputError, match="batch_size"):
        agop(image, torch.randn(2, 1, 4, 4), batch_size=0)


def test_coupled_examples_are_refused_and_nothing_is_touched(as_users_run_it):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(6, 3)
    before = fingerprint(model, x)
    with pytest.raises(CoupledExamplesError, match="eval"):
        agop(model, x)
    assert_same_fingerprint(before, fingerprint(model, x))
    model.eval()
    before = fingerprint(model, x)
    agop(model, x)
    layer_agop(model, x)
    agop_operator(model, x)
    assert_same_fingerprint(before, fingerprint(model, x))


# The ansatz ---------------------------------------------------------------------------------------------


def balanced(depth, width, seed):
    """Deep linear weights with W_{l+1}ᵀW_{l+1} = W_l W_lᵀ: the same singular values, joined singular vectors."""
    torch.manual_seed(seed)
    values = torch.linspace(0.3, 1.5, width).double()
    bases = [torch.linalg.qr(torch.randn(width, width).double())[0] for _ in range(depth + 1)]
    return [bases[k + 1] @ torch.diag(values) @ bases[k].T for k in range(depth)]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_deep_linear_balanced_exponent_is_one_over_depth(depth):
    weights = balanced(depth, 5, 0)
    model = nn.Sequential(*[nn.Linear(5, 5, bias=False) for _ in weights]).double()
    with torch.no_grad():
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.copy_(weight)
    x = torch.randn(7, 5).double()
    found = layer_agop(model, x)
    for place in range(depth):
        above = depth - place  # layers from here to the output
        gram, matrix = found.grams[f"{place}.weight"], found[f"{place}.weight"]
        # Small eigenvalues of a product of many layers carry the rounding of the large ones, up to 5^(2·depth).
        assert relative(matrix_power(matrix, 1 / above), gram) < 1e-10
        assert ansatz_exponent(gram, matrix) == pytest.approx(1 / above, abs=1e-6)
        assert ansatz_correlation(gram, matrix, 1 / above) == pytest.approx(1, abs=1e-12)
    ansatz = neural_feature_ansatz(model, x, power=1 / depth)
    assert ansatz["0.weight"] == pytest.approx(1, abs=1e-12)


def test_trained_deep_linear_network_reaches_the_exponent():
    """Three layers from a small balanced start, gradient descent at rate 0.002: a relative error of 1.9e-4 measured.

    Balance holds for gradient flow; the error is that of finite steps (9e-4 at rate 0.01; 1.3e-4 was had elsewhere).
    """
    torch.manual_seed(0)
    depth, width = 3, 6
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(depth)]).double()
    with torch.no_grad():
        for layer, weight in zip(model, balanced(depth, width, 1), strict=True):
            layer.weight.copy_(0.3 * weight)
    target = torch.randn(width, width).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    x = torch.eye(width).double()
    for _ in range(2500):
        optimizer.zero_grad()
        ((model(x) - x @ target.T).square().sum() / 2).backward()
        optimizer.step()
    found = layer_agop(model, x)
    error = relative(matrix_power(found["0.weight"], 1 / depth), found.grams["0.weight"])
    assert error < 5e-4
    assert ansatz_exponent(found.grams["0.weight"], found["0.weight"]) == pytest.approx(1 / depth, abs=0.01)
    assert ansatz_correlation(found.grams["0.weight"], found["0.weight"], 1.0) < 0.999  # another power: not


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.floats(0.1, 2.0), st.integers(0, 10**6))
def test_correlation_against_numpy_and_scipy(d, power, seed):
    rng = numpy.random.default_rng(seed)
    a, b = rng.normal(size=(d, d)), rng.normal(size=(d, d))
    gram, outer = a @ a.T, b @ b.T
    raised = scipy.linalg.fractional_matrix_power(outer, power).real
    expected = numpy.corrcoef(gram.ravel(), raised.ravel())[0, 1]
    found = ansatz_correlation(torch.as_tensor(gram), torch.as_tensor(outer), power)
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_trivial_last_layer_is_left_out_and_others_are_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(30, 4)
    found = neural_feature_ansatz(model, x)
    assert list(found) == ["0.weight", "2.weight"]
    assert "trivial" in found.left_out["4.weight"]
    assert all(-1 <= value <= 1 for value in found.values())
    last = layer_agop(model, x)
    assert relative(last["4.weight"], last.grams["4.weight"]) < 1e-6
    softmax = nn.Sequential(model, nn.Softmax(dim=1))
    assert "0.4.weight" in neural_feature_ansatz(softmax, x)


def test_undefined_and_refused():
    flat = torch.ones(3, 3)
    with pytest.warns(UndefinedMeasureWarning, match="same in all entries"):
        assert math.isnan(ansatz_correlation(flat, torch.eye(3)))
    with pytest.warns(UndefinedMeasureWarning, match="AGOP"):
        assert math.isnan(ansatz_correlation(torch.eye(3), torch.zeros(3, 3)))
    with pytest.warns(UndefinedMeasureWarning):
        assert math.isnan(ansatz_exponent(torch.ones(1, 1), torch.ones(1, 1)))
    with pytest.raises(InputError, match="one shape"):
        ansatz_correlation(torch.eye(3), torch.eye(2))
    with pytest.raises(InputError, match="greater than 0"):
        neural_feature_ansatz(nn.Linear(2, 2), torch.ones(1, 2), power=0.0)


def test_a_first_layer_in_place():
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    plain, in_place = (nn.Sequential(nn.ReLU(inplace=flag), nn.Linear(4, 2)) for flag in (False, True))
    in_place.load_state_dict(plain.state_dict())
    kept = x.clone()
    assert torch.equal(agop(in_place, x), agop(plain, x))
    assert torch.equal(agop_operator(in_place, x).dense(), agop_operator(plain, x).dense())
    assert torch.equal(x, kept)
    assert not x.requires_grad


def test_what_is_not_finite_is_said():
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    with pytest.raises(InputError, match="output must be finite"):
        agop(model, x * math.nan)

    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()

    with pytest.raises(InputError, match="gradient outer product must be finite"):
        agop(Root(), torch.zeros(3, 2))


def test_frozen_weights_have_an_agop():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(6, 4)
    before, correlations = layer_agop(model, x), neural_feature_ansatz(model, x)
    model.requires_grad_(False)
    after = layer_agop(model, x)
    assert list(after) == list(before) == ["0.weight", "2.weight"]
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert dict(neural_feature_ansatz(model, x)) == dict(correlations)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_the_ansatz_knows_no_size(factor):
    w = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = w.mT @ w
    outer = gram @ gram
    for one, two in ((gram * factor, outer), (gram, outer * factor)):
        assert ansatz_correlation(one, two) == pytest.approx(1, abs=1e-12)
        assert ansatz_correlation(one, two) <= 1
        assert ansatz_exponent(one, two) == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(InputError, match="powers of it leave float64"):
        ansatz_correlation(gram * factor**3, outer)


def test_the_ansatz_explains_what_it_cannot_take():
    gram = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    with pytest.warns(UndefinedMeasureWarning) as said:
        assert math.isnan(ansatz_exponent(torch.ones(2, 2), gram))
    assert len(said) == 1
    for message, call in {
        "agop must be finite": lambda: ansatz_exponent(gram, gram * math.nan),
        "gram must be finite": lambda: ansatz_correlation(gram * math.nan, gram),
        "one shape": lambda: ansatz_exponent(gram, torch.eye(3)),
        "must be a square matrix": lambda: ansatz_correlation(torch.ones(2, 3), torch.ones(2, 3)),
        "must be symmetric": lambda: ansatz_correlation(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), gram),
        "bounds must be": lambda: ansatz_exponent(gram, gram, (0.0, 1.0)),
        "power must be one finite number greater than 0": lambda: ansatz_correlation(gram, gram, math.inf),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


# One list of precisions ---------------------------------------------------------------------------------


def _loss(f):
    return f.square().sum()


PRECISE = {
    "agop": lambda model, x, p: agop(model, x, precision=p),
    "AGOP": lambda model, x, p: AGOP(model, precision=p)(x),
    "agop_operator": lambda model, x, p: agop_operator(model, x, precision=p).dense(),
    "layer_agop": lambda model, x, p: layer_agop(model, x, precision=p)["0.weight"],
    "neural_feature_ansatz": lambda model, x, p: torch.tensor(neural_feature_ansatz(model, x, precision=p)["0.weight"]),
    "feature_learning": lambda model, x, p: feature_learning(model, x, _loss, precision=p)["0.weight"].cross,
    "FeatureLearning": lambda model, x, p: FeatureLearning(model, _loss, precision=p)(x)["0.weight"].cross,
    "stationarity": lambda model, x, p: torch.tensor(stationarity(model, x, _loss, 0.1, precision=p)["0.weight"]),
}


@pytest.mark.parametrize("name", PRECISE)
def test_one_list_of_precisions(name, as_users_run_it):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16(), torch.randn(5, 3).bfloat16()
    before = fingerprint(model)
    for wrong in ("float16", 7):
        with pytest.raises(InputError, match="precision must be one of None, 'float64', 'float32', 'tf32'"):
            PRECISE[name](model, x, wrong)
    exact = PRECISE[name](model, x, "float64").double()
    errors = {p: relative(PRECISE[name](model, x, p).double(), exact) for p in ("float32", "tf32", None)}
    assert errors["float32"] < 1e-5
    assert errors["float32"] < errors[None]
    assert errors["tf32"] == errors[None]  # no more than leave to round float32 products
    assert_same_fingerprint(before, fingerprint(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_powers_leave_rounding_out(dtype):
    """An AGOP of rank 2 in twelve dimensions: rounding to a small power is as large as what was measured."""
    rng = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(12, 2, generator=rng, dtype=torch.float64)).Q
    matrix = ((q * torch.tensor([2.0, 1.0]).double()) @ q.mT).to(dtype)
    small = (q * torch.tensor([2.0, 1.0]).double().pow(0.05)) @ q.mT
    assert relative(matrix_power(matrix, 0.05), small) < (1e-12 if dtype == torch.float64 else 1e-6)
    gram = (q * torch.tensor([2.0, 1.0]).double().pow(0.1)) @ q.mT
    assert ansatz_exponent(gram, matrix) == pytest.approx(0.1, abs=1e-4)
