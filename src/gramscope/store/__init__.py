"""Run directories: one writer that a kill or a full disk cannot hurt, readers that follow it. Never imports torch."""

from typing import TYPE_CHECKING

from gramscope.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from gramscope.store.damage import Damage as Damage
    from gramscope.store.files import Disk as Disk
    from gramscope.store.folders import find_runs as find_runs
    from gramscope.store.folders import open_runs as open_runs
    from gramscope.store.names import file_name as file_name
    from gramscope.store.reader import Run as Run
    from gramscope.store.reader import open_run as open_run
    from gramscope.store.records import SCHEMA as SCHEMA
    from gramscope.store.records import Record as Record
    from gramscope.store.store_errors import StoreError as StoreError
    from gramscope.store.writer import RunWriter as RunWriter

# Resolved on first use: a training process that only writes need not wait for pandas and xarray.
if not TYPE_CHECKING:  # so that a type checker knows every name and no other
    __getattr__, __dir__, __all__ = lazy_names(__name__)
