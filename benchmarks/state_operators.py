"""Collapse over and above the task, blocked components over tasks and initial dynamics, ranks of self-attention.

python benchmarks/state_operators.py [--hidden 128] [--trials 20] [--products 4] [--only learnt]
"""

import argparse

import torch
from torch import nn

import gramscope as gs
from gramscope.propagators import (
    GlobalNTK,
    blocked_components,
    collapse_beyond_task,
    finite_time_exponent,
    kernel_rank,
)
from gramscope.propagators.blocked import components

TASKS = ("memory_pro", "delayed_match", "go_anti", "context_integration", "interval_timing", "n_back", "flip_flop")


def over_tasks(hidden: int, trials: int, products: int) -> None:
    print(f"tanh network, H {hidden}, {trials} trials; participation ratios over time")
    print(f"{'task':20} gain  exponent  task  kernel ratio    K   P P* | noise kernel ratio | blocked, by component")
    for name in TASKS:
        task = getattr(gs.tasks, name)(trials)
        for gain in (0.5, 1.0, 2.0, 4.0):
            model = gs.tasks.recurrent("rnn", task.x.shape[2], hidden, task.y.shape[2])
            with torch.no_grad():
                model.cell.weight_hh_l0.mul_(gain)
            found = collapse_beyond_task(model.cell, task.x, task.y, products=products)
            parts = blocked_components(model, task, products=32)
            exponent = float(finite_time_exponent(GlobalNTK(model.cell, task.x[:2])).mean())
            relative = " ".join(
                f"{share:.2f}:{value:.2g}" for share, value in zip(parts.share, parts.relative, strict=True)
            )
            print(
                f"{name:20} {gain:4} {exponent:9.3f} {found.task:5.1f} {found.kernel:7.2f} {found.ratio:5.2f} "
                f"{found.parameters:5.1f} {found.propagator:5.1f} | {found.noise_task:5.1f} {found.noise_kernel:6.2f} "
                f"{found.noise_ratio:5.2f} | {parts.blocked_share:.2f}  {relative}",
                flush=True,
            )


def learnt(hidden: int, trials: int, steps: int) -> None:
    """Are components with a small quotient at the start learnt late? By full-batch Adam, at gain 1."""
    print(f"components after {steps} steps of Adam (1e-3): share, relative quotient at the start, part learnt")
    pairs = []
    for name in TASKS:
        task = getattr(gs.tasks, name)(trials)
        model = gs.tasks.recurrent("rnn", task.x.shape[2], hidden, task.y.shape[2])
        found = blocked_components(model, task)
        modes = components(task, None)[0].float()
        mask = task.mask[..., None].float()
        before = ((model(task.x) - task.y) * mask).flatten().detach() @ modes
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            task.loss(model(task.x)).backward()
            optimizer.step()
        after = ((model(task.x) - task.y) * mask).flatten().detach() @ modes
        part = 1 - (after / before).square()
        pairs += list(zip(found.relative.tolist(), part.tolist(), strict=True))
        shown = zip(found.share, found.relative, part, strict=True)
        print(f"{name:20} " + "  ".join(f"{a:.2f} {b:.2g} {c:.3f}" for a, b, c in shown), flush=True)
    ranks = [torch.tensor(column).argsort().argsort().double() for column in zip(*pairs, strict=True)]
    print(f"rank correlation of quotient and part learnt, {len(pairs)} components: {corr(ranks):.2f}")


def corr(ranks: list[torch.Tensor]) -> float:
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


def attention() -> None:
    print("self-attention, 8 units, 2 heads, float64: states, bound, rank, effective rank, participation ratio")
    for trials, tokens in ((1, 2), (1, 8), (2, 8), (4, 16), (4, 24)):
        torch.manual_seed(0)
        model = SelfAttention(8, 2, batch_first=True).double()
        found = kernel_rank(GlobalNTK(model, torch.randn(trials, tokens, 8, dtype=torch.float64)))
        print(
            f"{trials} x {tokens:2} tokens: {found.size:5} {found.bound:4} {found.rank:4} {found.effective_rank:6.1f} "
            f"{found.participation_ratio:6.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--products", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=["attention", "tasks", "learnt"])
    given = parser.parse_args()
    if given.only in (None, "attention"):
        attention()
    if given.only in (None, "tasks"):
        over_tasks(given.hidden, given.trials, given.products)
    if given.only in (None, "learnt"):
        learnt(given.hidden, given.trials, given.steps)


if __name__ == "__main__":
    main()
