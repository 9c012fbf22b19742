"""Debiased CKA between all pairs of 50 layers: us and the packages that are installed, in one process, on one data set.

    pip install pytorch-cka torch_cka
    python benchmarks/cka.py [--device cuda] [--width 64] [--examples 2048] [--batch 256] [--repeats 3] [--skip-slow]

Columns: seconds (the least of the repeats, forward passes included), peak memory that the call adds, how much longer it
takes than ours, and the largest distance of its matrix from the float64 reference over the whole data set. Packages sum
HSIC over minibatches: given minibatches they answer another question, so they also get all examples as one batch.
ckatorch is left out: it takes activations with three axes only and keeps the value of the last batch.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
import timing

LAYERS = 50


class Residual(nn.Module):
    """Keeps the signal alive through fifty layers, and makes neighbours alike but not equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(self.inner(x))


@dataclass(frozen=True)
class Contest:
    model: nn.Module
    x: Tensor
    batch: int

    @property
    def names(self) -> list[str]:
        return [str(place) for place in range(1, LAYERS + 1)]

    def loader(self, size: int) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.x), batch_size=size)

    def reference(self) -> Tensor:
        """HSIC₁ from centred float64 Gram matrices, one pair of layers at a time."""
        found = gs.measures.features(self.model, self.x, self.names)
        n = len(self.x)
        rows = [value.double() - value.double().mean(0) for value in found.values()]
        squares = torch.stack([row.square().sum(1) for row in rows])
        inner = torch.stack([torch.stack([(a.mT @ b).square().sum() for b in rows]) for a in rows])
        outer = torch.outer(squares.sum(1), squares.sum(1))
        hsic = inner - squares @ squares.mT * (n / (n - 2)) + outer / ((n - 1) * (n - 2))
        return (hsic / torch.sqrt(torch.outer(hsic.diagonal(), hsic.diagonal()))).cpu()


def ours(contest: Contest) -> Tensor:
    return gs.measures.layer_similarity(contest.model, contest.loader(contest.batch), contest.names).values.cpu()


def pytorch_cka(contest: Contest, size: int) -> Tensor:
    compute = _peer("cka").compute_cka
    device = contest.x.device
    found = compute(
        contest.model, contest.model, contest.loader(size), layers=contest.names, device=device, progress=False
    )
    return found[0].cpu()


def torch_cka(contest: Contest, size: int) -> Tensor:
    found = _peer("torch_cka").CKA(
        contest.model,
        contest.model,
        model1_layers=contest.names,
        model2_layers=contest.names,
        device=str(contest.x.device),
    )
    try:
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            found.compare(contest.loader(size))
    finally:
        for module in contest.model.modules():  # it leaves its hooks behind
            module._forward_hooks.clear()
    return found.hsic_matrix.cpu()


def _peer(name: str) -> Any:
    """The installed package; this file is called like one of them and must not be found in its place."""
    here = str(Path(__file__).parent)
    before = list(sys.path)
    sys.path[:] = [place for place in sys.path if place not in ("", here)]
    try:
        return __import__(name)
    finally:
        sys.path[:] = before


def installed(name: str) -> bool:
    try:
        _peer(name)
    except ImportError:
        return False
    return True


def build(width: int, examples: int, batch: int, device: torch.device) -> Contest:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), *(Residual(width) for _ in range(LAYERS))).eval().to(device)
    return Contest(model, torch.randn(examples, 32, device=device), batch)


def contestants(contest: Contest, skip_slow: bool) -> dict[str, Callable[[], Tensor]]:
    n, batch = len(contest.x), contest.batch
    found: dict[str, Callable[[], Tensor]] = {f"gramscope, batches of {batch}": lambda: ours(contest)}
    if installed("cka"):
        found[f"pytorch-cka, one batch of {n}"] = lambda: pytorch_cka(contest, n)
        found[f"pytorch-cka, batches of {batch}"] = lambda: pytorch_cka(contest, batch)
    if installed("torch_cka") and not skip_slow:
        found[f"torch_cka, batches of {batch}"] = lambda: torch_cka(contest, batch)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-slow", action="store_true", help="leave out torch_cka (minutes for 50 layers)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        timing.use_cpu_time()
    contest = build(arguments.width, arguments.examples, arguments.batch, device)
    reference = contest.reference()
    setting = f"{LAYERS} layers of width {arguments.width}, {arguments.examples} examples"
    print(f"{setting}, {device}, torch {torch.__version__}")
    print(f"{'':36}{'seconds':>9}{'memory':>10}{'x ours':>8}{'error':>10}")
    mine = None
    for name, call in contestants(contest, arguments.skip_slow).items():
        error = float((call() - reference).abs().max())
        best = min(timing.seconds(call, device) for _ in range(arguments.repeats))
        memory = timing.peak_bytes(call, device) / 2**20
        mine = mine or best
        print(f"{name:36}{best:9.3f}{memory:7.0f} MB{best / mine:8.2f}{error:10.1e}", flush=True)


if __name__ == "__main__":
    main()
