"""Readings of single weights against their definitions, written out by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gramscope as gs
from gramscope.measures.gram_tracker import gram_change_sizes
from gramscope.record import watched_measures
from gramscope.record.scope import WatchWarning

LR = 0.1
GRAM = ("delta_gram", "delta_vc", "gram_vc_correlation")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def test_what_a_layer_is_given_unchanged_is_looked_at_once(monkeypatch):
    """The first layer is always given the probe; the others are looked at again, since the weights moved."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(20, 3), torch.arange(20) % 2
    seen, real, several = [], gs.measures.target_linearity, watched_measures.target_linearities
    monkeypatch.setattr(
        watched_measures, "target_linearities", lambda new, y: seen.extend(new.values()) or several(new, y)
    )
    scope = gs.watch(model, (x, y), measures="target_linearity", on_error="raise", overhead=None, every=1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    scope.step()
    assert [h.shape[1] for h in seen] == [3, 5, 5]
    last = scope.records[-1]["scalars"]
    assert last["target_linearity/0"] == real(x, F.one_hot(y).double())
    assert last["target_linearity/2"] == real(model[:2](x), F.one_hot(y).double())


def test_measures_that_fail_for_one_reason_are_told_in_one_warning(recwarn):
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    probe = torch.randn(20, 3), torch.arange(20) % 2
    scope = gs.watch(model, probe, measures=["loss", "shares", "norm", "kernel"], overhead=None, every=1)
    with torch.no_grad():
        model[2].weight.fill_(float("nan"))
    scope.step()
    (said,) = (str(w.message) for w in recwarn if "failed at step 1" in str(w.message))
    assert said.startswith("the measures 'loss', 'shares', 'kernel' failed at step 1: InputError: parameter '2.weight'")
    scope.step()
    assert not any("failed at step 2" in str(w.message) for w in recwarn), "said already"
    assert set(scope.records[2]["failures"]) == {"loss", "shares", "kernel"}


def test_a_graph_has_losses_and_gradients_but_no_kernel(recwarn):
    """One step of a full-batch graph network: the nodes are the examples, and see one another."""
    torch.manual_seed(0)
    neighbors = torch.rand(12, 12).softmax(1)
    one, two = nn.Linear(5, 7), nn.Linear(7, 3)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = one, two

        def forward(self, x):
            return neighbors @ self.two(torch.relu(neighbors @ self.one(x)))

    model, x, y = Graph(), torch.randn(12, 5), torch.arange(12) % 3
    names = ["loss", "shares", "gradient", "classes", "kernel", "richness", "target_linearity", "collapse"]
    scope = gs.watch(model, (x, y), measures=names, overhead=None, every=1)
    scope.step()
    (said,) = {str(w.message) for w in recwarn}
    assert said.startswith("the measures 'kernel', 'richness', 'target_linearity', 'collapse' failed at step 0")
    assert "neighbours in a graph" in said
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, [*one.parameters(), *two.parameters()])
    whole = sum(float(g.double().square().sum()) for g in gradients)
    for record in scope.records:
        found = record["scalars"]
        assert found["loss/probe"] == pytest.approx(float(loss), rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(whole**0.5, rel=1e-5)
        of_first = sum(float(g.double().square().sum()) for g in gradients[:2])
        assert found["share/one"] == pytest.approx(of_first / whole, rel=1e-5)
        assert "noise_scale" not in found
        assert set(record["failures"]) == {"kernel", "richness", "target_linearity", "collapse"}


def test_a_weight_of_one_row_has_no_tail():
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 1))
    found = first(model, torch.randn(20, 3), torch.randn(20, 1), "spectra")
    assert not any("alpha" in name and "2.weight" in name for name in found)


