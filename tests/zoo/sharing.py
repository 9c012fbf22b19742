"""One parameter at several places, and one place at several times."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.case import Call, ids, normal, registry, several, weight

CASES, case = registry()


@case(ids(4, 2))
def tied_embedding_and_readout():
    embed, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embed.weight
    return Call(lambda m, i: m.head(torch.tanh(m.inner(m.embed(i)))), embed=embed, inner=nn.Linear(3, 3), head=head)


@case(normal(4), fallback_ok=True)
def autoencoder_with_transposed_weight():
    return Call(lambda m, x: torch.tanh(x @ m.W) @ m.W.T, W=weight(4, 3))


@case(normal(4), fallback_ok=True)
def autoencoder_of_a_linear_and_its_transpose():
    return Call(lambda m, x: F.linear(torch.tanh(m.encode(x)), m.encode.weight.t()), encode=nn.Linear(4, 3))


@case(normal(4))
def linear_called_three_times():
    return Call(
        lambda m, x: m.head(torch.tanh(m.step(torch.tanh(m.step(torch.tanh(m.step(x))))))),
        step=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )


@case(normal(3, 4))
def linear_called_on_two_and_three_axes():
    return Call(lambda m, x: torch.tanh(m.step(x).mean(1)) * m.step(x[:, 0]), step=nn.Linear(4, 3))


@case(normal(1, 6, 6))
def conv_at_two_resolutions():
    def run(m, x):
        fine, coarse = m.conv(x), m.conv(F.avg_pool2d(x, 2))
        return m.head(torch.cat([torch.tanh(fine).mean((2, 3)), torch.tanh(coarse).amax((2, 3))], 1))

    return Call(run, conv=nn.Conv2d(1, 3, 3, padding=1), head=nn.Linear(6, 2))


@case(normal(4), fallback_ok=("inner.bias", "inner.weight"))
def linear_and_elementwise():
    """The bias is also a gain, and a row of the weight also a shift."""
    return Call(lambda m, x: torch.tanh(m.inner(x)) * m.inner.bias + m.inner.weight[0, :3], inner=nn.Linear(4, 3))


@case(normal(4))
def one_parameter_under_two_names():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 2))


@case(normal(4))
def one_module_under_two_names():
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.ReLU(), nn.Linear(4, 2))


@case(normal(2, 4, 4), fallback_ok=True)
def one_parameter_in_layers_of_two_kinds():
    """A Linear weight viewed as the kernel of a 1x1 convolution."""
    return Call(
        lambda m, x: F.conv2d(x.tanh(), m.inner.weight[:, :, None, None]).mean((2, 3)) * m.inner(x.mean((2, 3))),
        inner=nn.Linear(2, 3),
    )


@case(normal(4))
def norm_called_twice():
    return Call(
        lambda m, x: m.head(m.norm(torch.tanh(m.inner(m.norm(x))))),
        norm=nn.LayerNorm(4),
        inner=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )


@case(several(normal(4), normal(4)))
def siamese():
    return Call(lambda m, a, b: m.net(a) * m.net(b), net=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))


@case(several(normal(4), normal(4)), fallback_ok=True)
def siamese_in_one_doubled_batch():
    """(2n, d) inside: row i and row n + i belong to example i."""

    def run(m, a, b):
        first, second = m.net(torch.cat([a, b])).chunk(2)
        return first * second

    return Call(run, net=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)))


@case(normal(4), fallback_ok=True)
def siamese_interleaved():
    """(2n, d) inside: rows 2i and 2i + 1 belong to example i."""
    return Call(
        lambda m, x: m.net(torch.stack([x, x.flip(1)], 1).flatten(0, 1)).view(len(x), 2, 2).prod(1),
        net=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
    )


# --- connections


@case(normal(4))
def residual():
    return Call(
        lambda m, x: m.head((h := x + torch.relu(m.a(x))) + torch.tanh(m.b(h))),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )


@case(normal(3))
def dense_connections():
    def run(m, x):
        for layer in m.layers:
            x = torch.cat([x, torch.tanh(layer(x))], 1)
        return m.head(x)

    return Call(run, layers=nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 2)]), head=nn.Linear(7, 2))


@case(normal(4))
def gated_product_of_two_paths():
    return Call(
        lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
        gate=nn.Linear(4, 5),
        up=nn.Linear(4, 5),
        down=nn.Linear(5, 2),
    )


@case(normal(4))
def stop_gradient_in_one_path():
    return Call(
        lambda m, x: m.a(x).tanh() * m.b(x).detach() + m.b(m.a(x).detach()),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
    )


@case(normal(4))
def no_grad_part():
    def run(m, x):
        with torch.no_grad():
            x = torch.tanh(m.fixed(x))
        return m.head(x)

    return Call(run, fixed=nn.Linear(4, 4), head=nn.Linear(4, 2))


# --- frozen, unused, absent


@case(normal(4))
def frozen_first_layer():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    return model


@case(normal(4))
def frozen_middle_layer_and_bias():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


@case(normal(2, 3))
def frozen_parts_of_attention_and_recurrence():
    model = Call(
        lambda m, x: m.attend(*[m.rnn(x)[0]] * 3)[0],
        rnn=nn.LSTM(3, 2, batch_first=True),
        attend=nn.MultiheadAttention(2, 1, batch_first=True),
    )
    model.rnn.weight_ih_l0.requires_grad_(False)
    model.attend.in_proj_bias.requires_grad_(False)
    return model


@case(normal(4))
def unused_parameters():
    return Call(
        lambda m, x: m.head(torch.tanh(m.inner(x))),
        inner=nn.Linear(4, 4),
        spare=nn.Linear(3, 3),
        loose=weight(2),
        head=nn.Linear(4, 2),
    )


@case(normal(4))
def called_but_without_effect():
    """The second head runs, but the output does not use it."""
    return Call(
        lambda m, x: (m.head(h := torch.tanh(m.inner(x))), m.other(h))[0],
        inner=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
        other=nn.Linear(4, 3),
    )


@case(normal(4))
def submodule_without_parameters():
    return nn.Sequential(
        nn.Identity(),
        nn.Linear(4, 4),
        nn.Sequential(),
        nn.Sequential(nn.Tanh(), nn.Identity()),
        nn.Linear(4, 2),
    )


@case(normal(3, 4))
def output_of_tokens_and_channels():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
