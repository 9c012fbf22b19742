"""How much memory may be used: what the user allows, or half of what is free to this process."""

import math
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from gramscope.base.errors import InputError

Memory = int | float | str | None
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def memory_budget(memory: Memory, device: torch.device) -> int:
    """Bytes to stay within: ``memory`` as a number or a size such as "2GB" or "512 MiB"; half of what is free if None.

    >>> memory_budget("1.5 GiB", torch.device("cpu")) == 1.5 * 2**30
    True
    """
    if memory is None:
        return free_memory(device) // 2
    if isinstance(memory, str) and (found := _SIZE.fullmatch(memory)):
        memory = float(found[1]) * UNITS[found[2].lower()]
    if isinstance(memory, bool | str) or not isinstance(memory, int | float) or not 1 <= memory < math.inf:
        raise InputError(f'memory must be a positive number of bytes, or a size such as "2GB", got {memory!r}.')
    return int(memory)


def check_budget(need: int, memory: Memory, device: torch.device, what: str, advice: str) -> int:
    """The budget in bytes; raise unless ``need`` bytes fit."""
    budget = memory_budget(memory, device)
    if need > budget:
        raise InputError(f"memory must be at least {need:,} bytes for {what}, got {budget:,}. {advice}")
    return budget


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on ``device``. The processes of one job on one machine share."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # set by torchrun and its like
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free // math.ceil(ranks / torch.cuda.device_count()) + own)
    limits = [available(), *cgroup_rooms(), address_space()]
    return min((limit for limit in limits if limit is not None), default=8 * 2**30) // ranks


def available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What the machine has left, as Linux estimates it."""
    text = meminfo.read_text() if meminfo.exists() else ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def cgroup_rooms(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What the control groups of this process, and those around them, leave it: containers are such groups."""
    for folder, names in _groups(root, own.read_text() if own.exists() else ""):
        if (room := _room(folder, *names)) is not None:
            yield room


@lru_cache(maxsize=8)
def _groups(root: Path, membership: str) -> list[tuple[Path, tuple[str, str, str, str]]]:
    """The folders of the control groups that count memory, and what their files are called."""
    found = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, base = ("memory.max", "memory.current", "{}_file", "file_mapped"), root
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_{}_file", "total_mapped_file"
            base = root / "memory"
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container its own group is often mounted as the root, and the path is that of the host.
        around = (folder for folder in (group, *group.parents) if folder.is_relative_to(base))
        found += [(folder, names) for folder in around if (folder / names[1]).exists()]
    return found


def _room(folder: Path, limit: str, usage: str, cache: str, mapped: str) -> int | None:
    """Limit less usage, where files that are merely cached do not count as used; None without a limit.

    Both lists of cached files count: the kernel moves files that are read twice from the inactive to the active one.
    """
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text() if (folder / "memory.stat").exists() else ""
    except (OSError, ValueError):
        return None
    if not most.isdigit():  # "max"
        return None
    bytes_of = {name: int(count) for name, count in (line.split() for line in stat.splitlines())}
    cached = sum(bytes_of.get(cache.format(kind), 0) for kind in ("inactive", "active")) - bytes_of.get(mapped, 0)
    return max(0, int(most) - used + max(0, cached))


def address_space(statm: Path = Path("/proc/self/statm")) -> int | None:
    """What ``ulimit -v`` leaves; None without such a limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not statm.exists():
        return None
    return max(0, limit - int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
