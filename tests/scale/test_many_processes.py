"""Many processes on one folder: ranks of torchrun, jobs that are killed, that join, that come back."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gramscope as gs
from scale import filling_process, full_disk_process, limited_process

SCRIPT = Path(filling_process.__file__)
ROOT = Path(gs.__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PATIENCE = 240  # seconds; a busy machine is slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The bytes of all tiles from one process with the same plan."""
    folder = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    filling_process.fill(folder / "K")
    torch.set_num_threads(threads)
    return tiles(folder / "K")


def tiles(folder):
    return {path.name: path.read_bytes() for path in (folder / "kernel").iterdir() if not path.name.startswith(".")}


def workers(folder):
    """Tiles by the process that computed them."""
    found = {}
    for path in (folder / "tiles").glob("*.json"):
        found.setdefault(json.loads(path.read_text())["process"].split()[-1], []).append(path.stem)
    return found


def until(condition):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < PATIENCE
        time.sleep(0.01)


def start(folder, name):
    return subprocess.Popen([sys.executable, str(SCRIPT), str(folder), name], env=ENVIRONMENT)


def test_two_gloo_ranks_give_the_bits_of_one_process(tmp_path, alone):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(SCRIPT), str(tmp_path), "rank"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiles(tmp_path / "K") == alone
    shared = workers(tmp_path / "K")
    assert len(shared) == 2, "both ranks did a part"
    assert not list((tmp_path / "K" / "claims").iterdir())


def test_a_killed_job_a_second_one_and_one_that_joins(tmp_path, alone):
    jobs = {name: start(tmp_path, name) for name in ("killed", "second", "joins")}
    try:
        until(lambda: all((tmp_path / f"{name}.ready").exists() for name in jobs))
        records = tmp_path / "K" / "tiles"
        (tmp_path / "killed.go").touch()
        until(lambda: records.is_dir() and len(list(records.glob("*.json"))) >= 4)
        jobs["killed"].send_signal(signal.SIGKILL)
        jobs["killed"].wait()
        before = {path.name: path.stat().st_mtime_ns for path in records.glob("*.json")}
        assert 4 <= len(before) < 15, "killed half-way"
        half = gs.open_kernel(tmp_path / "K")
        assert len(half.missing) == 15 - len(before)
        assert not half.verify(), "what is there is whole"
        (tmp_path / "second.go").touch()
        until(lambda: len(list(records.glob("*.json"))) > len(before))
        jobs["second"].send_signal(signal.SIGSTOP)  # on a busy machine it could be done before the other begins
        (tmp_path / "joins.go").touch()
        until(lambda: str(jobs["joins"].pid) in workers(tmp_path / "K"))
        jobs["second"].send_signal(signal.SIGCONT)
        assert [jobs[name].wait(timeout=PATIENCE) for name in ("second", "joins")] == [0, 0]
    finally:
        for job in jobs.values():
            job.kill()
    assert tiles(tmp_path / "K") == alone
    assert all((records / name).stat().st_mtime_ns == when for name, when in before.items()), "nothing is done twice"
    shared = workers(tmp_path / "K")
    assert set(shared) == {str(job.pid) for job in jobs.values()}, "all three did a part"
    assert not [path for path in (tmp_path / "K" / "claims").iterdir() if not path.name.startswith(".clock")]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a limit of the address space is read on Linux")
def test_a_kernel_larger_than_what_the_system_gives(tmp_path):
    command = [sys.executable, limited_process.__file__, str(tmp_path)]
    # Each thread of the C library would reserve an address space of its own, used or not.
    environment = {**ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused: memory must be at least" in done.stdout
    kernel = gs.open_kernel(tmp_path / "K")
    assert kernel.plan.bytes > limited_process.ROOM > 2 * kernel.plan.memory
    model, x = limited_process.build()
    some = [0, 1234, 5999]
    found = torch.tensor(kernel.array[some, some].values)
    torch.testing.assert_close(found, gs.ntk(model, x[some], reduce="trace"), rtol=1e-4, atol=1e-4)


@pytest.fixture
def memory_group():
    """A control group of our own inside the one that we are in; processes are moved to it before they begin."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            group = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), f"gramscope-test-{os.getpid()}")
            try:
                group.mkdir()
            except OSError:
                continue
            if any((group / name).exists() for name in limited_process.FILES):
                yield group
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("this system gives us no control group of our own that counts memory")


def run_in(group, *arguments):
    command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", sys.executable, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)


def test_a_kernel_larger_than_a_control_group(tmp_path, memory_group):
    """A real one, as containers are: who takes more is killed. So is a plain tensor of the kernel's size."""
    killed = run_in(memory_group, limited_process.__file__, str(memory_group))
    assert killed.returncode == -signal.SIGKILL, killed
    done = run_in(memory_group, limited_process.__file__, str(tmp_path), str(memory_group))
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])
    assert "refused: memory must be at least" in done.stdout
    assert done.stdout.endswith("worked with\n")
    kernel = gs.open_kernel(tmp_path / "K")
    limit = next(memory_group / name for name in limited_process.FILES if (memory_group / name).exists())
    assert kernel.plan.bytes > int(limit.read_text())
    model, x = limited_process.build(kernel.shape[0])
    some = [0, 1234, 5999]
    found = torch.tensor(kernel.array[some, some].values)
    torch.testing.assert_close(found, gs.ntk(model, x[some], reduce="trace"), rtol=1e-4, atol=1e-4)


def test_a_disk_that_is_full(tmp_path):
    """A real one: a small file system in a name space of its own, where the system lets us make it."""
    mounted = f"mount -t tmpfs -o size={full_disk_process.DISK} none {tmp_path}"
    own = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, mounted], capture_output=True).returncode:
        pytest.skip("this system gives us no file system of our own")
    command = f"{mounted} && exec {sys.executable} {full_disk_process.__file__} {tmp_path}"
    done = subprocess.run([*own, command], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "No space left on device. The disk is full: free some space and go on" in done.stdout
    assert "bytes, but its disk has" in done.stderr, "it was said before"
    assert done.stdout.endswith("went on\n")
