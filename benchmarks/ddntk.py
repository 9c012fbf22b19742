"""What third-order products cost, in units of one forward pass over the batch.

python benchmarks/ddntk.py        about two minutes on one core; tanh 784-1024-1024-1024-10, N = 256, float32

Processor time, taken in turns with the forward pass. ``train_truncated`` is timed over 5 steps.
"""

import time
from itertools import pairwise

import torch
from torch import nn

from gramscope.kernels import DDNTK, ntk_acceleration, output_curvature, output_third_order, train_truncated


def seconds(work, turns=3):
    """The least processor time of some turns."""
    found = []
    for _ in range(turns):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def main():
    torch.manual_seed(0)
    sizes = [784, 1024, 1024, 1024, 10]
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    model, x, y = nn.Sequential(*layers[:-1]), torch.randn(256, 784), torch.randn(256, 10)
    residual = model(x).detach() - y
    with torch.no_grad():
        model(x)
        unit = min(seconds(lambda: model(x), 10), seconds(lambda: model(x), 10))
    print(f"forward pass {1e3 * unit:.0f} ms of processor time, {torch.get_num_threads()} threads")
    acceleration = ntk_acceleration(model, x, residual, check=False)
    both = DDNTK(model, x, check=False)
    vector = residual.flatten()
    second = both.second(residual, residual)
    second @ vector
    acceleration @ vector
    works = {
        "output_curvature, check=False": lambda: output_curvature(model, x, residual, check=False),
        "output_third_order, check=False": lambda: output_third_order(model, x, residual, check=False),
        "output_third_order": lambda: output_third_order(model, x, residual),
        "ntk_acceleration, first product": lambda: ntk_acceleration(model, x, residual, check=False) @ vector,
        "ntk_acceleration, each further product": lambda: acceleration @ vector,
        "DDNTK.second(a, b), each further product": lambda: second @ vector,
    }
    for name, work in works.items():
        print(f"{name:45s} {seconds(work) / unit:6.1f} c", flush=True)
    for order in (1, 2, 3):
        spent = seconds(lambda: train_truncated(model, x, y, lr=1e-5, order=order, steps=5), turns=2)  # noqa: B023
        print(f"train_truncated, order {order}, a step {'':17s} {spent / 5 / unit:6.1f} c", flush=True)


if __name__ == "__main__":
    main()
