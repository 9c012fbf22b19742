"""Snapshots in files, and the kernel between two of them, against Jacobians in float64."""

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from references.jacobian import reference_jacobian


class Tied(nn.Module):
    """An embedding that is also the head, a packed attention, a convolution with groups, a norm: all kinds of sites."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        h = self.table(ids)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.norm(torch.tanh(self.conv(h.mT).mT))
        return (h.mean(1) @ self.table.weight.T)[:, :3]


def build(seed):
    torch.manual_seed(seed)
    return Tied().double()


def jacobian(model, x):
    rows = reference_jacobian(model, x)
    return torch.cat([rows[name].flatten(2) for name, _ in model.named_parameters()], dim=2)


IDS = torch.tensor([[1, 2, 3, 1], [4, 0, 6, 5], [2, 2, 5, 0]])


def test_two_states_of_one_network_and_files_against_jacobians(tmp_path):
    before, after = build(0), build(1)
    a, b = gs.capture(before, IDS), gs.capture(after, IDS[1:])
    wanted = torch.einsum("ncp,mdp->ncmd", jacobian(before, IDS), jacobian(after, IDS[1:]))
    torch.testing.assert_close(gs.snapshot_kernel(a, b), wanted, rtol=1e-10, atol=1e-12)
    traced = torch.einsum("ncmc->nm", wanted)
    torch.testing.assert_close(gs.snapshot_kernel(a, b, reduce="trace"), traced, rtol=1e-10, atol=1e-12)
    by_site = gs.snapshot_kernel(a, b, by_site=True)
    assert set(by_site) == set(dict(before.named_parameters()))
    torch.testing.assert_close(sum(by_site.values()), wanted, rtol=1e-10, atol=1e-12)
    b.save(tmp_path / "b.safetensors")
    again = gs.Snapshot.load(tmp_path / "b.safetensors")
    assert str(again) == str(b)
    assert torch.equal(again.outputs, b.outputs)
    assert [type(site) for site in again.sites] == [type(site) for site in b.sites]
    assert {type(site).__name__ for site in b.sites} == {"OuterSite", "LookupSite", "RowSite"}
    assert all(torch.equal(x.whole_rows(), y.whole_rows()) for x, y in zip(again.sites, b.sites, strict=True))
    # The numbers are the same, but lie elsewhere in memory: their sums may round otherwise.
    torch.testing.assert_close(gs.snapshot_kernel(a, again), gs.snapshot_kernel(a, b), rtol=1e-14, atol=1e-13)
    assert (again.parameters, again.directions, again.frozen) == (b.parameters, b.directions, b.frozen)
    assert [site.frame for site in again.sites] == [site.frame for site in b.sites]
    assert [path.name for path in tmp_path.iterdir()] == ["b.safetensors"]


def test_snapshots_that_do_not_fit_are_refused(tmp_path):
    linear, other = nn.Linear(3, 2), nn.Linear(3, 4)
    a, b = gs.capture(linear, torch.ones(2, 3)), gs.capture(other, torch.ones(2, 3))
    with pytest.raises(InputError, match="same parameters, but they differ in bias, weight"):
        gs.snapshot_kernel(a, b)
    with pytest.raises(InputError, match="same directions, got 2 and 1"):
        gs.snapshot_kernel(a, gs.capture(linear, torch.ones(2, 3), outputs=0), reduce="trace")
    with pytest.raises(InputError, match="no such file"):
        gs.Snapshot.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InputError, match="is not, or is damaged"):
        gs.Snapshot.load(tmp_path / "text")
    a.save(tmp_path / "new" / "folder" / "a.safetensors")
    with pytest.raises(InputError, match=r"must be a file that can be written, but .* Check its folder"):
        a.save(tmp_path / "new" / "folder")
    with pytest.raises(InputError, match="must be a file that can be written"):
        a.save(tmp_path / "text" / "a.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["folder"], "nothing temporary is left"
