"""P K P* of networks that are not recurrent themselves, against the Jacobian of the stacked states."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import CASES
from conformance import assert_operator_conforms
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.propagators import GlobalNTK, predict_states, structural_rank_bound
from references.jacobian import reference_jacobian, relative_error
from references.propagators import recurrent_states, stacked_jacobian

TOLERANCE = 1e-12


class Hooked(nn.Module):
    """States by hand: a forward pass that also returns the list of what its weight sites gave out."""

    def forward(self, x):
        return self.stated(x)[0]


class MLP(Hooked):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def stated(self, x):
        first = self.a(x)
        second = self.b(torch.tanh(first))
        third = self.c(F.relu(second) + torch.tanh(first))
        return F.softplus(third), [first, second, third]


class CNN(Hooked):
    def __init__(self):
        super().__init__()
        self.conv, self.deep = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 2, stride=2, padding=1, groups=1)
        self.norm, self.head = nn.BatchNorm2d(3).eval(), nn.Linear(8, 2)

    def stated(self, x):
        first = self.conv(x)
        normed = self.norm(first)
        second = self.deep(F.relu(normed))
        third = self.head(F.max_pool2d(second.tanh(), 1).flatten(1))
        return third, [first, normed, second, third]


class Block(Hooked):
    """Attention with nn.MultiheadAttention, layer norms, a tied embedding and a position table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.randn(3, 4))
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def stated(self, tokens):
        looked = self.embed(tokens)
        placed = looked + self.position
        normed = self.norm1(placed)
        attention = self.attention
        packed = F.linear(normed, attention.in_proj_weight, attention.in_proj_bias)
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in packed.chunk(3, dim=-1))
        weights = torch.softmax(q @ k.mT / 2**0.5, dim=-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        out = attention.out_proj(mixed)
        stream = placed + out
        second = self.norm2(stream)
        up = self.up(second)
        down = self.down(F.gelu(up))
        logits = F.linear(stream + down, self.embed.weight)
        return logits, [looked, placed, normed, packed, out, second, up, down, logits]

    def forward(self, tokens):
        placed = self.embed(tokens) + self.position
        normed = self.norm1(placed)
        stream = placed + self.attention(normed, normed, normed, need_weights=False)[0]
        stream = stream + self.down(F.gelu(self.up(self.norm2(stream))))
        return F.linear(stream, self.embed.weight)


class Reader(Hooked):
    """A recurrent layer between two linear ones, with a learnt initial state."""

    def __init__(self):
        super().__init__()
        self.enter, self.rnn, self.leave = nn.Linear(2, 3), nn.GRU(3, 3, batch_first=True), nn.Linear(3, 2)
        self.start = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x):
        hidden, _ = self.rnn(self.enter(x).tanh(), self.start.expand(-1, len(x), -1).contiguous())
        return self.leave(hidden)

    def stated(self, x):
        entered = self.enter(x)
        hidden = recurrent_states(self.rnn, entered.tanh(), self.start.expand(-1, len(x), -1))
        left = self.leave(hidden[:, :, 0])
        return left, [entered, hidden, left]


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = kind().double()
        shape = {MLP: (3, 3), CNN: (2, 2, 4, 4), Reader: (2, 3, 2)}.get(kind)
        x = torch.randint(0, 7, (2, 3)) if shape is None else torch.randn(shape, dtype=torch.float64)
    return model, x


