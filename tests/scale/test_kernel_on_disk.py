"""Kernels on disk: the same numbers as in memory, readable by others, safe from damage, mix-ups and full disks."""

import errno
import inspect
import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramscope as gs
from gramscope.base.errors import CoupledExamplesError, InputError, UnsupportedError
from gramscope.kernels.empirical_ntk import ntk as ntk_in_memory
from gramscope.scale import kernel_job
from gramscope.scale.fill_tiles import fill_tiles
from gramscope.scale.kernel_job import KernelJob
from gramscope.scale.tile_costs import tile_cost
from gramscope.scale.tile_plan import TilePlan, choose_tile
from gramscope.store import StoreError
from references.jacobian import reference_ntk
from store.failing_disk import FailingDisk

N, TILE = 14, 5


def network(seed=0, activation=nn.Tanh, outputs=2):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, outputs)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def examples(n=N, seed=1):
    return torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tile_files(folder):
    return {path.name: path.read_bytes() for path in (folder / "kernel").iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A traced kernel in six tiles, and its folder; only to be read."""
    folder = tmp_path_factory.mktemp("written") / "K"
    return gs.ntk(network(), examples(), reduce="trace", out=folder, tile=TILE), folder


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 7), st.none() | st.integers(1, 5), st.integers(2, 8), st.sampled_from(["none", "trace"]))
def test_equal_to_brute_force(tmp_path_factory, n, m, tile, reduce):
    folder = tmp_path_factory.mktemp("K")
    model, x, x2 = network(), examples(n), None if m is None else examples(m, seed=2)
    wanted = reference_ntk(model, x, x2)
    if reduce == "trace":
        wanted = torch.einsum("ncmc->nm", wanted)
    kernel = gs.ntk(model, x, x2, reduce, out=folder, tile=tile)
    torch.testing.assert_close(kernel.to_tensor(), wanted, rtol=1e-12, atol=1e-12)  # float64 and small sums
    torch.testing.assert_close(kernel.operator().dense(), kernel.to_tensor().reshape(kernel.operator().shape))


def test_what_is_told_in_memory_is_told_on_disk():
    mine, theirs = inspect.signature(gs.ntk).parameters, inspect.signature(ntk_in_memory).parameters
    assert [(p.name, p.default) for p in mine.values()][:-2] == [(p.name, p.default) for p in theirs.values()]
    assert list(mine)[-2:] == ["out", "tile"]


def test_others_read_it_without_us(written):
    kernel, folder = written
    whole = kernel.to_tensor().numpy()
    zarr, xarray = pytest.importorskip("zarr"), pytest.importorskip("xarray")
    assert np.array_equal(zarr.open(str(folder), mode="r")["kernel"][:], whole)
    opened = xarray.open_zarr(folder)["kernel"]
    assert opened.dims == ("row", "col")
    assert np.array_equal(opened.to_numpy(), whole)
    dask = pytest.importorskip("dask.array")
    assert float(dask.from_zarr(str(folder / "kernel")).sum().compute()) == pytest.approx(whole.sum(), rel=1e-12)
    plain = np.fromfile(folder / "kernel" / "2.0", dtype="<f8").reshape(TILE, TILE)
    assert np.array_equal(plain[:4], whole[10:, :5])
    assert np.isnan(plain[4:]).all(), "beyond the edge"


def test_lazy_array(written, tmp_path):
    kernel, _ = written
    whole = kernel.to_tensor().numpy()
    for key in [(3, 7), (slice(2, 12, 3), slice(None)), ([13, 0, 6, 6], slice(9, None, -2)), (slice(0, 0), 1)]:
        assert np.array_equal(
            kernel.array[key].to_numpy(), whole[tuple(np.array(k) if isinstance(k, list) else k for k in key)]
        )
    four = gs.ntk(network(), examples(7), examples(5, 2), out=tmp_path / "K", tile=3)
    picked = four.array.isel(row=[6, 1], row_output=1, col=slice(1, 5)).to_numpy()
    assert np.array_equal(picked, four.to_tensor()[[6, 1], 1, 1:5].numpy())


def test_work_on_tiles_agrees_with_work_on_the_matrix(written, tmp_path):
    model, x, y = network(), examples(), torch.arange(N) % 3
    targets = torch.nn.functional.one_hot(y).double()
    kernels = [(written[0], gs.kernel(model, x, reduce="trace", by_site=False))]
    kernels.append((gs.ntk(model, x, out=tmp_path / "K", tile=4), gs.kernel(model, x, by_site=False)))
    for tiled, whole in kernels:
        aim = targets if whole.total.dim() == 2 else targets[:, :2]
        matrix = whole.matrix
        assert tiled.trace() == pytest.approx(float(matrix.trace()), rel=1e-12)
        torch.testing.assert_close(tiled.eigenvalues_top(3).values, whole.spectrum()[:3], rtol=1e-9, atol=0)
        assert tiled.target_alignment(aim) == pytest.approx(whole.target_alignment(aim), rel=1e-12)
        other = torch.exp(whole.total / whole.total.abs().max())
        assert tiled.alignment(other) == pytest.approx(whole.alignment(other), rel=1e-12)
        assert tiled.alignment(tiled) == pytest.approx(1.0, abs=1e-14)
        cross = gs.ntk(model, examples(3, 5), x, reduce="trace" if matrix is whole.total else "none")
        for rank in (0, 6):
            found = tiled.regress(aim, ridge=0.3, rank=rank, tol=1e-12)
            assert found.solution.all_converged
            torch.testing.assert_close(found.predict(cross), whole.predict(cross, aim, ridge=0.3), rtol=1e-8, atol=1e-9)
    assert written[0].target_alignment(y) == pytest.approx(kernels[0][1].target_alignment(y), rel=1e-12)


def test_the_preconditioner_saves_steps(tmp_path):
    x = torch.randn(80, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kernel = gs.ntk(network(), x, reduce="trace", out=tmp_path / "K", tile=40)
    y = torch.sin(x.sum(1, keepdim=True))
    plain, fewer = (kernel.regress(y, ridge=1e-2, rank=rank).solution.iterations.max() for rank in (0, 30))
    assert fewer < plain / 2


def test_damaged_tiles_are_found_and_computed_again(tmp_path):
    folder = tmp_path / "K"
    gs.ntk(network(), examples(), reduce="trace", out=folder, tile=TILE)
    whole = tile_files(folder)
    with (folder / "kernel" / "1.2").open("r+b") as file:
        file.seek(11)
        file.write(b"\x55")
    (folder / "kernel" / "0.1").write_bytes(b"")
    (folder / "kernel" / "1.0").unlink()
    (folder / "tiles" / "2.2.json").write_text("{")
    kernel = gs.open_kernel(folder)
    assert kernel.verify() == [(0, 1), (1, 2), (2, 2)]
    with pytest.raises(StoreError, match=r"the file is damaged\. Run the same gs\.ntk"):
        kernel.tile(1, 2)
    kept = (folder / "kernel" / "0.0").stat().st_mtime_ns
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again = gs.ntk(network(), examples(), reduce="trace", out=folder, tile=TILE)
    assert sorted(str(w.message).split()[1] for w in told) == ["0.1", "1.2", "2.2"]
    assert tile_files(folder) == whole
    assert (folder / "kernel" / "0.0").stat().st_mtime_ns == kept, "what is whole is left alone"
    assert not again.verify()


def test_another_version_of_torch_is_named(tmp_path):
    gs.ntk(network(), examples(), reduce="trace", out=tmp_path / "K", tile=TILE)
    manifest = tmp_path / "K" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    with pytest.warns(UserWarning, match=r"was begun with torch 1\.0, and this is .* differ by rounding"):
        gs.ntk(network(), examples(), reduce="trace", out=tmp_path / "K", tile=TILE)


def test_missing_tiles(tmp_path):
    kernel = gs.ntk(network(), examples(), reduce="trace", out=tmp_path / "K", tile=TILE)
    (tmp_path / "K" / "tiles" / "0.2.json").unlink()
    assert kernel.missing == [(0, 2)]
    assert not kernel.complete
    assert repr(kernel) == "TiledKernel 14 x 14, float64, 5 of 6 tiles"
    with pytest.raises(StoreError, match=r"tile \(0, 2\) .* is not computed yet \(1 of 6 are missing\)"):
        kernel.to_tensor()
    for place in ((0, 3), (-1, 0)):
        with pytest.raises(InputError, match=r"must be one of 3 x 3, counted from 0"):
            kernel.tile(*place)
    with pytest.warns(UserWarning, match="begun with, of 5 x 5 examples; tile=7 is ignored"):
        again = gs.ntk(network(), examples(), reduce="trace", out=tmp_path / "K", tile=7)
    assert again.complete
    assert len(again.plan.tiles) == 6


OTHERS = {
    "another model": ({"model": network(seed=5)}, "another model"),
    "other examples": ({"x": examples(seed=9)}, "other examples x"),
    "more examples": ({"x": examples(15)}, "other examples x"),
    "other outputs": ({"outputs": [0]}, "other outputs"),
    "the same weights in another network": ({"model": network(activation=nn.ReLU)}, "gives other outputs"),
    "another function": ({"outputs": lambda model, x: 2 * model(x)}, "other outputs"),
    "not traced": ({"reduce": "none"}, "reduce='none' instead of 'trace'"),
    "columns": ({"x2": examples(3)}, "other examples x2"),
    "precision": ({"precision": "float32"}, "precision='float32' instead of None"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_folder_of_another_kernel_is_refused(written, case):
    change, told = OTHERS[case]
    given = {"model": network(), "x": examples(), "reduce": "trace", **change}
    before = tile_files(written[1])
    with pytest.raises(InputError, match=r"must hold tiles of the kernel that is asked for") as refusal:
        gs.ntk(**given, out=written[1], tile=TILE)
    assert told in str(refusal.value)
    assert tile_files(written[1]) == before


def test_folders_that_are_none_of_ours(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds other files \(mine\.txt\)"):
        gs.ntk(network(), examples(), out=tmp_path)
    with pytest.raises(InputError, match="out must be a folder"):
        gs.ntk(network(), examples(), out=tmp_path / "mine.txt")
    with pytest.raises(StoreError, match="there is no such folder"):
        gs.open_kernel(tmp_path / "none")
    with pytest.raises(StoreError, match=r"holds no manifest\.json"):
        gs.open_kernel(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(StoreError, match="damaged"):
        gs.open_kernel(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 9, "versions": {"gramscope": "7"}}))
    with pytest.raises(StoreError, match="Upgrade"):
        gs.open_kernel(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_bad_arguments(written, tmp_path):
    model, x = network(), examples()
    with pytest.raises(UnsupportedError, match="by_site=True"):
        gs.ntk(model, x, by_site=True, out=tmp_path / "K")
    with pytest.raises(UnsupportedError, match="tile= is for kernels on disk"):
        gs.ntk(model, x, tile=3)
    with pytest.raises(InputError, match="tile must be a whole number"):
        gs.ntk(model, x, out=tmp_path / "K", tile=0)
    with pytest.raises(InputError, match="memory must be at least"):
        gs.ntk(model, x, out=tmp_path / "K", memory=100)
    assert not (tmp_path / "K").exists()
    with pytest.raises(InputError, match="ridge must be"):
        written[0].regress(x, ridge=0.0)
    with pytest.raises(InputError, match="one row for each of the 14 examples"):
        written[0].regress(x[:3], ridge=1.0)
    with pytest.raises(InputError, match="must fit into memory"):
        written[0].to_tensor(memory=100)


@pytest.mark.filterwarnings("ignore::gramscope.base.user_warnings.RandomOutputsWarning")
@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(6).double()])
def test_outputs_that_depend_on_the_batch_are_refused(tmp_path, layer):
    model = nn.Sequential(*network()[:2], layer, *network()[2:])
    with pytest.raises(CoupledExamplesError):
        gs.ntk(model, examples(), out=tmp_path / "K")
    assert not (tmp_path / "K").exists()
    assert gs.ntk(model.eval(), examples(4), out=tmp_path / "K").complete


def test_a_full_disk_stops_the_job_and_loses_nothing(tmp_path):
    job = KernelJob(network(), examples(), None, "trace")
    counting = FailingDisk(10**9)
    fill_tiles(job, tmp_path / "whole", tile=TILE, disk=counting)
    places = [place for place, call in enumerate(counting.calls, 1) if call in ("write", "rename")]
    done = []
    for fail_at in (places[0], places[len(places) // 2], places[-2]):
        folder, disk = tmp_path / str(fail_at), FailingDisk(fail_at, lasting=True, short=True)
        with pytest.raises(StoreError, match="The disk is full: free some space and go on") as stopped:
            fill_tiles(job, folder, tile=TILE, disk=disk)
        assert stopped.value.errno == errno.ENOSPC
        if (folder / "manifest.json").exists():
            kernel = gs.open_kernel(folder)
            assert not kernel.verify(), "what is there is whole"
            done.append(len(kernel.plan.tiles) - len(kernel.missing))
            assert not list((folder / "claims").iterdir()), "the next job need not wait"
        disk.heal()
        fill_tiles(job, folder, tile=TILE, disk=disk)
        assert tile_files(folder) == tile_files(tmp_path / "whole")
    assert 0 < done[0] < done[1] < 6


def test_a_kernel_larger_than_the_memory(tmp_path):
    model, x = network(outputs=1), examples(200)
    with pytest.raises(InputError, match="memory must be at least"):
        gs.ntk(model, x, memory="150kB")
    kernel = gs.ntk(model, x, memory="150kB", out=tmp_path / "K")
    assert kernel.plan.bytes > 2 * 150_000
    assert 4 * kernel.plan.tile_bytes <= 150_000
    torch.testing.assert_close(kernel.to_tensor(), gs.ntk(model, x))


def test_less_memory_than_thought(tmp_path, monkeypatch):
    asked = []

    def short_of_memory(*args, memory, **options):
        asked.append(memory)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ntk_in_memory(*args, memory=memory, **options)

    monkeypatch.setattr(kernel_job, "ntk", short_of_memory)
    with pytest.warns(UserWarning, match="ran out of memory"):
        kernel = gs.ntk(network(), examples(3), reduce="trace", out=tmp_path / "K", memory="10MB")
    assert asked[1] == asked[0] // 2
    torch.testing.assert_close(kernel.to_tensor(), gs.ntk(network(), examples(3), reduce="trace"))
    monkeypatch.setattr(kernel_job, "free_memory", lambda device: 2_000_000)
    with pytest.warns(UserWarning, match="has 2,000,000 free"):
        gs.ntk(network(), examples(3), reduce="trace", out=tmp_path / "K2", memory="10MB")
    assert asked[-1] == 1_000_000


def test_nested_inputs_and_an_unchanged_model(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x, mask, scale):
            return self.inner(x * mask) * scale

    model, x = Masked(), examples(6)
    given = {"x": x, "mask": (x > 0).double(), "scale": torch.tensor([2.0], dtype=torch.float64)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    kernel = gs.ntk(model, given, out=tmp_path / "K", tile=4)
    torch.testing.assert_close(kernel.to_tensor(), gs.ntk(model, given))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_plans():
    for rows, cols, processes in [(60_000, 60_000, 8), (100, 60_000, 1), (5, 5, 1), (3000, 10, 4)]:
        symmetric = rows == cols
        tile = choose_tile(rows, cols, outputs=1, itemsize=4, memory=10**9, processes=processes, symmetric=symmetric)
        plan = TilePlan(rows, cols, 1, "trace", symmetric, tile, "float32", 10**9)
        assert plan.tile_bytes * 8 <= 10**9
        covered = sum(
            plan.examples(i, 0) * plan.examples(j, 1) * (2 if plan.mirrored((i, j)) else 1) for i, j in plan.tiles
        )
        assert covered == rows * cols
        assert plan.bytes < 1.1 * 4 * rows * cols + 10**4, "edges waste little"
        if processes > 1 and rows > 1000:
            assert len(plan.tiles) >= 2 * processes or min(tile) <= 64
        assert TilePlan.from_json(json.loads(json.dumps(vars(plan)))) == plan


def test_the_cost_of_a_small_network_by_hand():
    model = nn.Sequential(nn.Conv2d(2, 3, 2, bias=False), nn.Flatten(), nn.Linear(12, 5))
    job = KernelJob(model, torch.randn(6, 2, 3, 3), None, "trace")
    cost = tile_cost(job, job.plan(tile=3))
    # The convolution has 4 positions of 8 inputs, and by position 4² (8 + 5·3) is more than by rows, 5·24.
    convolution, head = 4 * 24, 60
    assert cost.by_example == 2 * ((1 + 5) * (convolution + head) + 5 * convolution)
    assert cost.by_pair == 2 * (5 * 24 + (12 + 5 * 5))
    assert cost.total == cost.by_example * 12 + cost.by_pair * 27  # three tiles, two of them on the diagonal
    assert math.isclose(cost.seconds(1e9, processes=2), cost.total / 2e9)


def test_the_cost_counts_what_a_tight_memory_makes_pass_again():
    model = nn.Sequential(nn.Linear(4, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1))
    passed = []
    model.register_forward_hook(lambda module, args, output: passed.append(len(output) * output.requires_grad))
    job = KernelJob(model, torch.randn(40, 4), None, "trace")
    for memory in ("1GB", "400kB"):
        plan = job.plan(memory, tile=20)
        cost = tile_cost(job, plan)
        passed.clear()
        job.compute(plan, (0, 1))
        expected = cost.again * 40
        # Beside it: examples pass up to four times when it is tried whether they may be joined and cut, two tell the
        # sizes, and for each pair of blocks three tell where weights meet data.
        assert expected <= sum(passed) <= 1.5 * expected + 4 * 40 + 2, (memory, expected, passed)
        assert (cost.again > 1) == (memory == "400kB") == ("an example passes" in str(cost))
        assert cost.repeated == pytest.approx((cost.again - 1) / cost.again * cost.passes)
        kept = 4 * (4 + 2 * 600)  # bytes: the inputs of the three layers, and other tensors
        assert 2 * kept * plan.passes <= cost.moved <= 8 * kept * plan.passes
        assert cost.away == cost.moved / (plan.passes * 2) * 40  # one output: once there, once back; 20 + 20 examples


def test_activations_may_be_moved_away(tmp_path):
    """As torch.autograd.graph.save_on_cpu does; here out of torch's sight, so that nothing can use the first copy."""
    model, x, moved = network(), examples(), []

    def away(tensor):
        moved.append(tensor.nbytes)
        return tensor.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(away, torch.from_numpy):
        kernel = gs.ntk(model, x, reduce="trace", out=tmp_path / "K", tile=TILE)
    assert sum(moved) > 0
    assert torch.equal(kernel.to_tensor(), gs.ntk(model, x, reduce="trace", out=tmp_path / "L", tile=TILE).to_tensor())
