"""Full and read-only disks that are real: a small file system of its own, or a user without rights."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import gramscope.store.folders  # noqa: F401  (before the user changes, who may not read Python's own files)
from gramscope.store import Run, RunWriter, StoreError, open_run

LOSS = {"loss": 1.0}


def mount(path: Path, *options: str) -> None:
    subprocess.run(["mount", *options, str(path)], check=True)


def full(folder: Path) -> dict[str, object]:
    mount(folder, "-t", "tmpfs", "-o", "size=512k", "tmpfs")
    ballast = folder / "ballast"
    ballast.write_bytes(b"\0" * 200_000)
    writer = RunWriter.create(folder / "a")
    committed: list[int] = []
    for step in range(1000):
        try:
            writer.append(step, LOSS, {"kernel": np.full((50, 50), step)})
        except StoreError as refusal:
            error = refusal
            break
        committed.append(step)
    else:
        raise SystemExit("the disk never ran full")
    run = open_run(folder / "a")
    report: dict[str, object] = {
        "errno": error.errno,
        "message": str(error),
        "committed": committed,
        "readable": [step for step in run.steps if run.array("kernel", step, check=True)[0, 0] == step],
        "damage": len(run.verify()),
        "temporary_files": len(list((folder / "a").rglob("*.tmp"))),
    }
    ballast.unlink()
    writer.append(step, LOSS, {"kernel": np.full((50, 50), step)})
    run.refresh()
    writer.close()
    report["after_space_is_back"] = run.steps == [*committed, step] and run.verify() == []
    return report


def read_only(folder: Path) -> dict[str, object]:
    mount(folder, "-t", "tmpfs", "tmpfs")
    three_steps(folder / "a")
    mount(folder, "-o", "remount,ro")
    return refused(folder / "a")


def no_permission(folder: Path) -> dict[str, object]:
    path = folder / "a"
    three_steps(path)
    Run(path)  # whatever is imported on demand is imported before the rights go
    (folder / "closed").mkdir(0)
    for file in (*path.rglob("*"), path, folder):
        file.chmod(0o555 if file.is_dir() else 0o444)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        report = refused(path)
        try:
            RunWriter.create(folder / "b")
        except StoreError as error:
            report["create_errno"] = error.errno
        try:
            open_run(folder / "closed" / "run")
        except StoreError as error:
            report["open_errno"] = error.errno
    finally:
        if was_root:
            os.seteuid(0)
        for file in (folder, path, path / "arrays", folder / "closed"):
            file.chmod(0o755)
    return report


def three_steps(path: Path) -> None:
    with RunWriter.create(path) as writer:
        for step in range(3):
            writer.append(step, LOSS, {"kernel": np.eye(3)})


def refused(path: Path) -> dict[str, object]:
    try:
        RunWriter.resume(path)
    except StoreError as error:
        run = open_run(path)
        assert run.verify() == []
        return {"errno": error.errno, "message": str(error), "readable": len(run.steps)}
    raise SystemExit("a read-only run was opened for writing")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        try:
            print(json.dumps(globals()[sys.argv[1]](Path(name))))
        finally:
            if os.path.ismount(name):
                subprocess.run(["umount", "--lazy", name], check=True)
