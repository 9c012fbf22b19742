"""Reading: tables, labelled arrays, damage, and runs that mean harm."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.base.errors import InputError
from gramscope.store import Record, RunWriter, StoreError, file_name, find_runs, open_run, open_runs
from gramscope.store.records import Arrays, DamagedLine, decode_line, encode_line, newest_view, sealed


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    with RunWriter.create(tmp_path / "a", {"model": "Sequential"}) as writer:
        for step in (0, 50, 100):
            arrays = {
                "kernel": np.eye(3) * (step + 1),
                "kernel/labels": [0, 1, 1],
                "spectrum/0.weight": [1.0, 2.0],
                "spectrum/2.weight": [1.0, 2.0, float(step)],
                "richness/quality": np.arange(4) / 3,
            }
            if step == 50:
                del arrays["spectrum/2.weight"]
            writer.append(step, {"loss": 1 / (step + 1), f"only/{step}": 1.0}, arrays)
    return tmp_path / "a"


def write_lines(folder: Path, *lines: object) -> None:
    with open(folder / "scalars.jsonl", "ab") as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


def test_scalars_by_step_and_name(run_folder: Path) -> None:
    frame = open_run(run_folder).scalars()
    assert frame.index.name == "step"
    assert frame.index.tolist() == [0, 50, 100]
    assert list(frame.columns) == ["loss", "only/0", "only/50", "only/100"]
    assert frame.loc[50, "loss"] == 1 / 51
    assert frame["only/50"].isna().tolist() == [True, False, True]
    assert all(dtype == "float64" for dtype in frame.dtypes)


def test_a_run_without_steps(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "a").close()
    run = open_run(tmp_path / "a")
    assert run.steps == []
    assert run.scalars().shape == run.history().shape == (0, 0)
    assert run.failures().empty
    assert run.times().empty
    assert len(run.spectra().data_vars) == 0
    assert run.verify() == []
    assert "no record yet" in repr(run)
    with pytest.raises(InputError, match="holds no array 'kernel'"):
        run.kernels()
    run.to_csv(tmp_path / "a.csv")
    run.to_netcdf(tmp_path / "a.nc")


def test_a_run_says_how_far_it_is(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(50, {"loss": 1.0})
    assert repr(open_run(tmp_path / "a")) == f"Run('{tmp_path}/a', 1 record up to step 50)"
    with RunWriter.resume(tmp_path / "a") as writer:
        writer.append(60, {"loss": 1.0})
    assert repr(open_run(tmp_path / "a")) == f"Run('{tmp_path}/a', 2 records up to step 60, attempt 2)"


def test_spectra_share_a_dimension_where_their_sizes_agree(run_folder: Path) -> None:
    spectra = open_run(run_folder).spectra()
    assert set(spectra.data_vars) == {"0.weight", "2.weight"}
    assert spectra["0.weight"].dims == ("step", "rank_2")
    assert spectra["2.weight"].sel(step=100).values.tolist() == [1.0, 2.0, 100.0]
    assert bool(spectra["2.weight"].sel(step=50).isnull().all())
    assert spectra["2.weight"].attrs["missing_steps"] == [50]
    assert open_run(run_folder).spectra(steps=[100]).step.values.tolist() == [100]


def test_a_weight_called_step_keeps_its_long_name(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {}, {"spectrum/step": [1.0], "spectrum/rank_1": [2.0], "spectrum/other": [3.0]})
    assert set(open_run(tmp_path / "a").spectra().data_vars) == {"spectrum/step", "spectrum/rank_1", "other"}


def test_kernels_carry_their_labels(run_folder: Path) -> None:
    kernels = open_run(run_folder).kernels()
    assert kernels.dims == ("step", "example", "other")
    assert kernels.sel(step=50).values.tolist() == (np.eye(3) * 51).tolist()
    assert kernels.label.values.tolist() == [0, 1, 1]
    assert open_run(run_folder).kernels(steps=[100]).shape == (1, 3, 3)
    with pytest.raises(InputError, match="must be a matrix"):
        open_run(run_folder).kernels("richness/quality")


def test_shapes_that_change_are_filled_up_and_said_so(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {}, {"kernel": np.ones((2, 2)), "kernel/labels": [3, 4], "odd": 1.0, "spectrum/w": [1.0]})
        writer.append(
            1, {}, {"kernel": np.ones((3, 3)), "kernel/labels": [3, 4, 5], "odd": [1.0], "spectrum/w": [1, 2]}
        )
    run = open_run(tmp_path / "a")
    kernels = run.kernels()
    assert np.isnan(kernels.values).sum() == 5
    assert "NaN" in kernels.attrs["padded"]
    assert kernels.label.dims == ("step", "example")
    assert run.spectra()["w"].shape == (2, 2)
    with pytest.raises(InputError, match="number of axes"):
        run.stacked("odd")
    assert run.stacked("odd", steps=[1]).shape == (1, 1)


def test_what_is_not_there_is_named(run_folder: Path) -> None:
    run = open_run(run_folder)
    with pytest.raises(InputError, match=r"got 7\. It has 0, 50, 100"):
        run.array("kernel", 7)
    with pytest.raises(InputError, match=r"holds no array 'spectrum/2.weight'. That array is there at 0, 100"):
        run.array("spectrum/2.weight", 50)
    with pytest.raises(InputError, match=r"The run has 'kernel'"):
        run.array("nothing", 50)
    with pytest.raises(InputError, match="attempt 3"):
        run.array("kernel", 50, attempt=3)


@pytest.mark.parametrize("damage", ["missing", "cut", "bit", "empty", "other"])
def test_verify_lists_damage(run_folder: Path, damage: str) -> None:
    run = open_run(run_folder)
    file = run_folder / "arrays" / "step_00000050.safetensors"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "other":
        file.write_bytes((run_folder / "arrays" / "step_00000000.safetensors").read_bytes())
    else:
        file.write_bytes({"cut": data[:-3], "bit": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[damage])
    (found,) = run.verify()
    assert (found.step, found.attempt, found.file) == (50, 0, "arrays/step_00000050.safetensors")
    with pytest.raises(StoreError):
        run.array("kernel", 50, check=True)
    assert run.array("kernel", 100, check=True).shape == (3, 3)


def test_a_damaged_line_is_left_out_and_said_so(run_folder: Path) -> None:
    file = run_folder / "scalars.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"0.0196", b"0.0197")  # still JSON, no longer what was written
    file.write_bytes(b"".join(lines))
    with pytest.warns(UserWarning, match=r"line 2 of .*scalars\.jsonl is damaged"):
        run = open_run(run_folder)
    assert run.steps == [0, 100]
    assert [damage.problem for damage in run.verify()] == ["line 2 is no commit record"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run.refresh(), "told once"
    with RunWriter.resume(run_folder) as writer:  # the unreadable line may have been of attempt 1
        assert writer.attempt == 2


def test_many_damaged_lines_are_one_warning(run_folder: Path) -> None:
    with (run_folder / "scalars.jsonl").open("ab") as file:
        file.write(b"rubbish\n" * 300)
    told = r"300 lines of .*scalars\.jsonl are damaged \(the first is line 4: .*\)"
    with pytest.warns(UserWarning, match=told) as said:
        run = open_run(run_folder)
    assert len(said) == 1
    assert len(run.damaged) == 300
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.refresh()


HOSTILE = [
    b"\n",
    b"null\n",
    b"[1]\n",
    b'{"step":-1,"scalars":{}}\n',
    b'{"step":true,"scalars":{}}\n',
    b'{"step":1e3,"scalars":{}}\n',
    b'{"scalars":{}}\n',
    b'{"step":1,"scalars":{"loss":"lots"}}\n',
    b'{"step":1,"scalars":{"loss":null}}\n',
    b'{"step":1,"scalars":{"":1}}\n',
    b'{"step":1,"scalars":{"\\ud800":1}}\n',
    b'{"step":1,"scalars":[]}\n',
    b'{"step":1,"scalars":{"loss":1' + b"0" * 400 + b"}}\n",
    b'{"step":1' + b"0" * 5000 + b',"scalars":{}}\n',
    b"[" * 100_000 + b"\n",
    b"\xff\xfe\n",
    b"\0" * 64 + b"\n",
    b'{"step":1,"arrays":{"file":"../../etc/passwd","sha256":"0","names":["x"]}}\n',
    b'{"step":1,"arrays":{"file":"arrays/../meta.json","sha256":"0","names":["x"]}}\n',
    b'{"step":1,"arrays":{"file":"/etc/passwd","sha256":"0","names":["x"]}}\n',
    b'{"step":1,"arrays":{"file":"arrays/step_1.safetensors/../../x","sha256":"0","names":["x"]}}\n',
    b'{"step":1,"arrays":{"file":"arrays/step_1.safetensors\\n","sha256":"0","names":["x"]}}\n',
    b'{"step":1,"arrays":{"file":7,"sha256":"0","names":["x"]}}\n',
    b'{"step":1,"arrays":"x"}\n',
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_lines_that_mean_harm_are_damage(run_folder: Path, line: bytes) -> None:
    write_lines(run_folder, line)
    with pytest.warns(UserWarning, match="line 4"):
        run = open_run(run_folder)
    assert run.steps == [0, 50, 100]
    assert len(run.verify()) == 1


def test_lines_by_other_hands_need_only_the_schema(run_folder: Path) -> None:
    write_lines(run_folder, {"step": 150, "scalars": {"loss": "Infinity"}, "new_field": [1]})
    run = open_run(run_folder)
    assert run.steps == [0, 50, 100, 150]
    assert run.scalars()["loss"].iloc[-1] == np.inf
    assert np.isnan(run.times().iloc[-1])


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60), at=st.integers(0, 200))
def test_no_bytes_break_the_decoder(data: bytes, at: int) -> None:
    line = encode_line(Record(3, 1.0, 0, {"loss": 0.5}))
    mixed = line[: at % len(line)] + data + line[at % len(line) :]
    for candidate in (data, mixed):
        try:
            record = decode_line(candidate)
        except DamagedLine:
            continue
        assert candidate.strip(b"\r\n") == line.strip() or b"crc32" not in candidate or record.step >= 0


NUMBERS = st.floats(allow_nan=False) | st.sampled_from([float("inf"), -float("inf")])


@settings(max_examples=100, deadline=None)
@given(step=st.integers(0, 2**63 - 1), time=NUMBERS, scalars=st.dictionaries(st.text("a/é", min_size=1), NUMBERS))
def test_a_sealed_line_is_decoded_as_any_other(step: int, time: float, scalars: dict[str, float]) -> None:
    arrays = Arrays("arrays/step_1.safetensors", "ab", ("kernel",)) if step % 2 else None
    given = Record(step, time, 2, scalars, arrays, {"richness": "it }, failed"} if step % 3 else {})
    line = encode_line(given)
    without_seal = line[: line.rindex(b',"crc32"')] + b"}"
    for found in (decode_line(line), decode_line(without_seal)):
        for name in ("step", "time", "attempt", "scalars", "arrays", "failures", "event"):
            assert getattr(found, name) == getattr(given, name)


def test_a_sealed_line_that_is_no_record_is_damage() -> None:
    content = {"step": 1, "time": 0.0, "attempt": 0, "scalars": {"loss": [1]}, "arrays": None, "failures": {}}
    with pytest.raises(DamagedLine, match="not a number"):
        decode_line(sealed(content))
    outside = {**content, "scalars": {}, "arrays": {"file": "../x.safetensors", "sha256": "", "names": []}}
    with pytest.raises(DamagedLine, match="outside the run"):
        decode_line(sealed(outside))


def test_a_parent_folder_names_its_runs(tmp_path: Path) -> None:
    for name in ("sweep/lr-10", "sweep/lr-2", "other"):
        RunWriter.create(tmp_path / name).close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds 3 of them: 'other', 'sweep/lr-2', 'sweep/lr-10'"):
        open_run(tmp_path)
    assert [run.name for run in open_runs(tmp_path)] == ["other", "lr-2", "lr-10"]
    assert [run.name for run in open_runs(str(tmp_path / "sweep" / "lr-*"))] == ["lr-2", "lr-10"]
    assert find_runs(tmp_path / "other") == [tmp_path / "other"]
    for nothing in ("empty", "missing", "no-*"):
        assert find_runs(tmp_path / nothing) == []
        with pytest.raises(InputError, match="or a pattern that matches some"):
            open_runs(tmp_path / nothing)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
def test_newest_view_against_its_definition(moves: list[tuple[int, bool]]) -> None:
    records: list[Record] = []
    attempt, last = 0, -1
    for step, restart in moves:
        if restart or step <= last:
            attempt += 1
        last = step
        records.append(Record(step, 0.0, attempt, {}))
    expected = [
        old
        for i, old in enumerate(records)
        if not any(new.attempt > old.attempt and new.step <= old.step for new in records[i + 1 :])
    ]
    found = newest_view(records)
    assert found == sorted(expected, key=lambda record: record.step)
    assert len({record.step for record in found}) == len(found)


def test_a_newer_schema_is_refused(run_folder: Path) -> None:
    meta = json.loads((run_folder / "meta.json").read_text())
    for schema, words in ((2, "Upgrade"), ("1", "whole number"), (None, "whole number"), (0, "whole number")):
        (run_folder / "meta.json").write_text(json.dumps({**meta, "schema": schema}))
        for opening in (open_run, RunWriter.resume):
            with pytest.raises(StoreError, match=words):
                opening(run_folder)
    for text in ("", "[]", '{"schema":', "[" * 100_000):
        (run_folder / "meta.json").write_text(text)
        with pytest.raises(StoreError, match=r"meta\.json"):
            open_run(run_folder)


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, words in ((tmp_path, "no meta"), (tmp_path / "no", "not exist"), (tmp_path / "file", "is a file")):
        with pytest.raises(StoreError, match=words):
            open_run(path)


def test_symbolic_links_are_not_followed(run_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    file = run_folder / "arrays" / "step_00000050.safetensors"
    file.rename(secret)
    file.symlink_to(secret)
    run = open_run(run_folder)
    with pytest.raises(StoreError, match="symbolic link"):
        run.array("kernel", 50)
    assert [damage.step for damage in run.verify()] == [50]
    (run_folder / "arrays").rename(tmp_path / "arrays")
    (run_folder / "arrays").symlink_to(tmp_path / "arrays")
    with pytest.raises(StoreError):
        open_run(run_folder).array("kernel", 0)
    with pytest.raises(StoreError, match="symbolic link"):
        RunWriter.resume(run_folder)
    for name in ("scalars.jsonl", "meta.json"):
        (run_folder / name).rename(tmp_path / name)
        (run_folder / name).symlink_to(tmp_path / name)
        with pytest.raises(StoreError, match="symbolic link"):
            open_run(run_folder)
    os.symlink(run_folder, tmp_path / "link")  # the run itself may be reached by a link: the user chose it


def test_pipes_and_directories_are_no_files(run_folder: Path) -> None:
    file = run_folder / "arrays" / "step_00000050.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(StoreError, match="plain file"):
        open_run(run_folder).array("kernel", 50)
    (run_folder / "scalars.jsonl").unlink()
    (run_folder / "scalars.jsonl").mkdir()
    with pytest.raises(StoreError, match="plain file"):
        open_run(run_folder)


def test_refresh_notices_a_file_that_was_cut_and_written_anew(run_folder: Path) -> None:
    run = open_run(run_folder)
    lines = (run_folder / "scalars.jsonl").read_bytes().splitlines(keepends=True)
    (run_folder / "scalars.jsonl").write_bytes(lines[0])
    assert run.refresh()
    assert run.steps == [0]
    (run_folder / "scalars.jsonl").write_bytes(b"".join([lines[2], lines[0], lines[0]]))
    assert run.refresh()
    assert run.steps == [0, 100]
    assert not run.refresh()


def test_reading_and_writing_never_import_torch(run_folder: Path) -> None:
    script = (
        "import sys; from gramscope.store import open_run, RunWriter\n"
        f"run = open_run({str(run_folder)!r}); run.scalars(); run.kernels(); run.spectra(); run.verify()\n"
        f"RunWriter.resume({str(run_folder)!r}).append(200, dict(loss=1.0), dict(x=[1.0]))\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_writer_alone_imports_neither_pandas_nor_xarray() -> None:
    script = "import sys, gramscope.store.writer; assert not {'torch', 'pandas', 'xarray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text("./%~ab", min_size=1))
@settings(deadline=None)
def test_file_names_stay_in_their_directory_and_apart(name: str, other: str) -> None:
    for text in (name, other, "../" + name, name * 200):
        made = file_name(text)
        assert Path("/root/x", made).parent == Path("/root/x")
        assert os.path.normpath(made) == made
        assert len(made) <= 180
        assert not made.startswith(".")
    assert (file_name(name) == file_name(other)) == (name == other)
