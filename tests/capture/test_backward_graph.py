"""Backward passes in parts give the signals of one pass, and sites are the same however they were found."""

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import CASES
from gramscope.capture.backward_graph import TOGETHER, BackwardGraph
from gramscope.capture.capturing import opened
from gramscope.capture.known_sites import KnownSites
from gramscope.capture.weight_sites import WeightSites
from gramscope.kernels import memory
from gramscope.kernels.memory import FEW
from references.jacobian import assert_kernel_close, reference_ntk

CUT = ["vit", "lstm", "gru", "gpt_tied", "encoder_layer", "residual_in_place", "pinn_residual", "batch_norm2d_eval",
       "siamese_in_one_doubled_batch", "experts_by_boolean_mask", "mlp_relu"]  # fmt: skip
MANY = 15


@pytest.fixture(autouse=True)
def always_from_a_few(monkeypatch):
    """Small networks too are looked at by a few examples first, as large ones are."""
    monkeypatch.setattr(memory, "SMALL_INPUT", -1)


@pytest.mark.parametrize("together", [0, 2**62])
@pytest.mark.parametrize("name", CUT)
def test_signals_in_parts_are_those_of_one_pass(name, together, monkeypatch):
    """Whether all directions go back together or one after the other."""
    case = CASES[name]
    model, x, _ = case.build(dtype=torch.float64)
    with opened(model, x, outputs=case.outputs) as network:
        sites, cotangents = network.weight_sites, network.cotangents()
        (whole,) = sites.graph.signals(cotangents, sites.edges)
        monkeypatch.setitem(TOGETHER, "cpu", together)
        parts = list(sites.graph.signals(cotangents, sites.edges, room=1))
        found = {edge: signal for part in parts for edge, signal in part.items()}
        assert found.keys() == whole.keys()
        for edge, signal in ((edge, signals.whole) for edge, signals in whole.items()):
            torch.testing.assert_close(found[edge].whole, signal, rtol=1e-12, atol=1e-12 * float(signal.abs().max()))


@pytest.mark.parametrize("name", ["batch_norm2d_eval", "vit", "gpt_tied", "prelu_per_channel", "group_norm", "lstm"])
def test_kernels_one_direction_after_the_other(name, monkeypatch):
    monkeypatch.setitem(TOGETHER, "cpu", 0)
    case = CASES[name]
    model, x, _ = case.build(dtype=torch.float64)
    expected = reference_ntk(model, x, outputs=case.outputs)
    assert_kernel_close(gs.ntk(model, x, outputs=case.outputs), expected, 1e-11)


def test_a_deep_network_is_cut_into_many_parts():
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(3, 3), nn.Tanh())])
    with opened(model, torch.randn(4, 3)) as network:
        sites = network.weight_sites
        assert len(list(sites.graph.signals(network.cotangents(), sites.edges, room=1))) == 6


class OneAtATime(torch.autograd.Function):
    """Its backward pass asks for a number, which a batch of directions does not have."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient if gradient.sum().item() else gradient


class Scan(nn.Module):
    """A loop over the steps of a computed tensor, which has another use too."""

    def __init__(self, steps: list[int], kind: str) -> None:
        super().__init__()
        self.inputs, self.cell = nn.Linear(3, 4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(4))
        self.steps, self.kind = steps, kind

    def forward(self, x):
        hidden = self.inputs(x).sin()  # (n, T, 4)
        if self.kind == "a weight's signals":
            hidden = hidden * self.gain
        state = hidden.mean(1)
        for place, step in enumerate(self.steps):
            state = torch.tanh(self.cell(hidden[:, step] + state))
            if self.kind == "not batched" and place == 0:  # the last in the backward pass
                state = OneAtATime.apply(state)
        return state


@pytest.mark.parametrize("together", [0, 2**62])
@pytest.mark.parametrize("kind", ["plain", "not batched", "a weight's signals"])
@pytest.mark.parametrize("steps", [range(7), [-1, 5, 3, -5, 3, 0], [6, 6, 6, 5]])
def test_gradients_of_steps_are_put_together(steps, kind, together, monkeypatch):
    """They are those of autograd, which makes a tensor of all steps for each; also in parts, and a second time.

    A batched pass that stops halfway leaves nothing behind for the passes that take its place.
    """
    monkeypatch.setitem(TOGETHER, "cpu", together)
    torch.manual_seed(0)
    model, x = Scan(list(steps), kind).double(), torch.randn(5, 7, 3, dtype=torch.float64)
    with opened(model, x) as network:
        sites, cotangents = network.weight_sites, network.cotangents()
        graph = sites.graph
        assert [len(loop.steps) for loop in graph._loops] == [len(steps)]
        once, again = (list(graph.signals(cotangents, sites.edges)) for _ in range(2))
        in_parts = list(graph.signals(cotangents, sites.edges, room=1))
        graph._loops = []
        (expected,) = graph.signals(cotangents, sites.edges)
        for passes in (once, again, in_parts):
            found = {edge: signals for part in passes for edge, signals in part.items()}
            assert found.keys() == expected.keys()
            for edge, signals in expected.items():
                torch.testing.assert_close(found[edge].whole, signals.whole, rtol=1e-13, atol=1e-13)
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)


def test_skips_are_not_counted_twice():
    """From the middle of a block the gradient goes two ways, one of which meets the other again."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(5))

        def forward(self, x):
            hidden = [self.layers[0](x)]
            for layer in self.layers[1:]:
                hidden.append(torch.tanh(layer(hidden[-1])) + sum(hidden))
            return hidden[-1]

    model, x = Skipping().double(), torch.randn(4, 3, dtype=torch.float64)
    with opened(model, x) as network:
        sites, cotangents = network.weight_sites, network.cotangents()
        (whole,) = sites.graph.signals(cotangents, sites.edges)
        for part in sites.graph.signals(cotangents, sites.edges, room=1):
            for edge, signal in part.items():
                torch.testing.assert_close(signal.whole, whole[edge].whole)


