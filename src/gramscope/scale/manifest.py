"""The manifest: whose kernel a folder holds, how it is cut, and what was used to compute it."""

import errno
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from gramscope import __version__
from gramscope.base.errors import InputError
from gramscope.base.user_warnings import warn
from gramscope.scale.fingerprints import Fingerprints
from gramscope.scale.tile_plan import TilePlan
from gramscope.store.files import Disk
from gramscope.store.store_errors import StoreError, disk_trouble

MANIFEST_FILE, SCHEMA = "manifest.json", 1
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    plan: TilePlan
    fingerprints: Fingerprints
    options: Mapping[str, object]
    versions: Mapping[str, str]
    created: str

    @classmethod
    def of(cls, plan: TilePlan, fingerprints: Fingerprints, options: Mapping[str, object]) -> "Manifest":
        return cls(plan, fingerprints, options, _versions(), datetime.now(UTC).isoformat(timespec="seconds"))

    def to_bytes(self) -> bytes:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False).encode() + b"\n"

    def check_same(self, wanted: "Manifest", folder: Path) -> None:
        """Raise unless a job that wants ``wanted`` may go on in this folder; warn of another torch."""
        found = self.fingerprints.differences(wanted.fingerprints)
        found += [
            f"{name}={wanted.options.get(name)!r} instead of {self.options.get(name)!r}"
            for name in dict.fromkeys([*self.options, *wanted.options])
            if self.options.get(name) != wanted.options.get(name)
        ]
        if (self.plan.rows, self.plan.cols) != (wanted.plan.rows, wanted.plan.cols) and not found:
            found.append("another number of examples")
        if found:
            raise InputError(
                f"{folder} must hold tiles of the kernel that is asked for, but what is asked for has "
                f"{'; '.join(found)}. Choose another folder for it, or remove {folder}."
            )
        before, now = self.versions.get("torch"), wanted.versions.get("torch")
        if before != now:
            warn(f"{folder} was begun with torch {before}, and this is {now}: tiles of the two may differ by rounding.")


def create_or_read(folder: Path, manifest: Manifest, disk: Disk, writer: str) -> Manifest:
    """Write the manifest, or read that of the process that was first."""
    path = folder / MANIFEST_FILE
    with disk_trouble(f"writing {path}"):
        _check_ours(folder)
        disk.make_directory(folder)
        if not path.exists():
            temporary = path.with_name(f".{MANIFEST_FILE}.{writer}.new")
            try:
                disk.write_whole(temporary, manifest.to_bytes(), writer)
                _publish(temporary, path, disk)
            finally:
                disk.remove_if_possible(temporary)
    return read_manifest(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that ``gs.ntk(..., out=...)`` made."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        what = "it holds no manifest.json" if folder.is_dir() else "there is no such folder"
        raise StoreError(f"{folder} must be a folder that gs.ntk(..., out=...) made, but {what}. Check the path.")
    try:
        with disk_trouble(f"reading {path}"):
            fields = json.loads(path.read_bytes())
        if fields["schema"] > SCHEMA:
            raise StoreError(
                f"{path} was written with schema {fields['schema']} (gramscope {fields['versions']['gramscope']}), but "
                f"gramscope {__version__} knows schemas up to {SCHEMA}. Upgrade: pip install --upgrade gramscope."
            )
        prints = fields["fingerprints"]
        sample = tuple(tuple(float(value) for value in row) for row in prints["sample"])
        plan, found = TilePlan.from_json(fields["plan"]), Fingerprints(**{**prints, "sample": sample})
        return Manifest(plan, found, fields["options"], fields["versions"], fields["created"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StoreError(
            f"{path} must be a manifest of gramscope, but it is damaged ({type(error).__name__}: {error}). Restore it "
            "from a copy, or remove the folder and compute the kernel again."
        ) from error


def _publish(temporary: Path, path: Path, disk: Disk) -> None:
    """Give the file its name, unless another process was first."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not path.exists():  # a file system without links: two that come here at once write the same
            disk.rename(temporary, path)


def _check_ours(folder: Path) -> None:
    """Refuse a folder of other files; hidden ones may be of a process that just begins."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"out must be a folder, but {folder} is a file. Choose another path.")
    if not folder.is_dir() or (folder / MANIFEST_FILE).exists():
        return
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    if others and not (folder / MANIFEST_FILE).exists():
        raise InputError(
            f"out must be a new folder, an empty one, or one with a kernel that is to be completed, but {folder} holds "
            f"other files ({', '.join(sorted(others)[:3])}). Choose another folder."
        )


def _versions() -> dict[str, str]:
    import numpy
    import torch

    return {
        "gramscope": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
