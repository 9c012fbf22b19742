"""A process that may take little more memory than it has: ``python limited_process.py FOLDER [GROUP]``.

It writes a kernel that is larger than that and works with it. The limit is one of the operating system, which ends
allocations and not the estimate alone: of the address space (``RLIMIT_AS``), or of the control group GROUP, whose
processes the system kills where they take more. ``python limited_process.py GROUP`` takes more.
"""

import math
import resource
import sys
from pathlib import Path

import torch
from torch import nn

import gramscope as gs

N, ROOM = 6000, 120_000_000  # 144 MB of kernel
ROOM_OF_GROUP = 250_000_000
FILES = {  # limit and usage of a control group of either kind
    "memory.max": "memory.current",
    "memory.limit_in_bytes": "memory.usage_in_bytes",
}


def build(n=N):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(n, 8, generator=generator)


def limit_address_space():
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, now + ROOM))
    return N


def limit_group(group):
    """Examples whose kernel is larger than all that the group may have."""
    limit, usage = next(pair for pair in FILES.items() if (group / pair[0]).exists())
    most = int((group / usage).read_text()) + ROOM_OF_GROUP
    (group / limit).write_text(str(most))
    return math.isqrt(most // 4) + 100


def main(folder, group=None):
    torch.set_num_threads(1)
    model, x = build(8)
    gs.ntk(model, x, reduce="trace", out=folder / "first").eigenvalues_top(1)  # imports, threads and first calls
    model, x = build(limit_address_space() if group is None else limit_group(group))
    try:
        gs.ntk(model, x, reduce="trace")
    except gs.GramscopeError as error:
        print("refused:", error)
    kernel = gs.ntk(model, x, reduce="trace", out=folder / "K")
    assert kernel.complete
    print("written:", kernel.plan.bytes)
    if group is not None:
        y = torch.arange(len(x)) % 3
        print(kernel.trace(), kernel.target_alignment(y), kernel.eigenvalues_top(1, tol=1e-2).values)
        assert kernel.regress(torch.tanh(x[:, :1]), ridge=1e4, rank=10, tol=1e-1).solution.all_converged
        gs.ntk(model, x, reduce="trace", out=folder / "K")  # goes on: every tile is read again
        print("worked with")


def take_too_much(group):
    torch.ones(4 * limit_group(group) ** 2, dtype=torch.uint8)
    print("not killed")


if __name__ == "__main__":
    if len(sys.argv) == 2 and (Path(sys.argv[1]) / "cgroup.procs").exists():
        take_too_much(Path(sys.argv[1]))
    else:
        main(*map(Path, sys.argv[1:]))
