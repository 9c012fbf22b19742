"""Reductions of activations to rows, batches of features, and the last layer of common models."""

import random

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from references.fingerprint import assert_same_fingerprint, fingerprint


@pytest.fixture
def as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


class Tokens(nn.Module):
    def __init__(self, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = nn.GRU(8, 6, batch_first=batch_first)
        self.head = nn.Linear(6, 11)
        self.batch_first = batch_first

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        h = self.rnn(h)[0] if self.batch_first else self.rnn(h.transpose(0, 1))[0].transpose(0, 1)
        return self.head(h)


def test_reductions_of_images():
    model, x = convnet(), torch.randn(5, 1, 6, 6)
    with torch.no_grad():
        conv = model[0](x)
    for reduce, expected in {
        "flatten": conv.flatten(1),
        "pool": conv.mean((2, 3)),
        "unfold": conv.permute(0, 2, 3, 1).reshape(-1, 4),
        "last": conv[:, :, -1, -1],
    }.items():
        found = gs.measures.features(model, x, "0", reduce=reduce)["0"]
        assert torch.allclose(found, expected, atol=1e-6), reduce
    custom = gs.measures.features(model, x, "0", reduce=lambda a: a.amax((2, 3)))["0"]
    assert torch.equal(custom, conv.amax((2, 3)))
    last = gs.measures.features(model, x, "0", reduce="pool", channels="last")["0"]
    assert torch.allclose(last, conv.mean((1, 2)), atol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
def test_reductions_of_tokens(batch_first):
    torch.manual_seed(0)
    model, ids = Tokens(batch_first), torch.randint(11, (3, 5))
    with torch.no_grad():
        h = Tokens.forward(model, ids)
    head = {
        reduce: gs.measures.features(model, ids, "head", reduce=reduce)["head"] for reduce in ("pool", "last", "unfold")
    }
    assert torch.allclose(head["pool"], h.mean(1), atol=1e-6)
    assert torch.allclose(head["last"], h[:, -1], atol=1e-6)
    assert torch.allclose(head["unfold"], h.flatten(0, 1), atol=1e-6)
    rnn = gs.measures.features(model, ids, "rnn", reduce="unfold")["rnn"]
    inputs = gs.measures.features(model, ids, "head", reduce="unfold", at="input")["head"]
    assert torch.allclose(rnn, inputs, atol=1e-6)


def test_padding_does_not_count():
    torch.manual_seed(0)
    model, ids = Tokens(), torch.randint(11, (3, 5))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    x = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        h = model(ids)
    keep = mask.bool()
    for reduce, expected in {
        "pool": torch.stack([row[kept].mean(0) for row, kept in zip(h, keep, strict=True)]),
        "last": torch.stack([h[0, 2], h[1, 4], h[2, 4]]),
        "unfold": h[keep],
    }.items():
        assert torch.allclose(gs.measures.features(model, x, "head", reduce=reduce)["head"], expected, atol=1e-6), (
            reduce
        )
    with pytest.raises(InputError, match="at least one token"):
        gs.measures.features(model, x | {"attention_mask": mask * 0}, "head", reduce="pool")


def test_a_mask_that_does_not_fit_is_said_to_be_left_out():
    class Prepended(Tokens):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(torch.cat([torch.zeros_like(input_ids[:, :1]), input_ids], 1))

    torch.manual_seed(0)
    model, mask = Prepended(), torch.tensor([[1, 1, 1, 0, 0]]).expand(3, 5)
    x = {"input_ids": torch.randint(11, (3, 5)), "attention_mask": mask}
    with pytest.warns(UserWarning, match=r"shape \(3, 5\), but layer 'head' has 6 positions for 3 examples"):
        found = gs.measures.features(model, x, "head", reduce="pool")["head"]
    with torch.no_grad():
        assert torch.allclose(found, model(x["input_ids"]).mean(1), atol=1e-6)


def test_a_float16_mean_does_not_overflow():
    class Big(nn.Module):
        def forward(self, x):
            return x * 1.0

    x = torch.full((2, 3, 64, 64), 60.0, dtype=torch.float16)
    model = nn.Sequential(Big())
    assert gs.measures.features(model, x, "0", reduce="pool")["0"].tolist() == [[60.0] * 3] * 2


def test_batches_of_many_kinds():
    model = convnet()
    x, y = torch.randn(7, 1, 6, 6), torch.arange(7)
    whole = gs.measures.features(model, x, "5")["5"]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    for data in (loader, x.split(3), [{"input": part} for part in x.split(3)], x):
        parts = list(gs.measures.feature_batches(model, data, "5"))
        assert torch.allclose(torch.cat([found["5"] for found, _ in parts]), whole, atol=1e-6)
    pairs = [(label, image) for image, label in zip(x.split(3), y.split(3), strict=True)]
    by_choice = list(gs.measures.feature_batches(model, pairs, "5", inputs=lambda batch: batch[1]))
    assert torch.allclose(torch.cat([found["5"] for found, _ in by_choice]), whole, atol=1e-6)
    labelled = [{"input": x, "labels": y}]
    assert len(list(gs.measures.feature_batches(model, labelled, "5"))) == 1


def test_last_layers():
    x = torch.randn(2, 1, 6, 6)
    assert gs.measures.last_layer(convnet(), x) == "5"
    assert gs.measures.last_layer(nn.Linear(3, 2), torch.ones(2, 3)) == ""
    assert gs.measures.last_layer(Tokens(), torch.zeros(2, 4, dtype=torch.long)) == "head"

    class Heads(nn.Module):
        """The layer that gives the output is not the one called last."""

        def __init__(self):
            super().__init__()
            self.body, self.policy, self.value = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.policy(h), self.value(h)

    assert gs.measures.last_layer(Heads(), torch.randn(5, 3)) == "policy"
    assert gs.measures.last_layer(nn.Sequential(Heads().body, nn.Softmax(1)), torch.randn(5, 3)) == "0"
    wrapped = nn.DataParallel(convnet())
    assert gs.measures.last_layer(wrapped, x) == "5"


@pytest.mark.parametrize("kind", ["gpt2", "bert", "vit"])
def test_last_layer_of_hugging_face_models(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=1, n_head=2)
        model, x, last = transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(20, (3, 4))}, "lm_head"
    elif kind == "bert":
        config = transformers.BertConfig(
            vocab_size=20, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        model = transformers.BertForSequenceClassification(config)
        x, last = {"input_ids": torch.randint(20, (3, 4))}, "classifier"
    else:
        config = transformers.ViTConfig(
            hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
        )
        model, x, last = (
            transformers.ViTForImageClassification(config),
            {"pixel_values": torch.randn(3, 3, 8, 8)},
            "classifier",
        )
    assert gs.measures.last_layer(model, x) == last
    assert 0 <= gs.measures.network_richness(model, x, reduce="last") <= 1


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained():
    model, x = convnet(), torch.randn(5, 1, 6, 6)
    with pytest.raises(InputError, match="reduce must be"):
        gs.measures.features(model, x, "0", reduce="mean")
    with pytest.raises(InputError, match="channels must be"):
        gs.measures.features(model, x, "0", channels="middle")
    with pytest.raises(InputError, match=r"must return rows \(n, p\)"):
        gs.measures.features(model, x, "0", reduce=lambda a: a.mean())
    with pytest.raises(InputError, match="must be an iterable"):
        next(gs.measures.feature_batches(model, 3))

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.last = nn.Embedding(6, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(x + self.table(torch.arange(6))[None])

    with pytest.raises(InputError, match="one row for each of the 3 examples on its first axis, got shape"):
        gs.measures.features(Positions(), torch.randn(3, 6, 4), "table")
    with pytest.raises(InputError, match="must contain a linear layer"):
        gs.measures.last_layer(nn.Sequential(nn.Conv2d(1, 2, 1)), x)


class Noisy(torch.utils.data.Dataset):
    """Draws from torch's, Python's and NumPy's streams, as augmentations do."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randn(4) + random.random() + np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("own", [False, True], ids=["global stream", "own generator"])
@pytest.mark.parametrize("measure", [gs.measures.network_richness, gs.measures.layer_similarity])
def test_a_loader_leaves_the_random_streams_as_they_were(measure, own, as_users_run_it):
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(3) if own else None
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=5, shuffle=True, generator=generator)
    before, drawn = fingerprint(model), None if generator is None else generator.get_state()
    measure(model, loader)
    assert_same_fingerprint(before, fingerprint(model))
    assert generator is None or torch.equal(generator.get_state(), drawn)

    def failing(batch):
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        measure(model, loader, inputs=failing)
    assert_same_fingerprint(before, fingerprint(model))
    assert generator is None or torch.equal(generator.get_state(), drawn)


def test_a_generator_of_a_batch_sampler_is_put_back():
    generator = torch.Generator().manual_seed(3)
    sampler = torch.utils.data.RandomSampler(Noisy(), generator=generator)
    loader = torch.utils.data.DataLoader(Noisy(), batch_sampler=torch.utils.data.BatchSampler(sampler, 5, False))
    before = generator.get_state()
    gs.measures.network_richness(nn.Linear(4, 2), loader)
    assert torch.equal(generator.get_state(), before)
