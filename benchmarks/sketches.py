"""Sketches of gradients on trained networks: error against size for four uses, and CPU seconds, beside the peers.

    python benchmarks/sketches.py                         # both networks, all methods; some minutes on one thread
    python benchmarks/sketches.py --network cnn --sizes 8 16
    python benchmarks/sketches.py --network gpt --shapes 16x4 4x64 32x4    # few numbers many times, or many few times?
    python benchmarks/sketches.py --picture docs/images/sketches.svg --json sketches.json

Uses: norms of gradients, alignment with the labels, the ten leading eigenvectors, the ten nearest neighbours. Peers:
dense Gaussian projections of formed gradients (TRAK's way), and the exact kernel of the last layer as a control
variate. Every method holds the same numbers for each example: repeats x size² for each parameter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope import tasks
from gramscope.kernels.accumulate import summed_rows

EXAMPLES, REPEATS, TOP = 256, 4, 10
USES = ("kernel", "norms", "alignment", "eigenvectors", "neighbours")
PRODUCT = "learned, apart=False"  # all sketches as products, also of weights that are used at one position
METHODS = ("learned", "orthogonal")
DENSE, CONTROL = "dense gaussian", ", exact last layer"
MOST_DENSE = 16  # size up to which a dense matrix is drawn: beyond it takes gigabytes


@dataclass
class Trained:
    """A trained network with examples, labels, and what is sketched of it."""

    model: nn.Module
    x: Any
    labels: Tensor
    options: dict[str, Any]
    last: tuple[str, ...]
    note: str


class GPT(nn.Module):
    """A decoder with a tied readout, before which each block normalises."""

    def __init__(self, tokens: int, length: int, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=self.mask[: ids.shape[1], : ids.shape[1]])
        return self.norm(x) @ self.table.weight.T


def largest_logit(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).amax(1, keepdim=True)


def sequence_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean loss of each sequence's own tokens, (n, 1)."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1, keepdim=True)


def trained_cnn(steps: int) -> Trained:
    try:
        task, size, name = tasks.mnist(train=8000, test=EXAMPLES), 28, "MNIST"
    except FileNotFoundError:
        task, size, name = tasks.digits(), 8, "digits"
    model = tasks.cnn(width=16, size=size)
    train(model, steps, lambda j: F.cross_entropy(model(task.x[j]), task.y[j]), len(task.x))
    accuracy = float((model(task.x_test).argmax(1) == task.y_test).float().mean())
    x, y = task.x_test[:EXAMPLES], task.y_test[:EXAMPLES]
    note = f"CNN on {name}, {count(model):,} parameters, test accuracy {accuracy:.3f}, the largest logit's gradient"
    return Trained(model, x, y, {"outputs": largest_logit}, ("8.weight", "8.bias"), note)


def trained_gpt(steps: int) -> Trained:
    """Four languages: the first token is the label, and each next token follows the last by the label's own table."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.stack([torch.randperm(60, generator=generator) + 4 for _ in range(4)])

    def draw(n: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(4, (n,), generator=generator)
        ids = [label, torch.randint(4, 64, (n,), generator=generator)]
        for _ in range(31):  # one token in five is random
            noise = torch.randint(4, 64, (n,), generator=generator)
            ids.append(torch.where(torch.rand(n, generator=generator) < 0.2, noise, tables[label, ids[-1] - 4]))
        return torch.stack(ids, 1), label

    torch.manual_seed(0)
    model = GPT(64, 33)
    train(model, steps, lambda j: sequence_loss(model, draw(len(j))[0]).mean(), 64, lr=2e-3)
    x, label = draw(EXAMPLES)
    loss = float(sequence_loss(model, x).mean())
    note = f"GPT on four generated languages, {count(model):,} parameters, loss {loss:.2f} nats, each sequence's loss"
    return Trained(model, x, label, {"outputs": sequence_loss}, ("table.weight",), note)


def train(model: nn.Module, steps: int, loss: Callable[[Tensor], Tensor], n: int, lr: float = 2e-3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.randint(n, (64,), generator=generator)).backward()
        optimizer.step()
    model.eval()


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# What is compared ---------------------------------------------------------------------------------


def dense_kernel(net: Trained, size: int, seed: int) -> Tensor:
    """TRAK's way: gradients are formed and multiplied by a dense Gaussian matrix, parameter by parameter."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(EXAMPLES, EXAMPLES)
    matrices: dict[str, Tensor] = {}
    features: dict[str, list[Tensor]] = {}
    for start in range(0, EXAMPLES, 64):
        taken = gs.capture(net.model, net.x[start : start + 64], **net.options)
        for name, sites in taken.by_parameter().items():
            rows = summed_rows(sites)
            if name not in matrices:
                width = min(REPEATS * size**2, rows.shape[2])
                matrices[name] = torch.randn(rows.shape[2], width, generator=generator) / width**0.5
            features.setdefault(name, []).append(rows @ matrices[name])
    for parts in features.values():
        phi = torch.cat(parts).flatten(1)
        total += phi @ phi.T
    return total


def sketched_kernel(net: Trained, size: int, seed: int, method: str, last: Tensor | None) -> Tensor:
    kind, _, product = method.partition(", ")
    found = gs.sketch(
        net.model, net.x, size=size, repeats=REPEATS, method=kind, seed=seed, apart=not product, **net.options
    )
    kernel = found.kernel().value
    if last is None:
        return kernel
    return kernel - sum(found.kernel(layers=name).value for name in net.last) + last


def errors(kernel: Tensor, exact: Tensor, labels: Tensor) -> dict[str, float]:
    kernel, exact = kernel.double(), exact.double()
    y = F.one_hot(labels).double()
    y = y - y.mean(0)

    def alignment(K: Tensor) -> float:
        return float((K * (y @ y.T)).sum() / K.norm() / (y @ y.T).norm())

    def leading(K: Tensor) -> Tensor:
        return torch.linalg.eigh(K)[1][:, -TOP:]

    def near(K: Tensor) -> Tensor:
        norms = K.diagonal().clamp(min=1e-300).sqrt()
        return (K / torch.outer(norms, norms)).fill_diagonal_(-9).topk(TOP).indices

    same = (near(kernel)[:, :, None] == near(exact)[:, None, :]).any(2).double().mean()
    ratio = kernel.diagonal().clamp(min=0).sqrt() / exact.diagonal().sqrt()
    return {
        "kernel": float((kernel - exact).norm() / exact.norm()),
        "norms": float((ratio - 1).abs().median()),
        "alignment": abs(alignment(kernel) / alignment(exact) - 1),
        "eigenvectors": float(1 - (leading(kernel).T @ leading(exact)).square().sum() / TOP),
        "neighbours": float(1 - same),
    }


def timed(call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    begin = time.process_time()
    found = call()
    return found, time.process_time() - begin


def study(net: Trained, sizes: list[int], seeds: int) -> list[dict[str, Any]]:
    def exact_kernel() -> Tensor:
        return gs.ntk(net.model, net.x, reduce="trace", **net.options)

    def exact_last() -> Tensor:
        frozen = {n: p.requires_grad for n, p in net.model.named_parameters()}
        for name, parameter in net.model.named_parameters():
            parameter.requires_grad_(name in net.last)
        found = exact_kernel()
        for name, parameter in net.model.named_parameters():
            parameter.requires_grad_(frozen[name])
        return found

    exact_kernel()  # the first call makes what torch keeps
    exact, exact_seconds = timed(exact_kernel)
    last, last_seconds = timed(exact_last)
    rows: list[dict[str, Any]] = [{"method": "exact", "size": 0, "seconds": exact_seconds, **dict.fromkeys(USES, 0.0)}]
    print_row(rows[0])
    for size in sizes:
        # Methods take turns, seed by seed.
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(seeds):
            for method in (*METHODS, PRODUCT):
                kernel, spent = timed(lambda m=method, s=seed: sketched_kernel(net, size, s, m, None))  # noqa: B023
                found.setdefault(method, []).append({"seconds": spent, **errors(kernel, exact, net.labels)})
            for method in METHODS[:2]:
                kernel, spent = timed(lambda m=method, s=seed: sketched_kernel(net, size, s, m, last))  # noqa: B023
                row = {"seconds": spent + last_seconds, **errors(kernel, exact, net.labels)}
                found.setdefault(method + CONTROL, []).append(row)
            if size <= MOST_DENSE and seed == 0:
                kernel, spent = timed(lambda s=seed: dense_kernel(net, size, s))  # noqa: B023
                found.setdefault(DENSE, []).append({"seconds": spent, **errors(kernel, exact, net.labels)})
        for method, parts in found.items():
            mean = {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]}
            rows.append({"method": method, "size": size, **mean})
            print_row(rows[-1])
    return rows


def compare_shapes(net: Trained, shapes: list[tuple[int, int]], seeds: int) -> None:
    """Sizes against repeats: CPU seconds, kB held of an example, and the errors, means over seeds."""
    exact = gs.ntk(net.model, net.x, reduce="trace", **net.options)
    for size, repeats in shapes:
        for method in METHODS:
            rows = []
            for seed in range(seeds):
                begin = time.process_time()
                found = gs.sketch(net.model, net.x, size=size, repeats=repeats, method=method, seed=seed, **net.options)
                kernel, spent = found.kernel().value, time.process_time() - begin
                rows.append([spent, found.nbytes / EXAMPLES / 1e3, *errors(kernel, exact, net.labels).values()])
            mean = torch.tensor(rows).mean(0).tolist()
            told = " ".join(f"{use} {value:.4f}" for use, value in zip(USES, mean[2:], strict=True))
            print(f"size {size:3d} x {repeats:3d} {method:11s} {mean[0]:.2f} s {mean[1]:.0f} kB  {told}", flush=True)


HEADINGS = ("method", "size", "seconds", *USES)


def print_row(row: dict[str, Any] | None) -> None:
    if row is None:
        print("".join(f"{heading:>14}" if place else f"{heading:28}" for place, heading in enumerate(HEADINGS)))
        return
    numbers = "".join(f"{row[use]:14.4f}" for use in USES)
    print(f"{row['method']:28}{row['size']:>14}{row['seconds']:14.2f}{numbers}", flush=True)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gramscope"
    from matplotlib import pyplot as plt

    uses = USES[1:]
    figure, axes = plt.subplots(len(found), len(uses), figsize=(13, 3.1 * len(found)), squeeze=False)
    for line, (name, rows) in zip(axes, found.items(), strict=True):
        for ax, use in zip(line, uses, strict=True):
            for method in (*METHODS, DENSE):
                points = [(row["size"], row[use]) for row in rows if row["method"] == method]
                ax.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
            ax.set(xscale="log", yscale="log", title=f"{name}: {use}", xlabel="size")
            ax.set_xticks(sorted({row["size"] for row in rows if row["size"]}))
            ax.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
            ax.minorticks_off()
    axes[0, 0].set_ylabel("error")
    axes[0, -1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["cnn", "gpt", "all"], default="all")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, nargs=2, default=[300, 500], help="training steps of the cnn, of the gpt")
    parser.add_argument("--shapes", nargs="+", help="SIZExREPEATS ...: only compare these")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drawn-from", type=Path, nargs="+", help="only draw, from what --json wrote earlier")
    options = parser.parse_args()
    if options.drawn_from:
        read = [json.loads(path.read_text()) for path in options.drawn_from]
        draw({name: rows for part in read for name, rows in part.items()}, options.picture)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, build, steps in (("cnn", trained_cnn, options.steps[0]), ("gpt", trained_gpt, options.steps[1])):
        if options.network in (name, "all"):
            net = build(steps)
            if options.shapes:
                print(net.note)
                pairs = [text.split("x") for text in options.shapes]
                compare_shapes(net, [(int(size), int(repeats)) for size, repeats in pairs], options.seeds)
                continue
            print(f"\n{net.note}; N = {EXAMPLES}, {REPEATS} repeats, CPU seconds on one thread, errors over seeds")
            print_row(None)
            found[name.upper()] = study(net, options.sizes, options.seeds)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
