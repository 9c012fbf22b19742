"""The reference has witnesses of its own: a closed form, torch.func, and checkers fed wrong answers."""

import pytest
import torch
from torch.func import functional_call, jacrev

from cases import CASES, COUPLED
from references.jacobian import (
    assert_kernel_close,
    assert_sites_close,
    flat_outputs,
    reference_jacobian,
    reference_ntk,
    relative_error,
)

EVERY_CASE = CASES | COUPLED


def built(name, dtype=torch.float64):
    case = EVERY_CASE[name]
    if case.needs:
        pytest.importorskip(case.needs)
    return case, *case.build(dtype=dtype)


def test_linear_layer_has_the_closed_form():
    model, x, x2 = CASES["linear_bias"].build()
    want = torch.einsum("ab,cd->acbd", x @ x2.T + 1, torch.eye(3, dtype=x.dtype))
    assert_kernel_close(reference_ntk(model, x, x2), want, 1e-15)


@pytest.mark.parametrize(
    "name",
    [
        "mlp_gelu",
        "conv2d_groups",
        "layer_norm_two_axes",
        "autoencoder_with_transposed_weight",
        "gpt_tied",
        "batch_norm_without_running_statistics",
    ],
)
def test_agrees_with_torch_func(name):
    _, model, x, _ = built(name)
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    want = jacrev(lambda p: functional_call(model, p, (x,)).flatten(1))(parameters)
    got = reference_jacobian(model, x)
    assert set(got) == set(want)
    for key in want:
        assert_kernel_close(got[key], want[key], 1e-13, scale=torch.ones(1), name=key)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_every_case_is_well_posed(name):
    """Finite and not zero, the same when built again, and float32 autograd itself comes within tolerance.

    The last point keeps the float32 tolerance of the zoo honest: a case whose own rounding error was near
    1e-5 could not tell a right method from a wrong one.
    """
    case, model, x, _ = built(name)
    want = reference_ntk(model, x, outputs=case.outputs)
    assert want.isfinite().all()
    assert want.norm() > 1e-3
    assert len(want) == case.n
    _, again, x_again, _ = built(name)
    assert_kernel_close(
        reference_ntk(again, x_again, outputs=case.outputs), want, 1e-6 if case.inner_float32 else 1e-13
    )

    _, single, x_single, _ = built(name, torch.float32)
    exact = reference_ntk(single, x_single, outputs=case.outputs)
    assert relative_error(_float32_ntk(single, x_single, case.outputs), exact) < 3e-6


def _float32_ntk(model, x, outputs):
    parameters = [p for p in model.parameters() if p.requires_grad]
    f = flat_outputs(model, x, outputs)
    rows = []
    for value in f.flatten():
        model.zero_grad(set_to_none=True)
        value.backward(retain_graph=True)
        gradients = [p.grad.to_dense() for p in parameters if p.grad is not None]
        rows.append(torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in gradients]))
    jacobian = torch.stack(rows).double()
    return (jacobian @ jacobian.T).view(*f.shape, *f.shape)


def test_the_reference_leaves_the_model_alone():
    model, x, _ = CASES["embedding_max_norm"].build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    reference_ntk(model, x, frozen=True)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_count_only_when_asked():
    model, x, _ = CASES["frozen_first_layer"].build()
    assert set(reference_ntk(model, x, by_site=True)) == {"2.weight", "2.bias"}
    assert set(reference_ntk(model, x, by_site=True, frozen=True)) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


def test_kernel_checker_raises_on_wrong_answers():
    want = torch.randn(3, 2, 3, 2, dtype=torch.float64)
    assert_kernel_close(want.clone(), want, 1e-15)
    wrong = {
        "off by": want * (1 + 1e-9),
        "must have shape": want.permute(1, 0, 3, 2),
        "not finite": want.where(want > 0, torch.nan),
        "must be a tensor": want.tolist(),
    }
    for message, answer in wrong.items():
        with pytest.raises(AssertionError, match=message):
            assert_kernel_close(answer, want, 1e-12)
    with pytest.raises(AssertionError, match="off by"):
        assert_kernel_close(want.transpose(0, 2), want, 1e-12)


def test_site_checker_raises_on_wrong_answers():
    want = {"a": torch.eye(3, dtype=torch.float64), "b": torch.ones(3, 3, dtype=torch.float64)}
    assert_sites_close(dict(want), want, 1e-15)
    with pytest.raises(AssertionError, match="missing"):
        assert_sites_close({"a": want["a"]}, want, 1e-12)
    with pytest.raises(AssertionError, match="not expected"):
        assert_sites_close(want | {"c": want["a"]}, want, 1e-12)
    with pytest.raises(AssertionError, match="b is off by"):
        assert_sites_close({"a": want["a"], "b": want["b"] + 1e-6}, want, 1e-12)
    with pytest.raises(AssertionError, match=r"a is off by.*b is off by"):
        assert_sites_close({"a": want["b"], "b": want["a"]}, want, 1e-12)
