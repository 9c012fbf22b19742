"""Data sets and models that ship: seeded, shaped, and read from files without a download."""

import gzip
import inspect
import struct

import pytest
import torch

from fresh import run_after_torch
from gramscope import tasks
from gramscope.base.errors import InputError
from gramscope.tasks.idx import data_folder, read_idx


def write_idx(path, tensor, code):
    head = bytes([0, 0, code, tensor.dim()]) + b"".join(struct.pack(">I", size) for size in tensor.shape)
    body = tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(head + body) if path.suffix == ".gz" else head + body)


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.uint8, 8), (torch.int16, 11), (torch.int32, 12), (torch.float32, 13)]
)
@pytest.mark.parametrize("name", ["a.gz", "a"])
def test_idx_files(tmp_path, dtype, code, name):
    tensor = (torch.arange(24).reshape(2, 3, 4) * 7).to(dtype)
    write_idx(tmp_path / name, tensor, code)
    assert torch.equal(read_idx(tmp_path / name), tensor)


def test_damaged_idx_files(tmp_path):
    (tmp_path / "a").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="must be an idx file"):
        read_idx(tmp_path / "a")
    write_idx(tmp_path / "b", torch.zeros(5, dtype=torch.uint8), 8)
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:-2])
    with pytest.raises(ValueError, match="must hold 5 bytes"):
        read_idx(tmp_path / "b")


def mnist_like(folder):
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 4)):
        images = torch.randint(0, 255, (count, 4, 4), dtype=torch.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images, 8)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", torch.arange(count).to(torch.uint8) % 3, 8)


def test_mnist_from_a_folder(tmp_path, monkeypatch):
    mnist_like(tmp_path / "mnist")
    monkeypatch.setenv("GRAMSCOPE_DATA", str(tmp_path))
    task = tasks.mnist(train=5)
    assert task.x.shape == (5, 16)
    assert task.x_test.shape == (4, 16)
    assert task.classes == 3
    coded = tasks.label_encoded(task)
    assert torch.equal(coded.x[:, :3], torch.nn.functional.one_hot(task.y, 3).float())
    low, span = task.x.min(), task.x.max() - task.x.min()
    torch.testing.assert_close(coded.x[:, 3:] * span + low, task.x[:, 3:])
    assert torch.equal(coded.y_test, task.y_test)
    honest = tasks.label_encoded(task, test="true")
    assert torch.equal(honest.x_test[:, :3].argmax(1), task.y_test)
    draws = {tuple(tasks.label_encoded(task, seed=seed).x_test[:, :3].argmax(1).tolist()) for seed in range(9)}
    assert len(draws) > 1  # random, and by the seed
    with pytest.raises(InputError, match="random"):
        tasks.label_encoded(task, test="wrong")
    monkeypatch.setenv("GRAMSCOPE_DATA", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="GRAMSCOPE_DATA"):
        tasks.mnist()


@pytest.mark.skipif(data_folder("mnist") is None, reason="MNIST lies in neither $GRAMSCOPE_DATA nor ../shared/data")
def test_the_real_mnist():
    task = tasks.mnist(train=1000, test=100)
    assert task.x.shape == (1000, 784)
    assert task.classes == 10


@pytest.mark.parametrize("make", [tasks.digits, tasks.teacher_student, tasks.heaviside])
def test_seeded_without_touching_the_global_stream(make):
    stream = torch.get_rng_state()
    one, two, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.y, two.y)
    assert not torch.equal(one.x, other.x)
    assert set(one.y.tolist()) == set(range(one.classes))


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (tasks.digits, 1797),
        (lambda test: tasks.heaviside(n=50, test=test), None),
        (lambda test: tasks.teacher_student(n=50, test=test), None),
    ],
)
def test_what_is_held_out(make, count):
    for test in (0, 1, 7):
        task = make(test=test)
        assert len(task.y) == (50 if count is None else count - test)
        assert len(task.y_test) == len(task.x_test) == test
        assert len(task.x) == len(task.y)
    with pytest.raises(InputError, match="test must be a whole number of at least 0, got -1"):
        make(test=-1)


