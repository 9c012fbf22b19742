"""``expected.toml``: what was published, where, and how far off ours may be."""

import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.reproduce.experiments import EXPECTED_FILE, Case

KINDS = ("absolute", "relative", "at least", "at most")
KEYS = {"case", "name", "published", "source", "tolerance", "kind", "why"}
UNPUBLISHED = "not published"


@dataclass(frozen=True)
class Expected:
    """A published number. ``published`` is None where the source names none.

    ``kind``: "absolute" and "relative" say how ``tolerance`` is meant; "at least" and "at most" are published bounds,
    which ours may miss by ``tolerance``.
    """

    case: Case
    name: str
    published: float | None
    source: str
    tolerance: float = 0.0
    kind: str = "absolute"
    why: str = field(default="", repr=False)

    def allows(self, ours: float) -> bool:
        """Whether a mean of ours agrees.

        >>> Expected({}, "D_LR", 0.5, "2410.04264", tolerance=0.1, kind="relative").allows(0.54)
        True
        >>> Expected({}, "cosine", 0.999, "2605.06258", kind="at least").allows(0.99)
        False
        """
        assert self.published is not None
        if self.kind == "at least":
            return ours >= self.published - self.tolerance
        if self.kind == "at most":
            return ours <= self.published + self.tolerance
        scale = abs(self.published) if self.kind == "relative" else 1.0
        return abs(ours - self.published) <= self.tolerance * scale


def read_expected(folder: Path) -> list[Expected]:
    """The ``[[value]]`` tables of an experiment's ``expected.toml``, checked."""
    path = folder / EXPECTED_FILE
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8")).get("value", [])
    except FileNotFoundError:
        raise InputError(f"{path} must say what was published, but there is no such file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} must be TOML, but {error}.") from error
    return [_checked(path, place, value) for place, value in enumerate(values, 1)]


def _checked(path: Path, place: int, value: JSONObject) -> Expected:
    where = f"value {place} of {path}"
    unknown = sorted(set(value) - KEYS)
    if unknown:
        raise InputError(f"{where} has the key {unknown[0]!r}; keys are {', '.join(sorted(KEYS))}.")
    for key in ("name", "published", "source", "why"):
        if key not in value or value[key] == "":
            raise InputError(f"{where} must have {key}.")
    published, kind = value["published"], value.get("kind", "absolute")
    if kind not in KINDS:
        raise InputError(f"kind of {where} must be one of {', '.join(KINDS)}, got {kind!r}.")
    if published == UNPUBLISHED:
        return Expected(value.get("case", {}), value["name"], None, value["source"], why=value["why"])
    tolerance: Any = value.get("tolerance", 0.0 if kind.startswith("at ") else None)
    for key, number in (("published", published), ("tolerance", tolerance)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise InputError(f"{key} of {where} must be a finite number (or {UNPUBLISHED!r}), got {number!r}.")
    return Expected(
        value.get("case", {}), value["name"], float(published), value["source"], float(tolerance), kind, value["why"]
    )  # fmt: skip
