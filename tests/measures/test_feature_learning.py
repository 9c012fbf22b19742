"""The Feature Learning Equation, matrix forms of weights and the virtual covariance."""

import math

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.measures.feature_learning_equation import FeatureLearning, feature_learning, feature_learning_residual
from gramscope.measures.virtual_updates import VirtualCovariance, gram_step, virtual_covariance, virtual_update
from gramscope.measures.weight_matrices import weight_forms
from references.feature_learning import reference_sides
from references.fingerprint import assert_same_fingerprint, fingerprint
from zoo import attention, convolutions, recurrent, sharing

FEW = settings(max_examples=15, deadline=None)
ZOO = {
    **convolutions.CASES,
    **{name: case for name, case in attention.CASES.items() if not case.inner_float32},
    **{name: case for name, case in recurrent.CASES.items() if not case.inner_float32},
    **{name: case for name, case in sharing.CASES.items() if not case.fallback_ok},
}


@pytest.fixture
def as_users_run_it():
    # The runtime type checker of the test suite draws from Python's random stream; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def some_loss(f):
    return f.square().sum() + f.sin().sum()


def relative(a, b):
    return float((a - b).norm() / b.norm())


# The equation -------------------------------------------------------------------------------------------


def test_residual_of_the_theory_case():
    """Biases, a nonlinear network above and cross entropy: two independent backward passes agree to rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5)).double()
    x, y = torch.randn(64, 20).double(), torch.randint(5, (64,))
    found = feature_learning(model, x, lambda f: F.cross_entropy(f, y))
    assert list(found) == ["0.weight", "2.weight", "4.weight"]
    assert found.residual <= 1e-13
    assert found.loss == pytest.approx(float(F.cross_entropy(model(x), y).detach()), rel=1e-12)
    assert set(found.left_out) == {"0.bias", "2.bias", "4.bias"}


@pytest.mark.parametrize("name", sorted(ZOO))
def test_residual_and_exact_step_over_the_zoo(name):
    model, x, _ = ZOO[name].build()
    if ZOO[name].outputs is not None:
        pytest.skip("the loss here is of all outputs")
    found = feature_learning(model, x, some_loss, precision=None)
    assert found.residual <= 1e-13
    for weight in found.values():
        after = weight.weight - 0.1 * weight.gradient
        true = after.mT @ after - weight.gram
        # W⁺ᵀW⁺ - WᵀW cancels, so its own rounding is that of the Gram matrices.
        assert float((weight.gram_step(0.1) - true).norm()) <= 1e-13 * float(weight.gram.norm() + true.norm())


@FEW
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(1, 2),
    st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
def test_convolution_against_patches_cut_one_by_one(groups, in_, out, stride, padding, dilation, bias, seed):
    torch.manual_seed(seed)
    layer = nn.Conv2d(
        groups * in_, groups * out, (2, 3), stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias
    ).double()
    x = torch.randn(3, groups * in_, 5, 6).double()

    def above(image):
        return (image.flatten(1).tanh().sum(1) ** 2).sum()

    left, right = reference_sides(layer, x, above)
    model = nn.Sequential(layer, nn.Flatten(), nn.Tanh())
    found = feature_learning(model, x, lambda f: (f.sum(1) ** 2).sum())["0.weight"]
    assert relative(found.cross, right) < 1e-12
    assert relative(found.weight.mT @ found.gradient, left) < 1e-12


@FEW
@given(st.integers(1, 7), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_linear_over_tokens_against_the_reference(n, d, m, tokens, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(d, m).double()
    x = torch.randn(n, tokens, d).double()
    left, right = reference_sides(layer, x, lambda u: u.sin().sum() + (u**2).sum())
    found = feature_learning(layer, x, lambda f: f.sin().sum() + (f**2).sum())["weight"]
    assert relative(found.cross, right) < 1e-12
    assert relative(found.weight.mT @ found.gradient, left) < 1e-12


def test_residual_sees_a_wrong_gradient():
    torch.manual_seed(0)
    h, w, dz = torch.randn(5, 3).double(), torch.randn(4, 3).double(), torch.randn(5, 4).double()
    assert feature_learning_residual(w, dz.T @ h, h, dz @ w) < 1e-14
    assert feature_learning_residual(w, dz.T @ h + 0.1, h, dz @ w) > 1e-3
    assert feature_learning_residual(w, 0 * w, h, 0 * h) == 0.0
    with pytest.raises(InputError, match="same"):
        feature_learning_residual(w, dz, h, dz @ w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_measured_in_float64_or_as_they_are(dtype):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype), torch.randn(9, 6).to(dtype)
    assert feature_learning(model, x, some_loss).residual < 1e-13
    rounded = feature_learning(model, x, some_loss, precision=None).residual
    assert 1e-7 < rounded < 0.1


def test_zero_gradients_and_dead_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)
    found = feature_learning(model, torch.randn(5, 3).double(), lambda f: (f * 0).sum())
    assert found.residual == 0.0


def test_tied_weights_sum_over_their_uses_or_say_why_not():
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 2)).double()
    found = feature_learning(model, torch.randn(6, 4).double(), some_loss)
    assert found["0.weight"].rows == 12
    assert found.residual < 1e-13

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.inner = nn.Linear(3, 3)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.inner(self.embed(ids))))

    found = feature_learning(Tied().double(), torch.randint(5, (4, 2)), some_loss)
    assert list(found) == ["inner.weight"]
    assert "embedding" in found.left_out["embed.weight"]


def test_nothing_is_touched_and_hooks_stay_silent(as_users_run_it):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].eval()
    fired = []
    model[0].weight.register_hook(lambda g: fired.append(1))
    x = torch.randn(6, 3)
    before = fingerprint(model, x)
    assert feature_learning(model, x, some_loss).residual < 1e-13  # the same dropout mask on both sides
    assert_same_fingerprint(before, fingerprint(model, x))
    model.train()
    before = fingerprint(model, x)
    with pytest.raises(CoupledExamplesError):
        feature_learning(model, x, some_loss)
    assert_same_fingerprint(before, fingerprint(model, x))
    assert not fired


def test_batches_of_a_summed_loss_add_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(9, 1, 3, 3), torch.randint(3, (9,))
    measure = FeatureLearning(model, lambda f, y: F.cross_entropy(f, y, reduction="sum"))
    parts = [measure.update(x[a:b], y[a:b]) for a, b in ((4, 9), (0, 1), (1, 4))]
    found = measure.compute(measure.merge(parts[0], measure.merge(parts[1], parts[2])))
    whole = feature_learning(model, x, lambda f: F.cross_entropy(f, y, reduction="sum"))
    assert found.residual < 1e-13
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    for name, weight in whole.items():
        for part in ("gradient", "cross", "covariance", "gradient_covariance"):
            assert relative(getattr(found[name], part), getattr(weight, part)) < 1e-12
        assert found[name].rows == weight.rows
    with torch.no_grad():
        model[0].weight.mul_(2)
    moved = measure.update(x, y)
    with pytest.raises(InputError, match="weights differ"):
        measure.merge(parts[0], moved)


def test_a_loss_that_does_not_fit_float64_is_explained():
    model, x, y = nn.Linear(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    with pytest.raises(InputError, match="precision=None"):
        feature_learning(model, x, lambda f: F.cross_entropy(f, y, weight=torch.ones(2)))
    assert (
        feature_learning(model, x, lambda f: F.cross_entropy(f, y, weight=torch.ones(2)), precision=None).residual
        < 1e-5
    )
    with pytest.raises(InputError, match="lazy"):
        weight_forms(nn.LazyLinear(3))


def test_choice_of_weights(as_users_run_it):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert list(feature_learning(model, torch.ones(2, 3), some_loss, weights="1.*")) == ["1.weight"]
    with pytest.raises(InputError, match=r"head"):
        feature_learning(model, torch.ones(2, 3), some_loss, weights="head")
    with pytest.raises(InputError, match="precision"):
        feature_learning(model, torch.ones(2, 3), some_loss, precision="float16")


# Matrix forms -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(convolutions.CASES))
def test_forms_by_module_agree_with_forms_by_use(name):
    import gramscope as gs

    model, x, _ = convolutions.CASES[name].build()
    by_module, by_use = weight_forms(model), weight_forms(gs.capture(model, x))
    parameters = dict(model.named_parameters())
    assert set(by_module) == set(by_use)
    for key, use in by_use.items():
        value = parameters[use.parameter]
        assert torch.equal(by_module[key].form.matrices(value), use.form.matrices(value))
        assert torch.equal(use.form.tensor(use.form.matrices(value), value), value)


def test_packed_projections_are_three_groups():
    import gramscope as gs

    model = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(3, 5, 4).double()
    parts = weight_forms(gs.capture(model, (x, x, x)))
    packed = weight_forms(model)["in_proj_weight"].form.matrices(model.in_proj_weight)
    for place in range(3):
        part = parts[f"in_proj_weight[{place}]"].form
        assert torch.equal(part.matrices(model.in_proj_weight)[0], packed[place])
        changed = part.tensor(0 * part.matrices(model.in_proj_weight), model.in_proj_weight)
        assert float(changed.norm()) < float(model.in_proj_weight.detach().norm())  # only this part is written
        assert int((changed == 0).sum()) == 16


# Virtual covariance -------------------------------------------------------------------------------------


def test_exact_gram_step_from_features():
    """W⁺ᵀW⁺ - WᵀW = (H̃ᵀH̃ - HᵀH) + η²(GᵀG - ∇ᵀ∇), for a large step."""
    torch.manual_seed(0)
    h, w, dz, lr = torch.randn(9, 5).double(), torch.randn(4, 5).double(), torch.randn(9, 4).double(), 0.7
    g, dh = dz.T @ h, dz @ w
    after = w - lr * g
    true = after.T @ after - w.T @ w
    from_features = virtual_covariance(h, dh, lr) - h.T @ h + lr**2 * (g.T @ g - dh.T @ dh)
    assert float((from_features - true).abs().max()) <= 1e-10
    assert relative(gram_step(w, g, lr), true) < 1e-13


def test_virtual_covariance_of_example_gradients_is_the_mean():
    torch.manual_seed(0)
    h, dh = torch.randn(6, 3), torch.randn(6, 3)
    moved = virtual_update(h, dh, 0.5)
    assert torch.allclose(virtual_covariance(h, dh, 0.5, gradients="example"), moved.T @ moved / 6)
    # One loss that is the mean of the examples' losses has gradients n times smaller, at a rate n times larger.
    first_order = virtual_covariance(h, dh / 6, 1e-6) - h.double().T @ h.double()
    by_example = 6 * (virtual_covariance(h, dh, 1e-6, gradients="example") - h.double().T @ h.double() / 6) / 6
    assert torch.allclose(first_order, by_example, rtol=1e-3)


def test_virtual_covariance_streams_in_any_order():
    torch.manual_seed(0)
    h, dh = torch.randn(20, 2, 4).bfloat16(), torch.randn(20, 2, 4).bfloat16()
    measure = VirtualCovariance(0.3)
    parts = [measure.update(h[a:b], dh[a:b]) for a, b in ((13, 20), (0, 1), (1, 13))]
    merged = measure.compute(measure.merge(parts[0], measure.merge(parts[1], parts[2])))
    assert relative(merged, virtual_covariance(h.transpose(0, 1), dh.transpose(0, 1), 0.3)) < 1e-14
    with pytest.raises(InputError, match="width"):
        measure.merge(parts[0], measure.update(torch.ones(2, 3), torch.ones(2, 3)))
    with pytest.raises(InputError, match="one shape"):
        virtual_covariance(torch.ones(2, 3), torch.ones(3, 2), 0.1)
    with pytest.raises(InputError, match="finite"):
        virtual_covariance(torch.ones(2, 3), torch.full((2, 3), math.nan), 0.1)
