"""Arrays of a step as the bytes of a safetensors file, and back."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from gramscope.base.errors import InputError, UnsupportedError
from gramscope.store.files import read_inside
from gramscope.store.names import check_name
from gramscope.store.records import Arrays
from gramscope.store.store_errors import StoreError

_KINDS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_RESERVED = "__metadata__"  # safetensors keeps its own text under this name

Array: TypeAlias = npt.NDArray[Any]  # of whatever dtype was recorded


def encode_arrays(arrays: Mapping[str, object]) -> bytes:
    """A safetensors file of named arrays: booleans, integers and floats of 16 to 64 bits, any shape.

    >>> sorted(load(encode_arrays({"kernel": np.eye(2), "kernel/labels": [0, 1]})))
    ['kernel', 'kernel/labels']
    """
    return save({_array_name(name): _plain(value, name) for name, value in arrays.items()})


def _array_name(name: object) -> str:
    if name == _RESERVED:
        raise InputError(f"an array may not be called {_RESERVED!r}, a name that safetensors reserves. Rename it.")
    return check_name(name, "an array")


def _plain(value: object, name: str) -> Array:
    try:
        if hasattr(value, "detach"):  # a tensor, without importing torch to ask
            value = value.detach().cpu()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the array {name!r} must be something that numpy.asarray takes, got {type(value).__name__} ({error}). "
            "Pass a numpy array, or tensor.float() for bfloat16."
        ) from error
    kind = f"{array.dtype.kind}{array.dtype.itemsize}"
    if kind not in _KINDS:
        raise UnsupportedError(
            f"the array {name!r} must hold booleans, integers or floats of at most 64 bits, got dtype {array.dtype}. "
            "Convert it, e.g. .astype('float64'); store a complex array as two, .real and .imag."
        )
    # safetensors writes the memory as it lies: row by row and little-endian is what it will be read as.
    return np.array(array, dtype=array.dtype.newbyteorder("<"), order="C", ndmin=0)


def read_arrays(root: Path, arrays: Arrays, *, check: bool = False) -> dict[str, Array]:
    """All arrays of one committed step; with ``check`` the file's SHA-256 must be the committed one."""
    data = read_inside(root, arrays.file)
    found = hashlib.sha256(data).hexdigest() if check else arrays.sha256
    if found != arrays.sha256:
        raise StoreError(
            f"{root / arrays.file} must have the SHA-256 of its commit record, {arrays.sha256}, but has {found}. "
            "It was altered or damaged after it was written; restore it from a copy."
        )
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{root / arrays.file} must be a safetensors file, but cannot be read ({error}). It was damaged after "
            "it was written; restore it from a copy. The other steps can be read."
        ) from error
