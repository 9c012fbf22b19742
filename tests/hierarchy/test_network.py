import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from conformance import assert_operator_conforms
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.hierarchy import NetworkPullback, Transport
from hierarchy.chains import close, make
from references import hierarchy as reference
from references.fingerprint import assert_same_fingerprint, fingerprint

TOL = 1e-10  # as the issue asks; what is seen is below 1e-13


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(1, 2, 2), nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Linear(12, 2)

    def forward(self, x):
        x = F.silu(self.stem(x))
        return self.head(F.relu(self.conv(x), inplace=True).flatten(1))


def conv_reference(net: ConvNet):
    def run(one: Tensor, offsets):
        patches = F.unfold(one[None], 2, stride=2, padding=1)[0].T  # (T, i)
        u = patches @ net.conv.weight.flatten(1).T + net.conv.bias + offsets["conv"]
        hidden = F.relu(u).T.flatten()[None]
        return (hidden @ net.head.weight.T + net.head.bias + offsets["head"])[0], {"conv": patches, "head": hidden}

    return run, {"conv": torch.zeros(4, 3).double(), "head": torch.zeros(1, 2).double()}


class ResidualNet(nn.Module):
    """Two branches around a block, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + torch.tanh(self.block(x))
        x = x + F.gelu(self.block(x))
        return self.head(x)


def residual_reference(net: ResidualNet):
    def run(one: Tensor, offsets):
        v1 = torch.tanh(one)[None]
        v2 = v1 + torch.tanh(v1 @ net.block.weight.T + net.block.bias + offsets["first"])
        v3 = v2 + F.gelu(v2 @ net.block.weight.T + net.block.bias + offsets["second"])
        return (v3 @ net.head.weight.T + net.head.bias + offsets["head"])[0], {"first": v1, "second": v2, "head": v3}

    return run, {
        "first": torch.zeros(1, 4).double(),
        "second": torch.zeros(1, 4).double(),
        "head": torch.zeros(1, 2).double(),
    }


class AttentionNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.attend = nn.MultiheadAttention(4, 1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return self.head(x.mean(1))


def attention_reference(net: AttentionNet):
    def run(one: Tensor, offsets):
        w, b = net.attend.in_proj_weight, net.attend.in_proj_bias
        q, k, v = (one @ w.T + b + offsets["in"]).chunk(3, dim=1)
        mixed = torch.softmax(q @ k.T / 2.0, dim=1) @ v
        out = mixed @ net.attend.out_proj.weight.T + net.attend.out_proj.bias + offsets["out"]
        raw = one + out
        normal = F.layer_norm(raw, (4,))
        # The gain as a site of its own: u_i = γ_i x̂_i is a linear map whose weight is diagonal; see `gain` below.
        x = normal * net.norm.weight + net.norm.bias + offsets["gain"]
        pooled = x.mean(0, keepdim=True)
        f = (pooled @ net.head.weight.T + net.head.bias + offsets["head"])[0]
        return f, {"in": one, "out": mixed, "gain": normal, "head": pooled}

    sizes = {"in": (3, 12), "out": (3, 4), "gain": (3, 4), "head": (1, 2)}
    return run, {name: torch.zeros(*size).double() for name, size in sizes.items()}


def gain_corrected(net: AttentionNet, here: Tensor) -> Tensor:
    """A with the gain's term entry by entry: Σ_pq Σ_i s_{pi} s_{qi} (∂x̂_{pi})ᵀ (∂x̂_{qi}), not through a full matrix."""
    run, offsets = attention_reference(net)
    full = {name: name for name in offsets}
    whole = reference.network_pullback(run, here, offsets, full)
    only = reference.network_pullback(
        lambda one, shift: _restricted(run, one, {**offsets, **shift}), here, {"gain": offsets["gain"]}, full
    )
    total = whole - only
    for i in range(4):
        for mu in range(len(here)):
            for nu in range(len(here)):
                rows = []
                for one in (here[mu], here[nu]):
                    jac = torch.func.jacrev(lambda o, i=i: run(o, offsets)[1]["gain"][:, i])(one).flatten(1)  # (T, N)
                    sig = torch.func.jacrev(lambda s, o=one: run(o, {**offsets, "gain": s})[0])(offsets["gain"])[..., i]
                    rows.append(sig @ jac)  # (C, N)
                total[mu, :, :, nu] += torch.einsum("ca,db->cadb", rows[0], rows[1])
    return total


def _restricted(run, one, offsets):
    f, inputs = run(one, offsets)
    return f, {"gain": inputs["gain"]}


def flat(a: Tensor) -> Tensor:
    size = a.shape[0] * a.shape[1] * a.shape[2]
    return a.reshape(size, size)


def test_convolutions():
    torch.manual_seed(0)
    net = ConvNet().double()
    x = torch.randn(3, 1, 4, 4).double()
    operator = NetworkPullback(net, x, "stem")
    run, offsets = conv_reference(net)
    here = net.stem(x).detach()
    wanted = reference.network_pullback(lambda one, s: run(F.silu(one), s), here, offsets, {k: k for k in offsets})
    assert close(operator.dense(), flat(wanted), TOL)


