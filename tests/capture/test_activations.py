"""Outputs and inputs of named modules: right, private copies, and the model as it was."""

import jaxtyping
import pytest
import torch
from torch import nn

from cases import CASES
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.activations import activations
from references.fingerprint import assert_same_fingerprint, fingerprint


@pytest.fixture
def as_users_run_it():
    # The runtime type checker of the test suite draws from Python's random stream; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(4, 2))


def test_outputs_are_those_before_an_in_place_operation():
    model, x = mlp(), torch.randn(5, 3)
    found = activations(model, x, ["0", "1", "3", ""])
    with torch.no_grad():
        before = model[0](x)
        assert torch.equal(found["0"], before)
        assert torch.equal(found["1"], before.relu())
        assert torch.equal(found[""], model.eval()(x))
    assert bool((found["0"] < 0).any())
    assert not any(value.requires_grad for value in found.values())


def test_inputs_and_sides_by_name():
    model, x = mlp(), torch.randn(5, 3)
    assert torch.equal(activations(model, x, "0", at="input")["0"], x)
    both = activations(model, x, ["0", "3"], at={"0": "input"})
    assert both["0"].shape == (5, 3)
    assert both["3"].shape == (5, 2)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("mode", ["eval", "train", "as_is"])
@pytest.mark.parametrize(
    "name",
    [
        "mlp_relu",
        "batch_norm2d_eval",
        "dropout_in_eval",
        "embedding_max_norm",
        "encoder_layer",
        "lstm_two_layers_bidirectional",
        "spectral_norm_train",
        "weight_norm_by_hook",
        "layer_output_changed_by_a_hook",
        "compiled",
        "data_parallel",
        "checkpoint_not_reentrant",
        "relu_in_place_conv_and_batch_norm",
        "input_overwritten",
        "energy_and_forces",
        "keyword_arguments",
        "siamese",
        "hf_gpt2",
    ],
)
def test_nothing_changes(name, mode):
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    model, x, _ = case.build(dtype=torch.float32)
    before = fingerprint(model, x)
    found = activations(model, x, mode=mode, missing="skip", layers=["", "*"] if len(list(model.modules())) > 1 else "")
    assert_same_fingerprint(before, fingerprint(model, x))
    assert found


@pytest.mark.usefixtures("as_users_run_it")
def test_nothing_changes_after_an_error():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

        def forward(self, x):
            torch.rand(1)
            self.last(self.norm(x))
            raise RuntimeError("on purpose")

    model, x = Fails(), torch.randn(4, 3)
    model.norm.eval()  # flags that differ must come back as they were
    before = fingerprint(model, x)
    for mode in ("train", "eval"):
        with pytest.raises(RuntimeError, match="on purpose"):
            activations(model, x, "last", mode=mode)
        assert_same_fingerprint(before, fingerprint(model, x))


def test_modes():
    model, x = mlp(), torch.ones(200, 3)
    assert float((activations(model, x, "2", mode="train")["2"] == 0).float().mean()) > 0.3
    assert torch.equal(activations(model, x, "2")["2"], activations(model, x, "1")["1"])
    assert model.training


def test_a_module_called_again_has_numbered_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.layer(torch.tanh(self.layer(x))))

    model, x = Twice(), torch.randn(4, 3)
    found = activations(model, x, "*")
    assert list(found) == ["layer@1", "layer@2", "head"]
    assert torch.equal(activations(model, x, "layer@2")["layer@2"], found["layer@2"])
    with pytest.raises(InputError, match="was called 2 times"):
        activations(model, x, "layer@3")


def test_tuples_objects_and_keywords():
    lstm = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    assert torch.equal(activations(lstm, x, "")[""], lstm(x)[0])

    class Output:
        def __init__(self, logits):
            self.ids, self.logits = torch.arange(2), logits

    class Wraps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, *, values):
            return Output(self.inner(input=values))

    model = Wraps()
    found = activations(model, {"values": x[:, 0]}, ["inner", ""], at={"inner": "input"})
    assert torch.equal(found["inner"], x[:, 0])
    assert found[""].shape == (2, 2)


