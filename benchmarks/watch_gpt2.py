"""What watching costs GPT-2 small at default settings: bf16 autocast, batches of 8 x 512 tokens, 2,000 steps.

    python benchmarks/watch_gpt2.py                    on a GPU
    python benchmarks/watch_gpt2.py --tiny --steps 60  a tiny model on the CPU, to see that it runs

Unwatched steps run before and after the watched run, in the same process; their median says what training alone takes.
The opening, the last measurement and closing are counted as watching.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import gramscope as gs
from gramscope.record.budget import Budget

PROBE = 4  # sequences


class Training:
    def __init__(self, tiny: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 500} if tiny else {}
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
        if scope is not None:
            scope.close()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--plain", type=int, default=300, help="unwatched steps, before and after")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = Training(options.tiny, device)
    training.seconds(min(20, options.plain))  # warm-up
    parts, size = [], max(1, options.plain // 10)
    parts += [training.seconds(size) / size for _ in range(10)]
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
        watched = opening + training.seconds(options.steps, scope)
        measured = [record["step"] for record in scope.records]
        failed = {name: why for record in scope.records for name, why in record["failures"].items()}
    peak_watched = _peak(device)
    parts += [training.seconds(size) / size for _ in range(10)]
    one = statistics.median(parts)
    print(f"{device}: one training step {1e3 * one:.1f} ms; opening {opening:.2f} s ({opening / one:.0f} steps)")
    print(f"{options.steps} steps: {100 * (watched / (one * options.steps) - 1):.1f} % longer, the opening included")
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
