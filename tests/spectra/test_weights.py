"""Which parameters become which matrices, and that none is left out without a word."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from cases import CASES
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.linalg import Dense, Diagonal
from gramscope.spectra import analyze, esds, skipped
from references.spectra import block_diagonal, squared_singular_values

F64 = torch.float64


def quick(source, **options):
    return analyze(source, bootstrap=0, **options)


def assert_accounts_for(frame, names: set[str]) -> None:
    """Raise unless every parameter has a row (or rows of its parts) or is listed as skipped, and none has both."""
    rows = {name.split("[")[0] for name in frame["name"]}
    left_out = set(skipped(frame)["name"])
    assert rows | left_out == names, (rows | left_out) ^ names
    assert not rows & left_out


def assert_same(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), np.sort(expected), atol=1e-12 * max(expected.max(), 1e-300))


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_network_of_the_zoo_is_accounted_for(name):
    model, *_ = CASES[name].build()
    before = copy.deepcopy(model.state_dict())
    training = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    frame = quick(model)
    keys = [key.replace("_orig_mod.", "") for key, _ in model.named_parameters(remove_duplicate=False)]
    stripped = {key.removeprefix("module.") if isinstance(model, nn.DataParallel) else key for key in keys}
    computed = {key for key in set(frame["name"].str.split("[").str[0]) if key not in stripped}
    assert_accounts_for(frame, stripped | computed)
    assert all(".parametrizations." not in key for key in frame["name"])
    numbers = frame.select_dtypes("number")
    unexplained = frame[numbers.isna().any(axis=1) & (frame["reason"] == "")]
    assert unexplained.empty, unexplained.T
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == training
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items() if torch.is_tensor(value))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions(layer, groups):
    torch.manual_seed(0)
    conv = layer(8, 12, 2, groups=groups, bias=False).double()
    unfolded = esds(conv, conv="unfold")["weight"]
    reference = block_diagonal(conv.weight.detach().flatten(2), groups)
    assert_same(unfolded, squared_singular_values(reference))
    positions = [
        block_diagonal(conv.weight.detach().flatten(2)[..., [p]], groups) for p in range(conv.weight[0, 0].numel())
    ]
    assert_same(esds(conv)["weight"], np.concatenate([_block_values(p, groups, 12, 8) for p in positions]))


def _block_values(matrix: torch.Tensor, groups: int, out: int, fan: int) -> np.ndarray:
    values = squared_singular_values(matrix)
    kept = groups * min(out // groups, fan // groups)
    return values[len(values) - kept :]  # the zeros between blocks of a wide matrix are no eigenvalues of a block


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions(groups):
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(8, 6, 3, groups=groups, bias=False).double()
    weight = conv.weight.detach()
    blocks = weight.reshape(groups, 8 // groups, -1)
    assert_same(esds(conv, conv="unfold")["weight"], np.concatenate([squared_singular_values(b) for b in blocks]))
    slices = [b for p in range(9) for b in weight.flatten(2)[..., p].reshape(groups, 8 // groups, -1)]
    assert_same(esds(conv)["weight"], np.concatenate([squared_singular_values(s) for s in slices]))
    assert quick(conv)["kind"].tolist() == ["conv_transpose"]


def test_the_unfolded_matrix_is_the_convolution():
    """W_unfolded times the patches is the layer's output: the matrix whose spectrum is taken is the one that acts."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3, bias=False).double()
    x = torch.randn(2, 3, 8, 8, dtype=F64)
    patches = nn.functional.unfold(x, 3)
    assert torch.allclose((conv.weight.flatten(1) @ patches).reshape(2, 5, 6, 6), conv(x))
    assert_same(esds(conv, conv="unfold")["weight"], squared_singular_values(conv.weight.flatten(1)))


@pytest.mark.parametrize(
    ("layer", "gates"),
    [
        (nn.LSTM, "ifgo"),
        (nn.GRU, "rzn"),
        (nn.RNN, [""]),
        (nn.LSTMCell, "ifgo"),
        (nn.GRUCell, "rzn"),
        (nn.RNNCell, [""]),
    ],
)
def test_recurrent_gates(layer, gates):
    torch.manual_seed(0)
    module = layer(5, 7).double()
    found = esds(module)
    suffix = "_l0" if isinstance(module, nn.RNNBase) else ""
    for part in ("ih", "hh"):
        whole = getattr(module, f"weight_{part}{suffix}")
        for gate, rows in zip(gates, whole.chunk(len(gates)), strict=True):
            key = f"weight_{part}{suffix}" + (f"[{gate}]" if gate else "")
            assert_same(found[key], squared_singular_values(rows))
    assert len(found) == 2 * len(gates)
    # The same parts from the names and shapes of a state dict alone.
    assert set(esds(module.state_dict())) == set(found)


def test_projected_bidirectional_lstm_from_module_and_state_dict():
    module = nn.LSTM(5, 8, num_layers=2, proj_size=3, bidirectional=True)
    names = set(esds(module))
    assert "weight_hr_l0" in names
    assert "weight_hh_l1_reverse[o]" in names
    assert set(esds(module.state_dict())) == names


