"""Sizes by layer, dead units, noise and sharpness: measurements of the watch against brute force in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.record import along_loss
from gramscope.record.scope import WatchWarning
from references import training as reference


class Tied(nn.Module):
    """An embedding that is the head too, used at several positions."""

    def __init__(self, pool: bool = True) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head, self.pool = nn.Linear(4, 7), pool
        self.head.weight = self.table.weight

    def forward(self, ids):
        hidden = torch.tanh(self.middle(self.table(ids)))
        return self.head(hidden.mean(1)) if self.pool else self.head(hidden).mean(1)


class Scaled(nn.Module):
    """A parameter that is used twice, entry by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x * self.gain)) * self.gain)


def convolutional():
    return nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(4 * 3, 3))  # fmt: skip


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), lambda: torch.randn(9, 4)),
    "convolutions": (convolutional, lambda: torch.randn(9, 2, 5)),
    "tied embedding": (Tied, lambda: torch.randint(7, (9, 3))),
    "tied embedding at positions": (lambda: Tied(pool=False), lambda: torch.randint(7, (9, 2))),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)), lambda: torch.randint(5, (9, 3))
    ),
    "used twice": (Scaled, lambda: torch.randn(9, 5)),
}  # fmt: skip


def case(name, seed=0):
    torch.manual_seed(seed)
    make, inputs = CASES[name]
    model, x = make().double(), inputs()
    return model, x.double() if x.is_floating_point() else x, torch.arange(9) % 3


