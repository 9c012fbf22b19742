"""A process that fills a folder of tiles: ``python filling_process.py FOLDER NAME``, alone or as a rank of torchrun.

It says that it is ready (``FOLDER/NAME.ready``) and begins when it is told to (``FOLDER/NAME.go``).
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gramscope as gs

N, TILE, MEMORY = 50, 10, "200MB"  # 15 tiles


class Unhurried(nn.Sequential):
    """A network whose passes take long enough that another process can do something meanwhile."""

    pause = 0.0

    def forward(self, x):
        time.sleep(self.pause)
        return super().forward(x)


def build():
    generator = torch.Generator().manual_seed(0)
    model = Unhurried(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randn(N, 6, generator=generator)


def fill(out, pause=0.0):
    model, x = build()
    model.pause = pause
    return gs.ntk(model, x, out=out, tile=TILE, memory=MEMORY)


def main(folder, name):
    torch.set_num_threads(1)
    gs.ntk(*build())  # imports and first calls
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    else:
        (folder / f"{name}.ready").touch()
        while not (folder / f"{name}.go").exists():
            time.sleep(0.01)
    kernel = fill(folder / "K", pause=0.05)
    assert kernel.complete
    if "RANK" in os.environ:
        sums = [torch.zeros(()) for _ in range(2)]
        torch.distributed.all_gather(sums, kernel.to_tensor().sum())
        assert torch.equal(sums[0], sums[1])
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
