"""CIFAR-10 in its four forms, the networks of arXiv:2410.04264, equations modulo a prime, greedy training."""

import json
import pickle

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.tasks import cifar
from gramscope.tasks.idx import data_folder

t = gs.tasks


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
    return x, np.arange(12) % 10


def write_npz(folder, x, y):
    images = x.transpose(0, 2, 3, 1)
    np.savez(folder / "cifar10.npz", x=images[:10], y=y[:10], xt=images[10:], yt=y[10:])


def parts(x, y):
    names = [*cifar.BATCHES, "test_batch"]
    return [(name, x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]) for i, name in enumerate(names)]


def write_pickles(folder, x, y):
    for name, images, labels in parts(x, y):
        stored = {b"data": images.reshape(2, -1), b"labels": labels.tolist(), b"batch_label": name.encode()}
        (folder / name).write_bytes(pickle.dumps(stored, protocol=2))


def write_binary(folder, x, y):
    for name, images, labels in parts(x, y):
        records = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(2, -1)], 1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_sheets(folder, x, y):
    image = pytest.importorskip("PIL.Image", reason="PNG sheets are read with Pillow, which is not installed")
    for name, images, _ in parts(x, y):
        image.fromarray(images.transpose(0, 2, 3, 1).reshape(2, 1024, 3)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(y[:10].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(y[10:].tolist()))


@pytest.mark.parametrize("write", [write_npz, write_pickles, write_binary, write_sheets])
def test_every_form_gives_the_same_images(write, images, tmp_path):
    x, y = images
    write(tmp_path, x, y)
    task = t.cifar10(tmp_path)
    mean, std = (np.array(v)[:, None, None] for v in (cifar.MEAN, cifar.STD))
    wanted = (x / 255 - mean) / std
    assert np.allclose(task.x, wanted[:10], atol=1e-6)
    assert np.allclose(task.x_test, wanted[10:], atol=1e-6)
    assert task.y.tolist() == y[:10].tolist()
    assert task.y_test.tolist() == y[10:].tolist()
    assert len(t.cifar10(tmp_path, train=3, test=1).x) == 3


def test_the_usual_folder_inside_is_found(images, tmp_path):
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    write_pickles(inner, *images)
    assert len(t.cifar10(tmp_path).x) == 10


class Harm:
    def __reduce__(self):
        return (print, ("harm",))


def test_broken_files_say_what_is_wrong(images, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        t.cifar10(tmp_path / "nowhere")
    (tmp_path / "test_batch").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="data_batch_1 as well"):
        t.cifar10(tmp_path)
    write_pickles(tmp_path, *images)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InputError, match="Refused"):
        t.cifar10(tmp_path)
    assert "harm" not in capsys.readouterr().out
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}))
    with pytest.raises(InputError, match="one label for each image"):
        t.cifar10(tmp_path)
    binary = tmp_path / "binary"
    binary.mkdir()
    write_binary(binary, images[0], images[1] + 5)
    with pytest.raises(InputError, match="from 0 to 9"):
        t.cifar10(binary)
    (binary / "data_batch_2.bin").write_bytes(b"123")
    with pytest.raises(InputError, match="records of 3073 bytes"):
        t.cifar10(binary)


@pytest.mark.skipif(data_folder("cifar10") is None, reason="CIFAR-10 is not in $GRAMSCOPE_DATA nor in ../shared/data")
def test_the_true_data():
    task = t.cifar10()
    assert task.x.shape == (50_000, 3, 32, 32)
    assert task.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert task.y.bincount().tolist() == [5000] * 10
    assert task.x.mean((0, 2, 3)).abs().max() < 1e-3


def test_shifts_and_mirrors_against_a_loop():
    x = torch.arange(2 * 6 * 6.0).reshape(1, 2, 6, 6).expand(20, 2, 6, 6) + 1
    found = t.crop_and_flip(x, seed=1, shift=2)
    padded = nn.functional.pad(x[0], (2,) * 4)
    crops = [padded[:, i : i + 6, j : j + 6] for i in range(5) for j in range(5)]
    every = crops + [crop.flip(2) for crop in crops]
    seen = [next(i for i, one in enumerate(every) if one.equal(image)) for image in found]
    assert len(set(seen)) > 10
    assert {i >= 25 for i in seen} == {True, False}
    assert t.crop_and_flip(x, seed=1, shift=2).equal(found)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_vgg_has_the_published_features(batch_norm):
    with torch.device("meta"):  # shapes alone; nothing is drawn
        model = t.vgg16(batch_norm=batch_norm)
        x, sizes = torch.empty(1, 3, 32, 32), []
        for layer in model:
            x = layer(x)
            sizes += [x[0].numel()] if isinstance(layer, nn.MaxPool2d) else []
    assert sizes == [16_384, 8_192, 4_096, 2_048, 512]
    assert model[-1].in_features == 4_096
    assert sum(isinstance(layer, nn.Conv2d) for layer in model) == 13
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model) == 13 * batch_norm


