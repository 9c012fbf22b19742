"""What watching costs GPT-2 small at default settings: bf16 autocast, batches of 8 x 512 tokens, 2,000 steps.

    python benchmarks/watch_gpt2.py                    on a GPU
    python benchmarks/watch_gpt2.py --tiny --steps 60  a tiny model on the CPU, to see that it runs
    python benchmarks/watch_gpt2.py --operations       torch operations of a measurement, 12 narrow layers on the CPU
    python benchmarks/watch_gpt2.py --profile          what the first and third measurements wait for, on a GPU

Unwatched steps run between the watched ones, in the same process, so that a busy machine slows both alike; what they
take is what training alone takes. The opening, the last measurement and closing are counted as watching. Watched steps
that measured nothing are also compared with unwatched ones: that is what the hooks cost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import gramscope as gs
from gramscope.record.budget import Budget
from gramscope.record.measuring import Measurer

PROBE = 4  # sequences
TURN, PLAIN = 100, 25  # steps in a row, watched and not


class Training:
    def __init__(self, tiny: bool, device: torch.device, **other_sizes: int) -> None:
        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 500, **other_sizes} if tiny else {}
        config = GPT2Config(**sizes)
        self.device, self.autocast = device, torch.autocast(device.type, dtype=torch.bfloat16)
        self.batch, self.length, self.vocabulary = (4, 32, 500) if tiny else (8, 512, config.vocab_size)
        self.model = GPT2LMHeadModel(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1)
        self.rng = torch.Generator().manual_seed(0)

    def tokens(self, count: int) -> Tensor:
        """Sequences that can be learned: each token follows from the one before, with some noise."""
        first = torch.randint(self.vocabulary, (count, 1), generator=self.rng)
        ids = (first + 7 * torch.arange(self.length)) % self.vocabulary
        noise = torch.rand(ids.shape, generator=self.rng) < 0.1
        return torch.where(noise, torch.randint(self.vocabulary, ids.shape, generator=self.rng), ids).to(self.device)

    def step(self) -> Tensor:
        ids = self.tokens(self.batch)
        with self.autocast:
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def seconds(self, steps: int, scope: gs.record.Scope | None = None) -> float:
        self.wait()
        begun = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
            if scope is not None:
                scope.step(loss=loss)
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass
class Turns:
    """Seconds of watched and unwatched steps, in turns of ``TURN`` and ``PLAIN`` steps."""

    watched: float = 0.0
    unmeasured: list[float] = field(default_factory=list)  # a step of each turn that measured nothing
    plain: list[float] = field(default_factory=list)  # a step of each unwatched turn

    def run(self, training: Training, scope: gs.record.Scope, steps: int) -> None:
        while scope.count < steps:
            size = min(TURN, steps - scope.count)
            before = len(scope.records)
            seconds = training.seconds(size, scope)
            self.watched += seconds
            if len(scope.records) == before:
                self.unmeasured.append(seconds / size)
            if not scope.due_next():  # the hooks of the optimiser would take an unwatched step for a watched one
                self.plain.append(training.seconds(PLAIN) / PLAIN)
        begun = time.perf_counter()
        scope.close()
        training.wait()
        self.watched += time.perf_counter() - begun


class Operations(TorchDispatchMode):
    """Counts operations, and those for which a GPU is waited for."""

    WAITS = ("_local_scalar_dense", "equal", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.all = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.all += 1
        self.waits += func.overloadpacket.__name__ in self.WAITS
        return func(*args, **(kwargs or {}))


def count_operations() -> None:
    """Of a training step, and of each measure at the first three measurements. The number does not depend on width."""
    training = Training(True, torch.device("cpu"), n_layer=12, n_embd=48, n_head=12)
    training.step()
    with Operations() as own:
        training.step()
    print(f"a training step: {own.all} operations, {own.waits} waits")
    whole, time_one = [0, 0], Measurer._time

    def timed(self, name, work):  # type: ignore[no-untyped-def]
        with Operations() as own:
            result = time_one(self, name, work)
        whole[0], whole[1] = whole[0] + own.all, whole[1] + own.waits
        if own.all > 50:
            print(f"  {name}: {own.all} operations, {own.waits} waits")
        return result

    Measurer._time = timed  # type: ignore[assignment]
    print("measurement 1")
    scope = cheap_watch(training)
    for number in (2, 3):
        print(f"  in all: {whole[0]} operations, {whole[1]} waits\nmeasurement {number}")
        whole[:] = [0, 0]
        training.step()
        scope.step()
    print(f"  in all: {whole[0]} operations, {whole[1]} waits")


def profile_measurements(training: Training) -> None:
    """Of each measure of the first and the third measurement: how long it took, and how long the GPU worked on what.

    Where the GPU worked for much less, the time is that of Python and of launching; at the start, of loading kernels.
    """
    number, time_one = 1, Measurer._time

    def profiled(self, name, work):  # type: ignore[no-untyped-def]
        if number == 2:
            return time_one(self, name, work)
        training.wait()
        with torch.profiler.profile() as found:
            begun = time.perf_counter()
            result = time_one(self, name, work)
            training.wait()
            seconds = time.perf_counter() - begun
        kernels = [event for event in found.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        busy = sum(event.self_device_time_total for event in kernels)
        if seconds > 5e-3:
            count = sum(event.count for event in kernels)
            print(f"  {name}: {1e3 * seconds:.1f} ms, of which the GPU worked {busy / 1e3:.1f} ms on {count} kernels")
            for event in kernels[:6]:
                print(f"    {event.self_device_time_total / 1e3:8.2f} ms, {event.count:5d} x {event.key[:90]}")
        return result

    Measurer._time = profiled  # type: ignore[assignment]
    print("measurement 1, profiled, which takes time too")
    scope = cheap_watch(training)
    for number in (2, 3):
        training.step()
        if number == 3:
            print("measurement 3")
        scope.step()


def cheap_watch(training: Training) -> gs.record.Scope:
    """A watch that takes every measure at every step, but those that are expensive by nature."""
    measures = [
        name for name, measure in gs.record.WATCHED_MEASURES.items() if measure.by_default and measure.guess is None
    ]
    ids = training.tokens(PROBE)
    scope = gs.watch(training.model, {"input_ids": ids, "labels": ids}, every=1, overhead=None, measures=measures)
    return scope.use(training.optimizer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--operations", action="store_true", help="only count operations")
    parser.add_argument("--profile", action="store_true", help="only look at what a measurement waits for")
    options = parser.parse_args()
    if options.operations:
        count_operations()
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, turns = Training(options.tiny, device), Turns()
    training.seconds(PLAIN)  # warm-up
    if options.profile:
        profile_measurements(training)
        return 0
    peak = _peak(device)
    with tempfile.TemporaryDirectory() as folder:
        ids = training.tokens(PROBE)
        training.wait()
        begun = time.perf_counter()
        scope = gs.watch(training.model, {"input_ids": ids, "labels": ids}, out=Path(folder) / "run")
        scope.use(training.optimizer)
        training.wait()
        opening = time.perf_counter() - begun
        opened_peak = _peak(device)
        turns.run(training, scope, options.steps)
        measured = [record["step"] for record in scope.records]
        failed = {name: why for record in scope.records for name, why in record["failures"].items()}
    peak_watched = _peak(device)
    one = statistics.mean(turns.plain)
    longer = (opening + turns.watched) / (one * options.steps) - 1
    print(f"{device}: one training step {1e3 * one:.1f} ms; opening {opening:.2f} s ({opening / one:.0f} steps)")
    print(f"{options.steps} steps: {100 * longer:.1f} % longer, the opening included")
    if turns.unmeasured:  # a short run measures in every turn
        hooks = statistics.median(turns.unmeasured) / statistics.median(turns.plain) - 1
        print(f"steps that measured nothing: {100 * hooks:.1f} % longer than unwatched ones (medians)")
    print(f"{len(measured)} measurements at {measured}")
    _print_costs(scope, one)
    print(f"left out: {failed or 'nothing'}")
    if device.type == "cuda":
        peaks = {"training": peak, "the opening": opened_peak, "the watched run": peak_watched}
        print("peak GPU memory: " + ", ".join(f"{name} {size:.0f} MB" for name, size in peaks.items()))
    return 0


def _print_costs(scope: gs.record.Scope, one: float) -> None:
    """Each measure: how often, at which steps its first series stands, its first and its later times, and its total."""
    budget = scope.budget
    print(f"{'measure':18} times    first ms  later ms  all, % of training   in training steps, later")
    for name in sorted(budget.taken, key=lambda name: -_total(budget, name)):
        later = budget.costs.get(name, 0.0)
        share = 100 * _total(budget, name) / budget.training_time
        print(
            f"{name:18} {budget.taken[name]:5d} {1e3 * budget.cold[name]:11.1f} {1e3 * later:9.1f} {share:12.2f}"
            f"{later / one:26.2f}"
        )
    noted = sum(_total(budget, name) for name in budget.taken)
    print(f"everything: {budget.spent:.2f} s, of which measures {noted:.2f} s (estimated from the median of the last)")
    for name in ("loss/probe", "kernel/drift", "richness", "update_ratio/transformer.h.0.mlp.c_fc", "step/error"):
        print(f"  {name} at {[r['step'] for r in scope.records if name in r['scalars']]}")


def _total(budget: Budget, name: str) -> float:
    return budget.cold[name] + (budget.taken[name] - 1) * budget.costs.get(name, 0.0)


def _peak(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    found = torch.cuda.max_memory_allocated() / 2**20
    torch.cuda.reset_peak_memory_stats()
    return found


if __name__ == "__main__":
    raise SystemExit(main())
