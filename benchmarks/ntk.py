"""gramscope's NTK beside its peers: one process, the same weights and data, values compared.

    python benchmarks/ntk.py                          every case of this device
    python benchmarks/ntk.py --case mlp --n 128       one case at another size
    python benchmarks/ntk.py --peers torch.func       against one peer (or "none")
    python benchmarks/ntk.py --device cuda --json gpu.json

See README.md beside this file for what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # neural-tangents imports TensorFlow, which talks

import models
import peers
import timing
from floor import Floor, flop_floor
from peers import Contestant, Problem, Unavailable

SLOW = 20.0  # seconds of timed calls after which a contestant is not repeated
REFERENCE_BYTES = 1.8e9  # the float64 Jacobian of the reference examples stays below this


@dataclass(frozen=True)
class Group:
    """Contestants on one network, batch size and reduction."""

    model: str
    n: int
    reduce: str = "none"  # "none", "trace", or "product" for K v
    precision: str | None = None
    block: int | None = None  # examples a block for torch.func, where the Jacobian does not fit
    quick_n: int = 8

    @property
    def title(self) -> str:
        what = {"none": "full kernel", "trace": "trace over outputs", "product": "K v"}[self.reduce]
        return f"{self.model}, N = {self.n}, {what}" + (f", {self.precision}" if self.precision else "")


# The small groups are there for the methods whose memory, or the reader's patience, ends before the large ones.
CPU = {
    "mlp": [
        Group("mlp", 512, quick_n=16),
        Group("mlp", 512, "trace", quick_n=16),
        Group("mlp", 64, quick_n=8),
        Group("mlp", 64, "trace", quick_n=8),
        Group("mlp", 8, quick_n=4),
    ],
    "cnn": [Group("cnn", 96), Group("cnn", 96, "trace"), Group("cnn", 16, quick_n=4)],
    "resnet8": [Group("resnet8", 64), Group("resnet8", 64, "trace"), Group("resnet8", 8, quick_n=4)],
    "resnet18": [Group("resnet18", 16, quick_n=2), Group("resnet18", 16, "trace", quick_n=2)],
    "operator": [
        Group("mlp", 512, "product", quick_n=64),
        Group("cnn", 96, "product"),
        Group("resnet8", 64, "product"),
        Group("resnet18", 16, "product", quick_n=2),
    ],
}
CUDA = {
    "mlp": [Group("mlp", 2048, block=256, quick_n=128), Group("mlp", 8192, quick_n=256)],
    "resnet18": [
        Group("resnet18", 256, block=64, quick_n=16),
        Group("resnet18", 256, precision="tf32", block=64, quick_n=16),
    ],
    "operator": [Group("mlp", 2048, "product", quick_n=128), Group("resnet18", 256, "product", quick_n=16)],
}


@dataclass
class Row:
    """One contestant's line of the table."""

    group: str
    name: str
    skipped: str | None = None
    seconds: float | None = None
    best: float | None = None
    runs: list[float] = field(default_factory=list)
    ratio: float | None = None
    peak_bytes: int | None = None
    flop: float | None = None
    over_floor: float | None = None
    best_over_floor: float | None = None
    of_rate: float | None = None
    error: float | None = None
    difference: float | None = None


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device = torch.device(options.device)
    cases = CUDA if device.type == "cuda" else CPU
    chosen = list(cases) if "all" in options.case else options.case
    unknown = [case for case in chosen if case not in cases]
    if unknown:
        print(f"{device.type} has the cases {', '.join(cases)}; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    print(header(device))
    rows: list[Row] = []
    floors: dict[str, Any] = {}
    for case in chosen:
        for group in sized(cases[case], options):
            with tf32(group.precision == "tf32"):
                measured, facts = run_group(group, device, options)
            rows += measured
            floors[group.title] = facts
            if options.json:
                write_json(Path(options.json), device, floors, rows)
    return 0


def sized(groups: list[Group], options: argparse.Namespace) -> list[Group]:
    """The groups at the sizes asked for, each once."""
    if options.n or options.quick:
        groups = [replace(group, n=options.n or group.quick_n) for group in groups]
    return list({group.title: group for group in groups}.values())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = sorted({*CPU, *CUDA})
    parser.add_argument("--case", nargs="+", default=["all"], choices=["all", *every])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--n", type=int, help="number of examples, in place of each case's own")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls; the median is printed")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=["all"],
        choices=["all", "none", *peers.PEERS],
        metavar="PEER",
        help=f"all, none, or some of: {', '.join(peers.PEERS)}",
    )
    parser.add_argument("--quick", action="store_true", help="small batches, two repeats: does it run?")
    parser.add_argument("--busy", action="store_true", help="one thread and CPU time, for a machine in use by others")
    parser.add_argument("--profile", action="store_true", help="print where gramscope's time goes, by operator")
    parser.add_argument("--json", metavar="OUT", help="write every row there")
    options = parser.parse_args(argv)
    if options.busy:
        timing.use_cpu_time()
        # XLA reads this when jax is first imported, which is later.
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    if options.quick:
        options.repeat = min(options.repeat, 2)
    if "all" in options.peers:
        options.peers = list(peers.PEERS)
    options.peers = [peer for peer in options.peers if peer != "none"]
    return options


