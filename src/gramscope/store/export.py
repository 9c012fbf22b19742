"""Runs in other programs' formats. A file appears whole or not at all."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import xarray as xr

from gramscope.base.errors import UnsupportedError
from gramscope.store.files import write_file
from gramscope.store.meta import check_not_of_a_run
from gramscope.store.store_errors import disk_trouble


def to_csv(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """CSV with the index as its first columns; infinities as ``inf``, missing values empty."""
    return _whole(path, frame.to_csv)


def to_parquet(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Parquet by pyarrow (or fastparquet), the index kept."""
    if not any(find_spec(module) for module in ("pyarrow", "fastparquet")):
        raise UnsupportedError(
            "parquet needs the package pyarrow, which is not installed. Run pip install 'gramscope[export]' "
            "(or pip install pyarrow), or export to CSV."
        )
    return _whole(path, frame.to_parquet)


def to_netcdf(dataset: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """netCDF by the best engine that is installed; scipy's writes the older netCDF 3, without 64-bit integers."""
    engine = next((name for name in ("h5netcdf", "netCDF4", "scipy") if find_spec(name)), None)
    if engine is None:
        raise UnsupportedError(
            "netCDF needs one of the packages h5netcdf, netCDF4 or scipy, and none is installed. Run "
            "pip install 'gramscope[export]' (or pip install h5netcdf), or export to CSV."
        )
    dataset = dataset.map(lambda array: array.astype("float32") if array.dtype == "float16" else array, keep_attrs=True)
    if engine == "scipy":
        dataset = dataset.map(_for_netcdf3, keep_attrs=True).assign_coords(step=_for_netcdf3(dataset.step))
    chosen = {"h5netcdf": "h5netcdf", "netCDF4": "netcdf4", "scipy": "scipy"}[engine]
    return _whole(path, lambda temporary: dataset.to_netcdf(temporary, engine=chosen))  # type: ignore[call-overload]


def _for_netcdf3(array: xr.DataArray) -> xr.DataArray:
    """Integers in 32 bits where they fit, else as float64: netCDF 3 has no others."""
    if array.dtype.kind not in "iu" or (array.dtype.itemsize < 4 and array.dtype.kind == "i"):
        return array
    fits = not array.size or (int(array.min()) >= -(2**31) and int(array.max()) < 2**31)
    return array.astype("int32" if fits else "float64", keep_attrs=True)


def _whole(path: str | os.PathLike[str], write: Callable[[Path], object]) -> Path:
    path = Path(path)
    check_not_of_a_run(path, "path")
    with disk_trouble(f"exporting to {path}"):
        write_file(path, write)
    return path
