"""Finding damage: does everything that was committed read back as it was written?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gramscope.store.arrays import read_arrays
from gramscope.store.records import SCALARS_FILE, Record
from gramscope.store.store_errors import StoreError


class Damage(NamedTuple):
    """One thing that is not as it was written; ``step`` and ``attempt`` are ``None`` if the record is lost."""

    file: str
    problem: str
    step: int | None = None
    attempt: int | None = None


def damage_of(path: Path, records: Sequence[Record], damaged_lines: Mapping[str, Sequence[int]]) -> list[Damage]:
    """Damage of a run: lines that cannot be read by file, then arrays in the order of their commit records."""
    what = {SCALARS_FILE: "no commit record"}
    found = [
        Damage(file, f"line {line} is {what.get(file, 'damaged')}")
        for file, lines in damaged_lines.items()
        for line in lines
    ]
    for record in records:
        if record.arrays is None:
            continue
        try:
            loaded = read_arrays(path, record.arrays, check=True)
        except StoreError as error:
            found.append(Damage(record.arrays.file, str(error), record.step, record.attempt))
            continue
        if set(loaded) != set(record.arrays.names):
            problem = f"it holds {sorted(loaded)}, its commit record names {sorted(record.arrays.names)}"
            found.append(Damage(record.arrays.file, problem, record.step, record.attempt))
    return found
