"""What watching costs: the same training with and without, in one process run, as a ratio.

    python benchmarks/watch.py                     the demo's MLP and ResNet-18 on the CPU, measured every 50 steps
    python benchmarks/watch.py --device cuda       both on the GPU

Runs alternate (without, with, without, with, ...) and the median of the ratios is printed, because machines are noisy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope import tasks

EVERY = 50


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    batch: int
    steps: int
    probe: int


def cases(device: torch.device) -> dict[str, Case]:
    digits = tasks.digits()
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.randn(512, 3, 32, 32, generator=rng), torch.randint(0, 10, (512,), generator=rng)
    long = device.type == "cuda"
    return {
        "demo MLP": Case(
            lambda: tasks.mlp((64, 64, 64, 64, 10)).to(device),
            digits.x.to(device),
            digits.y.to(device),
            64,
            10_000,
            100,
        ),
        "ResNet-18": Case(
            lambda: tasks.resnet18().to(device),
            images.to(device),
            labels.to(device),
            128 if long else 32,
            1000 if long else 150,
            16,
        ),
    }


def train(case: Case, overhead: float | None, watched: bool) -> tuple[float, gs.record.Scope | None]:
    """Seconds of the whole run, the watcher's opening and closing included."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    rng = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        _wait(case.x)
        begun = time.perf_counter()
        scope = None
        if watched:
            probe = (case.x[: case.probe], case.y[: case.probe])
            scope = gs.watch(model, probe=probe, out=Path(folder) / "run", every=EVERY, overhead=overhead).use(
                optimizer
            )
        for _ in range(case.steps):
            chosen = torch.randint(len(case.x), (case.batch,), generator=rng).to(case.x.device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(case.x[chosen]), case.y[chosen])
            loss.backward()
            optimizer.step()
            if scope is not None:
                scope.step(loss=loss)
        if scope is not None:
            scope.close()
        _wait(case.x)
        return time.perf_counter() - begun, scope


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", nargs="+", default=["demo MLP", "ResNet-18"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limited", action="store_true", help="only with the default overhead of 5 %%")
    options = parser.parse_args()
    device = torch.device(options.device)
    for name in options.case:
        case = cases(device)[name]
        train(Case(**{**vars(case), "steps": 2}), None, True)  # warm up both
        for overhead in (0.05,) if options.limited else (0.05, None):
            ratios = []
            for _ in range(options.repeat):
                plain, _ = train(case, None, False)
                seconds, scope = train(case, overhead, True)
                ratios.append(seconds / plain)
            assert scope is not None
            skipped = sum(len(record["skipped"]) for record in scope.records)
            costs = ", ".join(
                f"{n} {1e3 * s:.0f} ms" for n, s in sorted(scope.budget.costs.items(), key=lambda i: -i[1])
            )
            print(
                f"{name}, {case.steps} steps, measured every {EVERY}, overhead={overhead}: "
                f"{100 * (statistics.median(ratios) - 1):.1f} % longer (without {plain:.2f} s; {skipped} skipped; "
                f"one measurement: {costs})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
