"""How often the 95 % intervals of the random estimates hold the truth: spectra, estimators, numbers of products.

    python benchmarks/coverage.py                # 400 seeds, about five minutes on one core
    python benchmarks/coverage.py --seeds 100

Each cell: percent covered by 2 standard errors, and by ``interval(0.95)``.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gramscope.linalg import Dense, TraceEstimate, hutchinson, hutchpp, one_sided_trace, xtrace
from gramscope.propagators import alignment, participation_ratio

SIZE = 200
BUDGETS = (4, 6, 8, 12, 24, 50, 100)
Estimator = Callable[[int, int], TraceEstimate]


def spectra() -> dict[str, Tensor]:
    place = torch.arange(1, SIZE + 1, dtype=torch.float64)
    return {
        "power law 1": place**-1,
        "power law 1.5": place**-1.5,
        "power law 2": place**-2,
        "exponential 0.7": 0.7**place,
        "exponential 0.95": 0.95**place,
        "flat, 1 to 2": torch.linspace(1, 2, SIZE, dtype=torch.float64),
        "indefinite, -1 to 1": torch.linspace(-1, 1, SIZE, dtype=torch.float64),
        "spike 100 on 1": torch.where(place == 1, 100.0, 1.0).double(),
        "rank 1": torch.where(place == 1, 1.0, 0.0).double(),
        "rank 5": torch.where(place <= 5, 1.0, 0.0).double(),
    }


def with_spectrum(values: Tensor, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=rng, dtype=torch.float64)).Q
    matrix = (basis * values) @ basis.mT
    return (matrix + matrix.mT) / 2


def estimators(values: Tensor) -> Iterator[tuple[str, Estimator, float, int]]:
    """Name, estimator, truth, and the fewest products."""
    matrix = with_spectrum(values, 0)
    op, trace = Dense(matrix, symmetric=True), float(values.sum())
    for method, least in ((hutchinson, 2), (hutchpp, 6), (xtrace, 4)):
        yield method.__name__, lambda products, seed, method=method: method(op, products, seed=seed), trace, least  # type: ignore[misc]
    factor = Dense(with_spectrum(values.abs().sqrt(), 0))
    yield "one-sided", lambda products, seed: one_sided_trace(factor, products, seed=seed), float(values.abs().sum()), 2
    rank = float(values.sum() ** 2 / (values @ values))
    yield "effective rank", lambda products, seed: participation_ratio(op, products=products, seed=seed), rank, 3
    mixed = Dense(matrix + with_spectrum(values, 1) / 20, symmetric=True)
    cosine = float((matrix * mixed.matrix).sum() / matrix.norm() / mixed.matrix.norm())
    yield "alignment", lambda products, seed: alignment(op, mixed, products=products, seed=seed), cosine, 3


def cell(estimate: Estimator, truth: float, products: int, seeds: int) -> str:
    found = [estimate(products, seed) for seed in range(seeds)]
    plain = sum(abs(e.value - truth) <= 2 * e.standard_error for e in found) / seeds
    covered = sum(low <= truth <= high for low, high in (e.interval(0.95) for e in found)) / seeds
    return f"{100 * plain:3.0f} {100 * covered:5.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=400)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    print(f"size {SIZE}, {seeds} seeds; percent covered by 2 standard errors, by interval(0.95)")
    print(f"{'spectrum':20s}{'estimator':16s}" + "".join(f"{products:>11d}" for products in BUDGETS))
    for name, values in spectra().items():
        for label, estimate, truth, least in estimators(values):
            cells = [cell(estimate, truth, p, seeds) if p >= least else "-" for p in BUDGETS]
            print(f"{name:20s}{label:16s}" + "".join(f"{text:>11s}" for text in cells), flush=True)


if __name__ == "__main__":
    main()