def test_residual_connections_and_a_weight_used_twice():
    torch.manual_seed(0)
    net = ResidualNet().double()
    x = torch.randn(3, 3).double()
    run, offsets = residual_reference(net)
    tied = {"first": "block", "second": "block", "head": "head"}
    wanted = reference.network_pullback(run, net.stem(x).detach(), offsets, tied)
    assert_operator_conforms(NetworkPullback(net, x, "stem"), flat(wanted), tol=TOL)
    apart = reference.network_pullback(run, net.stem(x).detach(), offsets, {k: k for k in offsets})
    assert not close(flat(apart), flat(wanted), 1e-3), "the cross term of the shared weight must matter here"


def test_attention():
    torch.manual_seed(0)
    net = AttentionNet().double()
    x = torch.randn(2, 3, 3).double()
    wanted = gain_corrected(net, net.embed(x).detach())
    assert close(NetworkPullback(net, x, "embed").dense(), flat(wanted), TOL)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_chain_has_the_operator_of_its_fields(layer):
    case = make([4, 6, 5, 3], outputs=2, n=4, bias=True)
    net = nn.Sequential()
    for weight, bias in zip(case.weights, case.biases, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0]).double()
        linear.weight.data, linear.bias.data = weight, bias
        net.extend([linear, nn.ReLU()])
    readout = nn.Linear(3, 2, bias=False).double()
    readout.weight.data = case.readout
    net.append(readout.requires_grad_(False))
    name = "input" if layer == 0 else str(2 * layer - 1)
    operator = NetworkPullback(net, case.x, name)
    fields = case.fields()
    assert close(operator.dense(), fields.pullback(layer).dense())
    assert close(operator.conjugates, fields.conjugates[layer])
    v = torch.randn(4, 2, fields.widths[layer]).double()
    assert close(operator.apply(v), fields.pullback(layer).apply(v))


class Piecewise(nn.Module):
    """A convolutional residual net of ReLUs without biases: its outputs are homogeneous in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.block = nn.Conv2d(3, 3, 3, padding=1, bias=False, groups=3)
        self.head = nn.Linear(48, 2, bias=False)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head((x + F.relu(self.block(x))).flatten(1))


def test_it_foretells_the_conjugates_of_a_piecewise_linear_network():
    """Δg = -η A (x e) to first order, with the true change by finite steps of the real network."""
    torch.manual_seed(0)
    net = Piecewise().double()
    x, e = torch.randn(3, 1, 4, 4).double(), torch.randn(3, 2).double()
    before = NetworkPullback(net, x, "stem")
    (net(x) * e).sum().backward()
    predicted = -before.apply(before.value.reshape(3, 1, -1) * e[:, :, None])
    errors = []
    for lr in (1e-4, 5e-5, 2.5e-5):
        moved = Piecewise().double()
        moved.load_state_dict({name: p.data - lr * p.grad for name, p in net.named_parameters()})
        errors.append(float((NetworkPullback(moved, x, "stem").conjugates - before.conjugates - lr * predicted).norm()))
    assert errors[0] < 1e-5
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(2, 3), nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.cell(self.embed(x))[0][:, -1])


class Tied(nn.Module):
    """The head uses the transposed weight of a layer above the opened one, and a normalised weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(3, 4), nn.Linear(4, 5)
        self.second = weight_norm(nn.Linear(4, 2))

    def forward(self, x):
        x = torch.tanh(self.first(torch.tanh(self.stem(x))))
        return self.second(torch.tanh(x @ self.first.weight))


@pytest.mark.parametrize(("make_net", "shape", "layer"), [(Recurrent, (2, 2, 2), "embed"), (Tied, (2, 3), "stem")])
def test_recurrent_tied_and_derived_weights(make_net, shape, layer):
    """Symmetric and positive; the values themselves are checked on the networks above and below."""
    torch.manual_seed(0)
    net = make_net().double()
    operator = NetworkPullback(net, torch.randn(*shape).double(), layer)
    dense = operator.dense()
    assert close(dense, dense.T, TOL)
    values = torch.linalg.eigvalsh(dense)
    assert float(values.min()) > -1e-12 * float(values.max())
    assert float(values.max()) > 1e-3


def test_a_learned_initial_state_is_data_of_the_recurrence():
    """It depends on no layer, so that it adds nothing: A is that of the same state held fixed."""

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Linear(2, 3), nn.GRU(3, 3, batch_first=True), nn.Linear(3, 1)
            self.start = nn.Parameter(torch.randn(1, 1, 3))

        def forward(self, x):
            return self.head(self.cell(self.embed(x), self.start.expand(-1, len(x), -1).contiguous())[0][:, -1])

    torch.manual_seed(0)
    net, x = Started().double(), torch.randn(2, 3, 2).double()
    learned = NetworkPullback(net, x, "embed").dense()
    net.start.requires_grad_(False)
    assert close(learned, NetworkPullback(net, x, "embed").dense(), TOL)


