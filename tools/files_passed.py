"""Which files of gramscope one call of ``gs.ntk`` passes, on an MLP, a CNN and BERT (needs transformers).

python tools/files_passed.py
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gramscope as gs
from zoo.families import TINY, build

PACKAGE = str(Path(gs.__file__).parent)


def files_passed(model: nn.Module, x: Any, **options: Any) -> list[str]:
    """The files of which some function runs in a second call: the first one imports what is imported on use."""
    gs.ntk(model, x, **options)
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            found.add(name.removeprefix(PACKAGE + "/"))

    sys.setprofile(note)
    try:
        gs.ntk(model, x, **options)
    finally:
        sys.setprofile(None)
    return sorted(found)


def main() -> None:
    mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    bert, ids, outputs = build("bert", TINY, 4, torch.float32, 0.02)
    calls = {
        "MLP": files_passed(mlp, torch.randn(4, 3)),
        "CNN": files_passed(cnn, torch.randn(4, 1, 8, 8)),
        "BERT": files_passed(bert, ids, outputs=outputs),
    }
    for name, files in calls.items():
        print(f"{name}: {len(files)} files")
    for file in sorted(set().union(*calls.values())):
        print(f"  {file:<32}", " ".join(name for name, files in calls.items() if file in files))


if __name__ == "__main__":
    main()
