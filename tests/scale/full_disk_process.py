"""A process whose disk becomes full: ``python full_disk_process.py FOLDER``, FOLDER being a small disk."""

import sys
from pathlib import Path

import torch

import gramscope as gs

DISK, TAKEN, N, TILE = 3_000_000, 2_000_000, 600, 100  # bytes; 1.44 MB of kernel in 21 tiles


def main(folder):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model, x = torch.nn.Linear(8, 1), torch.randn(N, 8, generator=generator)
    (folder / "taken").write_bytes(bytes(TAKEN))
    try:
        gs.ntk(model, x, reduce="trace", out=folder / "K", tile=TILE)
    except gs.GramscopeError as error:
        print("stopped:", error)
    half = gs.open_kernel(folder / "K")
    assert 0 < len(half.missing) < 21
    assert not half.verify(), "what is there is whole"
    assert not list((folder / "K" / "claims").iterdir())
    (folder / "taken").unlink()
    kernel = gs.ntk(model, x, reduce="trace", out=folder / "K", tile=TILE)
    assert kernel.complete
    assert torch.equal(kernel.to_tensor(), gs.ntk(model, x, reduce="trace"))
    print("went on")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