def test_models_are_seeded_and_leave_the_stream_alone():
    task = t.modular_equations(5)
    state = torch.get_rng_state()
    makers = (lambda seed: t.vgg16(width=1, hidden=4, seed=seed), lambda seed: t.wide_cnn(width=1, seed=seed),
              lambda seed: t.causal_transformer(task, width=4, heads=2, seed=seed))  # fmt: skip
    for make in makers:
        first, again, other = (nn.utils.parameters_to_vector(make(seed).parameters()) for seed in (0, 0, 1))
        assert first.equal(again)
        assert not first.equal(other)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("operation", ["divide", "add", "multiply"])
def test_equations_against_trial(operation):
    task = t.modular_equations(7, operation=operation, train=0.5)
    assert (len(task.x), len(task.x_test), task.vocabulary) == (21, 21, 9)
    x, y = torch.cat([task.x, task.x_test]), torch.cat([task.y, task.y_test])
    assert len({tuple(row) for row in x.tolist()}) == 42
    for (a, sign, b, equals), result in zip(x.tolist(), y.tolist(), strict=True):
        assert (sign, equals) == (7, 8)
        assert b != 0
        wanted = {"divide": next(c for c in range(7) if c * b % 7 == a), "add": (a + b) % 7, "multiply": a * b % 7}
        assert result == wanted[operation]


def test_the_published_number_of_equations():
    task = t.modular_equations()
    assert len(task.x) == 97 * 96 // 2 == 4_656


def test_tokens_see_no_later_token():
    task = t.modular_equations(5)
    model = t.causal_transformer(task, width=8, heads=2).double()
    stream = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changed = stream.clone()
    changed[:, 3] += 1
    before, after = model.blocks(stream), model.blocks(changed)
    assert before[:, :3].equal(after[:, :3])
    assert not before[:, 3].allclose(after[:, 3])


def test_step_function():
    task = t.heaviside_step(50, seed=0)
    assert task.y.equal((task.x > 0).float())
    assert task.x.abs().max() <= 1
    assert not task.x.equal(t.heaviside_step(50, seed=1).x)


@pytest.fixture(scope="module")
def greedy():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=rng)
    y = nn.functional.one_hot((x[:, 0] > 0).long() + (x[:, 1] > 0).long()).float()
    model = t.mlp((4, 16, 16, 3))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    run = t.greedy_layerwise(model, x, y, [2, 4], epochs=12, lr=1e-2, batch_size=20)
    return model, before, x, y, run


def test_greedy_training_freezes_what_is_before(greedy):
    model, before, x, y, run = greedy
    assert nn.utils.parameters_to_vector(model.parameters()).equal(before)
    assert all(losses[-1] < 0.8 * losses[0] for losses in run.losses)
    # The first stage is that of a run with one stage alone: what came later did not touch it.
    alone = t.greedy_layerwise(model, x, y, [2], epochs=12, lr=1e-2, batch_size=20)
    assert alone.model[0].weight.equal(run.model[0].weight)
    assert not alone.model[2].weight.equal(run.model[2].weight)
    assert all(p.grad is None for p in run.model.parameters())


def test_greedy_training_by_hand(greedy):
    """One full batch, one step of Adam on the first stage: the gradient's sign times the learning rate."""
    model, _, x, y, _ = greedy
    run = t.greedy_layerwise(model, x, y, [2], epochs=1, lr=1e-3, batch_size=60)
    fresh = t.greedy_layerwise(model, x, y, [2], epochs=1, lr=0.0, batch_size=60)
    classifier = fresh.classifiers[0]
    weight = model[0].weight.detach().clone().requires_grad_()
    hidden = torch.relu(x @ weight.T + model[0].bias.detach())
    (grad,) = torch.autograd.grad((classifier(hidden) - y).square().mean(), weight)
    step = run.model[0].weight - model[0].weight
    assert torch.allclose(step, -1e-3 * grad.sign(), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: t.cifar10(train=0), "train must be a whole number"),
        (lambda: t.crop_and_flip(torch.ones(3, 8, 8), seed=0), "images"),
        (lambda: t.vgg16(dropout=1.0), "dropout"),
        (lambda: t.wide_cnn(size=3), "at least 4"),
        (lambda: t.modular_equations(9), "prime"),
        (lambda: t.modular_equations(5, operation="power"), "operation must be"),
        (lambda: t.modular_equations(5, train=1e-9), "both sides"),
        (lambda: t.causal_transformer(t.modular_equations(5), width=6), "multiple"),
        (lambda: t.heaviside_step(1), "at least 2"),
        (lambda: t.greedy_layerwise(t.mlp((2, 3, 1)), torch.ones(4, 2), torch.ones(4, 1), [3]), "ends must rise"),
        (
            lambda: t.greedy_layerwise(t.mlp((2, 3, 1)), torch.ones(4, 2), torch.ones(4, 1), [1, 2]),
            "parameters to train",
        ),
        (lambda: t.greedy_layerwise(t.mlp((2, 3, 1)), torch.ones(4, 2), torch.ones(3, 1), [2]), "one row for each"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input(call, match):
    with pytest.raises(InputError, match=match):
        call()
