"""P K P* of recurrent networks against the Jacobian of all hidden states by plain autograd."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from conformance import assert_operator_conforms
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.propagators import GlobalNTK
from references.jacobian import relative_error
from references.propagators import recurrent_states, stacked_jacobian

# Float64 rounds at 1e-16; sums of some thousand terms stay under 1e-13 of the norm.
TOLERANCE = 1e-12

MODULES = {
    "tanh": lambda **o: nn.RNN(3, 4, **o),
    "relu": lambda **o: nn.RNN(3, 4, nonlinearity="relu", **o),
    "gru": lambda **o: nn.GRU(3, 4, **o),
    "lstm": lambda **o: nn.LSTM(3, 3, **o),
    "gru_two_layers": lambda **o: nn.GRU(3, 3, 2, **o),
    "gru_bidirectional": lambda **o: nn.GRU(3, 3, bidirectional=True, **o),
    "lstm_two_layers_bidirectional": lambda **o: nn.LSTM(3, 2, 2, bidirectional=True, **o),
    "gru_no_bias": lambda **o: nn.GRU(3, 3, 2, bias=False, **o),
}
LENGTHS = (4, 2, 1)


def build(name: str, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODULES[name](batch_first=True).double()
        x = torch.randn(3, 4, 3, dtype=torch.float64)
        strands = model.num_layers * (2 if model.bidirectional else 1)
        parts = 2 if isinstance(model, nn.LSTM) else 1
        h0 = [0.5 * torch.randn(strands, 3, model.hidden_size, dtype=torch.float64) for _ in range(parts)]
    return model, x, h0


def reference(model, x, h0=None, lengths=None):
    states = recurrent_states(model, x, h0, lengths)
    return states.detach(), stacked_jacobian(states, list(model.parameters())).detach()


def given_state(h0):
    return None if h0 is None else h0[0] if len(h0) == 1 else tuple(h0)


@pytest.mark.parametrize(("start", "masked"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", MODULES)
def test_operator_is_jacobian_times_its_transpose(name, start, masked):
    model, x, h0 = build(name)
    h0, lengths = (h0 if start else None), (LENGTHS if masked else None)
    states, jacobian = reference(model, x, h0, lengths)
    g = GlobalNTK(model, x, given_state(h0), mask=None if lengths is None else torch.tensor(lengths))
    assert relative_error(g.values, states.flatten()) < TOLERANCE
    assert relative_error(g.operator.dense(), jacobian @ jacobian.mT) < TOLERANCE
    assert relative_error(g.jacobian.dense(), jacobian) < TOLERANCE
    assert relative_error((g.P @ g.K @ g.P.T).dense(), jacobian @ jacobian.mT) < TOLERANCE
    one = torch.eye(g.axes.size, dtype=torch.float64)
    assert relative_error(g.P_inverse.dense() @ g.P.dense(), one) < TOLERANCE
    parts = sum(part.dense() for part in g.K_parts.values())
    assert relative_error(parts, g.K.dense()) < TOLERANCE


@pytest.mark.parametrize("name", ["tanh", "gru", "lstm_two_layers_bidirectional"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_operator_conforms(name, dtype):
    model, x, h0 = build(name)
    x, h0 = x[:2, :3].to(dtype), given_state([h[:, :2].to(dtype) for h in h0])
    g = GlobalNTK(model.to(dtype), x, h0, mask=torch.tensor([3, 2]))
    for op in (g.P, g.P_inverse, g.K, g.operator, g.J, g.jacobian, g.C, g.output, g.select(g.sites[-1])):
        assert_operator_conforms(op)


def test_a_wrong_answer_is_noticed():
    model, x, _ = build("gru")
    _, jacobian = reference(model, x)
    wrong = GlobalNTK(model, x, torch.full((1, 3, 4), 0.1, dtype=torch.float64)).operator.dense()
    assert relative_error(wrong, jacobian @ jacobian.mT) > 1e-3


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["RNN", "GRU", "LSTM"]),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_random_recurrent_networks(kind, layers, bidirectional, bias, trials, steps, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(nn, kind)(2, 2, layers, bias=bias, bidirectional=bidirectional, batch_first=True).double()
        x = torch.randn(trials, steps, 2, dtype=torch.float64)
    lengths = [1 + (seed + b) % steps for b in range(trials)]
    states, jacobian = reference(model, x, None, lengths)
    g = GlobalNTK(model, x, mask=torch.tensor(lengths))
    assert torch.allclose(g.values, states.flatten(), atol=1e-13)
    assert float((g.operator.dense() - jacobian @ jacobian.mT).norm()) <= TOLERANCE * float((jacobian**2).sum())
    q = torch.randn(g.axes.size, 2, dtype=torch.float64)
    assert torch.allclose(g.P_inverse @ (g.P @ q), q, atol=1e-11)
    assert torch.allclose(g.P_inverse.T @ (g.P.T @ q), q, atol=1e-11)


@pytest.mark.parametrize("name", ["gru", "lstm", "gru_bidirectional"])
def test_packed_sequences_and_masks_agree_in_any_order(name):
    model, x, _ = build(name)
    lengths = torch.tensor([2, 4, 1])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    one, other = GlobalNTK(model, packed), GlobalNTK(model, x, mask=lengths)
    boolean = GlobalNTK(model, x, mask=torch.arange(4) < lengths[:, None])
    assert torch.equal(one.operator.dense(), other.operator.dense())
    assert torch.equal(boolean.operator.dense(), other.operator.dense())


def test_padding_is_never_read():
    model, x, _ = build("gru_bidirectional")
    lengths = torch.tensor([2, 4, 1])
    noisy = x.clone()
    noisy[0, 2:], noisy[2, 1:] = 1e6, -1e6
    a, b = GlobalNTK(model, x, mask=lengths), GlobalNTK(model, noisy, mask=lengths)
    assert torch.equal(a.operator.dense(), b.operator.dense())


def test_long_runs_go_block_by_block(monkeypatch):
    model, x, _ = build("gru")
    whole = GlobalNTK(model, x)
    q = torch.randn(whole.axes.size, 3, dtype=torch.float64)
    expected, parts = whole.K @ q, {name: part @ q for name, part in whole.K_parts.items()}
    monkeypatch.setattr("gramscope.propagators.recurrent_layer.ROWS", 6)  # two steps of three trials at a time
    assert relative_error(GlobalNTK(model, x).K @ q, expected) < TOLERANCE
    for name, part in GlobalNTK(model, x).K_parts.items():
        assert relative_error(part @ q, parts[name]) < TOLERANCE


def test_time_first_single_trials_and_cells():
    model, x, _ = build("gru")
    whole = GlobalNTK(model, x).operator.dense()
    first = nn.GRU(3, 4).double()
    first.load_state_dict(model.state_dict())
    assert torch.equal(GlobalNTK(first, x.transpose(0, 1)).operator.dense(), whole)
    cell = nn.GRUCell(3, 4).double()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in model.state_dict().items()})
    assert relative_error(GlobalNTK(cell, x).operator.dense(), whole) < TOLERANCE
    single = GlobalNTK(model, x[0])
    assert single.axes.shape == (1, 4, 1, 4)
    assert relative_error(single.operator.dense(), whole[:16, :16]) < TOLERANCE


def test_output_kernel_is_that_of_the_last_layer():
    model, x, _ = build("lstm_two_layers_bidirectional")
    output = model(x)[0]
    jacobian = stacked_jacobian(output, list(model.parameters()))
    g = GlobalNTK(model, x)
    assert g.output.rows.shape == tuple(output.shape)
    assert relative_error(g.output.dense(), (jacobian @ jacobian.mT).detach()) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured_in_float32(dtype):
    model, x, _ = build("gru")
    half = GlobalNTK(model.to(dtype), x.to(dtype))
    full = GlobalNTK(model.to(dtype).double(), x.to(dtype).double())
    assert half.operator.dtype == torch.float32
    # The same rounded weights and inputs, in float32 instead of float64.
    assert relative_error(half.operator.dense(), full.operator.dense()) < 1e-5


def test_frozen_parameters_are_left_out_unless_asked_for():
    model, x, _ = build("tanh")
    model.weight_hh_l0.requires_grad_(False)
    assert "weight_hh_l0" not in GlobalNTK(model, x).parameters
    assert "weight_hh_l0" in GlobalNTK(model, x, frozen=True).parameters


def test_training_on_does_not_change_the_operator():
    model, x, _ = build("gru")
    g = GlobalNTK(model, x)
    before = g.operator.dense()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    assert torch.equal(g.operator.dense(), before)


def test_exploding_products_are_named():
    model = nn.RNN(1, 2, nonlinearity="relu", bias=False, batch_first=True)
    with torch.no_grad():
        model.weight_hh_l0.copy_(20 * torch.eye(2))
        model.weight_ih_l0.fill_(1e-38)
    g = GlobalNTK(model, torch.cat([torch.ones(1, 1, 1), torch.zeros(1, 27, 1)], dim=1))
    with pytest.raises(InputError, match="overflowed"):
        g.operator @ (1e10 * torch.ones(g.axes.size))


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (nn.LSTM(3, 4, proj_size=2, batch_first=True), "proj_size"),
        (nn.GRU(3, 4, 2, dropout=0.5, batch_first=True), "dropout"),
    ],
)
def test_unsupported_options_are_refused_by_name(model, word):
    with pytest.raises(UnsupportedError, match=word):
        GlobalNTK(model, torch.zeros(2, 3, 3))
    wrapped = nn.Sequential(model)
    with pytest.raises(UnsupportedError, match=word):
        GlobalNTK(wrapped, torch.zeros(2, 3, 3))


def test_dropout_in_eval_mode_is_fine():
    model = nn.GRU(3, 4, 2, dropout=0.5, batch_first=True).eval()
    assert GlobalNTK(model, torch.zeros(2, 3, 3)).axes.shape == (2, 3, 2, 4)


BAD = {
    "too few axes": (lambda m, x: GlobalNTK(m, x[0, 0]), "axes"),
    "wrong width": (lambda m, x: GlobalNTK(m, x[..., :2]), "3 inputs"),
    "wrong dtype": (lambda m, x: GlobalNTK(m, x.float()), "dtype"),
    "no trials": (lambda m, x: GlobalNTK(m, x[:0]), "at least one trial"),
    "nan": (lambda m, x: GlobalNTK(m, x * float("nan")), "finite"),
    "bad h0": (lambda m, x: GlobalNTK(m, x, torch.zeros(1, 2, 4).double()), "h0"),
    "h0 of an lstm": (lambda m, x: GlobalNTK(m, x, (torch.zeros(1, 3, 4).double(),) * 2), "h0"),
    "mask with gaps": (lambda m, x: GlobalNTK(m, x, mask=torch.tensor([[1, 0, 1, 0]] * 3).bool()), "gaps"),
    "mask of zeros": (lambda m, x: GlobalNTK(m, x, mask=torch.zeros(3, 4).bool()), "gaps"),
    "length zero": (lambda m, x: GlobalNTK(m, x, mask=torch.tensor([0, 1, 2])), "lengths"),
    "mask shape": (lambda m, x: GlobalNTK(m, x, mask=torch.ones(4, 3).bool()), "mask must be"),
    "outputs": (lambda m, x: GlobalNTK(m, x, outputs=0), "outputs"),
    "not a tensor": (lambda m, x: GlobalNTK(m, [1, 2]), "tensor"),
    "a name": (lambda m, x: GlobalNTK(m, x).select("layer"), "no state site"),
    "a parameter": (lambda m, x: GlobalNTK(m, x).part("weight"), "no parameter"),
    "precision": (lambda m, x: GlobalNTK(m.half(), x, precision="float64").part(""), "no parameter"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_explained(case):
    model, x, _ = build("gru")
    call, word = BAD[case]
    with pytest.raises(InputError, match=word):
        call(model, x)


def test_the_users_model_is_untouched():
    for name, frozen in itertools.product(["gru", "lstm"], [False, True]):
        model, x, _ = build(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        rng, mode = torch.get_rng_state(), model.training
        GlobalNTK(model, x, frozen=frozen).operator.dense()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), rng)
        assert all(p.grad is None and p.requires_grad for p in model.parameters())
        assert model.training == mode


def test_initial_states_have_torchs_shapes():
    model, x, h0 = build("gru")
    with pytest.raises(InputError, match="h0"):
        GlobalNTK(model, x, h0[0][0])  # torch: batched x needs (layers, trial, unit)
    with pytest.raises(RuntimeError, match="hx"):
        model(x, h0[0][0])
    batched, alone = GlobalNTK(model, x[:1], h0[0][:, :1]), GlobalNTK(model, x[0], h0[0][:, 0])
    assert torch.equal(batched.values, alone.values)
    with pytest.raises(InputError, match="h0"):
        GlobalNTK(model, x[:1], h0[0][:, 0])
    cell = nn.GRUCell(3, 4).double()
    assert torch.equal(GlobalNTK(cell, x[:1], h0[0][0, :1]).values, GlobalNTK(cell, x[0], h0[0][0, 0]).values)
