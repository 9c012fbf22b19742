"""Numbers that a loop logs: every one at its own step, beside the records and without them."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gramscope.store import RunWriter, StoreError, open_run
from gramscope.store.logged_scalars import LOGGED_FILE
from store.conftest import TESTS
from store.failing_disk import FailingDisk

SOURCE = str(TESTS.parent / "src")


def logged(path: Path) -> dict[str, dict[int, float]]:
    return {name: series.to_dict() for name, series in open_run(path).logged().items()}


def test_every_number_stands_at_its_own_step(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"norm": 1.0})
        writer.log({"loss": ([1, 2, 3], [3.0, 2.0, math.inf]), "eval": ([2], [0.5])})
        writer.append(2, {"norm": 2.0})
        writer.log({"loss": ([4], [1.0])})
    assert logged(tmp_path / "a") == {"loss": {1: 3.0, 2: 2.0, 3: math.inf, 4: 1.0}, "eval": {2: 0.5}}
    frame = open_run(tmp_path / "a").scalars()
    assert list(frame.index) == [0, 2]
    assert frame["loss"].dropna().to_dict() == {2: 2.0}
    assert frame["eval"].dropna().to_dict() == {2: 0.5}
    assert frame["norm"].to_dict() == {0: 1.0, 2: 2.0}
    assert open_run(tmp_path / "a").verify() == []


def test_nan_is_a_number_that_was_logged(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.log({"loss": ([1, 2], [math.nan, 1.0])})
    found = open_run(tmp_path / "a").logged()["loss"]
    assert list(found.index) == [1, 2]
    assert math.isnan(found[1])


def test_of_two_numbers_at_one_step_the_last_counts(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.log({"loss": ([1, 1, 2], [1.0, 2.0, 3.0])})
        writer.log({"loss": ([1], [4.0])})
    assert logged(tmp_path / "a") == {"loss": {1: 4.0, 2: 3.0}}


def test_a_run_without_logged_numbers_has_no_file(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
    assert not (tmp_path / "a" / LOGGED_FILE).exists()
    assert logged(tmp_path / "a") == {}


def test_a_reader_follows(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        run = open_run(tmp_path / "a")
        writer.log({"loss": ([1], [1.0])})
        assert run.refresh()
        assert not run.refresh()
        writer.log({"loss": ([2], [2.0])})
        assert run.refresh()
        assert run.logged()["loss"].to_dict() == {1: 1.0, 2: 2.0}


def test_a_restart_from_a_checkpoint_supersedes_what_was_logged_later(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with RunWriter.create(path) as writer:
        writer.append(0, {})
        writer.log({"loss": (range(1, 10), [float(step) for step in range(1, 10)])})
    with RunWriter.resume(path, step=5) as writer:
        assert (writer.attempt, writer.last_step) == (1, 5)
    assert list(logged(path)["loss"]) == [1, 2, 3, 4, 5], "at once, before anything new is logged"
    with RunWriter.resume(path, step=3) as writer:
        assert writer.attempt == 2
        writer.log({"lr": ([3], [0.1]), "loss": ([4], [40.0])})
    assert logged(path) == {"loss": {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}, "lr": {3: 0.1}}
    with RunWriter.resume(path) as writer:
        assert writer.last_step == 4, "the last step that is known of, also where no record stands"
        writer.log({"loss": ([5], [50.0])})
    assert logged(path)["loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 50.0}


def test_a_damaged_line_is_found_and_a_torn_one_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with RunWriter.create(path) as writer:
        writer.append(0, {})
        for step in (1, 2, 3):
            writer.log({"loss": ([step], [float(step)])})
    file = path / LOGGED_FILE
    file.write_bytes(file.read_bytes().replace(b'"steps":[2]', b'"steps":[9]') + b'{"name":"loss"')
    with pytest.warns(UserWarning, match=r"line 2 of .*logged.jsonl is damaged"):
        run = open_run(path)
    assert list(run.logged()["loss"].index) == [1, 3]
    assert [(damage.file, damage.problem) for damage in run.verify()] == [(LOGGED_FILE, "line 2 is damaged")]
    with RunWriter.resume(path) as writer:
        writer.log({"loss": ([4], [4.0])})
    with pytest.warns(UserWarning, match="line 2"):
        assert list(open_run(path).logged()["loss"].index) == [1, 3, 4]


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"name": "a"},
        {"name": "a", "attempt": 0, "steps": [1], "values": []},
        {"name": "a", "attempt": 0, "steps": [-1], "values": [1]},
        {"name": "a", "attempt": 0, "steps": [2**70], "values": [1]},
        {"name": "a", "attempt": True, "steps": [1], "values": [1]},
        {"name": 3, "attempt": 0, "steps": [1], "values": [1]},
        {"name": "a", "attempt": 0, "steps": [1], "values": ["text"]},
        {"name": "a", "attempt": 0, "steps": [[1]], "values": [1]},
    ],
)
def test_a_line_that_says_nothing_is_damage(tmp_path: Path, content: object) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.log({"loss": ([1], [1.0])})
    with (tmp_path / "a" / LOGGED_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
    with pytest.warns(UserWarning, match="line 2"):
        assert logged(tmp_path / "a") == {"loss": {1: 1.0}}


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_a_full_disk_loses_nothing_that_is_tried_again(tmp_path: Path, short: bool, lasting: bool) -> None:
    disk = FailingDisk(10**9, short=short, lasting=lasting)
    with RunWriter.create(tmp_path / "a", disk=disk) as writer:
        writer.log({"loss": ([1], [1.0])})
        disk.fail_at = len(disk.calls) + 1
        with pytest.raises(StoreError, match=r"writing numbers to .*failed"):
            writer.log({"loss": ([2], [2.0])})
        assert disk.failed
        assert logged(tmp_path / "a") == {"loss": {1: 1.0}}
        disk.heal()
        writer.log({"loss": ([2], [2.0])})
    assert logged(tmp_path / "a") == {"loss": {1: 1.0, 2: 2.0}}
    assert open_run(tmp_path / "a").verify() == []


def test_a_killed_process_loses_nothing_that_was_logged(tmp_path: Path) -> None:
    program = (
        "import sys, time; from gramscope.store import RunWriter\n"
        f"writer = RunWriter.create({str(tmp_path / 'a')!r})\n"
        "for step in range(100): writer.log({'loss': ([step], [1.0])})\n"
        "print('logged', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"logged\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(logged(tmp_path / "a")["loss"]) == list(range(100))


def test_a_million_numbers_are_cheap(tmp_path: Path) -> None:
    begun = time.perf_counter()
    with RunWriter.create(tmp_path / "a") as writer:
        for start in range(0, 1_000_000, 1000):
            writer.log({"loss": (range(start, start + 1000), [0.123456789] * 1000)})
    assert len(open_run(tmp_path / "a").logged()["loss"]) == 1_000_000
    assert time.perf_counter() - begun < 10  # less than 2 s where this was written
