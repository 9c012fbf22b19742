"""Tables and labelled arrays made of commit records."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
import xarray as xr

from gramscope.base.errors import InputError
from gramscope.store.arrays import Array
from gramscope.store.logged_scalars import LoggedScalars
from gramscope.store.names import file_name
from gramscope.store.records import Record

# pandas' classes take a parameter only in its type stubs.
if TYPE_CHECKING:
    Index: TypeAlias = pd.Index[Any]
    Series: TypeAlias = pd.Series[float]
else:
    Index, Series = pd.Index, pd.Series


def scalars(records: Sequence[Record]) -> pd.DataFrame:
    """Scalars by step and name."""
    return _frame(records, _steps(records))


def history(records: Sequence[Record], newest: Sequence[Record]) -> pd.DataFrame:
    """Scalars of all attempts; those that are not among the newest are superseded."""
    kept = {id(record) for record in newest}
    steps = [record for record in records if record.event == "step"]
    keys = [(record.attempt, record.step, id(record) not in kept) for record in steps]
    index = pd.MultiIndex.from_arrays(
        [[key[i] for key in keys] for i in range(3)], names=["attempt", "step", "superseded"]
    )
    return _frame(steps, index)


def times(records: Sequence[Record]) -> Series:
    """Seconds since the start, by step."""
    return pd.Series([record.time for record in records], index=_steps(records), name="time", dtype="float64")


def failures(records: Sequence[Record]) -> pd.DataFrame:
    """A row for each measure that failed."""
    rows = [(r.step, measure, message) for r in records for measure, message in r.failures.items()]
    return pd.DataFrame(rows, columns=["step", "measure", "message"])


def _steps(records: Sequence[Record]) -> Index:
    return pd.Index([record.step for record in records], name="step", dtype="int64")


def _frame(records: Sequence[Record], index: Index) -> pd.DataFrame:
    """A float64 column for each name, in order of appearance; NaN where a record lacks it."""
    return pd.DataFrame([record.scalars for record in records], index=index, dtype="float64")


def logged(found: Mapping[str, LoggedScalars]) -> dict[str, Series]:
    """What the loop logged, as a series by step for each name."""
    return {
        name: pd.Series(each.values, index=pd.Index(each.steps, name="step", dtype="int64"), name=name)
        for name, each in found.items()
    }


def with_logged(frame: pd.DataFrame, logged: Mapping[str, Series]) -> pd.DataFrame:
    """The frame with the numbers that were logged at its own steps; those of other steps are left out."""
    for name, series in logged.items():
        here = series[series.index.isin(frame.index)]
        if len(here):
            frame.loc[here.index, name] = here
    return frame


def stack(name: str, by_step: Mapping[int, Array]) -> xr.DataArray:
    """Arrays of several steps under one name, filled up with NaN where shapes differ."""
    dimensions = {array.ndim for array in by_step.values()}
    if len(dimensions) > 1:
        raise InputError(
            f"the array {name!r} must have the same number of axes at all steps to be stacked, got "
            f"{sorted(dimensions)}. Pass the steps that agree, or read them one by one with run.array(name, step)."
        )
    shapes = {array.shape for array in by_step.values()}
    if len(shapes) == 1:
        values, attributes = np.stack(list(by_step.values())), {}
    else:
        values = _padded(list(by_step.values()))
        attributes = {"padded": f"the shape changes over the run ({sorted(shapes)}); missing entries are NaN"}
    axes = [f"axis_{i}" for i in range(values.ndim - 1)]
    return xr.DataArray(values, dims=["step", *axes], coords={"step": list(by_step)}, name=name, attrs=attributes)


def _padded(arrays: list[Array]) -> Array:
    largest = np.max([array.shape for array in arrays], axis=0)
    values = np.full((len(arrays), *largest), np.nan)
    for row, array in zip(values, arrays, strict=True):
        row[tuple(slice(size) for size in array.shape)] = array
    return values


def spectra(by_name: Mapping[str, Mapping[int, Array]], steps: list[int]) -> xr.Dataset:
    """A variable for each ``spectrum/<weight>``; weights with equally many eigenvalues share a dimension."""
    variables = {}
    for name, by_step in by_name.items():
        stacked = stack(name, {step: np.atleast_1d(array).ravel() for step, array in by_step.items()})
        size = stacked.sizes["axis_0"]
        stacked = stacked.rename(axis_0=f"rank_{size}")
        missing = [step for step in steps if step not in by_step]
        if missing:
            stacked = stacked.reindex(step=steps)
            stacked.attrs["missing_steps"] = missing
        variables[name] = stacked
    taken = {"step", *(str(dim) for array in variables.values() for dim in array.dims)}
    weights = {name: name.removeprefix("spectrum/") for name in variables}
    # A weight called "step" would clash with the coordinate: it keeps its long name.
    renamed = {name if weights[name] in taken else weights[name]: array for name, array in variables.items()}
    return xr.Dataset(renamed, coords={"step": np.array(steps, dtype="int64")})


def kernels(stacked: xr.DataArray, labels: xr.DataArray | None) -> xr.DataArray:
    """Name the axes of stacked kernels and attach the labels of their examples."""
    if stacked.ndim != 3:
        raise InputError(
            f"a kernel must be a matrix, but the array {stacked.name!r} has shape {stacked.shape[1:]}. "
            "Read it with run.stacked(name)."
        )
    named = stacked.rename(axis_0="example", axis_1="other")
    if labels is None or labels.ndim != 2 or labels.sizes["axis_0"] != named.sizes["example"]:
        return named
    labels = labels.rename(axis_0="example")
    first = labels.isel(step=0, drop=True)
    same = labels.sizes["step"] == named.sizes["step"] and bool((labels == first).all())
    return named.assign_coords(label=first if same else labels.reindex(step=named.step))


def dataset(
    scalars: pd.DataFrame, times: Series, stacks: Sequence[xr.DataArray], attributes: Mapping[str, str]
) -> xr.Dataset:
    """Everything of a run on one axis of steps; names as netCDF allows them, the full name in ``attrs["name"]``."""
    variables: dict[str, xr.DataArray] = {"time": _on_steps(times)}
    for name in scalars.columns:
        variables[_free(file_name(name), variables)] = _on_steps(scalars[name]).assign_attrs(name=name)
    for stacked in stacks:
        name = str(stacked.name)
        key = _free(file_name(name), variables)
        dims = {f"axis_{i}": f"{key}_axis_{i}" for i in range(stacked.ndim - 1)}
        missing = [step for step in scalars.index if step not in set(stacked.step.values)]
        if stacked.dtype == "bool":  # which has no NaN for the steps without it
            stacked = stacked.astype("int8")
        on_all = stacked.rename(dims).reindex(step=scalars.index.to_numpy())
        reason = {"missing_steps": np.array(missing, dtype="int64")} if missing else {}
        variables[key] = on_all.assign_attrs(name=name, **reason)
    return xr.Dataset(variables, coords={"step": scalars.index.to_numpy()}, attrs=dict(attributes))


def _on_steps(series: Series) -> xr.DataArray:
    return xr.DataArray(series.to_numpy(), dims=["step"], coords={"step": series.index.to_numpy()})


def _free(name: str, taken: Mapping[str, object]) -> str:
    if not (name[0].isalnum() or name[0] == "_"):
        name = "_" + name
    while name in taken or name == "step":
        name += "_"
    return name
