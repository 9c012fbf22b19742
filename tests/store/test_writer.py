"""What a writer takes and refuses, and how a run goes on after a restart."""

import errno
import json
import math
import os
import platform
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.store import SCHEMA, RunWriter, StoreError, open_run

# Each example makes a directory of its own inside tmp_path.
FRESH = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ">f4", ">i8"]


def run_path(tmp_path: Path) -> Path:
    return tmp_path / f"run{len(list(tmp_path.iterdir()))}"


@FRESH
@given(scalars=st.dictionaries(NAMES, st.floats(), max_size=5), failures=st.dictionaries(NAMES, st.text(), max_size=3))
def test_any_scalar_reads_back_bit_by_bit(tmp_path: Path, scalars: dict[str, float], failures: dict[str, str]) -> None:
    path = run_path(tmp_path)
    with RunWriter.create(path, fsync=False) as writer:
        writer.append(7, scalars, failures=failures)
    run = open_run(path)
    found = run.record(7).scalars
    assert list(found) == list(scalars)
    for name, value in scalars.items():
        assert np.float64(found[name]).tobytes() == np.float64(value).tobytes() or math.isnan(value)
        assert math.isnan(found[name]) == math.isnan(value)
    frame = run.scalars()
    assert list(frame.columns) == list(scalars)
    assert dict(zip(run.failures()["measure"], run.failures()["message"], strict=True)).keys() == failures.keys()
    for line in (path / "scalars.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON has no NaN and no Infinity


@FRESH
@given(
    name=NAMES.filter(lambda name: name != "__metadata__"),
    array=st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
    order=st.sampled_from(["C", "F", "reversed"]),
)
def test_any_array_reads_back(tmp_path: Path, name: str, array: np.ndarray, order: str) -> None:
    array = np.asarray(array)
    given_array = np.flip(array) if order == "reversed" and array.ndim else np.asarray(array, order="F")
    path = run_path(tmp_path)
    with RunWriter.create(path, fsync=False) as writer:
        writer.append(0, {}, {name: given_array})
    run = open_run(path)
    found = run.array(name, 0, check=True)
    assert found.dtype == given_array.dtype.newbyteorder("=")
    assert found.flags.writeable
    np.testing.assert_array_equal(found, given_array)
    # Whatever an array is called, the run has these files and no others.
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files == {"meta.json", "scalars.jsonl", "writer.lock", "arrays/step_00000000.safetensors"}
    assert run.verify() == []


def test_meta_is_written_at_once_and_in_strict_json(tmp_path: Path) -> None:
    config = {"lr": math.inf, "path": Path("x"), "seed": np.int64(3), "sizes": (np.float32(0.5), [1]), 4: torch.float32}
    with RunWriter.create(tmp_path / "a", {"model": "Sequential", "config": config}) as writer:
        meta = json.loads((tmp_path / "a" / "meta.json").read_text(), parse_constant=pytest.fail)
        assert meta == writer.meta == open_run(tmp_path / "a").meta
        assert meta["schema"] == SCHEMA
        assert meta["name"] == "a"
        assert meta["config"] == {
            "lr": "Infinity",
            "path": "x",
            "seed": 3,
            "sizes": [0.5, [1]],
            "4": "torch.float32",
        }
    with pytest.raises(InputError, match="schema"):
        RunWriter.create(tmp_path / "b", {"schema": 2})


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
        for opening in (RunWriter.resume, RunWriter.create):
            with pytest.raises(StoreError, match=f"(?s)pid {os.getpid()}, host {platform.node()}.*close"):
                opening(tmp_path / "a")
        writer.append(1, {"loss": 0.5})
        assert open_run(tmp_path / "a").steps == [0, 1]
    RunWriter.resume(tmp_path / "a").close()


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="No locks available"), RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
    assert open_run(tmp_path / "a").steps == [0]


def test_a_lock_file_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "a").close()
    (tmp_path / "a" / "writer.lock").unlink()
    with RunWriter.resume(tmp_path / "a"), pytest.raises(StoreError, match="one writer"):
        RunWriter.resume(tmp_path / "a")


