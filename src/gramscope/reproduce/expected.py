"""``expected.toml``: what was published, where, and how far off ours may be."""

import math
import tomllib
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from gramscope.base.errors import InputError
from gramscope.base.json_values import JSONObject
from gramscope.reproduce.experiments import EXPECTED_FILE, Case

KINDS = ("absolute", "relative", "at least", "at most")
KEYS = {"case", "name", "published", "source", "tolerance", "kind", "why", "control"}
UNPUBLISHED = "not published"


@dataclass(frozen=True)
class Expected:
    """A published number. ``published`` is None where the source names none.

    ``kind``: "absolute" and "relative" say how ``tolerance`` is meant; "at least" and "at most" are published bounds,
    which ours may miss by ``tolerance``. A ``control`` is judged and not counted: another reading of what the source
    leaves open, or a variant that explains a difference.
    """

    case: Case
    name: str
    published: float | None
    source: str
    tolerance: float = 0.0
    kind: str = "absolute"
    why: str = field(default="", repr=False)
    control: bool = False

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
    """The ``[[value]]`` tables of an experiment's ``expected.toml``, checked.

    What a table leaves out comes from ``[default]``. Lists in ``case`` or ``name``, and a list of cases, stand for one
    value each.
    """
    path = folder / EXPECTED_FILE
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} must say what was published, but there is no such file.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} must be TOML, but {error}.") from error
    shared = text.get("default", {})
    found = []
    for place, value in enumerate(text.get("value", []), 1):
        found += _checked(f"value {place} of {path}", {**shared, **value})
    return found


def _checked(where: str, value: JSONObject) -> list[Expected]:
    unknown = sorted(set(value) - KEYS)
    if unknown:
        raise InputError(f"{where} has the key {unknown[0]!r}; keys are {', '.join(sorted(KEYS))}.")
    for key in ("name", "published", "source", "why"):
        if key not in value or value[key] in ("", []):
            raise InputError(f"{where} must have {key}.")
    published, kind, control = value["published"], value.get("kind", "absolute"), value.get("control", False)
    if kind not in KINDS:
        raise InputError(f"kind of {where} must be one of {', '.join(KINDS)}, got {kind!r}.")
    if not isinstance(control, bool):
        raise InputError(f"control of {where} must be true or false, got {control!r}.")
    tolerance: Any = value.get("tolerance", 0.0 if kind.startswith("at ") or published == UNPUBLISHED else None)
    for key, number in (("tolerance", tolerance), *([] if published == UNPUBLISHED else [("published", published)])):
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise InputError(f"{key} of {where} must be a finite number (or {UNPUBLISHED!r}), got {number!r}.")
    number = None if published == UNPUBLISHED else float(published)
    return [
        Expected(one, name, number, value["source"], float(tolerance), kind, value["why"], control)
        for case in map(_each, _listed(value.get("case", {}))) for one in case for name in _listed(value["name"])
    ]  # fmt: skip


def _each(case: JSONObject) -> list[Case]:
    """Every combination of a case whose settings may be lists, the last one running fastest.

    >>> _each({"width": [1, 2], "kind": "a"})
    [{'width': 1, 'kind': 'a'}, {'width': 2, 'kind': 'a'}]
    """
    return [dict(zip(case, chosen, strict=True)) for chosen in product(*map(_listed, case.values()))]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