def first(model, x, y, measures, **options):
    options = {"overhead": None, "on_error": "raise"} | options
    scope = gs.watch(model, (x, y), measures=measures, every=1, **options)
    assert not scope.records[-1]["failures"]
    return scope.records[-1]["scalars"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", ["cross_entropy", "own"])
def test_gradient_norms(name, loss):
    model, x, y = case(name)
    own = F.cross_entropy if loss == "cross_entropy" else lambda f, y: 3 * F.cross_entropy(f, y) ** 2
    seen = first(model, x, y, "gradient", loss=loss if loss == "cross_entropy" else own)
    gradients = reference.loss_gradients(model, x, y, own)
    expected = {f"gradient_norm/{layer or 'gain'}": v for layer, v in reference.by_layer(gradients).items()}
    total = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
    assert {n: v for n, v in seen.items() if n.startswith("gradient")} == pytest.approx(
        {"gradient_norm": total, **expected}
    )


@pytest.mark.parametrize("block", [1, 2**22])
@pytest.mark.parametrize("name", CASES)
def test_noise_scale(name, block, monkeypatch):
    monkeypatch.setattr(along_loss, "BLOCK_ENTRIES", block)
    model, x, y = case(name, seed=1)
    y = torch.zeros_like(y)  # one class: the gradients of the examples agree, so that there is a signal
    seen = first(model, x, y, "gradient")
    expected = reference.noise_scale(model, x, y, F.cross_entropy)
    assert expected > 0
    assert seen["noise_scale"] == pytest.approx(expected, rel=1e-9)


def test_noise_without_signal_is_undefined():
    model, x, _ = case("mlp")
    f = model(x[:4]).detach()
    x, y = torch.cat([x[:4], x[:4]]), torch.cat([f + 1, f - 1.01])  # gradients that nearly cancel
    assert reference.noise_scale(model, x, y, F.mse_loss) < 0, "the unbiased |G|² is negative"
    assert "noise_scale" not in first(model, x, y, "gradient")
    assert "noise_scale" not in first(model, x[:1], y[:1], "gradient"), "one example has no spread"
    with pytest.warns(gs.measures.UndefinedMeasureWarning, match="too few to tell the gradient from its noise"):
        assert math.isnan(gs.measures.gradient_noise_scale(torch.ones(4), 0.1))


@pytest.mark.parametrize("name", CASES)
def test_sharpness(name):
    model, x, y = case(name)
    found = first(model, x, y, "sharpness")
    values = torch.linalg.eigvalsh(reference.hessian(model, x, y, F.cross_entropy))
    top = float(values[-1])
    assert found["sharpness"] <= top * (1 + 1e-9), "a Ritz value lies inside the spectrum"
    assert found["sharpness"] == pytest.approx(top, rel=0.02), "ten products are enough for two digits here"
    assert float((values - found["sharpness"]).abs().min()) <= found["sharpness/error"] + 1e-9


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("attached", [True, False])
def test_updates_are_those_that_the_optimiser_made(name, attached):
    model, x, y = case("mlp")
    optimizer = OPTIMISERS[name](model.parameters())
    scope = gs.watch(model, (x, y), measures=["update", "weights"], every=2, overhead=None, on_error="raise")
    scope = scope.attach(optimizer) if attached else scope.use(optimizer)
    expected = {}
    for step in range(1, 6):
        optimizer.zero_grad()
        F.cross_entropy(model(x[step:]), y[step:]).backward()  # batches that the probe is not
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        after = {n: p.detach().clone() for n, p in model.named_parameters()}
        sizes = [reference.by_layer(t) for t in ({n: after[n] - before[n] for n in after}, before, gradients)]
        expected[step] = {f"update_ratio/{layer}": sizes[0][layer] / sizes[1][layer] for layer in sizes[0]}
        expected[step] |= {f"effective_lr/{layer}": sizes[0][layer] / sizes[2][layer] for layer in sizes[0]}
        expected[step] |= {f"weight_norm/{layer}": norm for layer, norm in reference.by_layer(after).items()}
        if not attached:
            scope.step()
    scope.close()
    assert [record["step"] for record in scope.records] == [0, 2, 4, 5]
    for record in scope.records[1:3]:
        seen = {n: v for n, v in record["scalars"].items() if n.split("/")[0] in ("update_ratio", "effective_lr")}
        seen |= {n: v for n, v in record["scalars"].items() if n.startswith("weight_norm/")}
        assert seen == pytest.approx(expected[record["step"]], rel=1e-12)
        if name == "sgd":
            assert record["scalars"]["effective_lr/0"] == pytest.approx(0.3)
    assert "update_ratio/0" not in scope.records[0]["scalars"], "before training there is no update"
    assert "update_ratio/0" not in scope.records[3]["scalars"], "a step that was not due was not noted before"
    assert not optimizer._optimizer_step_pre_hooks, "the hook goes with the watch"


def test_several_optimisers_move_one_model():
    """Each holds a part: none is missing from the updates, nor held by nobody."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.3)]
    x, y = torch.randn(10, 4), torch.arange(10) % 2
    scope = gs.watch(model, (x, y), measures=["update", "setup"], overhead=None, every=1).use(*optimizers)
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scope.step()
    found = scope.records[-1]["scalars"]
    moved = [(p.detach() - old).norm() ** 2 for p, old in zip(model.parameters(), before, strict=True)]
    assert found["update_size"] == pytest.approx(float(sum(moved)) ** 0.5, rel=1e-4)
    assert (found["effective_lr/0"], found["effective_lr/2"]) == pytest.approx((0.1, 0.3), rel=1e-4)
    assert not any(name.startswith("not_optimized") for name in found)
    assert (found["optimizer/lr"], found["optimizer/lowest_lr"]) == (0.3, 0.1)


def test_a_layer_that_does_not_move():
    model, x, y = case("mlp")
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scope = gs.watch(model, (x, y), measures="update", every=1, overhead=None).attach(optimizer)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert {n.partition("/")[2] for n in scope.records[-1]["scalars"] if "/" in n} == {"2"}


class Functional(nn.Module):
    """ReLUs that are no modules, one of them in place; tokens with their units last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)
        self.tokens, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = F.relu_(self.norm(self.conv(x)))
        return self.head(self.tokens(h.mT).relu().mean(1))


def test_dead_units():
    torch.manual_seed(0)
    model, x, y = Functional().double(), torch.randn(8, 2, 6).double(), torch.arange(8) % 3
    with torch.no_grad():
        model.norm.bias[:2] = -100.0  # two of four channels
        model.tokens.bias[0] = -100.0  # one of five units
    seen = first(model, x, y, "dead_units")
    model.eval()
    channels = F.relu(model.norm(model.conv(x)))
    units = F.relu(model.tokens(channels.mT))
    expected = {
        "dead_units/norm": float((channels.amax((0, 2)) == 0).double().mean()),
        "dead_units/tokens": float((units.amax((0, 1)) == 0).double().mean()),
    }
    assert expected["dead_units/norm"] == 0.5
    assert expected["dead_units/tokens"] >= 0.2
    assert {n: v for n, v in seen.items() if n.startswith("dead")} == expected


