"""What made a result: command, commit, machine and versions. No names of hosts, users or folders."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gramscope

PACKAGES = ("torch", "numpy", "scipy", "pandas", "scikit-learn")


def commit() -> str:
    """The commit of the source checkout, "+" where files are changed; ``$GRAMSCOPE_COMMIT`` where that is set.

    A copy of the source on another machine may have no git, or a git that knows another commit.
    """
    if "GRAMSCOPE_COMMIT" in os.environ:
        return os.environ["GRAMSCOPE_COMMIT"]
    root = Path(gramscope.__file__).parents[2]
    try:
        found = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "experiments")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine(device: str) -> str:
    """Processor, cores and system, and the GPU where one was used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = f"{_processor()}, {cores} cores, {platform.system()}"
    if device.startswith("cuda"):
        import torch

        if torch.cuda.is_available():
            told += f", {torch.cuda.get_device_name(device)}"
    return told


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    found = {"gramscope": gramscope.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
