"""The run that a watch writes to. Whatever the disk says now is said before training: nothing is lost yet."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.network import Outputs, named_parameters
from gramscope.record.subject import Memory, Subject
from gramscope.store import RunWriter
from gramscope.store.names import FINGERPRINT
from gramscope.store.records import META_FILE
from gramscope.store.store_errors import RunExists, disk_trouble

_WHAT = ("with another probe (other x, precision or outputs)", "with another model (other parameter names or shapes)")


def open_writer(out: Path, resume: int | bool, meta: Mapping[str, object]) -> RunWriter:
    try:
        with disk_trouble(f"opening the run {out}"):
            # Not flushed: a flush waits 5 ms for the disk, and only a loss of power can tell.
            if resume is not False and not (resume is True and not (out / META_FILE).exists()):
                return RunWriter.resume(out, None if resume is True else resume, fsync=False)
            return RunWriter.create(out, meta, fsync=False)
    except RunExists as error:
        raise RunExists(
            f"out must be a directory without a run, but {out} holds one. Pass resume=True to go on with it, choose "
            "another directory, or remove it.",
            error.errno,
        ) from None


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


def fingerprint(model: nn.Module, x: ModelInput, outputs: Outputs) -> NDArray[np.uint8]:
    """SHA-256 of the inputs (and chosen outputs), and of the names and shapes of the parameters: two rows of 32 bytes.

    Targets are left out, since neither the kernel nor the features depend on them.
    """
    probe = hashlib.sha256()
    for tensor in tensors_in(x):
        values = _plain(tensor)
        probe.update(repr(values.shape).encode())
        probe.update(values.data)
    probe.update(b"" if callable(outputs) else repr(outputs).encode())
    shapes = {name: list(parameter.shape) for name, parameter in named_parameters(model).items()}
    digests = (probe.digest(), hashlib.sha256(json.dumps(shapes).encode()).digest())
    return np.stack([np.frombuffer(digest, dtype=np.uint8) for digest in digests])


def _plain(tensor: Tensor) -> NDArray[Any]:
    """The values; floats in 32 bits, so that the same examples in another precision are the same."""
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_floating_point():
        values = values.to(torch.float32)
    return np.ascontiguousarray(values.cpu().numpy())


def difference(stored: NDArray[Any] | None, now: NDArray[np.uint8]) -> str:
    """How the run began, if not as it goes on now; "" also for a run from before fingerprints were kept."""
    if stored is None or stored.shape != now.shape:
        return ""
    return " and ".join(what for what, a, b in zip(_WHAT, stored, now, strict=True) if not np.array_equal(a, b))