class Conv1D(nn.Module):
    """A linear layer with its weight stored as (in, out), as Hugging Face has it."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out))

    def forward(self, x):
        return x @ self.weight


def first(model, x, y, measures, optimizer=None):
    scope = gs.watch(model, (x, y), measures=measures, lr=LR, on_error="raise", overhead=None, every=1)
    if optimizer is not None:
        scope.use(optimizer).step()
    assert not scope.records[-1]["failures"]
    return scope.records[-1]["scalars"]


def gram_and_virtual(weight: Tensor, change: Tensor, pulled: Tensor) -> tuple[float, float, float]:
    """Sizes of ``W'ᵀW' - WᵀW`` and ``-2 sym(Wᵀ D g)``, and their cosine."""
    gram = (weight + change).T @ (weight + change) - weight.T @ weight
    virtual = -(weight.T @ pulled + pulled.T @ weight)
    return float(gram.norm()), float(virtual.norm()), float((gram * virtual).sum() / (gram.norm() * virtual.norm()))


def seen_of(seen: dict[str, float], key: str) -> tuple[float, ...]:
    return tuple(seen[f"{name}/{key}"] for name in GRAM)


def test_each_weight_of_a_layer_has_its_own_series():
    torch.manual_seed(0)
    model, x, y = Recurrent().double(), torch.randn(20, 5, 3).double(), torch.arange(20) % 2
    seen = first(model, x, y, ["target_linearity", "step"])
    weights = ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    assert {name for name in seen if name.split("/")[0] in (*GRAM, "target_linearity")} == {
        f"{kind}/{key}" for kind in (*GRAM, "target_linearity") for key in (*weights, "head")
    }  # a layer with one weight is known by its own name
    hidden = model.lstm(x)[0].detach()
    before = torch.cat([torch.zeros(20, 1, 4), hidden[:, :-1]], 1)
    for key, inputs in zip((*weights, "head"), (x.mean(1), before.mean(1), hidden[:, -1]), strict=True):
        assert seen[f"target_linearity/{key}"] == pytest.approx(float(gs.measures.target_linearity(inputs, y)))
    F.cross_entropy(model(x), y).backward()
    for key, name in zip((*weights, "head"), (*weights, "head.weight"), strict=True):
        w = model.get_parameter(name)
        assert seen_of(seen, key) == pytest.approx(gram_and_virtual(w.detach(), -LR * w.grad, LR * w.grad))


def test_a_frozen_weight_does_not_rename_its_neighbour():
    torch.manual_seed(0)
    model, x, y = Recurrent().double(), torch.randn(20, 5, 3).double(), torch.arange(20) % 2
    model.lstm.weight_hh_l0.requires_grad_(False)
    seen = first(model, x, y, ["target_linearity", "step"])
    for kind in (*GRAM, "target_linearity"):
        assert {name for name in seen if name.startswith(f"{kind}/")} == {f"{kind}/lstm.weight_ih_l0", f"{kind}/head"}


def written_out(layer: nn.Module, tensor: Tensor) -> Tensor:
    """The whole matrix from what the layer is given to what it gives at one place, zero between groups."""
    if isinstance(layer, Conv1D):
        return tensor.T
    groups, width, size = layer.groups, layer.kernel_size[0], (layer.out_channels, layer.in_channels)
    whole = tensor.new_zeros(size[0], size[1], width)
    for out in range(size[0]):
        for given in range(size[1]):
            group, outs, ins = out // (size[0] // groups), size[0] // groups, size[1] // groups
            if given // ins != group:
                continue
            own = tensor[given, out % outs] if layer.transposed else tensor[out, given % ins]
            whole[out, given] = own
    if layer.transposed:  # one input gives ``width`` outputs
        return whole.permute(0, 2, 1).reshape(size[0] * width, size[1])
    return whole.reshape(size[0], size[1] * width)  # ``width`` inputs give one output


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ConvTranspose1d(4, 6, 3),
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2),
        lambda: nn.Conv1d(4, 6, 3, groups=2),
        lambda: nn.Conv1d(4, 6, 3),
        lambda: Conv1D(7, 5),
    ],
    ids=["transposed", "transposed in groups", "in groups", "plain", "stored transposed"],
)
def test_gram_changes_are_those_of_the_matrix(make):
    torch.manual_seed(0)
    model, x = nn.Sequential(make(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)), torch.randn(8, 4, 7)
    model(x)
    model, x, y = model.double(), x.double(), torch.arange(8) % 3
    seen = first(model, x, y, "step")
    F.cross_entropy(model(x), y).backward()
    weight = model[0].weight
    w, g = (written_out(model[0], tensor) for tensor in (weight.detach(), weight.grad))
    assert seen_of(seen, "0") == pytest.approx(gram_and_virtual(w, -LR * g, LR * g), rel=1e-9)


def test_weights_without_a_matrix_are_named():
    """But not a table, which multiplies nothing."""

    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.weight = nn.Embedding(5, 4), nn.Parameter(torch.randn(4, 8))

        def forward(self, ids):
            return self.table(ids).mean(1) @ self.weight

    torch.manual_seed(0)
    model = nn.Sequential(Bilinear(), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randint(5, (6, 2)), torch.arange(6) % 3
    with pytest.warns(WatchWarning, match=r"delta_gram is left out: 0\.weight lack"):
        scope = gs.watch(model, (x, y), every=1, measures="step", lr=LR, overhead=None)
    record = scope.records[0]
    scope.close()
    assert "0.weight" in record["failures"]["delta_gram"]
    assert "table" not in record["failures"]["delta_gram"]
    assert {"delta_gram/2", "delta_vc/2"} <= record["scalars"].keys()
    assert "delta_gram/0" not in record["scalars"]


@pytest.mark.parametrize("memory", [0.0, 2.0, -4.0])
def test_gram_and_virtual_covariance_of_a_step(memory):
    """A step down the gradient changes both alike; against it, by its momenta, the correlation is negative."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(5, 3)).double(), torch.randn(12, 5).double(), torch.arange(12) % 3
    F.cross_entropy(model(x), y).backward()
    w, g = model[0].weight.detach(), model[0].weight.grad.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = memory * p.grad
    seen = first(model, x, y, "step", optimizer)
    expected = gram_and_virtual(w, -LR * (0.5 * memory + 1) * g, LR * g)
    assert seen_of(seen, "0") == pytest.approx(expected, rel=1e-9)
    assert seen["gram_vc_correlation/0"] * (1 if memory >= 0 else -1) > 0.99


