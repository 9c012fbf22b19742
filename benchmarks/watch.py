"""What watching costs: one measurement in units of a training step, and a whole run with and without.

    python benchmarks/watch.py                     on the CPU
    python benchmarks/watch.py --device cuda       on the GPU
    python benchmarks/watch.py --measurement          only the measurement in units of a training step
    python benchmarks/watch.py --memory            a language model with GPT-2's vocabulary: opening and peak memory

Runs alternate (without, with, without, with, ...) and the median of the ratios is printed, because machines are noisy.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope import tasks
from gramscope.record.budget import Budget


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    batch: int
    steps: int
    probe: int


class GPT(nn.Module):
    """Two blocks of causal attention, 64 wide."""

    def __init__(self, vocabulary: int = 80, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def cases(device: torch.device) -> dict[str, Case]:
    digits = tasks.digits()
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.randn(512, 3, 32, 32, generator=rng), torch.randint(0, 10, (512,), generator=rng)
    wide = torch.randn(512, 784, generator=rng)
    ids = torch.randint(80, (64, 65), generator=rng)
    large = digits.x.reshape(-1, 1, 8, 8).repeat(1, 1, 2, 2)
    long = device.type == "cuda"
    made = {
        "demo MLP": Case(lambda: tasks.mlp((64, 64, 64, 64, 10)), digits.x, digits.y, 64, 10_000, 100),
        "wide MLP": Case(lambda: tasks.mlp((784, 1024, 1024, 10)), wide, labels, 64, 300, 256),
        "CNN": Case(cnn, large, digits.y, 64, 1000, 100),
        "GPT": Case(GPT, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), 8, 300, 8),
        "ResNet-18": Case(tasks.resnet18, images, labels, 128 if long else 32, 1000 if long else 150, 16),
    }
    return {
        name: Case(
            lambda build=case.build: build().to(device),
            case.x.to(device),
            case.y.to(device),
            case.batch,
            case.steps,
            case.probe,
        )
        for name, case in made.items()
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
            scope = gs.watch(model, probe=probe, out=Path(folder) / "run", overhead=overhead).use(optimizer)
        for _ in range(case.steps):
            chosen = torch.randint(len(case.x), (case.batch,), generator=rng).to(case.x.device)
            loss = _step(model, optimizer, case.x[chosen], case.y[chosen])
            if scope is not None:
                scope.step(loss=loss)
        if scope is not None:
            scope.close()
        _wait(case.x)
        return time.perf_counter() - begun, scope


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    f = model(x)
    loss = F.cross_entropy(f.reshape(-1, f.shape[-1]), y.reshape(-1))
    loss.backward()
    optimizer.step()
    return loss


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


RUN, LONGEST = 2000, 120.0  # steps of a run whose measurements are averaged, unless training takes so many seconds


def measurement(name: str, case: Case) -> None:
    """One warm measurement of everything, in units of a training step on the probe; on the CPU in time of its own."""
    x, y = case.x[: case.probe], case.y[: case.probe]
    clock = time.perf_counter if x.is_cuda else time.process_time
    Budget.clock = staticmethod(clock)  # type: ignore[method-assign]
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scope = gs.watch(model, (x, y), every=1, overhead=None).use(optimizer)
    steps = []
    for _ in range(7):
        _wait(x)
        begun = clock()
        for _ in range(5):
            _step(model, optimizer, x, y)
        _wait(x)
        steps.append((clock() - begun) / 5)
        scope.step()
    one = statistics.median(steps)
    costs = {n: s / one for n, s in sorted(scope.budget.costs.items(), key=lambda i: -i[1])}
    parts = ", ".join(f"{n} {s:.1f}" for n, s in costs.items() if s >= 0.05)
    print(
        f"{name}, a measurement in training steps of {1e3 * one:.1f} ms: {sum(costs.values()):.1f} ({parts})",
        flush=True,
    )
    scope.close(measure=False)
    if one * RUN < LONGEST:
        average(name, case, one)


def average(name: str, case: Case, one: float) -> None:
    """What the measurements of a whole run at default settings cost, in training steps of ``one`` second.

    The cheap measures are taken at each of them, the others where the time allows. So this is what a user pays.
    """
    x, y = case.x[: case.probe], case.y[: case.probe]
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scope = gs.watch(model, (x, y)).use(optimizer)
    budget, seconds = scope.budget, Counter[str]()
    opening, note = budget.spent, budget.note

    def noted(measure: str, took: float) -> None:
        seconds[measure] += took
        note(measure, took)

    budget.note = noted  # type: ignore[method-assign]
    for _ in range(RUN):
        scope.step(loss=_step(model, optimizer, x, y))
    scope.close()
    later = len(scope.records) - 1
    costly = [n for n, measure in gs.record.WATCHED_MEASURES.items() if measure.guess is not None]
    rest = budget.spent - opening - sum(seconds[n] for n in costly)
    taken = ", ".join(f"{n} {budget.taken.get(n, 0) - 1}" for n in ("kernel", *costly) if budget.taken.get(n, 0) > 1)
    print(
        f"    {RUN} steps at default settings: opening {opening / one:.0f} training steps, {later} measurements later "
        f"of {(budget.spent - opening) / later / one:.1f} on average, {rest / later / one:.1f} of them for what is not "
        f"expensive by nature ({taken} times); in all {100 * budget.overhead:.1f} % of training",
        flush=True,
    )


def memory(watched: bool) -> None:
    """Run in a process of its own: a GPT-2 of two layers with the vocabulary of GPT-2; peak memory, and opening."""
    import resource

    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model, ids = GPT2LMHeadModel(config), torch.randint(50257, (4, 256))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times = []
    for step in range(4):
        if watched and step == 2:
            begun = time.process_time()
            scope = gs.watch(model, batch, every=1).use(optimizer)
            opening = time.process_time() - begun
        begun = time.process_time()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        times.append(time.process_time() - begun)
    if watched:
        scope.step()
        print(f"opening took {opening / statistics.median(times):.1f} training steps, ", end="")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


def compare_memory() -> None:
    plain, watched = (
        subprocess.run([sys.executable, __file__, "--part", kind], capture_output=True, text=True, check=True).stdout
        for kind in ("plain", "watched")
    )
    said, _, peak = watched.rpartition(", ")
    print(f"V = 50,257, T = 256: {said}; peak {peak.strip()} MB, of training alone {plain.strip()} MB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", nargs="+", default=["demo MLP", "wide MLP", "CNN", "GPT", "ResNet-18"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measurement", action="store_true", help="only one measurement in units of a training step")
    parser.add_argument("--memory", action="store_true", help="only the language model's memory")
    parser.add_argument("--part", choices=["plain", "watched"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        memory(options.part == "watched")
        return 0
    if options.memory:
        compare_memory()
        return 0
    real = Budget.clock
    for name in options.case:
        case = cases(torch.device(options.device))[name]
        measurement(name, case)
        Budget.clock = staticmethod(real)  # type: ignore[method-assign]
        if options.measurement:
            continue
        train(Case(**{**vars(case), "steps": 2}), None, True)  # warm up both
        ratios = []
        for _ in range(options.repeat):
            plain, _ = train(case, None, False)
            seconds, scope = train(case, 0.05, True)
            ratios.append(seconds / plain)
        assert scope is not None
        longer = 100 * (statistics.median(ratios) - 1)
        print(
            f"{name}, {case.steps} steps at default settings: {longer:.1f} % longer (without {plain:.2f} s), "
            f"{len(scope.records)} measurements",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
