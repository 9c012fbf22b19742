"""Sharded training with a watch, in two processes: the same to the last bit, measured whole, never left hanging."""

import socket

import pytest
import torch
import torch.multiprocessing as processes

import gramscope as gs
from record import sharded_training


def run(folder, *cases):
    """The results of both ranks, by case."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes.spawn(sharded_training.run, args=(cases, str(folder), port), nprocs=2)
    return {case: [torch.load(folder / f"{case} {rank}.pt", weights_only=False) for rank in (0, 1)] for case in cases}


def assert_measured_like(records, whole) -> None:
    """Numbers of the copy against those of the same training in one process, whose parameters are whole."""
    assert [record["step"] for record in records] == [record["step"] for record in whole] == [0, 2, 4]
    for record, other in zip(records, whole, strict=True):
        names = [name for name in other["scalars"] if name.startswith(("loss/", "share/", "kernel/", "richness"))]
        assert len(names) > 5
        for name in names:
            assert record["scalars"][name] == pytest.approx(other["scalars"][name], rel=1e-3, abs=1e-5), name
    assert records[0]["scalars"]["loss/probe"] != pytest.approx(records[2]["scalars"]["loss/probe"], rel=1e-3)


def test_fully_sharded(tmp_path):
    found = run(tmp_path, "FSDP2", "FSDP2, attached", "FSDP2, closed")
    assert [record["step"] for record in found["FSDP2, closed"][0]["records"]] == [0, 3, 4]  # the last by close()
    for case, ranks in found.items():
        assert [rank["same"] for rank in ranks] == [True, True], case
        assert [rank["count"] for rank in ranks] == [4, 4]
        assert not ranks[1]["records"], "rank 0 alone measures"
    # Not with AdamW: it makes steps of full size of the rounding in a gradient that is zero (a bias before batch norm).
    _, scope = sharded_training.train(sharded_training.network, tmp_path / "whole", optimizer=torch.optim.SGD)
    assert_measured_like(found["FSDP2, attached"][0]["records"], scope.records)
    meta = gs.open_run(tmp_path / "FSDP2" / "run").meta
    model = sharded_training.network()
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert meta["sharded"] == {"ranks": 2, "copy_bytes_on_rank_0": size}


def test_tensor_parallel_and_accelerate(tmp_path):
    found = run(tmp_path, "tensor parallel", "accelerate")
    assert [rank["same"] for rank in found["tensor parallel"]] == [True, True]
    _, scope = sharded_training.train(sharded_training.small, tmp_path / "whole")
    assert_measured_like(found["tensor parallel"][0]["records"], scope.records)
    assert [rank["same"] for rank in found["accelerate"]] == [True, True]
    assert list(gs.open_run(tmp_path / "accelerate" / "run").scalars().index) == [0, 2, 4]


def test_what_one_rank_refuses_all_refuse(tmp_path):
    first, second = run(tmp_path, "refusals")["refusals"]
    assert first["flat"] == second["flat"]
    assert "fully_shard (FSDP2), which is watched" in first["flat"]
    assert "taken" in first["rank 0's"]
    assert "rank 0 could not open the watch, so no rank does: StoreError" in second["rank 0's"]
    assert "got (16, 5). The model said" in first["probe"]
    assert "rank 0 could not open the watch, so no rank does: InputError" in second["probe"]
    assert "not all of them came. Call gs.watch and scope.step" in first["alone"]
    assert first["left alone"].count("From here on nothing is measured; training goes on.") == 1
    assert first["records"] == [0]


def test_the_comparison_sees_a_change():
    state, _ = sharded_training.train(sharded_training.network, None)
    other = {key: [t.clone() for t in tensors] for key, tensors in state.items()}
    assert sharded_training.same(state, other)
    other["momenta"][0].view(-1)[0] += 1e-6
    assert not sharded_training.same(state, other)
