"""Recurrent layers in all their settings, and loops written by hand."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo.case import Call, normal, registry, several, weight

CASES, case = registry()

LAYERS = {
    "rnn_tanh": lambda: nn.RNN(3, 4, batch_first=True),
    "rnn_relu_no_bias": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False, batch_first=True),
    "rnn_two_layers_bidirectional": lambda: nn.RNN(3, 2, 2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(3, 3, batch_first=True),
    "gru_two_layers": lambda: nn.GRU(3, 3, 2, batch_first=True, dropout=0.3),
    "gru_bidirectional_no_bias": lambda: nn.GRU(3, 2, bidirectional=True, bias=False, batch_first=True),
    "lstm": lambda: nn.LSTM(3, 3, batch_first=True),
    "lstm_two_layers_bidirectional": lambda: nn.LSTM(3, 2, 2, bidirectional=True, batch_first=True),
    "lstm_projected": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "lstm_projected_two_layers_bidirectional": lambda: nn.LSTM(
        3, 3, 2, proj_size=2, bidirectional=True, batch_first=True
    ),
    "lstm_no_bias": lambda: nn.LSTM(3, 3, bias=False, batch_first=True),
}


def _register_layer(name, layer):
    def build():
        return layer()

    build.__name__ = name
    case(normal(3, 3))(build)  # as many steps as examples


for _name, _layer in LAYERS.items():
    _register_layer(_name, _layer)


@case(normal(3, 3), n=3, n2=3)
def lstm_sequence_first():
    return Call(lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=nn.LSTM(3, 2))


@case(normal(4, 3))
def gru_sequence_first_last_state():
    return Call(lambda m, x: m.head(m.rnn(x.transpose(0, 1))[1][0]), rnn=nn.GRU(3, 3), head=nn.Linear(3, 2))


@case(normal(3, 3))
def lstm_cell_state_is_the_output():
    return Call(lambda m, x: m.rnn(x)[1][1].transpose(0, 1), rnn=nn.LSTM(3, 2, 2, batch_first=True))


@case(several(normal(2, 3), normal(2), normal(2)))
def lstm_initial_state():
    return Call(lambda m, x, h, c: m.rnn(x, (h[None], c[None]))[0], rnn=nn.LSTM(3, 2, batch_first=True))


@case(several(normal(2, 3), normal(2, 2)))
def rnn_initial_state_of_two_layers():
    return Call(lambda m, x, h: m.rnn(x, h.transpose(0, 1).contiguous())[0], rnn=nn.RNN(3, 2, 2, batch_first=True))


@case(normal(3, 3), fallback_ok=("start",))
def gru_learned_initial_state():
    return Call(
        lambda m, x: m.rnn(x, m.start.expand(-1, len(x), -1).contiguous())[0],
        rnn=nn.GRU(3, 2, batch_first=True),
        start=weight(1, 1, 2),
    )


@case(normal(3, 3))
def rnn_inside_a_network():
    return Call(
        lambda m, x: m.head(torch.tanh(m.rnn(torch.relu(m.embed(x)))[0])),
        embed=nn.Linear(3, 4),
        rnn=nn.LSTM(4, 3, batch_first=True),
        head=nn.Linear(3, 1),
    )


@case(normal(2, 3))
def rnn_called_twice():
    return Call(lambda m, x: m.rnn(x, m.rnn(x)[1])[0], rnn=nn.GRU(3, 2, batch_first=True))


def lengths(steps):
    """Unequal lengths, unsorted, each at least 1."""
    return lambda n: (torch.arange(n) * 2 + 1) % steps + 1


def packed(rnn, reduce):
    def run(m, x, steps):
        batch = pack_padded_sequence(x, steps.cpu(), batch_first=True, enforce_sorted=False)
        return reduce(m.rnn(batch))

    return Call(run, rnn=rnn)


def padded_outputs(result):
    return pad_packed_sequence(result[0], batch_first=True, total_length=3)[0]


@case(several(normal(3, 3), lengths(3)))
def rnn_packed():
    return packed(nn.RNN(3, 3, batch_first=True), padded_outputs)


@case(several(normal(3, 3), lengths(3)))
def gru_packed_bidirectional():
    return packed(nn.GRU(3, 2, bidirectional=True, batch_first=True), padded_outputs)


@case(several(normal(3, 3), lengths(3)))
def lstm_packed_two_layers_bidirectional_last_state():
    return packed(nn.LSTM(3, 2, 2, bidirectional=True, batch_first=True), lambda r: r[1][0].transpose(0, 1))


# --- cells and loops


def loop(cell, state, head=None):
    def run(m, x):
        h = state(len(x), x)
        for step in range(x.shape[1]):
            h = m.cell(x[:, step], h)
        return m.head(h[0] if isinstance(h, tuple) else h)

    return Call(run, cell=cell, head=head if head is not None else nn.Linear(3, 2))


def zeros(width):
    return lambda n, x: x.new_zeros(n, width)


@case(normal(3, 2))
def rnn_cell_loop():
    return loop(nn.RNNCell(2, 3), zeros(3))


@case(normal(3, 2))
def rnn_cell_relu_no_bias_loop():
    return loop(nn.RNNCell(2, 3, bias=False, nonlinearity="relu"), zeros(3))


@case(normal(3, 2))
def gru_cell_loop():
    return loop(nn.GRUCell(2, 3), zeros(3))


@case(normal(3, 2))
def lstm_cell_loop():
    return loop(nn.LSTMCell(2, 3), lambda n, x: (x.new_zeros(n, 3), x.new_zeros(n, 3)))


@case(normal(3, 2), fallback_ok=("J", "B", "start"))
def vanilla_loop_by_hand():
    """The neuroscientist's network: leaky units, bare matrices, a learned initial state."""

    def run(m, x):
        h, outputs = m.start.expand(len(x), -1), []
        for step in range(x.shape[1]):
            h = 0.7 * h + 0.3 * (torch.tanh(h) @ m.J.T + x[:, step] @ m.B.T + m.b)
            outputs.append(m.readout(torch.tanh(h)))
        return torch.stack(outputs, 1)

    return Call(run, J=weight(4, 4), B=weight(4, 2), b=weight(4), start=weight(4), readout=nn.Linear(4, 1))


@case(normal(3))
def deep_equilibrium_loop():
    def run(m, x):
        z = torch.zeros_like(x)
        for _ in range(6):
            z = torch.tanh(0.3 * m.state(z) + m.drive(x))
        return m.head(z)

    return Call(run, state=nn.Linear(3, 3, bias=False), drive=nn.Linear(3, 3), head=nn.Linear(3, 2))


@case(normal(3))
def loop_of_data_dependent_length():
    """Every batch stops when all its examples are small; the number of calls is known only at run time."""

    def run(m, x):
        for _ in range(4):
            if x.detach().abs().amax() < 1e-6:
                break
            x = torch.tanh(m.step(x))
        return m.head(x)

    return Call(run, step=nn.Linear(3, 3), head=nn.Linear(3, 2))
