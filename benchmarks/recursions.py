"""Time of the finite-width recursions for 2, 4 and 8 inputs: one step from layer 2 to layer 3, all nine tensors.

    python benchmarks/recursions.py                    tanh, gelu, erf (quadrature), relu (closed form)
    python benchmarks/recursions.py --tolerance 1e-7   a looser tolerance of the quadrature

Seconds of processor time on one thread; "error" is the largest difference of a tensor of layer 3 from the same at a
hundredth of the tolerance, relative to that tensor's largest entry (for up to 4 inputs).
"""

from __future__ import annotations

import argparse

import torch

import timing
from gramscope.theory import FiniteWidthMLP


def measure(name: str, inputs: int, tolerance: float) -> tuple[float, float | None]:
    rng = torch.Generator().manual_seed(inputs)
    x = torch.nn.functional.normalize(torch.randn(inputs, 10, generator=rng, dtype=torch.float64)) * 10**0.5
    mlp = FiniteWidthMLP(widths=[10, 64, 64, 64], activation=name, C_b=0.1, C_W=1.5)
    flow = mlp.flow(x[:1], tol=tolerance)  # warm the table of nodes

    def call() -> None:
        nonlocal flow
        flow = mlp.flow(x, tol=tolerance)

    seconds = timing.seconds(call, torch.device("cpu")) / 2  # two steps
    if inputs > 4:
        return seconds, None
    finer = mlp.flow(x, tol=max(tolerance / 100, 1e-13))[3].tensors()
    gaps = [
        float((t - finer[k]).abs().max() / finer[k].abs().max().clamp(min=1e-30)) for k, t in flow[3].tensors().items()
    ]
    return seconds, max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tolerance", type=float, default=1e-10)
    parser.add_argument("--inputs", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    timing.use_cpu_time()
    print(f"tolerance {arguments.tolerance:g}; seconds a step, error")
    for name in ("tanh", "gelu", "relu", "erf"):
        cells = []
        for inputs in arguments.inputs:
            seconds, error = measure(name, inputs, arguments.tolerance)
            cells.append(f"N = {inputs}: {seconds:7.3f} s" + (f", {error:.0e}" if error is not None else ""))
        print(f"{name:6s}", "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
