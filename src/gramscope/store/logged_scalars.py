"""What a loop logs: numbers by name, each at its own step; ``logged.jsonl`` has many of them to a line."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gramscope.base.json_values import json_number
from gramscope.store.names import check_name
from gramscope.store.records import DamagedLine, Record, number, opened, sealed

LOGGED_FILE = "logged.jsonl"


@dataclass(frozen=True, eq=False)
class LoggedScalars:
    """Numbers of one name, ``steps`` (k,) and ``values`` (k,), that one attempt logged."""

    name: str
    attempt: int
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


def encode_logged(name: str, attempt: int, steps: Sequence[int], values: Sequence[float]) -> bytes:
    r"""One line of json_number JSON with its own CRC-32.

    >>> encode_logged("loss", 0, [1, 2], [0.5, float("nan")])
    b'{"name":"loss","attempt":0,"steps":[1,2],"values":[0.5,"NaN"],"crc32":"a8f2b9bb"}\n'
    """
    kept: list[float | str] = list(values)
    if not all(map(math.isfinite, values)):
        kept = [json_number(value) for value in values]
    return sealed({"name": name, "attempt": attempt, "steps": list(steps), "values": kept})


def decode_logged(line: bytes) -> LoggedScalars:
    """The numbers of one line; raises :class:`DamagedLine` for anything else."""
    content = opened(line)
    try:
        return _logged(content)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DamagedLine(f"{type(error).__name__}: {error}") from None


def _logged(content: object) -> LoggedScalars:
    if not isinstance(content, dict):
        raise TypeError("the line is no JSON object")
    values, attempt = content["values"], content["attempt"]
    if not set(map(type, values)) <= {int, float}:
        values = [number(value) for value in values]
    steps, values = np.array(content["steps"], dtype=np.int64), np.array(values, dtype=np.float64)
    if steps.ndim != 1 or steps.shape != values.shape or not len(steps) or steps.min() < 0:
        raise ValueError("steps and values do not pair")
    if not isinstance(attempt, int) or isinstance(attempt, bool) or attempt < 0:
        raise ValueError("attempt is not a whole number >= 0")
    return LoggedScalars(check_name(content["name"], "a number that is logged"), attempt, steps, values)


def newest_logged(lines: Iterable[LoggedScalars], records: Iterable[Record]) -> dict[str, LoggedScalars]:
    """By name, steps rising, what no later attempt supersedes.

    A record supersedes what earlier attempts logged at its step and later; a number that is logged, what they logged
    later, and of its own name what stands at its own step.
    """
    lines = list(lines)
    begins: dict[int, int] = {}  # from which step on an attempt supersedes earlier ones
    for attempt, step in [(r.attempt, r.step) for r in records] + [(k.attempt, int(k.steps.min()) + 1) for k in lines]:
        begins[attempt] = min(step, begins.get(attempt, step))
    by_name: dict[str, list[LoggedScalars]] = {}
    for line in lines:
        end = min((step for attempt, step in begins.items() if attempt > line.attempt), default=None)
        kept = line.steps < end if end is not None else np.ones(len(line.steps), dtype=bool)
        by_name.setdefault(line.name, []).append(
            LoggedScalars(line.name, line.attempt, line.steps[kept], line.values[kept])
        )
    found = {name: _joined(parts) for name, parts in by_name.items()}
    return {name: logged for name, logged in found.items() if len(logged.steps)}


def _joined(parts: Sequence[LoggedScalars]) -> LoggedScalars:
    """Of several numbers at one step the last counts."""
    steps = np.concatenate([part.steps for part in parts])[::-1]
    values = np.concatenate([part.values for part in parts])[::-1]
    rising, places = np.unique(steps, return_index=True)
    return LoggedScalars(parts[-1].name, parts[-1].attempt, rising, values[places])