def test_logits_come_before_a_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            f = self.inner(x)
            return {"loss": f.square().mean(), "hidden": x, "logits": f}

    class Bare(WithLoss):
        def forward(self, x):
            f = self.inner(x)
            return f.square().mean(), f

    x = torch.randn(4, 3)
    assert activations(WithLoss(), x, "")[""].shape == (4, 2)
    assert activations(Bare(), x, "")[""].shape == (4, 2)


@pytest.mark.usefixtures("as_users_run_it")
def test_torchscript_is_refused_by_name():
    model = nn.Sequential(torch.jit.trace(nn.Linear(3, 2), torch.randn(2, 3)))
    x = torch.randn(2, 3)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="layer '0' must be a Python module"):
        activations(model, x, "0")
    assert_same_fingerprint(before, fingerprint(model))


def test_packed_sequences_are_read_at_their_data():
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 2]), batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    found = activations(Packs(), torch.randn(2, 5, 3), "rnn")["rnn"]
    assert found.shape == (7, 4)


def test_half_precision():
    model = mlp().bfloat16()
    assert activations(model, torch.randn(5, 3).bfloat16(), "3")["3"].dtype == torch.bfloat16


def test_under_inference_mode_and_no_grad():
    model, x = mlp(), torch.randn(5, 3)
    expected = activations(model, x, "3")["3"]
    with torch.inference_mode():
        assert torch.equal(activations(model, x, "3")["3"], expected)


def test_layers_can_be_left_out():
    model, x = mlp(), torch.randn(5, 3)
    assert list(activations(model, x, ["*", "!1", "!2"])) == ["0", "3"]
    with pytest.raises(InputError, match="leaves none"):
        activations(model, x, ["0", "!*"])
    with pytest.raises(InputError, match="nothing matches 'norm'"):
        activations(model, x, ["*", "!norm"])


def test_tied_modules_are_one():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    assert list(activations(model, torch.randn(2, 3), ["0", "2", "1"])) == ["0@1", "1", "0@2"]


@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input_is_explained():
    model, x = mlp(), torch.randn(5, 3)
    with pytest.raises(InputError, match=r"nothing matches 'blocks\.\*'"):
        activations(model, x, "blocks.*")
    with pytest.raises(InputError, match="layers must be a name"):
        activations(model, x, [])
    with pytest.raises(InputError, match="at must be"):
        activations(model, x, "0", at="both")
    with pytest.raises(InputError, match="mode must be"):
        activations(model, x, "0", mode="test")
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with pytest.raises(InputError, match="was not called"):
        activations(attention, (torch.randn(2, 3, 4),) * 3, "out_proj")
    with pytest.raises(InputError, match="must hold a floating tensor"):
        activations(nn.Sequential(nn.Embedding(5, 2)), torch.tensor([1, 2]), "0", at="input")


class Children(nn.Module):
    """Calls the children of a container, and one layer not at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.blocks = nn.ModuleDict({"head": nn.Linear(4, 2)})
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.blocks["head"](x)


def test_globs_take_the_layers_that_run():
    model, x = Children(), torch.randn(5, 3)
    assert list(activations(model, x)) == ["layers.0", "layers.1", "blocks.head"]
    assert list(activations(model, x, ["*", "!layers.*"])) == ["blocks.head"]
    assert list(activations(model, x, "l*")) == ["layers.0", "layers.1"]
    for asked in ("layers", ["*", "layers"], "unu*", ["blocks.*", "unused"], ["layers.0@2", "*"]):
        with pytest.raises(InputError, match="must run in the forward pass"):
            activations(model, x, asked)
    assert list(activations(model, x, ["layers", "layers.1"], missing="skip")) == ["layers.1"]
