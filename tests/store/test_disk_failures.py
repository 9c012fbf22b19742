"""A disk that is full or read-only: one clear error, a readable run, and appends that work once it works again."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gramscope.base.errors import GramscopeError
from gramscope.store import Disk, RunWriter, StoreError, open_run
from store.conftest import TESTS
from store.content import arrays_of, assert_record_holds, scalars_of
from store.failing_disk import FailingDisk

STEPS = [0, 1, 2]


def committed_files(path: Path) -> list[str]:
    if not (path / "meta.json").exists():
        return []
    return [Path(record.arrays.file).name for record in open_run(path).records if record.arrays]


class Bench:
    """A whole life of a run on a failing disk: each failure is checked, repaired, and tried again."""

    def __init__(self, path: Path, disk: FailingDisk) -> None:
        self.path, self.disk = path, disk
        self.committed: list[tuple[int, int]] = []
        self.pending: tuple[int, int] | None = None
        self.failures: list[GramscopeError] = []

    def insist(self, action: Callable[[], RunWriter | object]) -> object:
        """``action``, and once more after the disk is repaired where it failed."""
        try:
            return action()
        except GramscopeError as error:
            self.failures.append(error)
        assert isinstance(self.failures[-1], StoreError)
        assert self.failures[-1].errno == self.disk.number
        assert "disk is full" in str(self.failures[-1])
        self.assert_readable()
        if not self.disk.lasting:
            self.assert_no_arrays_without_a_line()
        self.disk.heal()
        return action()

    def assert_no_arrays_without_a_line(self) -> None:
        files = [file.name for file in (self.path / "arrays").glob("*")]  # with a dot too: temporary ones
        assert sorted(files) == sorted(committed_files(self.path))

    def assert_readable(self) -> None:
        if not (self.path / "meta.json").exists():
            assert not self.committed
            return
        run = open_run(self.path)
        steps = [record for record in run.records if record.event == "step"]
        keys = [(record.step, record.attempt) for record in steps]
        # A line that was written whole, but could be neither flushed nor taken back, is readable as well.
        allowed = [self.committed]
        if self.disk.lasting and self.pending is not None:
            allowed.append([*self.committed, self.pending])
        assert keys in allowed
        assert run.verify() == []
        assert run.damaged == []
        for record in steps:
            assert_record_holds(run, record)

    def append(self, writer: RunWriter, step: int) -> None:
        self.pending = (step, writer.attempt)
        content = scalars_of(step, writer.attempt), arrays_of(step, writer.attempt, 4)
        self.insist(lambda: writer.append(step, *content))
        self.committed.append(self.pending)
        self.pending = None

    def live(self) -> None:
        for open_writer, steps in (
            (lambda: RunWriter.create(self.path, {"model": "none"}, disk=self.disk), STEPS),
            (lambda: RunWriter.resume(self.path, disk=self.disk), [3]),
            (lambda: RunWriter.resume(self.path, 1, disk=self.disk), [2, 3]),
        ):
            writer = self.insist(open_writer)
            assert isinstance(writer, RunWriter)
            with writer:
                for step in steps:
                    self.append(writer, step)
        self.assert_readable()
        run = open_run(self.path)
        # A restart that failed and could not take its mark back has used up an attempt number.
        again = writer.attempt
        assert again == 2 or (again == 3 and self.disk.lasting)
        assert [(r.step, r.attempt) for r in run.view] == [(0, 0), (1, 0), (2, again), (3, again)]
        assert len(run.history()) == 6
        self.assert_no_arrays_without_a_line()


@pytest.mark.parametrize("short", [False, True], ids=["nothing taken", "half taken"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "until repaired"])
def test_full_disk_at_every_call(tmp_path: Path, lasting: bool, short: bool) -> None:
    healthy = FailingDisk(10**9)
    Bench(tmp_path / "healthy", healthy).live()
    assert not healthy.failed
    assert len(healthy.calls) > 50
    raised = 0
    # Only a write can be half taken.
    places = [i for i, call in enumerate(healthy.calls, start=1) if call == "write" or not short]
    for fail_at in places:
        disk = FailingDisk(fail_at, lasting=lasting, short=short)
        bench = Bench(tmp_path / str(fail_at), disk)
        bench.live()
        assert disk.failed
        raised += len(bench.failures)
        shutil.rmtree(bench.path)
    # Half a write is gone on with, but for the seven lines that commit six steps and a restart.
    assert raised == (7 if short and not lasting else len(places))


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "until repaired"])
def test_a_failed_commit_leaves_no_arrays(tmp_path: Path, lasting: bool) -> None:
    """Training goes on: the step that failed is not tried again, so nothing would write over its arrays."""
    healthy = FailingDisk(10**9)
    with RunWriter.create(tmp_path / "healthy", disk=healthy) as writer:
        before = len(healthy.calls)
        writer.append(0, {"loss": 1.0}, {"kernel": [1.0]})
    calls = healthy.calls[before:]
    assert calls == ["open", "write", "flush", "rename", "flush", "write", "flush"]
    for place in range(1, len(calls) + 1):
        path = tmp_path / str(place)
        disk = FailingDisk(10**9, lasting=lasting)
        with RunWriter.create(path, disk=disk) as writer:
            writer.append(0, {"loss": 1.0}, {"kernel": [1.0]})
            disk.fail_at = len(disk.calls) + place
            with pytest.raises(StoreError, match="disk is full"):
                writer.append(1, {"loss": 0.5}, {"kernel": [0.5]})
            disk.heal()
            if lasting:  # nothing could be taken back then; the next step does it
                writer.append(2, {"loss": 0.25})
            files = [file.name for file in (path / "arrays").iterdir()]
            assert files == ["step_00000000.safetensors"], (place, calls[place - 1])
        assert open_run(path).verify() == []


def test_the_bench_finds_a_lost_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", FailingDisk(10**9))
    bench.live()
    bench.assert_readable()
    lines = (tmp_path / "a" / "scalars.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a" / "scalars.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(AssertionError):
        bench.assert_readable()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "fault"),
        (errno.EFBIG, "limit"),
        (errno.ENODEV, "what was committed is safe"),
    ],
)
def test_other_failures_say_what_to_do(tmp_path: Path, number: int, words: str) -> None:
    disk = FailingDisk(10**9, number=number, lasting=True)
    with RunWriter.create(tmp_path / "a", disk=disk) as writer:
        writer.append(0, scalars_of(0, 0), arrays_of(0, 0))
        disk.fail_at = 1
        with pytest.raises(StoreError, match=words) as caught:
            writer.append(1, scalars_of(1, 0))
        assert caught.value.errno == number
        assert isinstance(caught.value.__cause__, OSError)
        assert str(tmp_path / "a") in str(caught.value)
        assert open_run(tmp_path / "a").steps == [0]
        disk.heal()
        writer.append(1, scalars_of(1, 0))
    assert open_run(tmp_path / "a").steps == [0, 1]


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(StoreError):
            RunWriter.create(path)


def test_an_interrupt_in_the_middle_of_a_commit_is_taken_back(tmp_path: Path) -> None:
    class Interrupted(FailingDisk):
        def flush(self, descriptor: int) -> None:
            if self.calls[-1] == "write" and self.lasting:
                self.lasting = False
                raise KeyboardInterrupt
            super().flush(descriptor)

    disk = Interrupted(10**9)
    with RunWriter.create(tmp_path / "a", disk=disk) as writer:
        writer.append(0, {"loss": 1.0})
        disk.lasting = True
        with pytest.raises(KeyboardInterrupt):
            writer.append(1, {"loss": 0.5})
        assert open_run(tmp_path / "a").steps == [0]
        writer.append(1, {"loss": 0.25})
    assert open_run(tmp_path / "a").scalars()["loss"].tolist() == [1.0, 0.25]


@pytest.mark.parametrize("call", ["write", "rename", "flush_directory"])
def test_an_interrupt_while_arrays_are_written_leaves_none(tmp_path: Path, call: str) -> None:
    class Interrupted(Disk):
        def __getattribute__(self, name: str) -> object:
            if name == call and stopped:
                stopped.clear()
                raise KeyboardInterrupt
            return super().__getattribute__(name)

    stopped: list[bool] = []
    with RunWriter.create(tmp_path / "a", disk=Interrupted()) as writer:
        stopped.append(True)
        with pytest.raises(KeyboardInterrupt):
            writer.append(0, {"loss": 1.0}, {"kernel": [1.0]})
        assert list((tmp_path / "a" / "arrays").iterdir()) == []
        writer.append(0, {"loss": 1.0}, {"kernel": [1.0]})
    assert open_run(tmp_path / "a").verify() == []


def test_a_run_that_was_removed_is_noticed(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
        shutil.rmtree(tmp_path / "a")
        for arrays in ({}, {"kernel": [1.0]}):
            with pytest.raises(StoreError, match="removed"):
                writer.append(1, {"loss": 0.5}, arrays)


def test_lines_of_another_program_are_not_cut_off(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
        with open(tmp_path / "a" / "scalars.jsonl", "ab") as file:
            file.write(b"{}\n")
        with pytest.raises(StoreError, match="another program"):
            writer.append(1, {"loss": 0.5})
    assert (tmp_path / "a" / "scalars.jsonl").read_bytes().endswith(b"{}\n")


def real_disk(case: str, *before: str) -> dict[str, object]:
    """The report of real_disk.py, or a skip where this machine does not allow the case."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    done = subprocess.run(
        [*before, sys.executable, str(TESTS / "store" / "real_disk.py"), case],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def needs_mounts() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here; the failing disk above stands in for a real one")
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this user may not mount a file system; the failing disk above stands in for a real one")


def test_a_real_full_disk() -> None:
    needs_mounts()
    report = real_disk("full", "unshare", "-m")
    assert report["errno"] == errno.ENOSPC
    assert "disk is full" in str(report["message"])
    assert report["committed"] == report["readable"]
    assert report["damage"] == 0
    assert report["temporary_files"] == 0
    assert report["after_space_is_back"] is True


def test_a_real_read_only_file_system() -> None:
    needs_mounts()
    report = real_disk("read_only", "unshare", "-m")
    assert report["errno"] == errno.EROFS
    assert "read-only" in str(report["message"])
    assert report["readable"] == 3


def test_a_directory_without_permission_to_write() -> None:
    report = real_disk("no_permission")
    assert report["errno"] == errno.EACCES
    assert "permissions" in str(report["message"])
    assert report["readable"] == 3
    assert report["create_errno"] == errno.EACCES
    assert report["open_errno"] == errno.EACCES
