"""Interference of the five tasks of the battery at realistic sizes, matrix-free: seconds and memory.

python benchmarks/task_interference.py [--hidden 128] [--trials 8] [--products 32] [--device cpu] [--train 200]
"""

import argparse
import resource
import time

import torch

import gramscope as gs
from gramscope.propagators import task_interference


def train(model: torch.nn.Module, task: gs.tasks.TaskBattery, steps: int) -> list[float]:
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model(task.x.to(next(model.parameters()))))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--products", type=int, default=32)
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kind", default="gru")
    given = parser.parse_args()
    task = gs.tasks.battery(trials=given.trials, seed=0)
    model = gs.tasks.recurrent(given.kind, task.x.shape[2], given.hidden, task.y.shape[2]).to(given.device)
    states = task.x.shape[0] * task.x.shape[1] * (given.hidden + task.y.shape[2])
    print(f"{given.kind}, H {given.hidden}, {len(task.x)} trials of {task.x.shape[1]} steps: {states:,} states")
    for steps in (0, given.train):
        losses = train(model, task, steps)
        start, wall = time.process_time(), time.perf_counter()
        found = task_interference(model, task, products=given.products)
        seconds = time.process_time() - start
        print(f"after {steps} steps" + (f", loss {losses[-1]:.3f}" if losses else ""))
        print(f"  {seconds:.1f} s of CPU time, {time.perf_counter() - wall:.1f} s by the clock")
        print("  tasks", ", ".join(found.names))
        for name, matrix in (("cosines", found.cosines), ("reach", found.reach), ("its error", found.reach_error)):
            print(f"  {name}\n    " + "\n    ".join(" ".join(f"{v:6.2f}" for v in row) for row in matrix.tolist()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB; one matrix of the states would take {states**2 * 4 / 2**30:.0f} GiB")


if __name__ == "__main__":
    main()