def test_tied_weights_in_a_linear_network_are_the_mixed_derivative():
    """With no activation there is no curvature term, and A = Bᵀ B with B = ∂²f/∂θ∂x^ℓ by autograd."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first = nn.Linear(3, 4), nn.Linear(4, 5)
            self.second = weight_norm(nn.Linear(4, 2))

        def forward(self, x):
            return self.second(self.first(self.stem(x)) @ self.first.weight)

    torch.manual_seed(0)
    net = Linear().double()
    x = torch.randn(3, 3).double()
    operator = NetworkPullback(net, x, "stem")
    theta = {n: p for n, p in net.named_parameters() if not n.startswith("stem")}

    def conjugates(params, value):
        return torch.func.jacrev(lambda v: _rest(net, params, v))(value)  # (C, N)

    rows = []
    for value in net.stem(x).detach():
        second = torch.func.jacrev(conjugates)({n: p.detach() for n, p in theta.items()}, value)
        rows.append(torch.cat([s.flatten(2) for s in second.values()], dim=2))  # (C, N, P)
    b = torch.stack(rows)
    assert close(operator.dense(), flat(torch.einsum("ncap,mdbp->ncamdb", b, b)), TOL)


def _rest(net, params, v):
    w, b = params["first.weight"], params["first.bias"]
    g, direction = (
        params["second.parametrizations.weight.original0"],
        params["second.parametrizations.weight.original1"],
    )
    last = g * direction / direction.norm(dim=1, keepdim=True)
    return last @ (w.T @ (w @ v + b)) + params["second.bias"]


TRANSPORTS = {
    "conv": (ConvNet, (3, 1, 4, 4), "stem", "conv"),
    "residual": (ResidualNet, (3, 3), "stem", "head"),
    "attention": (AttentionNet, (2, 5, 3), "embed", "norm"),
    "lstm": (Recurrent, (3, 4, 2), "embed", "head"),
    "input": (ResidualNet, (3, 3), "input", "head"),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_are_jacobians(name):
    make_net, shape, source, target = TRANSPORTS[name]
    torch.manual_seed(0)
    net = make_net().double()
    x = torch.randn(*shape).double()
    transport = Transport(net, x, source, target)
    seen: dict[str, Tensor] = {}

    def run(delta):
        handles = []
        if source != "input":
            handles.append(dict(net.named_modules())[source].register_forward_hook(lambda m, a, out: out + delta))

        def keep(m, a, out):
            seen[target] = out[0] if isinstance(out, tuple) else out.clone()

        handles.append(dict(net.named_modules())[target].register_forward_hook(keep))
        try:
            net(x + delta if source == "input" else x)
        finally:
            for handle in handles:
                handle.remove()
        return seen[target]

    start = x if source == "input" else dict(net.named_modules())[source](x)
    wanted = torch.autograd.functional.jacobian(run, torch.zeros_like(start))
    assert_operator_conforms(transport, wanted.reshape(transport.shape), tol=TOL)


def test_the_model_is_untouched_and_may_train_on():
    torch.manual_seed(0)
    net = ConvNet().double()
    x = torch.randn(3, 1, 4, 4).double()
    before = fingerprint(net)
    before.pop("python random numbers")  # the test suite's type checker draws from it
    operator = NetworkPullback(net, x, "stem")
    after = fingerprint(net)
    after.pop("python random numbers")
    assert_same_fingerprint(before, after)
    dense = operator.dense()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    assert torch.equal(operator.dense(), dense)


def test_a_weight_that_is_overwritten_after_its_use_is_refused():
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            weight = self.head.weight.clone()
            out = self.stem(x) @ weight.T
            weight.zero_()
            return out

    with pytest.raises(UnsupportedError, match="overwrote one of them in place"):
        NetworkPullback(Overwriting(), torch.randn(3, 3), "stem")


def test_bad_input():
    net, x = ConvNet(), torch.randn(3, 1, 4, 4)
    with pytest.raises(InputError, match="There are: stem, conv, head"):
        NetworkPullback(net, x, "nothing")
    with pytest.raises(UnsupportedError, match="called once"):
        NetworkPullback(ResidualNet(), torch.randn(3, 3), "block")
    with pytest.raises(InputError, match="v must have shape"):
        NetworkPullback(net, x, "stem").apply(torch.zeros(3))
    unused = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    unused.extra = nn.Linear(2, 2)
    unused.forward = lambda x: unused[1](unused[0](x))  # type: ignore[method-assign]
    with pytest.raises(InputError, match="was not called"):
        Transport(unused, torch.randn(3, 2), "0", "extra")
    with pytest.raises(InputError, match="Name the embedding"):
        NetworkPullback(
            nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 1)), torch.zeros(3, 2).long(), "input"
        )
    assert float(NetworkPullback(net, x, "head").dense().abs().max()) == 0  # no weight above the last layer
