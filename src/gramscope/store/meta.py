"""``meta.json``: what a run is, written whole or not at all; its presence makes a directory a run."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from gramscope import __version__
from gramscope.base.errors import InputError
from gramscope.base.json_values import clean_text, json_values
from gramscope.store.files import Disk, read_inside
from gramscope.store.lock import LOCK_FILE
from gramscope.store.logged_scalars import LOGGED_FILE
from gramscope.store.records import ARRAYS_FOLDER, META_FILE, SCALARS_FILE, SCHEMA, Content
from gramscope.store.store_errors import StoreError, disk_trouble

_SET_HERE = ("schema", "created", "gramscope")


def fresh_meta(path: Path, given: Mapping[str, object]) -> Content:
    """The meta data of a new run: what the caller gives, and schema, name, time and version."""
    taken = [key for key in _SET_HERE if key in given]
    if taken:
        raise InputError(
            f"{', '.join(taken)} of meta.json are set by gramscope itself. Choose other names, or 'config'."
        )
    stamp = {"schema": SCHEMA, "name": clean_text(path.resolve().name), "created": _now(), "gramscope": __version__}
    return {**stamp, **{clean_text(key): json_values(value) for key, value in given.items()}}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_meta(path: Path, meta: Mapping[str, object], disk: Disk) -> None:
    text = json.dumps(meta, indent=1, allow_nan=False)
    disk.write_whole(path / META_FILE, text.encode() + b"\n")


def check_not_of_a_run(path: Path, name: str) -> None:
    """Nothing else may be written over the files that make up a run; beside them in its folder it may."""
    folder = path.absolute().parent.resolve()  # of the file itself a link would be replaced, not followed
    own = path.name in (META_FILE, SCALARS_FILE, LOGGED_FILE, LOCK_FILE) and (folder / META_FILE).is_file()
    if own or (folder.name == ARRAYS_FOLDER and (folder.parent / META_FILE).is_file()):
        raise InputError(
            f"{name} must not be a file of a run, but {path} is one, which would be lost. Pass another path."
        )


def _check_is_run(path: Path) -> None:
    if not path.exists():
        raise StoreError(f"{path} must be a run directory, but it does not exist. Check the path.")
    if not path.is_dir():
        raise StoreError(
            f"{path} must be a run directory, but it is a file. Pass the directory that holds {META_FILE}."
        )
    if not (path / META_FILE).exists():
        raise StoreError(
            f"{path} must be a run directory, but it holds no {META_FILE}. Pass the directory that gramscope.watch "
            "(out=...) or RunWriter.create made."
        )


def read_meta(path: Path) -> Content:
    """``meta.json`` of a run whose schema this version knows."""
    with disk_trouble(f"reading the run {path}"):
        _check_is_run(path)
    try:
        meta = json.loads(read_inside(path, META_FILE))
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path / META_FILE} must be JSON, but it is damaged ({error}). Restore it from a copy."
        ) from error
    schema = meta.get("schema") if isinstance(meta, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise StoreError(
            f"{path / META_FILE} must name its schema as a whole number >= 1, got {schema!r}. Is it a run?"
        )
    if schema > SCHEMA:
        raise StoreError(
            f"{path} was written with schema {schema} (gramscope {meta.get('gramscope', 'unknown')}), but this "
            f"gramscope {__version__} knows schemas up to {SCHEMA}. Upgrade: pip install --upgrade gramscope."
        )
    assert isinstance(meta, dict)
    return meta
