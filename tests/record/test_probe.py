"""Probes, names and numbers as people pass them."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.record import WatchWarning
from gramscope.record.objective import objective_of
from gramscope.record.schedule import due_at

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(1))
ALL = {"overhead": None, "on_error": "raise", "lr": 0.1}


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs))


def first(model, probe, missing=(), **options):
    scope = gs.watch(model, probe, **{**ALL, **options})
    assert set(scope.records[0]["failures"]) == set(missing)
    return scope.records[0]["scalars"]


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return self.head(torch.tanh(self.table(ids)))


def test_a_batch_of_a_loader():
    batch = next(iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)))
    assert isinstance(batch, list)
    assert "accuracy/probe" in first(network(), batch)


def the_same(probe, other, model, **options):
    with_one, with_other = (first(model, given, measures=["loss", "kernel"], **options) for given in (probe, other))
    assert with_one == with_other


def test_numpy_arrays():
    model = network()
    the_same((X.numpy(), Y.numpy()), (X, Y), model)
    the_same([X.numpy()[::-1], Y.numpy()[::-1]], (X.flip(0), Y.flip(0)), model)
    ids = torch.randint(0, 7, (5, 4))
    the_same(({"ids": ids.numpy()}, ids.numpy()), ({"ids": ids}, ids), Language())
    with pytest.raises(InputError, match="must hold numbers, got <U1"):
        gs.watch(model, (X.numpy(), np.array(["a"] * len(X))))


class Noisy(torch.utils.data.Dataset):
    """Examples that are drawn anew each time, as an augmentation does; ``asked`` are those that were looked up."""

    def __init__(self, count=400):
        self.count, self.asked = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        self.asked.append(place)
        return X[place % len(X)] + torch.rand(()) + random.random() + np.random.rand(), Y[place % len(Y)]  # noqa: NPY002


@pytest.mark.parametrize("loader", [True, False])
def test_the_first_examples_of_a_dataset(loader, tmp_path):
    data, model = Noisy(), network()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    generator = torch.Generator().manual_seed(1)
    drawn = generator.get_state()
    probe = torch.utils.data.DataLoader(data, batch_size=7, shuffle=True, generator=generator) if loader else data
    scope = gs.watch(model, probe, tmp_path / "run", measures="loss", **ALL)
    assert len(scope.subject.x) == len(scope.subject.y) == 256
    assert sorted(set(data.asked)) == list(range(256))
    assert torch.equal(drawn, generator.get_state()), "the loader's own stream is left alone"
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    kind = "the Noisy of a DataLoader" if loader else "Noisy"
    assert gs.open_run(tmp_path / "run").meta["probe"]["taken"] == f"the first 256 examples of {kind}"


def test_a_few_sequences_of_a_dataset_of_tokens():
    ids = torch.randint(0, 7, (30, 5))
    data = torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
    the_same(torch.utils.data.DataLoader(data, batch_size=4), (ids[:8, :-1], ids[:8, 1:]), Language())


def test_a_collate_function_of_ones_own():
    data = torch.utils.data.TensorDataset(X, Y)
    probe = torch.utils.data.DataLoader(
        data, collate_fn=lambda items: tuple(map(torch.stack, zip(*items, strict=True)))
    )
    the_same(probe, (X, Y), network())


def test_a_dataset_that_cannot_be_looked_up():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from zip(X, Y, strict=True)

    with pytest.raises(InputError, match="can only be iterated"):
        gs.watch(network(), torch.utils.data.DataLoader(Stream(), batch_size=4))
    with pytest.raises(InputError, match="is empty"):
        gs.watch(network(), torch.utils.data.TensorDataset(X[:0], Y[:0]))


def test_labels_for_every_position():
    torch.manual_seed(0)
    model, ids = Language(), torch.randint(0, 7, (5, 4))
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[0, 0] = -100
    seen = first(model, (x, y))
    f = model(x).detach()
    assert seen["loss/probe"] == pytest.approx(float(F.cross_entropy(f.reshape(-1, 7), y.reshape(-1))), rel=1e-5)
    right = (f.argmax(-1) == y)[y != -100]
    assert seen["accuracy/probe"] == pytest.approx(float(right.double().mean()))
    assert {"step/error", "kernel/alignment", "share/head", "richness"} <= set(seen)


def test_a_label_that_does_not_count_is_no_class():
    torch.manual_seed(0)
    model, ids = Language().double(), torch.randint(0, 7, (5, 4))
    x, y = ids[:, :-1], ids[:, 1:].clone()
    y[0, 0], y[3] = -100, -100
    rows = torch.zeros(5, 3, 7).double()
    for example in range(5):
        for place in range(3):
            if y[example, place] != -100:
                rows[example, place, y[example, place]] = 1
    found = objective_of(y, (3, 7), None).rows(y)
    assert torch.equal(found @ found.T, rows.flatten(1) @ rows.flatten(1).T)
    seen = first(model, (x, y), measures="kernel")
    kernel = torch.einsum("ncmc->nm", gs.ntk(model, x))
    expected = gs.measures.kernel_target_alignment(kernel, rows.flatten(1))
    assert seen["kernel/alignment"] == pytest.approx(expected, rel=1e-6)


def test_classes_without_examples_have_no_column():
    y = torch.tensor([49_999, 7, -100, 7])
    assert objective_of(y, (50_000,), None).rows(y).tolist() == [[0, 1], [1, 0], [0, 0], [1, 0]]


def test_a_model_that_gives_one_position_without_targets_is_told_of():
    """As nanoGPT's: ``model(ids)`` is for generating, ``model(ids, targets)`` for training."""
    with pytest.raises(InputError, match=r"pass probe=\(\(x, y\), y\)"):
        objective_of(torch.zeros(8, 32, dtype=torch.long), (1, 65), None)


