"""kill -9 at any moment: every committed step reads back, nothing else does."""

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gramscope.store import Record, Run, RunWriter, StoreError, open_run
from store.conftest import Writers
from store.content import assert_record_holds

KILLS = 50
RUNS = 5


def reference_view(records: list[tuple[int, int]], restarts: dict[int, int]) -> list[tuple[int, int]]:
    """(step, attempt) of the newest view, from the definition: kept unless some later attempt reaches back to it."""
    return sorted(
        (step, attempt)
        for step, attempt in records
        if not any(later > attempt and first <= step for first, later in records)
        and not any(later > attempt and after < step for later, after in restarts.items())
    )


class Ledger:
    """What the writers of one run have said, against what the run holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: list[tuple[int, int]] = []
        self.tried: list[tuple[int, int]] = []
        self.restarts: dict[int, int] = {}
        self.order: dict[str, Any] = {}

    def hear(self, heard: dict[str, Any]) -> None:
        if heard["event"] == "try":
            self.tried.append((heard["step"], heard["attempt"]))
        if heard["event"] == "done":
            self.done.append((heard["step"], heard["attempt"]))
        if heard["event"] == "open" and self.order.get("step") is not None and heard["attempt"] > 0:
            self.restarts[heard["attempt"]] = self.order["step"]

    def assert_run_agrees(self) -> Run | None:
        try:
            run = open_run(self.path)
        except StoreError:
            assert not self.done, "a run with committed steps must open"
            return None
        committed = [record for record in run.records if record.event == "step"]
        keys = [(record.step, record.attempt) for record in committed]
        assert len(keys) == len(set(keys))
        assert set(self.done) <= set(keys) <= set(self.tried)
        # At most the step under way at each kill may be committed without having been reported.
        unreported = set(keys) - set(self.done)
        assert len({attempt for _, attempt in unreported}) == len(unreported)
        assert run.verify() == []
        assert run.damaged == []
        for record in committed:
            assert_record_holds(run, record)
        marks = {record.attempt: record.step - 1 for record in run.records if record.event == "resume"}
        assert [(r.step, r.attempt) for r in run.view] == reference_view(keys, marks)
        # A restart whose mark is missing was either killed before it, or had nothing to supersede.
        for attempt, after in self.restarts.items():
            assert marks.get(attempt, after) == after
        self.done = keys
        return run


def test_fifty_kills_at_random_moments(writers: Writers, tmp_path: Path) -> None:
    rng = random.Random(0)
    ledgers = [Ledger(tmp_path / f"run{i}") for i in range(RUNS)]
    mid_step = 0
    for kill in range(KILLS):
        ledger = ledgers[kill % RUNS]
        run = open_run(ledger.path) if (ledger.path / "meta.json").exists() else None
        back = rng.choice(run.steps) if run and run.steps and rng.random() < 0.3 else None
        ledger.order = {"path": str(ledger.path), "steps": 10_000, "size": rng.choice([4, 64]), "step": back}
        pid = writers.order(**ledger.order)
        # Some die while they open the run, most in the middle of some step.
        for _ in range(0 if kill % 7 == 0 else rng.randint(1, 4)):
            writers.hear_until("done", ledger.hear)
        time.sleep(rng.random() * rng.choice([0.001, 0.01, 0.05]))
        writers.kill(pid)
        writers.hear_until("end", ledger.hear)
        mid_step += bool(ledger.tried) and ledger.tried[-1] not in ledger.done
        ledger.assert_run_agrees()
    runs = [ledger.assert_run_agrees() for ledger in ledgers]
    # The test would show nothing if the writers had never got anywhere, or never been caught in the act.
    assert sum(len(run.records) for run in runs if run) > KILLS
    assert mid_step > KILLS // 5
    for run in runs:
        assert run is not None
        with RunWriter.resume(run.path) as writer:
            writer.append(10**6, {"loss": 0.0})
        assert open_run(run.path).steps[-1] == 10**6
        assert not list(run.path.rglob("*.tmp"))


@pytest.mark.parametrize("start", ["new", "resumed", "restarted"])
def test_kill_at_every_call_of_the_disk(writers: Writers, tmp_path: Path, start: str) -> None:
    for die_at in range(1, 60):
        ledger = Ledger(tmp_path / f"{start}{die_at}")
        ledger.order = {"path": str(ledger.path), "steps": 2}
        if start != "new":
            writers.order(**ledger.order)
            writers.hear_until("end", ledger.hear)
        if start == "restarted":
            ledger.order["step"] = 0
        ended = []
        writers.order(**ledger.order, die_at=die_at)
        writers.hear_until("end", lambda heard, ledger=ledger, ended=ended: (ended.append(heard), ledger.hear(heard)))
        before = ledger.assert_run_agrees()
        writers.order(path=str(ledger.path), steps=1)  # whatever was left behind, the run can go on
        writers.hear_until("end", ledger.hear)
        after = ledger.assert_run_agrees()
        assert after is not None
        assert len(after.records) > (len(before.records) if before else 0)
        if len([heard for heard in ended if heard["event"] == "done"]) == 2:
            break
    assert die_at > 15, "the disk must have been called often, and died at each call"


def test_the_ledger_finds_a_wrong_answer(writers: Writers, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "run")
    writers.order(path=str(ledger.path), steps=3)
    writers.hear_until("end", ledger.hear)
    ledger.assert_run_agrees()
    ledger.done.append((3, 0))
    with pytest.raises(AssertionError):
        ledger.assert_run_agrees()
    ledger.done.pop()
    file = ledger.path / "arrays" / "step_00000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(AssertionError):
        ledger.assert_run_agrees()


def test_a_worker_that_outlives_a_killed_writer_does_not_keep_the_lock(writers: Writers, tmp_path: Path) -> None:
    pid = writers.order(path=str(tmp_path / "run"), steps=1, fork=True, wait=True)
    worker = writers.hear_until("worker")["worker"]
    with pytest.raises(StoreError, match=f"pid {pid}"):
        RunWriter.resume(tmp_path / "run")
    writers.kill(pid)
    writers.hear_until("end")
    _resume_soon(tmp_path / "run").close()
    writers.kill(worker)


def _resume_soon(path: Path) -> RunWriter:
    """The system may free the files of a killed process a little after its end was told; the worker lives on."""
    for _ in range(100):
        with suppress(StoreError):
            return RunWriter.resume(path)
        time.sleep(0.05)
    return RunWriter.resume(path)


def test_reading_while_it_is_written(writers: Writers, tmp_path: Path) -> None:
    writers.order(path=str(tmp_path / "run"), steps=300, gate=50, fsync=False)
    writers.hear_until("done")
    run = open_run(tmp_path / "run")
    seen: list[Record] = []
    lengths = set()
    while len(run.steps) < 300:
        run.refresh()
        assert run.steps == list(range(len(run.steps)))
        for record in run.records[len(seen) :]:
            assert_record_holds(run, record)
        seen = list(run.records)
        lengths.add(len(seen))
        if len(seen) % 50 == 0:
            (tmp_path / "run" / f"gate_{len(seen)}").touch()
    writers.hear_until("end")
    assert not run.refresh()
    assert len(lengths) >= 6, "the reader must have seen the run grow"
    assert run.scalars().equals(open_run(tmp_path / "run").scalars())