@pytest.mark.parametrize("kind", [MLP, CNN, Block, Reader])
def test_operator_is_jacobian_times_its_transpose(kind):
    model, x = build(kind)
    output, states = model.stated(x)
    assert torch.allclose(output, model(x), atol=1e-12)
    parameters = list(model.parameters())
    n = len(x)
    g = GlobalNTK(model, x)
    if kind is MLP:
        assert g.axes.names == ("trial", "site", "unit")
    else:
        assert g.axes.names == ("trial", "state")
    flat = stacked(kind, states, n)
    jacobian = stacked_jacobian(flat, parameters).detach()
    assert relative_error(g.values, flat.detach().flatten()) < TOLERANCE
    assert relative_error(g.operator.dense(), jacobian @ jacobian.mT) < TOLERANCE
    assert relative_error(g.jacobian.dense(), jacobian) < TOLERANCE
    one = torch.eye(g.axes.size, dtype=torch.float64)
    assert relative_error(g.P_inverse.dense() @ g.P.dense(), one) < TOLERANCE
    assert relative_error(sum(part.dense() for part in g.K_parts.values()), g.K.dense()) < TOLERANCE
    outer = stacked_jacobian(output, parameters).detach()
    assert relative_error(g.output.dense(), outer @ outer.mT) < TOLERANCE


@pytest.mark.parametrize("kind", [MLP, Reader])
def test_every_operator_conforms(kind):
    model, x = build(kind)
    g = GlobalNTK(model, x[:2])
    for op in (g.P, g.P_inverse, g.K, g.operator, g.J, g.C, g.output, g.select(g.sites[1])):
        assert_operator_conforms(op)


def stacked(kind, states, n):
    """States in the order of the operators' axes."""
    if kind is MLP:
        return torch.stack(states, dim=1)
    return torch.cat([state.reshape(n, -1) for state in states], dim=1)


@pytest.mark.parametrize("kind", [MLP, CNN, Block, Reader])
def test_each_parameters_part_of_K_is_what_P_makes_its_jacobian_of(kind):
    """``P K_j P* = J_j J_jᵀ`` with the Jacobian of the stacked states in parameter j alone, all its uses together."""
    model, x = build(kind)
    _, states = model.stated(x)
    g = GlobalNTK(model, x)
    back = g.P_inverse.dense()
    size = float(g.K.dense().norm())
    for name, parameter in model.named_parameters():
        local = back @ stacked_jacobian(stacked(kind, states, len(x)), [parameter]).detach()
        assert float((g.K_parts[name].dense() - local @ local.mT).norm()) < TOLERANCE * size
        assert relative_error(g.part(name).dense(), g.P.dense() @ local @ local.mT @ g.P.T.dense()) < TOLERANCE


@pytest.mark.parametrize("kind", [CNN, Block])
def test_the_rank_bound_is_the_sum_of_the_parts_ranks(kind):
    """Convolutions, gains, tables and tied weights: each parameter counts as far as its inputs let it move states."""
    model, x = build(kind)
    g = GlobalNTK(model, x)
    ranks = [int(torch.linalg.matrix_rank(part.dense(), rtol=1e-10)) for part in g.K_parts.values()]
    assert structural_rank_bound(g) == sum(ranks) < g.axes.size


def test_inference_mode_changes_nothing():
    model, x = build(MLP)
    wanted = GlobalNTK(model, x).operator.dense()
    with torch.inference_mode():
        assert torch.equal(GlobalNTK(model, x.clone()).operator.dense(), wanted)