def test_classes_on_the_second_axis():
    model = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1))
    x, y = torch.randn(4, 2, 5), torch.randint(0, 3, (4, 5))
    seen = first(model, (x, y), measures=["loss", "shares", "kernel", "step"])
    assert seen["loss/probe"] == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
def test_one_logit(kind):
    model, y = network(1), (Y > 0).to(kind)
    seen = first(model, (X, y))
    f = model(X).detach().reshape(-1)
    assert seen["loss/probe"] == pytest.approx(float(F.binary_cross_entropy_with_logits(f, y.float())), rel=1e-5)
    assert seen["accuracy/probe"] == pytest.approx(float(((f > 0) == (y > 0)).double().mean()))


def test_yes_or_no_for_each_output():
    model, y = network(), torch.randint(0, 2, (16, 3)).bool()
    seen = first(model, (X, y))
    expected = float(F.binary_cross_entropy_with_logits(model(X).detach(), y.float()))
    assert seen["loss/probe"] == pytest.approx(expected, rel=1e-5)


def test_half_precision_and_autocast():
    seen = first(network().bfloat16(), (X, Y))
    assert seen["loss/probe"] == pytest.approx(first(network(), (X, Y))["loss/probe"], rel=0.02)
    model = network()
    scope = gs.watch(model, (X.double(), Y), every=1, **ALL)
    with torch.autocast("cpu", torch.bfloat16):
        scope.step()
        assert torch.is_autocast_enabled("cpu")
    assert not scope.records[1]["failures"]
    assert scope.records[1]["scalars"]["loss/probe"] == scope.records[0]["scalars"]["loss/probe"]
    assert scope.records[1]["scalars"]["kernel/drift"] == 0


def test_a_loss_of_ones_own_sees_the_outputs_as_they_are():
    torch.manual_seed(0)
    model, ids = Language(), torch.randint(0, 7, (5, 4))

    def loss(f, y):
        assert f.shape == (5, 4, 7)
        return F.cross_entropy(f.flatten(0, 1), y.flatten())

    seen = first(model, (ids, ids), loss=loss, measures=["loss", "step"])
    assert "step/error" in seen


@pytest.mark.parametrize(
    ("outputs", "y", "words"),
    [
        (3, Y + 5, "labels must lie between 0 and 2"),
        (3, Y - 1, "labels must lie between 0 and 2"),
        (1, Y, "labels must be 0 or 1"),
        (3, torch.zeros(16, 2), "y must have a number for each output"),
        (3, torch.zeros(16), r"Class labels are whole numbers: pass y.long\(\)"),
        (3, torch.zeros(16, 2).long(), "a label for each example"),
    ],
)
def test_targets_that_do_not_fit(outputs, y, words):
    with pytest.raises(InputError, match=words) as caught:
        gs.watch(network(outputs), (X, y))
    assert "loss=" in str(caught.value)


def test_without_targets():
    model = network()
    with pytest.warns(WatchWarning, match=r"loss, shares cannot be measured without targets: pass probe=\(x, y\)"):
        scope = gs.watch(model, X, measures=["loss", "kernel", "shares", "richness"], every=1, **ALL)
    scope.step()
    assert scope.records[1]["scalars"]["kernel/drift"] == 0
    assert "richness/initial_similarity" in scope.records[1]["scalars"]
    assert not scope.records[1]["failures"]


def test_layers_that_are_not_there():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    with pytest.raises(InputError, match=r"'blok\*' matches none. There are blocks.0"):
        gs.watch(model, (X, Y), layers="blok*")


def test_models_without_weights():
    with pytest.raises(InputError, match="must have parameters to be watched, but ReLU has none"):
        gs.watch(nn.ReLU(), (X, Y))
    with pytest.raises(InputError, match="lazy and not initialised"):
        gs.watch(nn.Sequential(nn.LazyLinear(4)), (X, Y))


def test_numbers_of_every_kind():
    scope = gs.watch(network(), (X, Y), every=1, measures="norm", overhead=None)
    for value in (np.float32(2), np.float64(2), np.int64(2), np.array(2.0), torch.tensor([2.0]), torch.tensor(2), 2):
        scope.step(loss=value)
        assert scope.records[-1]["scalars"]["loss"] == 2.0
    for wrong in ("a", torch.ones(2), np.ones(2), None, 1j):
        with pytest.raises(InputError, match="one number"):
            scope.log(wrong=wrong)
    for name in ("overhead", "skipped", "norm/parameters"):
        with pytest.raises(InputError, match="is measured by the watch"):
            scope.log(**{name: 1.0})


