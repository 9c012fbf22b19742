"""Which runs lie in a folder, or match a pattern: a sweep is opened by one path."""

import glob
import os
import re
from decimal import Decimal
from itertools import chain, count
from pathlib import Path

from gramscope.base.errors import InputError
from gramscope.store.reader import Run
from gramscope.store.records import META_FILE

MAX_DEPTH = 3  # runs/<sweep>/<run>; below it lie the arrays and checkpoints of others


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory: it holds a ``meta.json``."""
    return os.path.isfile(path / META_FILE)  # False where it may not be looked at


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """The run directories that ``path`` means: itself, those below it, or those that match it as a pattern.

    Names are sorted as people count: ``run-2`` comes before ``run-10``.

    >>> import tempfile
    >>> from gramscope.store import RunWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("run-10", "run-2"):
    ...         RunWriter.create(f"{folder}/{name}").close()
    ...     [found.name for found in find_runs(folder)], [found.name for found in find_runs(f"{folder}/*-2")]
    (['run-2', 'run-10'], ['run-2'])
    """
    text = os.fspath(path)
    start = Path(text)
    if is_run(start):
        return [start]
    if start.is_dir():
        return sorted(_below(start, MAX_DEPTH), key=counted)
    matched = [Path(name) for name in glob.glob(text)] if glob.has_magic(text) else []
    return sorted((run for folder in matched if folder.is_dir() for run in find_runs(folder)), key=counted)


def _below(folder: Path, depth: int) -> list[Path]:
    if depth == 0:
        return []
    try:
        inner = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except PermissionError:  # whatever lies there is not the user's
        return []
    return [run for path in inner for run in ([path] if is_run(path) else _below(path, depth - 1))]


def counted(path: Path) -> list[tuple[int, Decimal, str]]:
    """A sort key by which numbers in names count as numbers, decimal fractions too.

    >>> [path.name for path in sorted(map(Path, ["lr0.1", "lr10", "lr0.003", "lr9"]), key=counted)]
    ['lr0.003', 'lr0.1', 'lr9', 'lr10']
    """
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?)", str(path))  # every second one is a number
    return [(0, Decimal(part), "") if place % 2 else (1, Decimal(0), part) for place, part in enumerate(parts)]


def free_folder(path: Path) -> Path:
    """``path`` if nothing is there or an empty folder, else the first such of ``path-2``, ``path-3``, ...

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (Path(folder) / "a" / "kept").mkdir(parents=True)
    ...     free_folder(Path(folder) / "a").name, free_folder(Path(folder) / "b").name
    ('a-2', 'b')
    """
    places = chain([path], (path.parent / f"{path.name}-{number}" for number in count(2)))
    return next(place for place in places if not place.exists() or (place.is_dir() and not any(place.iterdir())))


def open_runs(path: str | os.PathLike[str]) -> list[Run]:
    """All runs of a folder, or of a pattern such as ``"runs/*"``; one run directory gives a list of one.

    >>> import tempfile
    >>> from gramscope.store import RunWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("a", "b"):
    ...         RunWriter.create(f"{folder}/{name}").close()
    ...     [run.name for run in open_runs(folder)]
    ['a', 'b']
    """
    found = find_runs(path)
    if not found:
        raise InputError(
            f"{os.fspath(path)} must be a run directory, a folder with runs in it, or a pattern that matches some, but "
            f"there is no {META_FILE} in it. Pass the folder that gramscope.watch(out=...) wrote, or its parent."
        )
    return [Run(run) for run in found]