def test_attention_is_split():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3).double()
    found = esds(module)
    for part, rows in zip("qkv", module.in_proj_weight.chunk(3), strict=True):
        assert_same(found[f"in_proj_weight[{part}]"], squared_singular_values(rows))
    assert set(esds(module.state_dict())) == set(found)
    apart = esds(nn.MultiheadAttention(12, 3, kdim=5, vdim=7))
    assert {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"} == set(apart)


@pytest.mark.parametrize("as_source", [lambda module: module, lambda module: module.state_dict()])
def test_projections_of_attention_apart_and_its_biases(as_source):
    module = nn.MultiheadAttention(12, 3, kdim=5, vdim=7, add_bias_kv=True)
    frame = quick(as_source(module))
    kinds = dict(zip(frame["name"], frame["kind"], strict=True))
    assert [kinds[f"{part}_proj_weight"] for part in "qkv"] == ["attention"] * 3
    assert {"bias_k", "bias_v"} <= set(skipped(frame)["name"])  # (1, 1, 12): one axis longer than one
    assert_accounts_for(frame, set(module.state_dict()))


@pytest.mark.parametrize("shape", [(1, 1, 9), (9, 1, 1), (1, 1, 1), (1, 9, 1, 1)])
def test_a_parameter_with_one_long_axis_is_a_vector(shape):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.stack = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(1, 4, 9))

    for source in (Tokens(), Tokens().state_dict()):
        frame = quick(source)
        assert frame["name"].tolist() == ["stack"]
        assert skipped(frame)["reason"].tolist() == ["a vector or a number (bias, gain), so it is no matrix"]


def test_a_matrix_of_one_row_stays_one():
    frame = quick({"readout": torch.randn(1, 9), "column": torch.randn(9, 1)})
    assert frame["name"].tolist() == ["readout", "column"]
    assert frame["M"].tolist() == [1, 1]


def test_packed_projections_of_other_libraries():
    class Conv1D(nn.Module):  # transformers' layer: a weight of shape (in, out)
        def __init__(self, out: int, fan: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(fan, out))

    model = nn.ModuleDict({"c_attn": Conv1D(12, 4), "qkv": nn.Linear(4, 12), "query_key_value": nn.Linear(4, 12)})
    found = esds(model)
    assert_same(found["c_attn.weight[v]"], squared_singular_values(model["c_attn"].weight[:, 8:]))
    assert_same(found["qkv.weight[q]"], squared_singular_values(model["qkv"].weight[:4]))
    # Interleaved by head in the models that use this name: thirds would mix q, k and v.
    assert "query_key_value.weight" in found
    assert set(esds(model.state_dict())) == set(found)


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 8)
            self.head = nn.Linear(8, 30, bias=False)
            self.head.weight = self.embedding.weight
            self.again = self.embedding

    frame = quick(Tied())
    assert frame["name"].tolist() == ["embedding.weight"]
    reasons = skipped(frame).set_index("name")["reason"]
    assert reasons["head.weight"] == "the same tensor as embedding.weight, analysed there"
    assert "embedding.weight" in reasons["again.weight"]
    assert quick(Tied().state_dict())["name"].tolist() == ["embedding.weight"]


def test_parametrised_weights_are_those_in_use():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 4), nn.Linear(4, 8))
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[1])
    nn.utils.parametrizations.orthogonal(model[2])
    prune.l1_unstructured(model[3], "weight", amount=0.5)
    model.train()
    before = copy.deepcopy(model.state_dict())
    found = esds(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    model.eval()
    with torch.no_grad():
        for k in range(4):
            np.testing.assert_allclose(found[f"{k}.weight"], squared_singular_values(model[k].weight), atol=1e-5)
    np.testing.assert_allclose(found["2.weight"], 1.0, atol=1e-5)
    reasons = skipped(quick(model)).set_index("name")["reason"]
    assert "enters through 0's parametrised weight" in reasons["0.parametrizations.weight.original0"]
    assert reasons["3.weight_orig"] == "enters through 3.weight"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_norms_by_hooks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 9)), nn.utils.spectral_norm(nn.Linear(9, 5)))
    with torch.no_grad():
        model[0].weight_g *= 3.0  # what the attribute `weight` still holds is stale until a forward pass
    found = esds(model)
    model.eval()(torch.randn(2, 6))
    for k in range(2):
        np.testing.assert_allclose(found[f"{k}.weight"], squared_singular_values(model[k].weight), rtol=1e-4)
    assert set(skipped(quick(model))["name"]) >= {"0.weight_g", "0.weight_v", "1.weight_orig"}


