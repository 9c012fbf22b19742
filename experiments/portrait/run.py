"""Sixty runs through every measure at once: which measures agree, which warn first, is the report's verdict right?

Twenty kinds of runs with three seeds each learn the 8 x 8 digits. Ten kinds are of known regime by construction, as in
docs/calibration.md: ``s (f - f0)`` with a small output scale s is rich, with a large one lazy (arXiv:1812.07956); a
last layer that trains alone is lazy; a learning rate that is far too large diverges. The other ten are everyday runs:
optimizers, learning rates, weight decay, wrong labels, few examples, wide and deep networks.

``gs.watch`` records every measure that the library has, on one probe of 100 examples, at eight steps. A measure that
has one number a layer is averaged over the trained layers. The verdict is the one that the report's page prints.

The thresholds of the verdict were fitted on seeds 0 to 2 of docs/calibration.md and tried there on seeds 3 to 9. Data,
network and batches here have the seeds from ``FIRST_SEED`` on, so that no run is one of those.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import gramscope as gs
from gramscope.record import WATCHED_MEASURES
from gramscope.tasks import Task, digits, mlp

TITLE = "One portrait of all measures"
QUESTION = "Which measures of learning agree over many runs, and which of them tell the end of a run early?"
SEEDS = 3
Case = dict[str, str | int | float | bool]
FIRST_SEED = 10
STEPS, EARLY = 400, (5, 40)
WATCHED = (0, 5, 15, 40, 80, 150, 250, 400)


@dataclass(frozen=True)
class Kind:
    """A run: its truth by construction ("" if none is known), its optimizer and what is special about it."""

    truth: str = ""
    scale: float = 0.0  # of s (f - f0) with squared error; 0: plain outputs and cross-entropy
    optimizer: str = "adam"
    lr: float = 1e-3
    decay: float = 0.0
    hidden: tuple[int, ...] = (64, 64, 64)
    wrong_labels: float = 0.0
    examples: int = 1400
    last_only: bool = False


KINDS = {
    **{f"scale {s:g}": Kind("rich", s, "sgd", 0.2) for s in (0.1, 0.3, 1.0)},
    **{f"scale {s:g}": Kind("in between", s, "sgd", 0.2) for s in (2.5, 4.0)},
    **{f"scale {s:g}": Kind("lazy", s, "sgd", 0.2) for s in (10.0, 30.0, 100.0)},
    "last layer only": Kind("lazy", 1.0, "sgd", 0.2, last_only=True),
    "rate too large": Kind("diverged", 1.0, "sgd", 200.0),
    "sgd 0.03": Kind(optimizer="sgd", lr=0.03),
    "sgd 0.3": Kind(optimizer="sgd", lr=0.3),
    "adam": Kind(),
    "adam 0.01": Kind(lr=1e-2),
    "decay 0.3": Kind(decay=0.3),
    "all labels wrong": Kind(wrong_labels=1.0),
    "half of the labels wrong": Kind(wrong_labels=0.5),
    "100 examples": Kind(examples=100),
    "wide": Kind(hidden=(192, 192, 192)),
    "deep": Kind(hidden=(64,) * 6),
}
MEASURES = (
    "kernel/drift", "kernel/alignment", "kernel/participation_ratio", "richness", "richness/initial_similarity",
    "target_linearity", "collapse/nc1", "collapse/nc2", "collapse/nc3", "collapse/nc4",
    "collapse/cdnv", "alpha", "coactivation_rank", "coactivation_rank_centred", "metric_rank", "update_alignment",
    "flow_share_input", "sharing_z", "feature_rank", "dead_units", "signal", "ansatz", "sharpness", "gradient_norm",
    "noise_scale", "norm/parameters", "update_ratio", "step/error", "step/second_order", "step/mask_flips",
    "gram_vc_correlation", "dntk/relative_change", "states/error", "accuracy/probe",
)  # fmt: skip
SAID = {
    "The run is rich": "rich", "The run lies between lazy and rich": "in between", "The run is lazy": "lazy",
    "The run diverged": "diverged",
}  # fmt: skip


class Centred(nn.Module):
    """``s (f - f0)``: the output scale of arXiv:1812.07956, zero at the start."""

    def __init__(self, net: nn.Module, start: nn.Module, scale: float) -> None:
        super().__init__()
        self.net, self.start, self.scale = net, start.requires_grad_(False), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.net(x) - self.start(x))


def cases(quick: bool) -> list[Case]:
    chosen = ("scale 0.3", "scale 100", "adam") if quick else tuple(KINDS)
    return [{"kind": name, "truth": KINDS[name].truth or "not known"} for name in chosen]


def run(case: Case, seed: int, *, quick: bool, device: str, out: Path) -> dict[str, float]:
    kind, seed = KINDS[str(case["kind"])], FIRST_SEED + seed
    task = _task(kind, seed)
    widths = (64, *kind.hidden, 10)
    net = mlp(widths, seed)
    model: nn.Module = Centred(net, mlp(widths, seed), kind.scale) if kind.scale else net
    trained = list(net[-1].parameters()) if kind.last_only else list(net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run that diverges warns at every measurement
        _train(model, trained, kind, task, seed, out / "run", steps=60 if quick else STEPS)
        page = gs.report(out / "run", out / "report.html").read_text(encoding="utf-8")
    said = [word for sentence, word in SAID.items() if sentence in page]
    found = _outcome(model, task)
    found["verdict_right"] = float(said == [kind.truth]) if kind.truth else float("nan")
    table = gs.open_run(out / "run").scalars()
    found["largest_drift"] = float(table["kernel/drift"].max())
    for step, suffix in (*((s, f" at {s}") for s in EARLY), (int(table.index[-1]), "")):
        now = table.loc[step] if step in table.index else {}
        found |= {name + suffix: _mean(name, now) for name in MEASURES}
    return found


def _task(kind: Kind, seed: int) -> Task:
    task = digits(seed)
    x, y = task.x[: kind.examples], task.y[: kind.examples].clone()
    rng = torch.Generator().manual_seed(1000 + seed)
    some = torch.randperm(len(y), generator=rng)[: int(kind.wrong_labels * len(y))]
    y[some] = y[some[torch.randperm(len(some), generator=rng)]]
    return Task(x, y, task.x_test, task.y_test)


def _train(
    model: nn.Module, trained: list[nn.Parameter], kind: Kind, task: Task, seed: int, out: Path, steps: int
) -> None:
    """Mini-batches of 128 under the watcher; the speed in function space is the same for all output scales."""

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if not kind.scale:
            return cross_entropy(f, y)
        return (f - one_hot(y, 10).to(f)).square().mean() / (2 * min(1.0, kind.scale))

    if kind.optimizer == "sgd":
        rate = kind.lr / max(1.0, kind.scale**2)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(trained, lr=kind.lr, weight_decay=kind.decay)
    rng = torch.Generator().manual_seed(seed)
    measures = [name for name in WATCHED_MEASURES if name not in ("probe_facts", "classes", "train_mode")]
    with gs.watch(
        model, task.balanced(10), out, [s for s in WATCHED if s <= steps], loss=loss, overhead=None, measures=measures,
        lr=kind.lr, config={"truth": kind.truth, "seed": seed},
    ) as scope:  # fmt: skip
        scope.use(optimizer)
        for _ in range(steps):
            rows = torch.randint(len(task.x), (128,), generator=rng)
            optimizer.zero_grad()
            value = loss(model(task.x[rows]), task.y[rows])
            value.backward()
            optimizer.step()
            scope.step(loss=value)


def _outcome(model: nn.Module, task: Task) -> dict[str, float]:
    with torch.no_grad():
        train, test = (
            float((model(x).argmax(1) == y).double().mean()) for x, y in ((task.x, task.y), (task.x_test, task.y_test))
        )
    return {"test_accuracy": test, "train_accuracy": train, "gap": train - test}


def _mean(name: str, scalars: Mapping[str, float]) -> float:
    """The number of that name, or the mean over the layers that train; NaN where it was not measured."""
    if name in scalars:
        return float(scalars[name])
    layers = [float(v) for k, v in scalars.items() if k.startswith(f"{name}/") and not k.startswith(f"{name}/start")]
    known = [value for value in layers if value == value]
    return sum(known) / len(known) if known else float("nan")


def figure(table, path: Path) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    names = ["test_accuracy", *(name for name in MEASURES if table[name].notna().sum() > 2)]
    apart = 1 - table[names].corr("spearman").abs().fillna(0).to_numpy()
    order = leaves_list(linkage(squareform(apart, checks=False), "average"))  # measures that agree stand together
    names = [names[k] for k in order]
    picture = Figure(figsize=(13, 8.5), layout="constrained")
    left, right = picture.subplots(1, 2, width_ratios=(2.2, 1))
    shown = left.imshow(table[names].corr("spearman"), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    left.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.set_title(f"Spearman correlation at the end of {len(table)} runs", fontsize=11)
    picture.colorbar(shown, ax=left, shrink=0.6, location="left")
    steps = {f"step {EARLY[0]}": f" at {EARLY[0]}", f"step {EARLY[1]}": f" at {EARLY[1]}", "the end": ""}
    for (label, suffix), color in zip(steps.items(), ("#c9c9c9", "#d9772b", "#1b4f8f"), strict=True):
        found = {n: abs(table[n + suffix].corr(table["test_accuracy"], "spearman")) for n in names if n in MEASURES}
        if not suffix:
            right.hlines(list(found), 0, list(found.values()), color="0.9", zorder=0)
        right.plot(list(found.values()), list(found), "o", ms=5, color=color, label=label)
    right.tick_params(axis="y", labelsize=8)
    right.invert_yaxis()
    right.margins(y=0.01)
    right.set(xlabel="|Spearman| with the final test accuracy", xlim=(0, 1))
    right.set_title("Which measures warn early", fontsize=11)
    right.legend(fontsize=8, title="measured at", loc="upper right")
    right.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=100)


def findings(table) -> str:  # type: ignore[no-untyped-def]
    """The pairs that agree most, each measure beside the final test accuracy early and late, and the verdicts."""
    from gramscope.reproduce import rank_correlation

    kinds = table["kind"].tolist()
    names = [name for name in MEASURES if table[name].notna().sum() > 3]
    ranks = table[names].corr("spearman").abs()
    pairs = sorted(
        ((ranks.loc[a, b], a, b) for k, a in enumerate(names) for b in names[:k] if a.split("/")[0] != b.split("/")[0]),
        reverse=True,
    )
    lines = ["Pairs of measures (of different prefixes) that agree most:", "", "| | | Spearman |", "|---|---|---|"]
    lines += [f"| {a} | {b} | {rank_correlation(table[a], table[b], groups=kinds)} |" for _, a, b in pairs[:15]]
    families = {
        "classes": ["collapse/nc1", "collapse/nc4", "collapse/cdnv", "target_linearity", "kernel/alignment"],
        "distance": ["kernel/drift", "signal", "feature_rank", "update_alignment", "flow_share_input", "richness"],
        "one step": ["step/error", "step/second_order", "step/mask_flips", "update_ratio"],
    }
    lines += ["", "Median of |Spearman| at the end, within families and between them:", ""]
    lines += [f"| | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
    every = table[list(MEASURES)].corr("spearman").abs()
    for name, rows in families.items():
        medians = [
            every.loc[rows, columns].stack().loc[lambda of: [a != b for a, b in of.index]].median()
            for columns in families.values()
        ]
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in medians)} |")
    lines += ["", "With D_LR (`richness`) at the end:", "", "| measure | Spearman |", "|---|---|"]
    others = ("collapse/nc1", "kernel/alignment", "kernel/drift", "alpha", "target_linearity", "sharpness")
    for name in (*others, "test_accuracy"):
        lines.append(f"| {name} | {rank_correlation(table['richness'], table[name], groups=kinds)} |")
    right = table[~table["kind"].str.contains("wrong")]
    lines += [
        "",
        "With the final test accuracy, by the step of the measurement (**clear** intervals leave out zero); the last "
        f"column is that of the {len(right)} runs with right labels:",
        "",
        f"| measure | {' | '.join(f'step {s}' for s in EARLY)} | end | step {EARLY[1]}, right labels |",
        "|---" * (len(EARLY) + 3) + "|",
    ]
    for name in names:
        found = [
            rank_correlation(part[name + suffix], part["test_accuracy"], groups=part["kind"].tolist())
            for part, suffix in (*((table, f" at {s}") for s in EARLY), (table, ""), (right, f" at {EARLY[1]}"))
        ]
        lines.append(f"| {name} | " + " | ".join(f"**{one}**" if one.is_clear else str(one) for one in found) + " |")
    known = table[table["verdict_right"].notna()]
    lines += [
        "",
        f"The report's verdict was right on {int(known['verdict_right'].sum())} of {len(known)} runs of known regime:",
        "",
        "| kind | truth | runs | feature change | largest kernel drift |",
        "|---|---|---|---|---|",
    ]
    for (kind, truth), part in known.groupby(["kind", "truth"], sort=False):
        change, drift = 1 - part["richness/initial_similarity"], part["largest_drift"]
        spans = [f"{one.min():.2g} to {one.max():.2g}" if one.notna().any() else "" for one in (change, drift)]
        lines.append(f"| {kind} | {truth} | {len(part)} | {' | '.join(spans)} |")
    return "\n".join(lines)