def test_a_forgotten_writer_frees_the_lock(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "a")
    with RunWriter.resume(tmp_path / "a") as writer:
        assert writer.append(0, {"loss": 1.0}).step == 0


def test_a_forked_child_may_not_write_and_leaves_the_lock(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        child = os.fork()
        if child == 0:
            try:
                writer.append(0, {"loss": 1.0})
            except StoreError as error:
                writer.close()
                os._exit(42 if "child" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        with pytest.raises(StoreError, match="one writer"):
            RunWriter.resume(tmp_path / "a")
        writer.append(0, {"loss": 1.0})


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a", fsync=False) as writer:
        steps = iter(range(200))
        guard = threading.Lock()

        def work() -> None:
            while True:
                with guard:
                    step = next(steps, None)
                    if step is None:
                        return
                    writer.append(step, {"loss": float(step)}, {"kernel": np.full(3, step)})

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = open_run(tmp_path / "a")
    assert run.steps == list(range(200))
    assert run.verify() == []


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
    with pytest.raises(StoreError, match=r"holds committed steps.*resume"):
        RunWriter.create(tmp_path / "a")
    assert open_run(tmp_path / "a").steps == [0]
    # A run that never committed anything is no loss, and a start that crashed must not need a hand.
    RunWriter.create(tmp_path / "b").close()
    RunWriter.create(tmp_path / "b", {"model": "second"}).close()
    assert open_run(tmp_path / "b").meta["model"] == "second"


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        RunWriter.resume(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"no meta\.json"):
        RunWriter.resume(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_relative_path_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunWriter.create("runs/ä b/c") as writer:
        run = open_run("runs/ä b/c")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.append(0, {"loss": 1.0}, {"x": [1.0]})
    assert run.refresh()
    assert run.array("x", 0).tolist() == [1.0]
    assert run.name == "c"


def test_closed_writers_say_so(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a")
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.append(0, {"loss": 1.0})
    assert "closed" in repr(writer)


@pytest.mark.parametrize("torn", [b'{"step":2,"ti', b"\0" * 300, b'{"step":2,"scalars":{}}', b"\xff\xfe"])
def test_a_torn_tail_is_not_read_and_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0})
        writer.append(1, {"loss": 0.5})
    with open(tmp_path / "a" / "scalars.jsonl", "ab") as file:
        file.write(torn)
    run = open_run(tmp_path / "a")
    assert run.steps == [0, 1]
    assert run.verify() == []
    with RunWriter.resume(tmp_path / "a") as writer:
        assert writer.last_step == 1
        writer.append(2, {"loss": 0.25})
    run.refresh()
    assert run.scalars()["loss"].tolist() == [1.0, 0.5, 0.25]
    assert len((tmp_path / "a" / "scalars.jsonl").read_bytes().splitlines()) == 3


def test_restart_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        for step in (0, 10, 20, 30, 40):
            writer.append(step, {"loss": float(step)}, {"kernel": np.full(2, step)})
    with RunWriter.resume(tmp_path / "a", step=20) as writer:
        run = open_run(tmp_path / "a")
        assert run.steps == [0, 10, 20], (
            "what follows the checkpoint is superseded at once, not from the next record on"
        )
        assert (writer.attempt, writer.last_step) == (1, 20)
        with pytest.raises(InputError, match=r"resume\(path, step=10\)"):
            writer.append(10, {"loss": 0.0})
        writer.append(40, {"loss": -40.0}, {"kernel": np.full(2, -40)})
        with pytest.raises(InputError, match="41 or later"):
            writer.append(40, {"loss": 0.0})
    run.refresh()
    assert run.steps == [0, 10, 20, 40]
    assert run.array("kernel", 40).tolist() == [-40, -40]
    assert run.array("kernel", 40, attempt=0).tolist() == [40, 40]
    history = run.history()
    assert history.index.names == ["attempt", "step", "superseded"]
    assert history.xs(True, level="superseded")["loss"].tolist() == [30.0, 40.0]
    assert history.xs(1, level="attempt")["loss"].tolist() == [-40.0]
    assert run.verify() == []


def test_a_checkpoint_may_be_measured_again(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        for step in (0, 10, 20):
            writer.append(step, {"loss": float(step)})
    with RunWriter.resume(tmp_path / "a", step=10) as writer:
        writer.append(10, {"loss": -10.0})
    assert open_run(tmp_path / "a").scalars()["loss"].to_dict() == {0: 0.0, 10: -10.0}


def test_time_goes_on_after_a_restart(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, time=100.0)
        writer.append(1, time=200.0)
    with RunWriter.resume(tmp_path / "a", step=0) as writer:
        writer.append(1)
    times = open_run(tmp_path / "a").times()
    assert times[0] == 100.0
    assert 100.0 <= times[1] < 200.0


@pytest.mark.parametrize("step", [-1, 0.5, "3", None, True, 2**63, np.float64(1), torch.tensor(1.5)])
def test_steps_are_counts(tmp_path: Path, step: object) -> None:
    with RunWriter.create(tmp_path / "a") as writer, pytest.raises(Exception, match=r"step"):
        writer.append(step, {"loss": 1.0})  # type: ignore[arg-type]
    assert open_run(tmp_path / "a").steps == []


def test_numbers_of_other_libraries(tmp_path: Path) -> None:
    scalars = {
        "tensor": torch.tensor([0.5], requires_grad=True),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "numpy": np.float32(0.5),
        "int": 2,
        "bool": True,
        "array": np.array(0.5),
    }
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(
            np.int64(10**10), scalars, {"weights": torch.eye(2, requires_grad=True), "list": [1, 2], "number": 3.0}
        )
    run = open_run(tmp_path / "a")
    assert run.steps == [10**10]
    assert run.scalars().iloc[0].tolist() == [0.5, 0.5, 0.5, 2.0, 1.0, 0.5]
    assert run.array("number", 10**10).shape == ()


@pytest.mark.parametrize("value", ["0.5", None, 1j, [1.0, 2.0], torch.ones(2), 10**400, {}])
def test_scalars_are_single_numbers(tmp_path: Path, value: object) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        with pytest.raises(InputError, match="'loss' must be one real number"):
            writer.append(0, {"loss": value})
        writer.append(0, {"loss": 1.0})


@pytest.mark.parametrize(
    "value", [np.ones(2, complex), np.array(["a"]), np.array([object()]), np.ones(2, "longdouble")]
)
def test_arrays_of_other_kinds_are_refused(tmp_path: Path, value: np.ndarray) -> None:
    with RunWriter.create(tmp_path / "a") as writer, pytest.raises(UnsupportedError, match="'x' must hold"):
        writer.append(0, {}, {"x": value})


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.bfloat16), torch.ones(2).to_sparse(), [[1], [1, 2]]])
def test_what_numpy_does_not_take_is_refused(tmp_path: Path, value: object) -> None:
    with (
        RunWriter.create(tmp_path / "a") as writer,
        pytest.raises(InputError, match=r"'x' must be something that numpy"),
    ):
        writer.append(0, {}, {"x": value})


@pytest.mark.parametrize("name", ["", 3, None, "half \ud800 pair"])
def test_names_are_texts(tmp_path: Path, name: object) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        for content in ([{name: 1.0}, {}], [{}, {name: [1.0]}]):
            with pytest.raises(Exception, match=r"name|str"):
                writer.append(0, *content)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="safetensors reserves"):
            writer.append(0, {}, {"__metadata__": [1.0]})
    assert open_run(tmp_path / "a").steps == []


def test_messages_with_broken_text_are_kept(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, failures={"richness": "no file \udcff here", "ntk": ValueError("line\nbreak")})
    assert open_run(tmp_path / "a").failures()["message"].tolist() == ["no file ? here", "line\nbreak"]


def test_a_resumed_run_finds_its_first_array(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"loss": 1.0}, {"kernel": np.eye(2)})
        writer.append(5, {"loss": 0.5}, {"kernel": np.ones((2, 2))})
    with RunWriter.resume(tmp_path / "a") as writer:
        assert writer.first_array("kernel").tolist() == np.eye(2).tolist()
        assert writer.first_array("nothing") is None
        writer.append(6, {"loss": 0.4})
    run = open_run(tmp_path / "a")
    assert run.steps == [0, 5, 6]
    assert run.verify() == []
