"""A process that may take little more memory than it has: ``python limited_process.py FOLDER`` writes a larger kernel.

The limit is one of the operating system (``RLIMIT_AS``), which ends allocations and not the estimate alone.
"""

import resource
import sys
from pathlib import Path

import torch
from torch import nn

import gramscope as gs

N, ROOM = 6000, 120_000_000  # 144 MB of kernel


def build():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(N, 8, generator=generator)


def main(folder):
    torch.set_num_threads(1)
    model, x = build()
    gs.ntk(model, x[:8], reduce="trace", out=folder / "first")  # imports, threads and first calls
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, now + ROOM))
    try:
        gs.ntk(model, x, reduce="trace")
    except gs.GramscopeError as error:
        print("refused:", error)
    kernel = gs.ntk(model, x, reduce="trace", out=folder / "K")
    assert kernel.complete
    print("written:", kernel.plan.bytes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