def run_group(group: Group, device: torch.device, options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    model, x = models.build(group.model, group.n, device)
    problem = Problem(model, x, group.reduce, group.precision, group.block)
    contest = Contest(group, problem, device)
    entries = products(problem) if group.reduce == "product" else kernels(problem, options.peers)
    ready = [entry for entry in entries if contest.admit(*entry)]
    contest.time(ready, options.repeat)
    contest.finish()
    print(contest.table(), flush=True)
    for name, entry in ready:
        if options.profile and name == peers.OURS:
            print(timing.top_costs(entry.run, device), flush=True)
    facts = {"floor_flop": contest.floor.total if contest.floor else None, "rates": contest.rate.samples}
    return contest.rows, facts


def kernels(problem: Problem, names: list[str]) -> Iterator[tuple[str, Contestant | Unavailable]]:
    """gramscope first, then the asked-for peers, each with the reason if it cannot take part."""
    for name, make in {peers.OURS: peers.gramscope, **{n: peers.PEERS[n] for n in names}}.items():
        try:
            for contestant in make(problem):
                yield contestant.name, contestant
        except Unavailable as reason:
            yield name, reason


def products(problem: Problem) -> Iterator[tuple[str, Contestant | Unavailable]]:
    """K v: gramscope's operator, and one vjp plus one jvp with and without the first forward pass."""
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(len(problem.x), problem.outputs, generator=generator).to(problem.x)
    try:
        operator = peers.load_gramscope().ntk_operator(problem.model, problem.x)
        yield peers.OURS, Contestant(peers.OURS, lambda: operator @ v.reshape(-1), lambda u: u.reshape(v.shape))
    except Unavailable as reason:
        yield peers.OURS, reason
    scratch = Contestant("vjp + jvp", lambda: peers.vjp_then_jvp(problem.model, problem.x, v))
    yield scratch.name, scratch
    kept = peers.kept_vjp_then_jvp(problem.model, problem.x)
    again = Contestant("vjp + jvp, forward pass kept", lambda: kept(v))
    yield again.name, again


class Contest:
    """Runs the contestants of one group in turns and compares what they return."""

    def __init__(self, group: Group, problem: Problem, device: torch.device) -> None:
        self.group, self.problem, self.device = group, problem, device
        self.rows: list[Row] = []
        self.rate = timing.MatmulRate(device)
        self.floor: Floor | None = None
        self._ours: Tensor | None = None
        self._where: Tensor | None = None
        self._reference: Tensor | None = None
        if group.reduce != "product":
            self.floor = flop_floor(problem.model, problem.x, problem.outputs, group.reduce)
            self._where, self._reference = self._reference_block()

    def admit(self, name: str, entry: Contestant | Unavailable) -> bool:
        """Warm the contestant up, check its values, and open its row; False if it cannot run here."""
        row = Row(self.group.title, name)
        self.rows.append(row)
        if isinstance(entry, Unavailable):
            row.skipped = str(entry)
            return False
        room = 0.8 * timing.available_bytes(self.device)
        if entry.needs > room:
            row.skipped = f"not run: needs at least {entry.needs / 1e9:.0f} GB, {room / 1e9:.0f} GB to hand"
            return False
        try:
            result, row.flop = entry.warm_up()
            self._compare(entry.layout(result), row)
        except Exception as error:  # a peer's failure is a finding, not ours to raise
            row.skipped = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
            return False
        finally:
            result = None
            gc.collect()
        return True

    def time(self, ready: list[tuple[str, Contestant]], repeat: int) -> None:
        rows = {row.name: row for row in self.rows}
        for name, entry in ready:
            row = rows[name]
            row.peak_bytes = timing.peak_bytes(lambda e=entry, r=row: self._run(e, r), self.device)
            self.rate.sample()
            if row.runs[0] < SLOW:
                row.runs.clear()  # it began with cold pages
        for _ in range(repeat):
            for name, entry in ready:
                if sum(rows[name].runs) < SLOW:
                    self._run(entry, rows[name])
                    self.rate.sample()

    def _run(self, entry: Contestant, row: Row) -> None:
        gc.collect()
        row.runs.append(timing.seconds(entry.run, self.device))

    def finish(self) -> None:
        timed = [row for row in self.rows if row.runs]
        for row in timed:
            row.seconds = statistics.median(row.runs)
            row.best = min(row.runs)
            row.ratio = row.seconds / statistics.median(timed[0].runs)
            if row.flop:
                row.of_rate = row.flop / row.seconds / self.rate.best
            if self.floor:
                floor = self.floor.total / self.rate.best
                row.over_floor, row.best_over_floor = row.seconds / floor, row.best / floor

    def _reference_block(self) -> tuple[Tensor, Tensor]:
        """Some examples, spread over the batch, and their exact kernel."""
        fit = int(REFERENCE_BYTES / (8 * self.problem.outputs * self.problem.parameters))
        count = min(len(self.problem.x), max(2, min(fit, 16)))
        where = torch.linspace(0, len(self.problem.x) - 1, count, device=self.device).round().long()
        kernel = peers.reference(self.problem.model, self.problem.x[where])
        return where, kernel if self.group.reduce == "none" else torch.einsum("icjc->ij", kernel)

    def _compare(self, kernel: Tensor, row: Row) -> None:
        if self._reference is not None:
            rows = kernel.index_select(0, self._where)
            picked = rows.index_select(2 if kernel.ndim == 4 else 1, self._where)
            row.error = relative(picked, self._reference)
        if kernel.numel() > 5e8:
            return
        if self._ours is None:
            self._ours = kernel.clone()
        else:
            row.difference = relative(kernel, self._ours)

    def table(self) -> str:
        lines = [f"\n{self.group.title}"]
        if self.floor:
            methods = sorted(set(self.floor.method.values()))
            lines.append(
                f"  floor {self.floor.total / 1e9:.1f} GFLOP (forward {self.floor.forward / 1e9:.1f}, signals "
                f"{self.floor.signals / 1e9:.1f}, layer kernels {self.floor.grams / 1e9:.1f} by {', '.join(methods)})"
            )
        lines.append(f"  {self.rate}" + self._floor_seconds())
        columns = (
            "",
            "seconds",
            "best",
            "ratio",
            "peak MB",
            "GFLOP",
            "GFLOP/s",
            "of rate",
            "x floor",
            "at best",
            "error",
            "difference",
        )
        width = max(len(row.name) for row in self.rows)
        form = f"  {{:<{width}}}" + " {:>9}" * 10 + " {:>10}"
        lines.append(form.format(*columns))
        lines += [
            f"  {row.name:<{width}}   {row.skipped}" if row.skipped else form.format(*cells(row)) for row in self.rows
        ]
        return "\n".join(lines)

    def _floor_seconds(self) -> str:
        return f", floor {self.floor.total / self.rate.best:.3f} s" if self.floor else ""


def cells(row: Row) -> list[str]:
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    flop = row.flop or None
    return [
        row.name,
        show(row.seconds, ".4f"),
        show(row.best, ".4f"),
        show(row.ratio, ".2f"),
        show(row.peak_bytes and row.peak_bytes / 1e6, ".0f"),
        show(flop and flop / 1e9, ".1f"),
        show(flop and row.seconds and flop / row.seconds / 1e9, ".0f"),
        show(row.of_rate, ".2f"),
        show(row.over_floor, ".2f"),
        show(row.best_over_floor, ".2f"),
        show(row.error, ".1e"),
        show(row.difference, ".1e"),
    ]


def relative(value: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth, in float64."""
    truth = truth.to("cpu", torch.float64)
    return float(torch.linalg.norm(value.to("cpu", torch.float64) - truth) / torch.linalg.norm(truth))


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """TF32 for matmul and convolution on or off; torch's own default has it on for convolutions."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = on
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before


def header(device: torch.device) -> str:
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    clock = ", CPU time" if timing.cpu_time_in_use() else ""
    return f"torch {torch.__version__}, Python {platform.python_version()}, {place}{clock}"


def write_json(path: Path, device: torch.device, groups: dict[str, Any], rows: list[Row]) -> None:
    content = {"machine": header(device), "groups": groups, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
