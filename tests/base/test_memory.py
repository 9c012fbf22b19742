"""What memory may be used: what is asked for, and what containers, limits and neighbours leave."""

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from gramscope.base.memory_budget import available, cgroup_rooms, free_memory, memory_budget

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "bytes_"),
    [("2GB", 2e9), ("2 GiB", 2**31), ("512MiB", 2**29), ("1.5k", 1500), ("7", 7), (".5tb", 5e11), (2e9, 2e9), (12, 12)],
)
def test_sizes(size, bytes_):
    assert memory_budget(size, CPU) == bytes_


@pytest.mark.parametrize("size", ["", "GB", "2 XB", "-1GB", 0, -3, True, float("nan"), float("inf")])
def test_sizes_that_are_none(size):
    with pytest.raises(InputError, match="memory must be a positive number of bytes, or a size"):
        memory_budget(size, CPU)
    with pytest.raises(InputError, match="memory must be a positive number of bytes, or a size"):
        gs.ntk(nn.Linear(2, 1), torch.ones(3, 2), memory=size)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def test_control_groups_of_the_second_kind(tmp_path):
    """The tightest of the group and those around it; cached files count as free; "max" is no limit."""
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("0::/pod/box\n")
    write(root / "pod" / "box", memory__max="max", memory__current=10)
    stat = "anon 5\ninactive_file 60\nactive_file 70\nfile_mapped 30\n"  # what is mapped, such as libraries, is in use
    write(root / "pod", memory__max=1000, memory__current=700, memory__stat=stat)
    assert list(cgroup_rooms(root, own)) == [400]
    write(root / "pod" / "box", memory__max=500, memory__current=200)
    assert sorted(cgroup_rooms(root, own)) == [300, 400]


def test_control_groups_of_the_first_kind(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("5:cpu,cpuacct:/a\n4:memory:/box\n")
    group = {"memory__limit_in_bytes": 900, "memory__usage_in_bytes": 300, "memory__stat": "total_inactive_file 50\n"}
    write(root / "memory" / "box", **group)
    assert list(cgroup_rooms(root, own)) == [650]


def test_inside_a_container_the_group_is_the_root(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "self"
    own.write_text("0::/docker/abc\n")  # the host's path, which is not mounted here
    write(root, memory__max=1000, memory__current=100)
    assert list(cgroup_rooms(root, own)) == [900]


def test_nothing_is_known(tmp_path):
    assert available(tmp_path / "none") is None
    assert list(cgroup_rooms(tmp_path, tmp_path / "none")) == []


def test_ranks_of_one_machine_share(monkeypatch):
    alone = free_memory(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == pytest.approx(alone / 4, rel=0.2)  # other processes come and go


def test_an_address_space_limit_counts():
    code = (
        "import resource, torch; from gramscope.base.memory_budget import free_memory, address_space\n"
        "room = 2**31 + int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "assert 2**30 < free_memory(torch.device('cpu')) <= 2**31, free_memory(torch.device('cpu'))\n"
    )
    assert resource.getpagesize() == 4096
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kernel_larger_than_memory_is_refused_at_once(monkeypatch):
    """Without a budget, too: nothing is computed before it is known to fit."""
    monkeypatch.setattr("gramscope.kernels.memory.free_memory", lambda device: 10**9)
    monkeypatch.setattr("gramscope.base.memory_budget.free_memory", lambda device: 10**9)
    calls = []
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 10))
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(InputError, match=r"at least 57,6\d\d,\d\d\d,\d\d\d bytes .* 1,000,000,000 are free"):
        gs.ntk(model, torch.randn(12_000, 8))
    assert len(calls) == 1  # nothing but the outputs is computed
    assert gs.ntk(model, torch.randn(1000, 8), reduce="trace").shape == (1000, 1000)


def test_many_outputs_need_no_square_of_them():
    """A matrix of all cotangents would take 160 GB."""
    kernel = gs.ntk(nn.Linear(4, 20_000), torch.eye(3, 4), reduce="trace", memory=2 * 10**8)
    torch.testing.assert_close(kernel, 20_000 * (torch.eye(3) + 1))
