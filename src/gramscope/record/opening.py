"""The run that a watch writes to. Whatever the disk says now is said before training: nothing is lost yet."""

from collections.abc import Mapping
from pathlib import Path

import torch

from gramscope.record.fingerprint import difference, fingerprint
from gramscope.record.subject import Memory, Subject
from gramscope.store import RunWriter
from gramscope.store.names import FINGERPRINT
from gramscope.store.records import META_FILE
from gramscope.store.store_errors import RunExists, disk_trouble


def open_writer(out: Path, resume: int | bool, meta: Mapping[str, object]) -> RunWriter:
    try:
        with disk_trouble(f"opening the run {out}"):
            if resume is not False and not (resume is True and not (out / META_FILE).exists()):
                return RunWriter.resume(out, None if resume is True else resume)
            return RunWriter.create(out, meta)
    except RunExists as error:
        raise RunExists(
            f"out must be a directory without a run, but {out} holds one. Pass resume=True to go on with it, choose "
            "another directory, or remove it.",
            error.errno,
        ) from error


def goes_on_from(writer: RunWriter | None, subject: Subject, resume: int | bool, start: int) -> tuple[int, Memory]:
    """The step at which a run goes on, and what it is compared with: what the first attempt stored."""
    if writer is None:
        return start, Memory()
    now = fingerprint(subject.model, subject.x, subject.outputs)
    last, count = writer.last_step, start
    if resume is not False and not (resume is True and last is None):
        count = resume if resume is not True else last or 0
    if resume is False or last is None or not count:
        return count, Memory(fingerprint=now)  # nothing to go on from, or step 0, which is measured again
    other = difference(writer.first_array(FINGERPRINT), now)
    if other:
        return count, Memory(resumed=True, other=other)
    arrays = {name: writer.first_array(f"start/{name}") for name in ("kernel", "features")}
    tensors = {name: None if array is None else torch.tensor(array, device="cpu") for name, array in arrays.items()}
    return count, Memory(tensors["kernel"], tensors["features"], resumed=True)