def test_a_logged_tensor_is_read_at_once():
    scope = gs.watch(network(), (X, Y), every=10, measures="norm", overhead=None)
    total = torch.zeros(())
    for i in range(10):
        total += 1
        if i == 4:
            scope.log(total=total)
        scope.step()
    assert scope.logged["total"] == {4: 5.0}


def test_arguments_of_the_wrong_kind():
    assert [step for step in range(12) if due_at(np.int64(5))(step)] == [0, 5, 10]
    assert [step for step in range(12) if due_at(np.array([2, 5]))(step)] == [0, 2, 5]
    for wrong in (10.0, None, [1.5], {"a"}):
        with pytest.raises(InputError, match="every must be a whole number"):
            gs.watch(network(), (X, Y), every=wrong)
    with pytest.raises(InputError, match="overhead must be a fraction"):
        gs.watch(network(), (X, Y), overhead="a")
    scope = gs.watch(network(), (X, Y), measures="norm")
    for method in (scope.attach, scope.use):
        with pytest.raises(InputError, match=r"must be a torch.optim.Optimizer, or hold one as .optimizer, got Linear"):
            method(nn.Linear(5, 3))


def residual(model, x):
    """u'' + u, as in the README: the outputs are derivatives of the network with respect to its inputs."""
    x = x.requires_grad_()
    u = model(x)
    du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    return torch.autograd.grad(du.sum(), x, create_graph=True)[0] + u


class Force(nn.Module):
    """A network whose own forward pass differentiates: outputs are the slope of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("kind", ["residual", "force", "plain energy"])
@pytest.mark.parametrize("surrounding", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_outputs_that_are_derivatives(kind, surrounding):
    torch.manual_seed(0)
    model = Force() if kind == "force" else nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    model, outputs = model.double(), residual if kind == "residual" else None
    x, y = torch.linspace(-1, 1, 6)[:, None].double(), torch.randn(6, 1).double()
    measures = ["loss", "shares", "kernel", "target_linearity", "spectra", "step", "dntk", "norm"]
    with surrounding():
        seen = first(model, (x, y), outputs=outputs, measures=measures)
    assert not x.requires_grad
    f = (residual if kind == "residual" else lambda model, x: model(x))(model, x.clone()).detach()
    assert seen["loss/probe"] == pytest.approx(float(F.mse_loss(f, y)), rel=1e-12)
    step = gs.explain_step(model, x, y, lr=0.1, outputs=outputs)
    assert seen["step/true_loss_change"] == pytest.approx(step.measured_loss_change, rel=1e-9)
    traced = torch.einsum("ncmc->nm", gs.ntk(model, x, outputs=outputs))
    expected = float(traced.trace()) ** 2 / float(traced.square().sum())
    assert seen["kernel/participation_ratio"] == pytest.approx(expected, rel=1e-9)


def test_the_probe_stays_a_plain_tensor():
    """Outputs that ask for gradients at x ask them of a copy: what is watched next is not differentiated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    scope = gs.watch(model, (torch.linspace(-1, 1, 6)[:, None], torch.zeros(6, 1)), outputs=residual, measures="norm")
    assert not scope.subject.x.requires_grad


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        ("mse", torch.randn(16, 3)),
        ("half_squared", torch.randn(16, 3)),
        ("cross_entropy", Y),
        ("cross_entropy", torch.randn(16, 3).softmax(1)),
        (lambda f, y: F.huber_loss(f, y), torch.randn(16, 3)),
    ],
    ids=["mse", "half squared", "labels", "probabilities", "own"],
)
def test_losses_are_those_of_explain_step(loss, y):
    model = network().double()
    x, y = X.double(), y.double() if y.is_floating_point() else y
    seen = first(model, (x, y), loss=loss, measures=["loss", "shares", "step"])
    step = gs.explain_step(model, x, y, loss=loss, lr=0.1)
    assert seen["loss/probe"] == pytest.approx(step.loss_before, rel=1e-12)
    assert seen["step/predicted_loss_change"] == pytest.approx(step.predicted_loss_change, rel=1e-12)
    assert seen["share/0"] == pytest.approx(step.shares["0"], rel=1e-9)
    assert ("accuracy/probe" in seen) == (not y.is_floating_point())


def test_cross_entropy_of_every_position_by_name():
    torch.manual_seed(0)
    model, ids = Language(), torch.randint(0, 7, (5, 4))
    x, y = ids[:, :-1], ids[:, 1:]
    named, plain = (first(model, (x, y), measures="loss", loss=loss) for loss in ("cross_entropy", None))
    assert {"loss/probe", "accuracy/probe"} <= named.keys()
    assert {n: named[n] for n in ("loss/probe", "accuracy/probe")} == {
        n: plain[n] for n in ("loss/probe", "accuracy/probe")
    }