def test_a_unit_that_one_use_turns_on_is_alive():
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(torch.relu(self.cell(torch.relu(self.cell(x)))))

    model, x = Repeated(), torch.ones(4, 3)
    with torch.no_grad():
        model.cell.weight.copy_(torch.tensor([[-1.0, 0, 0], [0, 1, 0], [-1, 0, 0]]))
        model.cell.bias.copy_(torch.tensor([0.5, 0.0, -9.0]))  # unit 0: off at first, on the second time; 2: never
    assert first(model, x, torch.arange(4) % 2, "dead_units")["dead_units/cell"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("act", "dead"), [(nn.ReLU6(), 0.5), (nn.ReLU6(inplace=True), 0.5), (nn.Hardtanh(), None)])
def test_units_that_pass_nothing_below_zero_may_die(act, dead):
    linear = nn.Linear(3, 4)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(torch.tensor([-1.0, 1.0, -2.0, 2.0]))
    model = nn.Sequential(linear, act, nn.Linear(4, 2))
    assert first(model, torch.randn(5, 3), torch.arange(5) % 2, "dead_units").get("dead_units/0") == dead


def test_networks_without_relu_have_no_dead_units():
    model, x, y = case("mlp")
    assert not [name for name in first(model, x, y, "dead_units") if name.startswith("dead")]


def test_layers_are_chosen():
    model, x, y = case("mlp")
    seen = first(model, x, y, ["gradient", "weights"], layers=["2"])
    assert {n for n in seen if "norm" in n} == {"gradient_norm", "gradient_norm/2", "weight_norm/2"}


def test_collapse():
    model, x, y = case("mlp")
    seen = first(model, x, y, "collapse")
    hidden = torch.tanh(model[0](x)).detach()
    found = gs.measures.neural_collapse(hidden, y, model(x).detach(), weight=model[2].weight)
    names = ("nc1", "nc2", "nc3", "nc4", "cdnv")
    assert {n: v for n, v in seen.items() if "/" in n} == pytest.approx(
        {f"collapse/{n}": getattr(found, n) for n in names}
    )
    assert not [n for n in first(model, x, torch.randn(9, 3).double(), "collapse") if n.startswith("collapse")]


def test_concentration():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    x, y, start = torch.randn(20, 4).double(), torch.arange(20) % 3, copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"measures": "concentration", "overhead": None, "on_error": "raise", "every": 1}
    scope = gs.watch(model, (x, y), **options).attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    masks = [model[0](x) > 0, model[2](torch.relu(model[0](x))) > 0]
    weights, initial = ([net[i].weight.detach() for i in (0, 2)] for net in (model, start))
    for layer, found in zip("02", gs.hierarchy.concentration(weights, masks, None, initial, k=5), strict=True):
        values = {
            "coactivation_rank": found.coactivation_rank, "coactivation_rank_centred": found.centred_rank,
            "metric_rank": found.metric_rank, "update_alignment": found.alignment.overlap,
        }  # fmt: skip
        for name, value in values.items():
            assert scope.records[-1]["scalars"][f"{name}/{layer}"] == pytest.approx(value, nan_ok=True), name
    assert "update_alignment/0" not in scope.records[0]["scalars"], "at the start nothing has changed"


def test_ansatz():
    model, x, y = case("mlp")
    found = gs.measures.neural_feature_ansatz(model, x)
    assert first(model, x, y, "ansatz")["ansatz/0.weight"] == pytest.approx(found["0.weight"])


@pytest.mark.parametrize("measure", ["concentration", "ansatz"])
def test_some_are_read_by_name_only(measure):
    assert not gs.record.WATCHED_MEASURES[measure].by_default


def test_a_failed_hessian_is_in_the_record():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if torch.is_grad_enabled():
                raise RuntimeError("this operation has no second derivative")
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return Once.apply(torch.tanh(self.layer(x)))

    with pytest.warns(WatchWarning, match="the measure 'sharpness' failed at step 0: .* no second derivative"):
        gs.watch(Net(), (torch.randn(4, 3), torch.arange(4) % 2), measures="sharpness", overhead=None)
