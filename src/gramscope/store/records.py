"""The commit record: one line of ``scalars.jsonl`` for each step, and which of them make up the newest view."""

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject, clean_text, json_number
from gramscope.store.names import check_name

SCHEMA = 1
META_FILE, SCALARS_FILE, ARRAYS_FOLDER = "meta.json", "scalars.jsonl", "arrays"

# No slash can hide in these characters, so a record cannot name a file outside arrays/.
_ARRAYS_FILE = re.compile(r"arrays/step_[A-Za-z0-9_.-]+\.safetensors")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_CHECK = re.compile(rb',"crc32":"([0-9a-f]{8})"\}$')

Content = JSONObject


@dataclass(frozen=True)
class Arrays:
    """Where the arrays of a step lie (``file``, relative to the run), their names, and the file's ``sha256``."""

    file: str
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """What was committed at one step of one attempt; ``time`` in seconds since the start of the run.

    ``event`` is ``"step"``, or ``"resume"`` for the mark that a restart from an earlier checkpoint leaves: it holds
    no scalars and only supersedes.
    """

    step: int
    time: float
    attempt: int
    scalars: Mapping[str, float]
    arrays: Arrays | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    event: str = "step"


class DamagedLine(Exception):
    """A line of ``scalars.jsonl`` that is no commit record."""


def encode_line(record: Record) -> bytes:
    r"""A record as one line of strict JSON with its own CRC-32, so that a damaged line is found out.

    >>> encode_line(Record(step=50, time=1.5, attempt=0, scalars={"loss": float("nan")}))
    b'{"step":50,"time":1.5,"attempt":0,"scalars":{"loss":"NaN"},"arrays":null,"failures":{},"crc32":"1857ea03"}\n'
    """
    arrays = record.arrays
    content: Content = {
        "step": record.step,
        "time": json_number(record.time),
        "attempt": record.attempt,
        "scalars": {name: json_number(value) for name, value in record.scalars.items()},
        "arrays": None
        if arrays is None
        else {"file": arrays.file, "sha256": arrays.sha256, "names": list(arrays.names)},
        "failures": dict(record.failures),
    }
    if record.event != "step":
        content["event"] = record.event
    return sealed(content)


def sealed(content: Mapping[str, object]) -> bytes:
    """An object as one line of strict JSON that ends with the CRC-32 of the line without it."""
    body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return body[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def opened(line: bytes) -> object:
    """The object of a line that agrees with its CRC-32, where it has one; raises :class:`DamagedLine` else."""
    line = line.rstrip(b"\r\n")
    check = _CHECK.search(line)
    if check and zlib.crc32(line[: check.start()] + b"}") != int(check[1], 16):
        raise DamagedLine("its CRC-32 does not match")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedLine(f"{type(error).__name__}: {error}") from None


def decode_line(line: bytes) -> Record:
    """The record of one line (with or without its newline); raises :class:`DamagedLine` for anything else."""
    content = opened(line)
    try:
        return _record(content)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DamagedLine(f"{type(error).__name__}: {error}") from None


def _record(content: object) -> Record:
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    arrays, failures = content.get("arrays"), _object(content.get("failures"), "failures")
    return Record(
        step=_count(content["step"], "step"),
        time=number(content.get("time", "NaN")),
        attempt=_count(content.get("attempt", 0), "attempt"),
        scalars=_numbers(_object(content.get("scalars"), "scalars")),
        arrays=None if arrays is None else _arrays(arrays),
        failures={check_name(name, "a measure"): clean_text(message) for name, message in failures.items()},
        event=str(content.get("event", "step")),
    )


def _numbers(content: Content) -> dict[str, float]:
    _check_names(tuple(content))
    if set(map(type, content.values())) <= {float}:  # as it mostly is, and then nothing is to be made of it
        return content
    return {name: number(value) for name, value in content.items()}


@lru_cache(maxsize=256)
def _check_names(names: tuple[str, ...]) -> None:
    """Remembered: the records of a run have few sets of names."""
    for name in names:
        check_name(name, "a scalar")


def _object(value: object, what: str) -> Content:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return value


def _arrays(content: Content) -> Arrays:
    file, sha256 = content["file"], content["sha256"]
    if not isinstance(file, str) or not _ARRAYS_FILE.fullmatch(file):
        raise ValueError(f"its arrays would lie outside the run, in {file!r}")
    if not isinstance(sha256, str):
        raise ValueError("its checksum is not a string")
    return Arrays(file, sha256, tuple(check_name(name, "an array") for name in content.get("names", ())))


def _count(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{what} is not a whole number >= 0")
    return value


def number(value: object) -> float:
    """A JSON value as a float; ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` are numbers too."""
    if isinstance(value, str):
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def check_step(step: object) -> int:
    """``step`` as a Python int >= 0 (numpy's integers are taken too)."""
    try:
        if isinstance(step, bool):
            raise TypeError
        whole = int(step.__index__())  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise InputError(f"step must be a whole number, got {step!r} of type {type(step).__name__}.") from None
    if not 0 <= whole < 2**63:
        raise InputError(f"step must be >= 0 and below 2**63, got {whole}. Count optimiser steps from 0.")
    return whole


def arrays_file(step: int, attempt: int) -> str:
    """Where the arrays of a step go; each attempt has its own file, so that nothing superseded is overwritten.

    >>> arrays_file(50, 0), arrays_file(50, 2)
    ('arrays/step_00000050.safetensors', 'arrays/step_00000050_attempt_2.safetensors')
    """
    again = f"_attempt_{attempt}" if attempt else ""
    return f"{ARRAYS_FOLDER}/step_{step:08d}{again}.safetensors"


def newest_view(records: Iterable[Record]) -> list[Record]:
    """The records that no later one supersedes, in order of steps.

    A record of step ``s`` and attempt ``a`` supersedes what was written before it at steps ``>= s`` by attempts
    ``< a``, and any record of the same step. Marks of a restart supersede and are not shown.

    >>> lines = [(10, 0), (20, 0), (30, 0), (20, 1)]
    >>> [(r.step, r.attempt) for r in newest_view(Record(s, 0.0, a, {}) for s, a in lines)]
    [(10, 0), (20, 1)]
    """
    view: list[Record] = []
    for record in records:
        view_add(view, record)
    return [record for record in view if record.event == "step"]


def view_add(view: list[Record], new: Record) -> None:
    """Add the next record of the file to a view, in place."""
    if view and new.step <= view[-1].step:
        view[:] = [old for old in view if old.step < new.step or (old.step > new.step and old.attempt >= new.attempt)]
    if new.event != "step":
        return
    view.append(new)
    if len(view) > 1 and view[-2].step >= new.step:
        view.sort(key=lambda record: record.step)
