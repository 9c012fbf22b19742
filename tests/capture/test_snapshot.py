"""What a snapshot holds: sites whose inputs and signals give every gradient, layouts, directions, frames."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs
from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.capture import OuterSite


def test_inputs_and_signals_are_the_textbook_ones():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    sites = gs.capture(model, x).by_parameter()
    (first,), (last,) = sites["0.weight"], sites["2.weight"]
    hidden = torch.tanh(model[0](x))
    torch.testing.assert_close(first.inputs[:, 0, 0], x)
    torch.testing.assert_close(last.inputs[:, 0, 0], hidden)
    torch.testing.assert_close(last.signals[:, :, 0, 0], torch.eye(2).double().expand(5, 2, 2))
    back = model[2].weight[None] * (1 - hidden**2)[:, None]
    torch.testing.assert_close(first.signals[:, :, 0, 0], back.detach())


def test_the_loss_direction_gives_example_gradients():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    snapshot = gs.capture(model, x, directions=lambda f: 0.5 * ((f - y) ** 2).sum())
    assert snapshot.directions == 1
    rows = snapshot.by_parameter()["weight"][0].rows()[:, 0].reshape(5, 2, 3)
    residual = (model(x) - y).detach()
    torch.testing.assert_close(rows, torch.einsum("no,ni->noi", residual, x))


def test_chosen_cotangents():
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()
    directions = torch.randn(3, 4, 2).double()
    rows = gs.capture(model, x, directions=directions).by_parameter()["bias"][0].rows()
    torch.testing.assert_close(rows, directions.transpose(0, 1))
    with pytest.raises(InputError, match=r"\(k, 4, 2\)"):
        gs.capture(model, x, directions=torch.randn(3, 5, 2))


def test_query_key_and_value_are_sites_of_their_own():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(3, 5, 4)
    snapshot = gs.capture(model, (x, x, x))
    parts = snapshot.by_parameter()["in_proj_weight"]
    where = torch.cat([site.frame.entries for site in parts if site.frame is not None]) if parts[0].frame else None
    covered = where if where is not None else torch.arange(48)
    assert torch.equal(covered.sort().values, torch.arange(48))


def test_what_was_left_out_is_named():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "frozen": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["used"](x) + model["frozen"](x)  # type: ignore[method-assign]
    snapshot = gs.capture(model, torch.randn(4, 3))
    assert snapshot.frozen == ("frozen.weight", "frozen.bias")
    assert snapshot.unreached == ("idle.weight", "idle.bias")
    assert "left out (frozen): frozen.weight" in str(snapshot)
    assert "idle.weight (2x3): not used by the output" in str(snapshot)


def test_the_packed_projection_of_a_sequence_first_model_is_no_fallback():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # sequence first, as many tokens as examples

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x.transpose(0, 1)).mean(0)

    snapshot = gs.capture(Model(), torch.randn(5, 5, 4))
    assert not snapshot.fallback
    assert all(isinstance(site, OuterSite) for site in snapshot.by_parameter()["layer.linear1.weight"])


class Cancelling(nn.Module):
    """A layer norm, or probabilities, summed: the signals at ``first`` are rounding and nothing else."""

    def __init__(self, squash, mixing=0.0) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(5, 7), nn.Linear(5, 2)
        self.squash, self.mixing = squash, mixing

    def forward(self, x):
        squashed = self.squash(self.first(x))
        squashed = squashed + self.mixing * squashed.roll(1, 0)
        return torch.einsum("ni->n", squashed)[:, None] + self.beside(x)  # einsum is not on the tape


SQUASH = {"probabilities": lambda h: h.softmax(-1), "centred": lambda h: h - h.mean(-1, keepdim=True)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 4, 9, 60])
@pytest.mark.parametrize("squash", SQUASH)
def test_signals_that_cancel_to_rounding_are_no_coupling(squash, n, dtype):
    torch.manual_seed(0)
    model, x = Cancelling(SQUASH[squash]).to(dtype), torch.randn(n, 5, dtype=dtype)
    found = gs.ntk(model, x)
    beside = gs.ntk(model, x, outputs=lambda model, x: model.beside(x))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, beside, rtol=16 * eps, atol=(16 * eps) ** 2 * n)


@pytest.mark.parametrize("n", [2, 4, 9, 60])
def test_coupling_is_seen_all_the_same(n):
    model = Cancelling(lambda h: h.softmax(-1) * torch.arange(7), mixing=1e-3).double()
    with pytest.raises(CoupledExamplesError, match="mix the"):
        gs.ntk(model, torch.randn(n, 5, dtype=torch.float64))


def test_inputs_overwritten_after_their_use_are_noticed():
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            hidden = self.first(x)
            out = self.second(hidden)
            hidden.mul_(2)
            return out + hidden[:, :2]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gs.capture(Overwriting(), torch.randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_networks(dtype):
    """Signals in half precision, contracted in float32: off by the rounding of the network itself, 2^-8 or 2^-11."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 3))
    x = torch.randn(6, 8)
    half = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 3)).to(dtype)
    half.load_state_dict(model.to(dtype).state_dict())
    got = gs.ntk(half, x.to(dtype))
    want = gs.ntk(half, x.to(dtype), precision="float64")
    assert got.dtype == torch.float32
    error = float((got.double() - want).norm() / want.norm())
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.005}[dtype]


