"""Run directories: one writer that a kill or a full disk cannot hurt, readers that follow it. Never imports torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gramscope.store.errors import StoreError as StoreError
    from gramscope.store.files import Disk as Disk
    from gramscope.store.names import file_name as file_name
    from gramscope.store.reader import Run as Run
    from gramscope.store.reader import open_run as open_run
    from gramscope.store.records import SCHEMA as SCHEMA
    from gramscope.store.records import Record as Record
    from gramscope.store.verify import Damage as Damage
    from gramscope.store.writer import RunWriter as RunWriter

# Resolved on first use: a training process that only writes need not wait for pandas and xarray.
_NAMES = {
    "SCHEMA": "records",
    "Damage": "verify",
    "Disk": "files",
    "Record": "records",
    "Run": "reader",
    "RunWriter": "writer",
    "StoreError": "errors",
    "file_name": "names",
    "open_run": "reader",
}

__all__ = [
    "SCHEMA",
    "Damage",
    "Disk",
    "Record",
    "Run",
    "RunWriter",
    "StoreError",
    "file_name",
    "open_run",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"gramscope.store has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"gramscope.store.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
