import pytest
import torch
from hypothesis import given, settings

from conformance import assert_operator_conforms
from gramscope.base.errors import InputError
from hierarchy.chains import cases, close, make
from references import hierarchy as reference

SHAPES = {
    "one layer": make([3, 4], n=3),
    "two": make([3, 4, 5], outputs=2, n=3),
    "deep": make([3, 4, 5, 2, 6], outputs=2, n=3),
    "biases": make([3, 4, 5, 2], outputs=2, n=3, bias=True),
    "leaky": make([3, 4, 5, 2], n=4, slope=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_conformance(name, dtype):
    case = SHAPES[name]
    fields = case.fields(dtype)
    for layer in range(fields.depth):
        wanted = reference.pullback(*case.network, case.x, layer)
        size = fields.pullback(layer).rows.size
        assert_operator_conforms(fields.pullback(layer), wanted.reshape(size, size).to(dtype))


@settings(max_examples=30, deadline=None)
@given(cases())
def test_recursion_and_operator_agree(case):
    fields = case.fields()
    for layer in range(fields.depth + 1):
        wanted = reference.pullback(*case.network, case.x, layer)
        operator = fields.pullback(layer)
        levels = [operator.level(k).dense() for k in operator.levels]
        if levels:
            assert close(torch.stack(levels).sum(0), operator.dense())
        for mu in range(fields.n):
            nu = (mu + 1) % fields.n
            assert close(operator.pair(mu, nu), wanted[mu, :, :, nu])
        assert close(operator.dense().reshape(wanted.shape), wanted)


def test_levels_are_the_terms_of_the_closed_form():
    case = make([3, 4, 5, 2], outputs=2, n=3)
    fields = case.fields()
    for level in (2, 3):
        wanted = reference.pullback(*case.network, case.x, 1, [level])
        got = fields.pullback(1).level(level)
        assert close(got.dense().reshape(wanted.shape), wanted)
        assert close(got.pair(0, 1), wanted[0, :, :, 1])
    # Three layers, in the paper's words: A^2 = G^3 1, A^1 = G^2 1 + G^3 M^1.
    unit = torch.eye(5, dtype=torch.float64)
    assert close(fields.pullback(2).pair(0, 1), torch.einsum("cd,ij->cidj", fields.correlator(3)[0, :, 1], unit))
    first = torch.einsum("cd,ij->cidj", fields.correlator(2)[0, :, 1], torch.eye(4, dtype=torch.float64))
    second = torch.einsum("cd,ij->cidj", fields.correlator(3)[0, :, 1], fields.metric(1, 0, 1))
    assert close(fields.pullback(1).pair(0, 1), first + second)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_conjugates_move_as_the_operator_says(case):
    """The derivative of g^ℓ along the gradient step, by autograd alone, is -A (x e), the bias as a constant input."""
    fields = case.fields()
    weights, _ = fields.gradients(case.residual)
    for layer in range(fields.depth):

        def conjugate(t, layer=layer):
            moved = [w - t * g for w, g in zip(case.weights, weights, strict=True)]
            # Biases change g only by flipping masks, which a derivative does not see.
            return reference.conjugate(moved, case.biases, case.slopes, case.readout, case.x, layer)

        # x^ℓ itself moves with the weights below ℓ, which changes no mask: the derivative of g^ℓ is the same.
        _, wanted = torch.func.jvp(conjugate, (torch.zeros((), dtype=torch.float64),), (torch.ones(()).double(),))
        v = fields.activations[layer][:, None] * case.residual[:, :, None]
        assert close(-fields.pullback(layer).apply(v, constant=case.residual), wanted, 1e-10)


def test_both_orders_of_contraction_agree():
    """Few examples in wide layers contract over examples, many in narrow ones over weights."""
    for case in (make([3, 40, 40, 40], n=2, seed=1), make([3, 2, 3, 2], n=60, seed=2)):
        fields = case.fields()
        wanted = reference.pullback(*case.network, case.x, 1)
        size = fields.pullback(1).rows.size
        assert close(fields.pullback(1).dense(), wanted.reshape(size, size))


def test_spectrum():
    fields = SHAPES["deep"].fields()
    operator = fields.pullback(1)
    whole = operator.spectrum()
    assert float(whole.min()) > -1e-10 * float(whole.max())
    assert close(operator.spectrum(4).double(), whole[:4], 1e-8)


def test_bad_input():
    fields = SHAPES["two"].fields()
    with pytest.raises(InputError, match=r"v must have shape \(3, 2, 4\)"):
        fields.pullback(1).apply(torch.zeros(3, 4).double())
    with pytest.raises(InputError, match="k must be a whole number from 2 to 2, the levels of layer 1"):
        fields.pullback(1).level(3)
    with pytest.raises(InputError, match="layer must be"):
        fields.pullback(3)