def test_pickled_and_saved(tmp_path):
    """Every kind of site; what is read back gives the same gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 6), nn.Conv1d(5, 4, 3), nn.ReLU(), nn.LayerNorm(4), nn.Flatten(), nn.Linear(16, 2)
    )
    snapshot = gs.capture(model, torch.randint(0, 7, (3, 5)))
    torch.save(snapshot, tmp_path / "snapshot.pt")
    for other in (pickle.loads(pickle.dumps(snapshot)), torch.load(tmp_path / "snapshot.pt", weights_only=False)):
        assert str(other) == str(snapshot)
        assert all(torch.equal(a.rows(), b.rows()) for a, b in zip(snapshot.sites, other.sites, strict=True))
        inputs = [site.inputs_of(slice(1, 2)) for site in other.sites if isinstance(site, OuterSite)]
        assert [len(part) for part in inputs] == [1, 1]


def test_a_loss_before_the_outputs_is_passed_over():
    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).square().mean(), self.layer(x)

    model, x = WithLoss(), torch.randn(4, 3)
    assert torch.equal(gs.capture(model, x).outputs, model.layer(x).detach())


class Copied(nn.Module):
    """A table whose entries reach the data as copies: cast, sliced, looked up, masked, and mixed at the end."""

    def __init__(self, how: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.table = how, nn.Parameter(torch.randn(41, 20, dtype=torch.float64).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, ids = self.table.to(x), torch.arange(36).reshape(6, 6) % 41
        if self.how == "slice":
            return x @ table[1:]
        if self.how == "mix":  # what is left below the copies is no copy
            table = torch.cat([table[:20] * 2.0, table[20:].exp()])
        looked_up = F.embedding(ids, table, padding_idx=7) if self.how == "padded" else table[ids]
        bias = looked_up.permute(2, 0, 1)[None].expand(1, 20, 6, 6)
        if self.how == "masked":
            bias = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), bias, 3.0)
        return (x[:, :20, None, None] + bias).tanh().mean((1, 2))


@pytest.mark.parametrize("how", ["slice", "look up", "padded", "masked", "mix"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_of_a_table_are_traced_to_their_entries(how, dtype):
    """820 entries: more than a number of bfloat16 can tell apart."""
    model, x = Copied(how, dtype), torch.randn(3, 40, dtype=torch.float64)
    found = gs.capture(model, x)
    assert found.fallback == ()
    rows = sum(site.whole_rows() for site in found.sites)
    f = model(x)
    one_by_one = [
        torch.autograd.grad(f[e, c], model.table, retain_graph=True)[0] for e in range(3) for c in range(f.shape[1])
    ]
    expected = torch.stack(one_by_one).double().reshape(3, f.shape[1], -1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(rows.double(), expected, rtol=tolerance, atol=tolerance)