@pytest.mark.parametrize("test", [1797, 5000])
def test_holding_out_every_digit_is_refused(test):
    with pytest.raises(InputError, match=f"less than the 1797 examples.*got {test}"):
        tasks.digits(test=test)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tasks.teacher_student(n=0),
        lambda: tasks.teacher_student(hidden=0),
        lambda: tasks.heaviside(inputs=0),
        lambda: tasks.mlp(()),
        lambda: tasks.mlp((3,)),
        lambda: tasks.mlp((3, 0, 2)),
    ],
)
def test_empty_tasks_and_networks_are_refused(call):
    with pytest.raises(InputError, match="must"):
        call()


def test_digits_leave_pythons_random_numbers_alone():
    code = (
        "import random, gramscope.tasks as t; random.seed(3); before = random.getstate(); t.digits(); "
        "assert random.getstate() == before"
    )
    run_after_torch(code)  # scikit-learn draws when it is first imported


MODELS = {
    "cnn": (lambda seed: tasks.cnn(size=8, seed=seed), torch.randn(3, 64), (3, 10)),
    "resnet18": (lambda seed: tasks.resnet18(width=4, seed=seed), torch.randn(3, 3, 16, 16), (3, 10)),
    "transformer": (
        lambda seed: tasks.causal_transformer(tasks.modular_equations(5), width=8, heads=2, seed=seed),
        torch.randint(0, 5, (3, 4)),
        (3, 5),
    ),
    "rnn": (lambda seed: tasks.recurrent("rnn", 2, 5, 3, seed=seed), torch.randn(3, 7, 2), (3, 7, 3)),
    "gru": (lambda seed: tasks.recurrent("gru", 2, 5, 3, seed=seed), torch.randn(3, 7, 2), (3, 7, 3)),
    "lstm": (lambda seed: tasks.recurrent("lstm", 2, 5, 3, seed=seed), torch.randn(3, 7, 2), (3, 7, 3)),
    "mlp": (lambda seed: tasks.mlp((4, 5, 2), seed), torch.randn(3, 4), (3, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    build, x, shape = MODELS[name]
    stream = torch.get_rng_state()
    one, two = build(3).eval(), build(3).eval()
    assert torch.equal(torch.get_rng_state(), stream)
    assert one(x).shape == shape
    assert torch.equal(one(x), two(x))
    assert not torch.equal(build(4).eval()(x), one(x))


@pytest.mark.parametrize("build", [tasks.cnn, tasks.resnet18, tasks.causal_transformer, tasks.recurrent, tasks.mlp])
def test_a_model_shows_the_seed_it_takes(build):
    parameters = inspect.signature(build).parameters
    assert list(parameters)[-1] == "seed"
    assert parameters["seed"].default == 0


def test_first_arguments_are_those_of_the_network():
    assert tasks.cnn(3, 7, width=4)[-1].out_features == 7
    assert tasks.cnn(size=9)(torch.randn(2, 81)).shape == (2, 10)


def test_an_unknown_cell():
    with pytest.raises(ValueError, match="kind must be one of"):
        tasks.recurrent("elman", 1, 1, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: tasks.mlp((3, 2), 5),
        lambda: tasks.cnn(seed=5),
        lambda: tasks.modular_transformer(tasks.modular(3), width=8, heads=2),
    ],
)
def test_models_seed_no_gpu(build, monkeypatch):
    """torch.manual_seed would seed every GPU too, at once or when the first one is used."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    build()
    assert not seeds
    assert torch.equal(before, torch.get_rng_state())


def test_numbers_of_examples_and_seeds_are_checked_as_everywhere(tmp_path):
    """``train=-5`` once took all examples but the last five, and a seed below zero was a seed."""
    for call in (tasks.mnist, tasks.cifar10):
        for name in ("train", "test"):
            with pytest.raises(InputError, match=f"{name} must be a whole number of at least 1, got -5"):
                call(folder=tmp_path, **{name: -5})
    for task in (tasks.digits, tasks.swiss_roll, tasks.parity, tasks.modular):
        with pytest.raises(InputError, match="seed must be"):
            task(seed=-1)