class Leaky(nn.Module):
    """A cell with two layers inside, so that one weight acts through another within a step."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x, h):
        return 0.7 * h + 0.3 * torch.tanh(self.outer(torch.tanh(self.inner(torch.cat([x, h], dim=1)))))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(2, 3)

    def forward(self, x, state):
        h, c = state
        c = 0.5 * c + self.w(x) * h
        return torch.tanh(c), c


def unrolled(cell, x, h0, lengths=None):
    """(trial, time, site, unit) of a custom cell."""
    state, rows = h0, []
    for t in range(x.shape[1]):
        state = cell(x[:, t], state)
        parts = state if isinstance(state, tuple) else (state,)
        alive = torch.ones(len(x), 1) if lengths is None else (t < torch.tensor(lengths))[:, None]
        rows.append(torch.stack([part * alive for part in parts], dim=1))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [Leaky, Pair, nn.GRUCell])
def test_custom_cells(kind, masked):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        cell = (nn.Sequential() if False else kind(2, 3) if kind is nn.GRUCell else kind()).double()
        x, h = torch.randn(2, 4, 2, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    h0 = (h, h.cos()) if kind is Pair else h
    lengths = [4, 2] if masked else None
    states = unrolled(cell, x, h0, lengths)
    jacobian = stacked_jacobian(states, list(cell.parameters())).detach()
    if kind is nn.GRUCell:  # hide that it is torch's, so that it goes the way of any cell

        class Hidden(nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = cell

            def forward(self, x, h):
                return self.cell(x, h)

        cell = Hidden()
    g = GlobalNTK(cell, x, h0, mask=None if lengths is None else torch.tensor(lengths))
    assert g.axes.names == ("trial", "time", "site", "unit")
    assert relative_error(g.values, states.detach().flatten()) < TOLERANCE
    assert relative_error(g.operator.dense(), jacobian @ jacobian.mT) < TOLERANCE
    one = torch.eye(g.axes.size, dtype=torch.float64)
    assert relative_error(g.P_inverse.dense() @ g.P.dense(), one) < TOLERANCE
    assert relative_error(g.P_inverse.T.dense() @ g.P.T.dense(), one) < TOLERANCE


def test_a_compiled_cell_is_opened():
    cell = torch.compile(Leaky().double())
    x, h = torch.randn(2, 3, 2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(GlobalNTK(cell, x, h).operator.dense(), GlobalNTK(cell._orig_mod, x, h).operator.dense())


REFUSED = {"lstm_projected", "lstm_projected_two_layers_bidirectional", "energy_and_forces"}
# Networks of every family of the zoo, and those with weights in unusual places; the whole zoo takes minutes.
CHOSEN = [
    "linear_bias", "embedding_bag_mean", "weight_norm", "lora_module", "fourier_neural_operator",
    "fourier_neural_operator_of_complex_parameters", "complex_network_with_a_real_output", "lstm_sequence_first",
    "gru_sequence_first_last_state", "lstm_initial_state", "temperature", "class_token", "relative_position_bias",
    "experts_by_boolean_mask", "gpt_tied", "decoder_layer", "unet_with_skip",
]  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_output_kernel_of_the_zoo(name):
    model, x, _ = CASES[name].build(0, torch.float64)
    g = GlobalNTK(model, x)
    found = reference_jacobian(model, x)
    jacobian = torch.cat([j.reshape(j.shape[0] * j.shape[1], -1) for j in found.values()], dim=1)
    assert relative_error(g.output.dense(), jacobian @ jacobian.mT) < TOLERANCE
    ours = g.jacobian.dense()  # of all states, complex parameters as two real ones
    assert relative_error(g.C.dense() @ ours, jacobian) < TOLERANCE
    assert relative_error(g.operator.dense(), ours @ ours.mT) < TOLERANCE
    assert relative_error(g.jacobian.T.dense(), ours.mT) < TOLERANCE


def test_a_step_of_complex_parameters_is_predicted():
    model, x, _ = CASES["complex_network_with_a_real_output"].build(0, torch.float64)
    step = predict_states(model, x, lambda f: f.square().sum(), lr=1e-8)
    assert step.relative_error < 1e-4


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_refused_by_name(name):
    model, x, _ = CASES[name].build(0, torch.float64)
    with pytest.raises(UnsupportedError, match=r"proj_size|differentiate"):
        GlobalNTK(model, x)


def test_trial_axes_are_found_out_not_guessed():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(2, 2)

        def forward(self, x):
            return self.w(x.transpose(0, 1)).transpose(0, 1).tanh()

    class Mixing(TimeFirst):
        def forward(self, x):
            return self.w(x - x.mean(0)).tanh()

    x = torch.randn(3, 3, 2, dtype=torch.float64)  # as many steps as trials
    first = GlobalNTK(TimeFirst().double(), x)
    assert first.axes == GlobalNTK(TimeFirst().double(), x).axes
    assert first.states.layout.sites[0].trial == 1
    assert first.axes["trial"] == 3
    assert "trial" not in GlobalNTK(Mixing().double(), x).axes


def test_the_users_model_is_untouched():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    g = GlobalNTK(model, x)  # training mode: statistics and masks are those of this state of the random stream
    torch.manual_seed(5)
    q = torch.randn(g.axes.size)
    assert torch.allclose(g.P_inverse @ (g.P @ q), q, atol=1e-4)
    torch.set_rng_state(rng)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_bad_calls_are_explained():
    model, x = build(MLP)
    with pytest.raises(InputError, match="mask"):
        GlobalNTK(model, x, mask=torch.ones(3, 3).bool())
    with pytest.raises(InputError, match="trial, time"):
        GlobalNTK(model, x[0], torch.zeros(3, 4))
    with pytest.raises(InputError, match="like h0"):
        GlobalNTK(nn.Bilinear(2, 3, 4), torch.zeros(2, 3, 2), torch.zeros(2, 3))
    with pytest.raises(InputError, match="h0 must have 2 trials"):
        GlobalNTK(Leaky(), torch.zeros(2, 3, 2), torch.zeros(3, 3))
    with pytest.raises(InputError, match=r"requires_grad"):
        GlobalNTK(nn.ReLU(), x)


def test_an_input_that_is_overwritten_is_refused():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            hidden = torch.tanh(self.a(x))
            out = self.b(hidden)
            hidden += 1  # autograd could not go back to the weight of b
            return out + hidden

    with pytest.raises(UnsupportedError, match="overwrote"):
        GlobalNTK(Overwriting(), torch.randn(2, 3))


def test_weights_written_in_place_and_made_in_the_forward_pass():
    """A matrix filled row by row from parameters, a bias added in place, a parameter only asked for its dtype."""

    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.bias = nn.ParameterList([torch.randn(3) for _ in range(2)]), nn.Parameter(torch.randn(2))

        def forward(self, x):
            matrix = torch.zeros(2, 3, dtype=x.dtype)
            for place, row in enumerate(self.rows):
                matrix[place] = row.exp()
            hidden = x @ matrix.T
            hidden += self.bias
            return torch.tanh(hidden.type_as(self.bias))

    torch.manual_seed(0)
    model, x = Filled().double(), torch.randn(4, 3, dtype=torch.float64)
    g = GlobalNTK(model, x)
    assert g.sites == ("rows", "bias")
    outer = stacked_jacobian(model(x), list(model.parameters())).detach()
    assert relative_error(g.output.dense(), outer @ outer.mT) < TOLERANCE


def test_sites_can_be_taken_out():
    model, x = build(Block)
    g = GlobalNTK(model, x)
    assert g.sites[0] == "embed"
    R = g.select("up")
    block = R @ g.operator @ R.T
    assert block.rows.names == ("trial", "token", "unit")
    assert block.symmetric
    parts = g.split(g.values)
    assert torch.equal((R @ g.values).reshape(parts["up"].shape), parts["up"])
    assert isinstance(parts["down"], Tensor)


class OverwritesAfterUse(nn.Module):
    """A bias, or the data that a weight met."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.what = nn.Linear(3, 2).double(), what

    def forward(self, x):
        named = {"bias": self.layer.bias.clone(), "data": torch.tanh(x)}
        out = named["data"] @ self.layer.weight.T + named["bias"]
        if self.what:
            named[self.what].zero_()
        return out


def test_what_is_overwritten_after_its_use():
    """A sum does not need its terms again; a product needs its data."""
    x = torch.randn(3, 3, dtype=torch.float64)
    found, want = (GlobalNTK(OverwritesAfterUse(what), x).operator.dense() for what in ("bias", None))
    assert torch.equal(found, want)
    assert want.any()
    with pytest.raises(UnsupportedError, match="overwrote one of them in place"):
        GlobalNTK(OverwritesAfterUse("data"), x)
