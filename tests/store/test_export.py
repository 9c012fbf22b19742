"""Export to CSV, parquet and netCDF."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.store import Run, RunWriter, StoreError, export, open_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    with RunWriter.create(tmp_path / "a", {"model": "Sequential"}) as writer:
        scalars = {
            "loss": 0.1,
            "share/0.weight": np.nan,
            "../../escape": 1.0,
            "time": 3.0,
            "a,b\n": np.inf,
            "kernel": 0.0,
        }
        writer.append(0, scalars, {"kernel": np.eye(2, dtype="float16"), "kernel/labels": [0, 2**40], "mask": [True]})
        writer.append(50, scalars, {"spectrum/0.weight": [1.0, 2.0]})
    with RunWriter.resume(tmp_path / "a", step=0) as writer:
        writer.append(60, scalars)
    return open_run(tmp_path / "a")


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(export, "find_spec", lambda name: None if name in modules else real(name))


def test_csv_reads_back(run: Run, tmp_path: Path) -> None:
    path = run.to_csv(tmp_path / "scalars.csv")
    pd.testing.assert_frame_equal(pd.read_csv(path, index_col="step"), run.scalars())
    path = run.to_csv(tmp_path / "history.csv", history=True)
    history = pd.read_csv(path, index_col=["attempt", "step", "superseded"])
    pd.testing.assert_frame_equal(history, run.history())


def test_netcdf_reads_back(run: Run, tmp_path: Path) -> None:
    with xr.open_dataset(run.to_netcdf(tmp_path / "run.nc")) as data:
        assert data.step.values.tolist() == [0, 60]
        by_name = {variable.attrs.get("name"): variable for variable in data.data_vars.values()}
        assert by_name["share/0.weight"].isnull().all()
        assert by_name["../../escape"].values.tolist() == [1.0, 1.0]
        assert by_name["time"].values.tolist() == [3.0, 3.0]
        assert data["time"].values.tolist() == run.times().tolist()
        labels = by_name["kernel/labels"]
        assert labels.sel(step=0).values.tolist() == [0, 2**40]
        assert np.ravel(labels.attrs["missing_steps"]).tolist() == [60]
        assert data["kernel_"].sel(step=0).values.tolist() == np.eye(2).tolist()
        assert json.loads(data.attrs["meta"]) == run.meta


def test_parquet_reads_back(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pd.testing.assert_frame_equal(pd.read_parquet(run.to_parquet(tmp_path / "scalars.parquet")), run.scalars())
    pd.testing.assert_frame_equal(pd.read_parquet(run.to_parquet(tmp_path / "h.parquet", history=True)), run.history())


def test_a_missing_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pyarrow", "fastparquet", "h5netcdf", "netCDF4", "scipy")
    with pytest.raises(UnsupportedError, match=r"pyarrow, which is not installed.*gramscope\[export\]"):
        run.to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UnsupportedError, match=r"h5netcdf.*gramscope\[export\]"):
        run.to_netcdf(tmp_path / "x.nc")
    assert not list(tmp_path.glob("*x*"))


def test_an_export_that_fails_leaves_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("old")
    with pytest.raises(StoreError, match="exporting"):
        run.to_csv(tmp_path / "no" / "such" / "folder.csv")

    def fails(_: Path) -> None:
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        export._whole(tmp_path / "old.csv", fails)
    assert (tmp_path / "old.csv").read_text() == "old"
    assert not list(tmp_path.glob(".*tmp"))


def test_a_file_of_a_run_is_not_written_over(run: Run) -> None:
    before = (run.path / "scalars.jsonl").read_bytes()
    for export_to in (run.to_csv, run.to_netcdf):
        with pytest.raises(InputError, match=r"path must not be a file of a run, but .*scalars\.jsonl is one"):
            export_to(run.path / "scalars.jsonl")
    assert (run.path / "scalars.jsonl").read_bytes() == before
    assert run.to_csv(run.path / "scalars.csv").is_file()