def test_a_parametrisation_that_fails_is_named():
    class Broken(nn.Module):
        def forward(self, weight):
            if not self.training:
                raise RuntimeError("not now")
            return weight

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Broken())
    model.train()
    frame = quick(model)
    assert frame["name"].tolist() == ["1.weight"]
    reasons = skipped(frame).set_index("name")["reason"]
    assert reasons["0.weight"] == "computing it raised RuntimeError: not now"
    assert all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_what_they_were_compiled_from():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Conv2d(4, 8, 3, groups=2), nn.LayerNorm((3, 4)), nn.LSTM(5, 3))
    plain, scripted = quick(model), quick(torch.jit.script(model))
    assert scripted[["name", "kind", "matrices"]].equals(plain[["name", "kind", "matrices"]])
    assert skipped(scripted).equals(skipped(plain))


def test_bare_parameters():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(1, 11, 6))
            self.experts = nn.Parameter(torch.randn(3, 5, 4))
            self.row = nn.Parameter(torch.randn(1, 7))
            self.scale = nn.Parameter(torch.tensor(2.0))

    model = Bare()
    frame = quick(model).set_index("name")
    assert frame.loc["position", ["matrices", "N", "M"]].tolist() == [1, 11, 6]
    assert frame.loc["experts", ["matrices", "N", "M", "n_eigenvalues"]].tolist() == [3, 5, 4, 12]
    assert frame.loc["row", "n_eigenvalues"] == 1
    assert skipped(frame)["name"].tolist() == ["scale"]


def test_what_cannot_be_measured_is_listed():
    tensors = {
        "complex": torch.randn(3, 3, dtype=torch.complex64),
        "whole": torch.ones(3, 3, dtype=torch.int64),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.zeros(0, 4),
        "step": 12,
        "optimizer": {"lr": 0.1},
        "array": np.eye(4),
        "operator": Dense(torch.randn(3, 3)),
        "metric": Diagonal(torch.arange(1.0, 9.0)),
        "layer.parametrizations.weight.original0": torch.randn(3, 1),
    }
    frame = quick(tensors)
    assert frame["name"].tolist() == ["array", "metric"]
    assert frame["kind"].tolist() == ["parameter", "operator"]
    reasons = skipped(frame).set_index("name")["reason"]
    for name, word in [
        ("complex", "complex"), ("whole", "int64"), ("sparse", "to_dense"), ("empty", "no entries"), ("step", "int"),
        ("optimizer", "pass this part alone"), ("operator", "symmetric"),
        ("layer.parametrizations.weight.original0", "pass the module"),
    ]:  # fmt: skip
        assert word in reasons[name], (name, reasons[name])


def test_prefixes_of_wrappers_are_stripped():
    model = nn.Sequential(nn.Linear(4, 3))
    assert esds(nn.DataParallel(model)).keys() == {"0.weight"}
    assert esds({f"module.{key}": value for key, value in model.state_dict().items()}).keys() == {"0.weight"}
    assert esds({f"_orig_mod.{key}": value for key, value in model.state_dict().items()}).keys() == {"0.weight"}


def test_lazy_and_meta_modules():
    frame = quick(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)))
    assert frame["name"].tolist() == ["1.weight"]
    assert "lazy" in skipped(frame).set_index("name")["reason"]["0.weight"]
    with pytest.raises(UnsupportedError, match=r"the weight 0\.weight must hold values, but it is on the meta device"):
        quick(nn.Sequential(nn.Linear(4, 4, device="meta")))


def test_sources_that_are_refused():
    with pytest.raises(InputError, match="nothing to analyse"):
        quick(nn.Sequential(nn.ReLU()))
    with pytest.raises(InputError, match=r"checkpoint\['state_dict'\]"):
        quick({"epoch": 3, "state_dict": {"w": torch.eye(2)}})
    with pytest.raises((UnsupportedError, TypeError)):
        quick("weights.pt")
    with pytest.raises(InputError, match="matches no weight"):
        quick(nn.Linear(3, 3), include="attention*")


def test_include_and_sizes_list_what_they_leave():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 9), nn.Linear(9, 9))
    frame = quick(model, include="[12].*", max_size=5)
    assert frame["name"].tolist() == ["1.weight"]
    reasons = skipped(frame).set_index("name")["reason"]
    assert "include" in reasons["0.weight"]
    assert "max_size=5" in reasons["2.weight"]


def test_a_state_dict_of_a_pruned_model_has_no_rows_for_the_parts():
    """Neither the weight before pruning nor the mask of zeros and ones is what the network computes with."""
    model = nn.Sequential(nn.Linear(12, 16), nn.utils.spectral_norm(nn.Linear(16, 10)), nn.Linear(10, 9))
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    frame = quick(model.state_dict())
    assert frame["name"].tolist() == ["2.weight"]
    reasons = skipped(frame).set_index("name")["reason"]
    assert "pruned weight (0.weight_orig times 0.weight_mask)" in reasons["0.weight_orig"]
    assert "pass the module" in reasons["0.weight_mask"]
    assert "spectrally normalised" in reasons["1.weight_orig"]
    assert {"0.weight", "1.weight"} <= set(quick(model)["name"])
    alone = quick({"first_orig": torch.randn(9, 9), "second_mask": torch.randn(9, 9)})  # names alone mean nothing
    assert len(alone) == 2
