"""The demo: a small network on digits, its kernel along the way, and a page with what was seen."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import gramscope as gs
from gramscope.kernels import Kernel
from gramscope.tasks import Task, digits, mlp

BATCH, RATE, PER_CLASS = 64, 0.1, 10


@dataclass(frozen=True)
class Moment:
    """What was seen at one step of the training."""

    step: int
    loss: float
    accuracy: float
    shares: dict[str, float]
    drift: float
    target: float
    rank: float


def run(out: Path, steps: int, width: int, seed: int) -> Path:
    """Train, measure, print, and write the page; returns its path."""
    console = Console(record=True, width=100)
    task = digits(seed)
    model = mlp((task.x.shape[1], width, width, width, task.classes), seed)
    console.print(_opening(model, task))
    moments = _train(model, task, steps, seed, console)
    console.print(_shares_table(moments))
    console.print(_kernel_table(moments))
    console.print(_verdict(moments))
    return _write(out, console)


def _train(model: nn.Module, task: Task, steps: int, seed: int, console: Console) -> list[Moment]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    probe = task.balanced(PER_CLASS)
    watched = {0, steps} | {min(steps, round(steps * f)) for f in (0.01, 0.05, 0.2, 0.5)}
    moments: list[Moment] = []
    first: Kernel | None = None
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("training", total=steps)
        for step in range(steps + 1):
            if step in watched:
                kernel = gs.kernel(model, probe[0])
                first = first or kernel
                moments.append(_look(model, task, probe, step, kernel, first))
            if step < steps:
                chosen = torch.randint(len(task.x), (BATCH,), generator=generator)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(task.x[chosen]), task.y[chosen]).backward()
                optimizer.step()
                progress.advance(bar)
    return moments


@torch.no_grad()
def _look(
    model: nn.Module, task: Task, probe: tuple[Tensor, Tensor], step: int, kernel: Kernel, first: Kernel
) -> Moment:
    x, y = probe
    probabilities = model(x).softmax(1)
    one_hot = nn.functional.one_hot(y, task.classes).double()
    residual = probabilities - one_hot  # ∂loss/∂f of the cross-entropy
    layers: dict[str, float] = {}
    for name, share in kernel.share(residual).items():
        layer = f"layer {int(name.split('.')[0]) // 2 + 1}"
        layers[layer] = layers.get(layer, 0.0) + share
    accuracy = float((model(task.x_test).argmax(1) == task.y_test).float().mean())
    loss = float(nn.functional.cross_entropy(model(task.x), task.y))
    return Moment(
        step, loss, accuracy, layers, kernel.alignment(first), kernel.target_alignment(one_hot), kernel.effective_rank()
    )


def _opening(model: nn.Module, task: Task) -> Panel:
    count, probes = sum(p.numel() for p in model.parameters()), PER_CLASS * task.classes
    text = (
        f"A ReLU network with {count:,} weights learns {len(task.x):,} handwritten digits by SGD.\n"
        f"Its exact tangent kernel on {probes} probe digits ({probes * task.classes} x {probes * task.classes}) is "
        "taken apart layer by layer along the way."
    )
    return Panel(text, title="[bold]gramscope demo", border_style="cyan")


def _shares_table(moments: list[Moment]) -> Table:
    table = Table(
        title="Who does the learning: share of each layer in the next decrease of the loss",
        title_justify="left",
    )
    table.add_column("step", justify="right")
    table.add_column("train loss", justify="right")
    table.add_column("test accuracy", justify="right")
    for layer in moments[0].shares:
        table.add_column(layer, justify="right")
    table.add_column("", justify="left")
    for moment in moments:
        cells = [f"{100 * share:.0f} %" for share in moment.shares.values()]
        table.add_row(
            str(moment.step),
            f"{moment.loss:.3f}",
            f"{100 * moment.accuracy:.1f} %",
            *cells,
            _bar(moment.shares),
        )
    return table


def _bar(shares: dict[str, float], width: int = 18) -> Text:
    colours = ("blue", "cyan", "green", "yellow", "magenta", "red")
    text, drawn = Text(), 0
    total = 0.0
    for place, share in enumerate(shares.values()):
        total += share
        cells = round(total * width) - drawn
        text.append("█" * cells, style=colours[place % len(colours)])
        drawn += cells
    return text


def _kernel_table(moments: list[Moment]) -> Group:
    table = Table(title="How the kernel moves", title_justify="left")
    for heading in ("step", "alignment with the start", "alignment with the labels", "effective rank"):
        table.add_column(heading, justify="right")
    for moment in moments:
        table.add_row(str(moment.step), f"{moment.drift:.3f}", f"{moment.target:.3f}", f"{moment.rank:.1f}")
    note = Text(
        "1.000 in the first column means that the features stand still (lazy); the further below, the richer.",
        style="dim",
    )
    return Group(table, note)


def _verdict(moments: list[Moment]) -> Panel:
    last = moments[-1]
    regime = "lazily: its features hardly moved" if last.drift > 0.9 else "richly: it changed its features"
    leader = max(moments[0].shares, key=lambda layer: moments[0].shares[layer])
    now = max(last.shares, key=lambda layer: last.shares[layer])
    text = (
        f"The network learnt {regime} (kernel alignment with the start {last.drift:.2f}). At first {leader} did most "
        f"of the learning ({100 * moments[0].shares[leader]:.0f} %), at the end {now} ({100 * last.shares[now]:.0f} %)."
    )
    return Panel(text, title="[bold]In words", border_style="green")


def _write(out: Path, console: Console) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    page = console.export_html(clear=False)
    temporary = path.with_suffix(".part")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    console.print(f"Report: [bold]{path}[/bold]")
    return path