@pytest.mark.parametrize("shape", [(40, 3), (9, 3), (8, 3), (3, 40), (1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_gram_changes_of_wide_and_of_tall_weights(shape, kind):
    """Whatever basis they are measured in, the sizes are those of the (d, d) matrices written out."""
    torch.manual_seed(0)
    fan_in, fan_out = shape
    model = nn.Sequential(nn.Linear(fan_in, fan_out), nn.Tanh(), nn.Linear(fan_out, 2)).double()
    x, y = torch.randn(6, fan_in).double(), torch.arange(6) % 2
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](model.parameters(), lr=LR)
    seen = first(model, x, y, "step", optimizer)
    step = gs.explain_step(model, x, y, loss="cross_entropy", optimizer=optimizer)
    pulled = step.parts.preconditioner["0.weight"] * step.gradients["0.weight"]
    expected = gram_and_virtual(model[0].weight.detach(), step.parts.change["0.weight"], pulled)
    # The reference subtracts WᵀW from W'ᵀW', which costs it some digits more than the measurement loses.
    assert seen_of(seen, "0") == pytest.approx(expected, rel=1e-10)


def test_a_step_that_only_turns_a_weight_changes_no_gram():
    """``W' = Q W``: rounding is all that is left, also where it is not the (d, d) matrices that are measured."""
    torch.manual_seed(0)
    weight = torch.randn(1, 4, 50).double()
    generator = torch.randn(4, 4).double()
    turn = torch.linalg.matrix_exp(0.1 * (generator - generator.T))
    change = turn @ weight - weight
    gram, virtual, inner = gram_change_sizes(weight, change, -change)
    size = float(weight.norm())
    assert gram < 1e-15 * size**2, "the change has the rounding of W; a sum of squares that cancel would leave 1e-9"
    assert virtual > 1e-6 * size**2
    assert abs(inner) <= gram * virtual * (1 + 1e-12)


class Largest(TorchDispatchMode):
    """The most entries that any tensor made inside has."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return made


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: nn.Sequential(nn.Linear(1500, 4), nn.ReLU(), nn.Linear(4, 3)), (12, 1500)),
        (lambda: nn.Sequential(nn.Conv1d(500, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)), (12, 500, 5)),
        (lambda: nn.Sequential(nn.Linear(6, 1500), nn.ReLU(), nn.Linear(1500, 3)), (12, 6)),
    ],
    ids=["wide input", "convolution", "wide layer"],
)
def test_a_reading_makes_no_matrix_of_inputs_by_inputs(model, x):
    """Every measure that is read by default needs what weights, inputs and signals take, and not d² numbers."""
    torch.manual_seed(0)
    model, x, y = model(), torch.randn(x), torch.arange(12) % 3
    with Largest() as largest:
        first(model, x, y, "*")
    weights = sum(p.numel() for p in model.parameters())
    signals = 12 * 3 * 1500  # examples, outputs, entries of the widest layer
    rows = 12 * 3 * weights  # of all examples and outputs
    assert largest.entries <= max(4 * weights + 2 * signals, rows) < 1500**2 / 4


@pytest.mark.parametrize("measure", ["step", "dntk", "states"])
@pytest.mark.parametrize("cause", ["fitted", "below precision"])
def test_the_error_of_a_step_that_changes_nothing_is_undefined(measure, cause):
    """Of no change there is no fraction: neither 0, as if theory had predicted the step, nor infinity."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(6, 5)
    y = model(x).detach() if cause == "fitted" else torch.randn(6, 2)
    with pytest.warns(WatchWarning, match=f"{measure}/error is left out: not defined: the step changed nothing"):
        scope = gs.watch(model, (x, y), measures=measure, lr=LR if cause == "fitted" else 1e-12, overhead=None)
    record = scope.records[0]
    relative = ("step/error", "step/second_order", "step/mask_flips", "dntk/error", "dntk/error_with_crossings")
    assert not {*relative, "states/error", "states/alignment"} & record["scalars"].keys()
    assert "not defined" in record["failures"][f"{measure}/error"]
    scope = gs.watch(model, (x, torch.randn(6, 2)), measures=measure, lr=LR, overhead=None, on_error="raise")
    assert f"{measure}/error" in scope.records[0]["scalars"]
    assert not scope.records[0]["failures"]


def test_states_are_read_with_the_outputs_that_were_chosen():
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(6, 5), torch.randn(6, 2)
    options = {"measures": "states", "lr": LR, "overhead": None, "on_error": "raise"}
    seen = gs.watch(model, (x, y), outputs=[0, 2], **options).records[0]["scalars"]

    def loss(f):
        return F.mse_loss(f, y)

    expected = gs.propagators.prediction.predict_states(model, x, loss, LR, outputs=[0, 2])
    assert seen["states/error"] == pytest.approx(expected.relative_error)
