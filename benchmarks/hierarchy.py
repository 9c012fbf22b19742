"""The pullback operator A^1: matrix-free beside dense pairs, its memory, and how its cost grows.

    python benchmarks/hierarchy.py                 L = 6, width 512, n = 512
    python benchmarks/hierarchy.py --quick         a small size, for a look
    python benchmarks/hierarchy.py --device cuda

The dense form builds every pair A_{μν} (N, N) by the backward recursion and multiplies; it holds n² N² numbers, so it
is run at the largest size whose array fits into 1 GiB. Growth is measured by doubling one of depth, n and N, with the
other two fixed, and printed as an exponent beside the exponent of the FLOP count.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from torch import Tensor

import timing
from gramscope.hierarchy import Fields

GIB = 2**30


def build(depth: int, width: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Fields:
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(width, width, generator=rng) * (2 / width) ** 0.5 for _ in range(depth)]
    x = torch.randn(n, width, generator=rng)
    return Fields([w.to(device, dtype) for w in weights], x.to(device, dtype))


def dense_apply(fields: Fields, v: Tensor) -> Tensor:
    """``Σ_ν A_{μν} v_ν`` from all pairs, the paper's objects as they stand."""
    operator = fields.pullback(1)
    n, width = v.shape
    pairs = torch.empty(n, n, width, width, dtype=v.dtype, device=v.device)
    for mu in range(n):
        for nu in range(n):
            pairs[mu, nu] = operator.pair(mu, nu)
    return torch.einsum("mnij,nj->mi", pairs, v)


def flop(depth: int, width: int, n: int) -> float:
    """Two sweeps of ``depth - 2`` layers (2 n N² each), and a correlation for each of ``depth - 1`` levels."""
    sweeps = 2 * (depth - 2) * 2 * n * width**2
    correlation = min(2 * n * n * 2 * width, 2 * 2 * n * width**2)
    return sweeps + (depth - 1) * correlation


def median_seconds(fields: Fields, repeat: int) -> float:
    operator = fields.pullback(1)
    v = torch.randn_like(fields.activations[1])
    operator.apply(v)
    device = v.device
    return statistics.median(timing.seconds(lambda: operator.apply(v), device) for _ in range(repeat))


def exponent(small: float, large: float, factor: float) -> float:
    return math.log(large / small) / math.log(factor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeat", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    # On a GPU the size of the aim is over before the kernels have been launched; growth shows at four times the size.
    size = 64 if options.quick else 2048 if device.type == "cuda" else 512
    depth, width, n = 6, size, size

    fields = build(depth, width, n, device)
    operator = fields.pullback(1)
    v = torch.randn_like(fields.activations[1])
    rate = timing.MatmulRate(device)
    rate.sample()
    seconds = median_seconds(fields, options.repeat)
    rate.sample()
    peak = timing.peak_bytes(lambda: operator.apply(v), device)
    work = flop(depth, width, n)
    print(f"{rate}")
    print(f"A^1 applied, matrix-free, L = {depth}, width {width}, n = {n}: {1e3 * seconds:.2f} ms, "
          f"{work / 1e9:.2f} GFLOP, {work / seconds / rate.best:.0%} of the matmul rate")  # fmt: skip
    item = v.element_size()
    print(f"  memory it adds: {peak / 2**20:.1f} MiB; an n N² array would be {n * width**2 * item / GIB:.2f} GiB, "
          f"n² N² {n * n * width**2 * item / GIB:.0f} GiB")  # fmt: skip

    size = 4
    while (2 * size) ** 4 * item <= (2**24 if options.quick else 2**30) and 2 * size <= 96:
        size *= 2
    small = build(depth, size, size, device)
    w = torch.randn_like(small.activations[1])
    dense = timing.seconds(lambda: dense_apply(small, w), device)
    free = median_seconds(small, options.repeat)
    error = float((dense_apply(small, w) - small.pullback(1).apply(w)).norm() / dense_apply(small, w).norm())
    print(f"dense pairs at width {size}, n = {size}: {dense:.2f} s against {1e3 * free:.2f} ms, "
          f"{dense / free:.0f} times longer; they differ by {error:.1e}")  # fmt: skip

    print("growth on doubling, measured (FLOP count):")
    for name, (first, second) in {
        "depth": ((depth, width, n), (2 * depth, width, n)),
        "n": ((depth, width, n), (depth, width, 2 * n)),
        "N": ((depth, width, n), (depth, 2 * width, n)),
    }.items():
        times = [median_seconds(build(*shape, device), options.repeat) for shape in (first, second)]
        measured, counted = exponent(*times, 2), exponent(flop(*first), flop(*second), 2)
        print(f"  {name}: {1e3 * times[0]:.2f} -> {1e3 * times[1]:.2f} ms, exponent {measured:.2f} ({counted:.2f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
