"""Parameters outside any layer: matrix products spelled in every way, odd operations, constants."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo.case import Call, ids, normal, registry, weight

CASES, case = registry()


# --- products


@case(normal(4), fallback_ok=True)
def matmul_operator():
    return Call(lambda m, x: torch.tanh(x @ m.W) @ m.V, W=weight(4, 5), V=weight(5, 2))


@case(normal(2, 4), fallback_ok=True)
def matmul_method_tokens():
    return Call(lambda m, x: torch.tanh(x.matmul(m.W)).matmul(m.V.T), W=weight(4, 5), V=weight(2, 5))


@case(normal(4), fallback_ok=True)
def matrix_times_vector():
    return Call(lambda m, x: torch.tanh(x @ m.W) @ m.v, W=weight(4, 5), v=weight(5))


@case(normal(4), fallback_ok=True)
def parameter_on_the_left():
    """The examples are the columns."""
    return Call(lambda m, x: (m.V @ torch.tanh(m.W @ x.T)).T, W=weight(5, 4), V=weight(2, 5))


@case(normal(4, 3), n=3, n2=3, fallback_ok=True)
def parameter_on_the_left_of_tokens():
    """(5, 4) @ (n, 4, 3): the product broadcasts over the examples; width 3 = n."""
    return Call(lambda m, x: torch.tanh(m.W @ x).sum(1), W=weight(5, 4))


@case(normal(4), fallback_ok=True)
def einsum_letters():
    return Call(
        lambda m, x: torch.einsum("nh,hc->nc", torch.einsum("ni,hi->nh", x, m.W).tanh(), m.V),
        W=weight(5, 4),
        V=weight(5, 2),
    )


@case(normal(3, 4), fallback_ok=True)
def einsum_three_factors():
    return Call(lambda m, x: torch.einsum("nti,hij,ntj->nh", x, m.W, x.tanh()), W=weight(2, 4, 4))


@case(normal(4), fallback_ok=True)
def addmm():
    return Call(
        lambda m, x: torch.addmm(m.c, torch.addmm(m.b, x, m.W, beta=0.5, alpha=2.0).tanh(), m.V),
        W=weight(4, 5),
        b=weight(5),
        V=weight(5, 2),
        c=weight(2),
    )


@case(normal(2, 4), fallback_ok=True)
def bmm_of_an_expanded_parameter():
    return Call(lambda m, x: torch.bmm(x, m.W.expand(len(x), -1, -1)).tanh().sum(1), W=weight(4, 3))


@case(normal(2, 4), fallback_ok=True)
def bmm_of_a_matrix_per_token():
    """(T, n, d) @ (T, d, h): a different matrix for every position, T = n2."""
    return Call(lambda m, x: torch.bmm(x.transpose(0, 1), m.W).tanh().sum(0), W=weight(2, 4, 3))


@case(normal(4), fallback_ok=True)
def functional_linear():
    return Call(lambda m, x: F.linear(F.linear(x, m.W, m.b).tanh(), m.V), W=weight(5, 4), b=weight(5), V=weight(2, 5))


@case(normal(4), fallback_ok=True)
def functional_linear_on_views():
    """A slice, a transpose and a reshape of one parameter each."""
    return Call(
        lambda m, x: F.linear(F.linear(F.linear(x, m.W[1:4], m.b[1:4]).tanh(), m.V.t()).tanh(), m.U.view(2, 4)),
        W=weight(5, 4),
        b=weight(5),
        V=weight(3, 4),
        U=weight(8),
    )


@case(normal(4), fallback_ok=True)
def two_slices_of_one_parameter():
    return Call(lambda m, x: F.linear(x, m.W[:3]).tanh() * F.linear(x, m.W[2:5]), W=weight(5, 4))


@case(normal(2, 4, 4), fallback_ok=True)
def functional_convolution():
    return Call(
        lambda m, x: F.conv2d(x, m.W, m.b, padding=1, groups=2).tanh().sum((2, 3)),
        W=weight(4, 1, 3, 3),
        b=weight(4),
    )


@case(normal(4), fallback_ok=True)
def functional_norm():
    return Call(lambda m, x: F.layer_norm(x, (4,), m.gain, m.bias).tanh(), gain=weight(4), bias=weight(4))


@case(ids(5, 3), fallback_ok=True)
def functional_embedding_and_indexing():
    return Call(lambda m, i: (F.embedding(i, m.W) * m.V[i]).sum(1), W=weight(5, 3), V=weight(5, 3))


@case(normal(5), fallback_ok=True)
def hypernetwork_of_a_constant():
    """The Linear sees a vector that has no example axis; its output is the weight of another layer."""
    return Call(
        lambda m, x: F.linear(x, m.make(m.z).view(2, 5)).tanh() @ m.V,
        make=nn.Linear(3, 10),
        z=weight(3),
        V=torch.randn(2, 2),
    )


@case(normal(4), n=3, n2=3, fallback_ok=True)
def hypernetwork_of_as_many_rows_as_examples():
    """The Linear sees (3, 2): three weight rows, which look like three examples."""
    return Call(lambda m, x: F.linear(x, m.make(m.z)).tanh(), make=nn.Linear(2, 4), z=torch.randn(3, 2))


@case(normal(4), fallback_ok=True)
def hypernetwork_per_example():
    return Call(lambda m, x: torch.einsum("nci,ni->nc", m.make(x).tanh().view(-1, 2, 4), x), make=nn.Linear(4, 8))


# --- elementwise


@case(normal(4))
def layer_scale():
    return Call(
        lambda m, x: m.head(x + m.gamma * torch.tanh(m.inner(x))),
        gamma=weight(4),
        inner=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )


@case(normal(3, 4))
def elementwise_gain_and_bias():
    return Call(lambda m, x: torch.tanh(m.gain * x + m.bias).sum(1), gain=weight(4), bias=weight(4))


@case(normal(3, 4), n=3, n2=3)
def elementwise_parameter_as_long_as_the_batch():
    """The gain has shape (T, 1) with T = n: it belongs to positions, not examples."""
    return Call(lambda m, x: torch.tanh(m.gain * x).sum(1), gain=weight(3, 1))


@case(normal(4), fallback_ok=True)
def elementwise_odd_operations():
    return Call(
        lambda m, x: (x / (m.a**2 + 1)) ** 2 + torch.maximum(x, m.b) - torch.atan2(x, m.a) + torch.lerp(x, m.b, 0.3),
        a=weight(4),
        b=weight(4),
    )


@case(normal(4))
def scalar_gain():
    return Call(
        lambda m, x: m.gain * torch.tanh(m.inner(x)) + m.shift,
        gain=weight(),
        shift=weight(1),
        inner=nn.Linear(4, 2),
    )


@case(normal(4), fallback_ok=True)
def scalar_through_exp_and_item_free_ops():
    return Call(lambda m, x: F.softmax(m.inner(x) / m.t.exp(), -1), t=weight(), inner=nn.Linear(4, 3))


@case(normal(4), fallback_ok=True)
def output_has_a_constant_part():
    """The second output is the parameter itself for every example; the third adds its norm."""
    return Call(
        lambda m, x: torch.stack([x @ m.w, m.w[0].expand(len(x)), x[:, 0] * m.w.norm()], 1),
        w=weight(4),
    )


# --- odd operations on a parameter


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w**3, (grad * x * 3 * w**2).sum(0)


@case(normal(4), fallback_ok=True)
def custom_autograd_function():
    return Call(lambda m, x: m.head(Cube.apply(torch.tanh(x), m.w)), w=weight(4), head=nn.Linear(4, 2))


@case(normal(6), fallback_ok=True)
def fourier_filter():
    return Call(lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(m.w), n=6).tanh()[:, :3], w=weight(6))


@case(normal(4), fallback_ok=True)
def cumulative_sum_of_a_parameter():
    return Call(lambda m, x: torch.tanh(x + m.w.cumsum(0))[:, :3], w=weight(4))


@case(normal(3, 4), fallback_ok=True)
def softmax_of_weights():
    return Call(lambda m, x: (x * m.w.softmax(0)[:, None]).sum(1).tanh(), w=weight(3))


@case(normal(4), fallback_ok=True)
def where_with_a_parameter():
    return Call(lambda m, x: torch.where(x > 0, x * m.w, m.v), w=weight(4), v=weight(4))


@case(normal(4), fallback_ok=True)
def matrix_exponential():
    return Call(lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.T)[:, :2], w=weight(4, 4))


@case(normal(4), fallback_ok=True)
def parameter_list_and_dict():
    def run(m, x):
        for w in m.layers:
            x = torch.tanh(x @ w)
        return x * m.scales["gain"] + m.scales["shift"]

    return Call(
        run,
        layers=nn.ParameterList([weight(4, 4), weight(4, 3)]),
        scales=nn.ParameterDict({"gain": weight(3), "shift": weight(3)}),
    )


@case(normal(4), fallback_ok=True)
def scatter_into_a_parameter():
    """Some rows of a table are overwritten by the example before it is used."""
    return Call(
        lambda m, x: torch.cat([m.table.expand(len(x), -1, -1)[:, :2], x[:, None]], 1).tanh().prod(1),
        table=weight(3, 4),
    )


@case(normal(2, 6))
def fourier_neural_operator():
    """Complex weights from real parameters, a real weight cast to complex, and a real gain on complex data."""

    def forward(m, x):
        modes = torch.fft.rfft(x)[..., :3]
        mixed = torch.einsum("bix,iox->box", modes, torch.view_as_complex(m.spectral))
        mixed = torch.einsum("box,op->bpx", mixed, m.mixing.to(mixed.dtype)) * m.gain[:, None]
        return torch.fft.irfft(mixed, n=4)

    return Call(forward, spectral=weight(2, 3, 3, 2), mixing=weight(3, 3), gain=weight(3))


class Spectral(nn.Module):
    """The layer of a Fourier neural operator: complex weights on the lowest frequencies."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        mixed = torch.zeros_like(spectrum)
        modes = self.weights.shape[-1]
        mixed[:, :, :modes] = torch.einsum("bim,iom->bom", spectrum[:, :, :modes], self.weights)
        return torch.fft.irfft(mixed, n=x.shape[-1])


@case(normal(1, 8), fallback_ok=("spectral.weights",))
def fourier_neural_operator_of_complex_parameters():
    return Call(
        lambda m, x: m.out(torch.tanh(m.spectral(m.lift(x)) + m.skip(m.lift(x)))).flatten(1)[:, :3],
        lift=nn.Conv1d(1, 3, 1), spectral=Spectral(3, 2), skip=nn.Conv1d(3, 3, 1), out=nn.Conv1d(3, 1, 1),
    )  # fmt: skip


@case(normal(4), fallback_ok=True)
def complex_network_with_a_real_output():
    """Weights, biases and inner states complex; the modulus is read out."""
    return Call(
        lambda m, x: ((x.to(m.a.dtype) @ m.a + m.c).tanh() @ m.b).abs(),
        a=nn.Parameter(torch.randn(4, 5, dtype=torch.cfloat)), c=nn.Parameter(torch.randn(5, dtype=torch.cfloat)),
        b=nn.Parameter(torch.randn(5, 2, dtype=torch.cfloat)),
    )  # fmt: skip
