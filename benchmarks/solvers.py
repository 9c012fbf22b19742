"""Top eigenvalues: gramscope, SciPy's eigsh and torch.lobpcg on the same operators, to the same residual.

    python benchmarks/solvers.py                       six spectra, k = 1, 10, 50, and a GRU's global kernel
    python benchmarks/solvers.py --device cuda         the same on a GPU (eigsh copies each vector to and from the host)
    python benchmarks/solvers.py --case GRU --k 50     one case
    python benchmarks/solvers.py --quick               small sizes: does everything run?

SciPy stops where each residual is below ``tol |θ_i|``; gramscope where all are below ``tol max|θ|``. "ours" gives
gramscope the stricter ``tol |θ_k| / |θ_1|``, so that all its pairs meet SciPy's rule; "ours, default rule" is ``tol``
as it stands. LOBPCG has at most 500 iterations and stops by torch's own rule; it takes dense matrices alone. "residual"
is the greatest true ``‖A v − θ v‖ / |θ|``. Contestants take turns; seconds are the best of the repeats, CPU time of
one thread on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import timing
from gramscope.linalg import Dense, LinearOperator, eigenvalues_top
from gramscope.propagators import GlobalNTK


class Counted(LinearOperator):
    """The same operator, with its products counted."""

    def __init__(self, op: LinearOperator) -> None:
        super().__init__(op.rows, op.cols, dtype=op.dtype, device=op.device, symmetric=True)
        self.op, self.products = op, 0

    def _matmat(self, x: Tensor) -> Tensor:
        self.products += x.shape[1]
        return self.op._matmat(x)

    _adjoint_matmat = _matmat


@dataclass(frozen=True)
class Found:
    values: Tensor
    vectors: Tensor


def spectra(n: int) -> dict[str, Tensor]:
    places = torch.arange(1, n + 1, dtype=torch.float64)
    data = torch.randn(3 * n // 2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outliers = torch.cat([torch.arange(2, 10, dtype=torch.float64), torch.linspace(0, 1.5, n - 8, dtype=torch.float64)])
    return {
        "1/i": 1 / places,
        "1/i^2": places**-2,
        "0.9^i": 0.9**places,
        "flat": torch.linspace(0, 1, n, dtype=torch.float64),
        "Marchenko-Pastur": torch.linalg.eigvalsh(data.T @ data / len(data)),
        "8 outliers": outliers,
    }


def with_spectrum(values: Tensor, device: torch.device, dtype: torch.dtype) -> Dense:
    random = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    basis = torch.linalg.qr(random).Q
    whole = (basis * values) @ basis.T
    return Dense(((whole + whole.T) / 2).to(device=device, dtype=dtype), symmetric=True)


def ours(op: LinearOperator, k: int, tol: float) -> Found:
    pairs = eigenvalues_top(op, k, tol=tol, max_products=20_000)
    return Found(pairs.values, pairs.vectors)


def scipy_eigsh(op: LinearOperator, k: int, tol: float) -> Found:
    start = np.random.default_rng(0).standard_normal(op.cols.size)
    values, vectors = eigsh(op.to_scipy(), k=k, tol=tol, v0=start)
    order = np.argsort(values)[::-1].copy()
    return Found(*(torch.from_numpy(part.copy()) for part in (values[order], vectors[:, order])))


def lobpcg(op: Counted, k: int, tol: float) -> Found:
    """torch's function takes matrices alone; its products are k for each step, which its tracker counts."""
    start = torch.randn(op.cols.size, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def count(worker: Any) -> None:
        op.products += k

    matrix = op.op.matrix
    return Found(*torch.lobpcg(matrix, X=start.to(matrix), tol=tol, niter=500, tracker=count))


def residual(op: LinearOperator, found: Found) -> float:
    vectors = found.vectors.to(dtype=op.dtype, device=op.device)
    off = op.matmat(vectors).double() - vectors.double() * found.values.to(op.device).double()
    return float((off.norm(dim=0) / found.values.to(op.device).abs()).max())


def compare(name: str, op: LinearOperator, k: int, tol: float, repeats: int, peers: list[str]) -> dict[str, float]:
    counted = Counted(op)
    least = scipy_eigsh(op, k, tol).values
    strict = tol * float(least.min() / least.max())
    calls: dict[str, Callable[[], Found]] = {
        "ours": lambda: ours(counted, k, strict),
        "eigsh": lambda: scipy_eigsh(counted, k, tol),
        "ours, default rule": lambda: ours(counted, k, tol),
        "lobpcg": lambda: lobpcg(counted, k, strict),
    }
    calls = {who: call for who, call in calls.items() if who in peers}
    seconds: dict[str, list[float]] = {who: [] for who in calls}
    products, error = {}, {}
    for turn in range(repeats):
        for who, call in calls.items():
            if who == "lobpcg" and turn:
                continue
            counted.products = 0
            held: list[Found] = []
            try:
                seconds[who].append(timing.seconds(lambda held=held, call=call: held.append(call()), op.device))
            except (RuntimeError, ValueError) as failure:
                print(f"{name:18s} k {k:3d}  {who:20s} failed: {str(failure).splitlines()[0][:60]}")
                seconds[who].append(float("nan"))
                continue
            products[who], error[who] = counted.products, residual(op, held[0])
    best = {who: min(taken) for who, taken in seconds.items()}
    for who in products:
        ratio = f"x eigsh {products[who] / products['eigsh']:5.2f} {best[who] / best['eigsh']:5.2f}"
        cost = f"{products[who]:6d} products {best[who]:9.4f} s   {ratio}"
        print(f"{name:18s} k {k:3d}  {who:20s} {cost}   residual {error[who]:.1e}", flush=True)
    return {"products": products["ours"] / products["eigsh"], "seconds": best["ours"] / best["eigsh"]}


def gru(device: torch.device, quick: bool) -> LinearOperator:
    width, steps, trials = (32, 10, 8) if quick else (128, 50, 32)
    torch.manual_seed(0)
    model = nn.GRU(16, width, batch_first=True).to(device)
    return GlobalNTK(model, torch.randn(trials, steps, 16, device=device)).operator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--tol", type=float, nargs="+", default=[1e-3, 1e-8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs="+", default=[*spectra(16), "GRU"], help="spectra by name, or GRU")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        timing.use_cpu_time()
    n, repeats = (200, 1) if options.quick else (options.n, options.repeats)
    peers = ["ours", "eigsh", "ours, default rule", "lobpcg"]
    ratios = []
    for tol in options.tol:
        print(f"\ndense matrices of size {n}, float64, {device}, tol {tol:.0e}")
        for name, values in spectra(n).items():
            if name in options.case:
                op = with_spectrum(values, device, torch.float64)
                ratios += [compare(name, op, k, tol, repeats, peers) for k in options.k]
    for what in ("products", "seconds") if ratios else ():
        found = [ratio[what] for ratio in ratios]
        print(f"\nours / eigsh, {what}: median {statistics.median(found):.2f}, greatest {max(found):.2f}", end="")
    if "GRU" in options.case:
        print(f"\n\nGRU, P K P*, float32, {device}, tol 1e-03")
        op = gru(device, options.quick)
        for k in options.k:
            compare("GRU", op, k, 1e-3, repeats, ["ours", "eigsh", "ours, default rule"])


if __name__ == "__main__":
    main()