@pytest.mark.parametrize("name", ["mlp_relu", "vit", "gpt_tied", "encoder_layer", "mha_sequence_first", "conv1d"])
def test_sites_found_from_a_few_examples(name, monkeypatch):
    case = CASES[name]
    model, x, _ = case.build(dtype=torch.float64)
    x = x.repeat((MANY + 2) // len(x) + 1, *[1] * (x.dim() - 1))
    known = KnownSites()
    with opened(model, x[:FEW], outputs=case.outputs) as network:
        network.weight_sites.keep_in(known, few=True)
    with opened(model, x, outputs=case.outputs, known=known) as network:
        sought = WeightSites(BackwardGraph(network.f, network.parameters), lambda names: None)
        monkeypatch.setattr(WeightSites, "_find", lambda self: pytest.fail("searched again"))
        found = network.weight_sites
        twin = dict(zip(sought.graph.nodes, found.graph.nodes, strict=True))
        assert [
            (twin[node], [(cut.slot, twin[cut.weight[0]], cut.weight[1]) for cut in cuts])
            for node, cuts in sought.cuts.items()
        ] == [(node, [(cut.slot, *cut.weight) for cut in cuts]) for node, cuts in found.cuts.items()]
        assert len(found.edges) == len(sought.edges)


class Changing(nn.Module):
    """Few examples take one way, many another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.first(x) if len(x) < 9 else self.first(x) + self.second(x) - self.second(x.flip(0)).detach()


def test_a_network_that_changes_with_its_batch_is_searched_whole():
    model, x = Changing().double(), torch.randn(MANY + 3, 3, dtype=torch.float64)
    assert set(gs.ntk(model, x, by_site=True)) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    kernel = gs.ntk(model, x, by_site=True)["second.bias"]
    torch.testing.assert_close(kernel, torch.eye(2).double().expand(len(x), len(x), 2, 2).permute(0, 2, 1, 3))


def test_a_function_that_keeps_a_leaf_is_not_the_leaf():
    """Under the very name by which a leaf's own node knows it."""
    kept, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = kept
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    f = Keeping.apply(x)[:, None]
    assert list(BackwardGraph(f, {"x": x, "kept": kept}).names.values()) == ["x"]


class Hooked(nn.Module):
    """Every hidden layer doubles its gradient by a hook, as implicit layers change theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(lambda gradient: 2 * gradient)
        return x


def test_hooks_on_tensors_run_once():
    model, x = Hooked().double(), torch.randn(4, 3, dtype=torch.float64)
    with opened(model, x) as network:
        sites, cotangents = network.weight_sites, network.cotangents()
        (whole,) = sites.graph.signals(cotangents, sites.edges)
        (again,) = sites.graph.signals(cotangents, sites.edges, room=1)
        assert all(torch.equal(again[edge].whole, signal.whole) for edge, signal in whole.items())
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)


class Routed(nn.Module):
    """Each token goes to one of two layers by its sign."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        out = torch.zeros_like(tokens)
        for layer, chosen in ((self.left, tokens[:, 0] > 0), (self.right, tokens[:, 0] <= 0)):
            places = chosen.nonzero()[:, 0]
            out = out.index_put((places,), torch.tanh(layer(tokens[places])))
        return out.view_as(x).sum(1)


def test_routed_examples_are_not_told_by_a_few():
    """One token of each of the first examples goes each way; of later ones both, as many in all."""
    model, x = Routed().double(), torch.rand(2 * MANY, 2, 2, dtype=torch.float64)
    x[:, 1] *= -1
    x[FEW + 2, 1] *= -1
    x[FEW + 4, 0] *= -1
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)


def test_silent_examples_tell_nothing_of_the_others():
    """The first examples have no signals; the layout of the others is another than examples first."""

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            hidden = self.layer(x.transpose(0, 1))  # (T, n, 2)
            return (torch.relu(hidden) ** 2).sum(0) * (x.sum((1, 2)) > 0)[:, None]

    model, x = SequenceFirst().double(), torch.randn(MANY, 3, 2, dtype=torch.float64)
    x[:FEW] = -x[:FEW].abs()
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)


def test_a_model_that_insists_on_its_batch_is_searched_whole():
    class Insisting(nn.Linear):
        def forward(self, x):
            assert len(x) == MANY, "no other batch"
            return super().forward(x)

    model, x = Insisting(3, 2).double(), torch.randn(MANY, 3, dtype=torch.float64)
    assert_kernel_close(gs.ntk(model, x), reference_ntk(model, x), 1e-12)
