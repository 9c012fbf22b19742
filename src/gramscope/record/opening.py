"""The run that a watch writes to. Whatever the disk says now is said before training: nothing is lost yet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gramscope.store import RunWriter
from gramscope.store.records import META_FILE
from gramscope.store.store_errors import RunExists, disk_trouble


def open_writer(out: Any, resume: int | bool, meta: Mapping[str, Any]) -> RunWriter:
    try:
        with disk_trouble(f"opening the run {out}"):
            if resume is not False and not (resume is True and not (Path(out) / META_FILE).exists()):
                return RunWriter.resume(out, None if resume is True else resume)
            return RunWriter.create(out, meta)
    except RunExists as error:
        raise RunExists(
            f"out must be a directory without a run, but {out} holds one. Pass resume=True to go on with it, choose "
            "another directory, or remove it.",
            error.errno,
        ) from error
