"""The empty section 9 of arXiv:2606.09744, filled: its own networks, trained, and its own quantities, measured.

The setting is the paper's: ReLU layers without biases, the fixed readout ``f = mean over neurons of x^L``, half the
squared error, full-batch gradient descent. Inputs are 150 examples; targets are 0 or 1 (is the digit odd, is the first
coordinate positive) or the output of a small network of the same kind. Weights start as He's; the step is
``0.3 / λ_max(K)`` of the first kernel, so that one step means the same in all networks.

Asked, by depth, width, task and seed:

- which layer lowers the loss (``share_ℓ``: ``Σ_t eᵀK^ℓe / Σ_t eᵀKe`` over all of training);
- do co-activation and the pullback metrics concentrate (ratios of participation ratios, end over start);
- how well the first-order equations predict one step, and what the rest is made of (second order, mask flips);
- how far the equations drift when they are integrated on their own for 50 steps.
"""

import itertools
from pathlib import Path

import torch
from torch import Tensor

from gramscope.hierarchy import Fields, metric_spectrum, overlap_rank, predict_trajectory
from gramscope.tasks import digits, heaviside, teacher_student

TITLE = "The numerical section that the Gram-hierarchy paper leaves empty"
QUESTION = (
    "Which layers learn, do the pullback metrics concentrate, and how well do the field equations predict a step?"
)
SEEDS = 3
Case = dict[str, str | int | float | bool]
MOST = 6
COLORS = {"digits": "#1b4f8f", "teacher": "#d9772b", "heaviside": "#2f855a"}


def cases(quick: bool) -> list[Case]:
    depths, widths, tasks = ((1, 3), (32,), ("heaviside",)) if quick else (range(1, 7), (64, 256), tuple(COLORS))
    steps = 60 if quick else 400
    return [
        {"task": task, "depth": depth, "width": width, "steps": steps}
        for task in tasks
        for width in widths
        for depth in depths
    ]


def run(case: Case, seed: int, *, quick: bool, device: str, out: Path) -> dict[str, float]:
    x, y, x_test, y_test = data(str(case["task"]), seed)
    start = Fields(_weights(x.shape[1], int(case["depth"]), int(case["width"]), seed), x)
    lr = 0.3 / float(torch.linalg.eigvalsh(start.kernel())[-1])
    end, decrease, errors = _train(start, y, lr, int(case["steps"]))
    test = Fields(end.weights, x_test).outputs - y_test
    found = {
        "loss_start": _loss(start.outputs - y),
        "loss_end": _loss(end.outputs - y),
        "test_loss": _loss(test),
        "explained": 1 - float(test.square().mean() / y_test.var(correction=0)),
    }
    shares = decrease / decrease.sum()
    for layer in range(1, MOST + 1):
        found[f"share_{layer}"] = float(shares[layer - 1]) if layer <= start.depth else float("nan")
    found |= _concentrated(start, end)
    found |= {f"step_{name}": float(torch.tensor(values).median()) for name, values in errors.items()}
    for masks in ("follow", "held"):
        path = predict_trajectory(start, y, lr, 10 if quick else 50, masks=masks)
        found[f"drift_{masks}"] = float("inf") if path.ended else float(path.drift[-1])
    return found


def data(task: str, seed: int, n: int = 150) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test examples with one number as the target."""
    if task == "teacher":
        made = teacher_student(n, test=300, seed=seed)
        teacher = [torch.randn(4, 20, generator=torch.Generator().manual_seed(99 + seed), dtype=torch.float64)]
        x, x_test = made.x.double(), made.x_test.double()
        return x, Fields(teacher, x).outputs / 4, x_test, Fields(teacher, x_test).outputs / 4
    made = digits(seed) if task == "digits" else heaviside(n, test=300, seed=seed)
    label = (made.y % 2, made.y_test % 2) if task == "digits" else (made.y, made.y_test)
    return made.x[:n].double(), label[0][:n].double(), made.x_test.double(), label[1].double()


def _weights(inputs: int, depth: int, width: int, seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    sizes = [inputs, *[width] * depth]
    return [
        torch.randn(n, m, generator=rng, dtype=torch.float64) * (2 / m) ** 0.5 for m, n in itertools.pairwise(sizes)
    ]


def _loss(residual: Tensor) -> float:
    return float(residual.square().mean()) / 2


def _train(start: Fields, y: Tensor, lr: float, steps: int) -> tuple[Fields, Tensor, dict[str, list[float]]]:
    """The trained fields, ``Σ_t eᵀK^ℓe`` by layer, and the parts of the change of f at some steps."""
    fields, decrease = start, torch.zeros(start.depth, dtype=torch.float64)
    watched = {int(s) for s in torch.logspace(0, torch.tensor(float(steps)).log10(), 12)} | {0}
    errors: dict[str, list[float]] = {"error": [], "second_order": [], "mask_flips": [], "flipped": []}
    for step in range(steps):
        residual = fields.outputs - y
        decrease += fields.loss_decrease(residual)
        if step in watched:
            comparison = fields.compare_step(residual, lr)
            whole = float(comparison.measured.outputs.norm())
            missed = comparison.measured.outputs - comparison.predicted.outputs
            parts = comparison.errors()
            errors["error"].append(float(missed.norm()) / whole)
            errors["second_order"].append(parts["second order"])
            errors["mask_flips"].append(parts["mask flips"])
            errors["flipped"].append(sum(comparison.flips) / sum(comparison.neurons))
        fields = fields.take_step(residual, lr)
    return fields, decrease, errors


def _concentrated(start: Fields, end: Fields) -> dict[str, float]:
    """Participation ratios at the end over those at the start: of co-activation, of mask patterns, of ⟨M⟩."""
    ratios = []
    for layer in range(1, start.depth + 1):
        old, new = start.masks[layer], end.masks[layer]
        assert old is not None
        assert new is not None
        ratios.append(
            (
                overlap_rank(new) / overlap_rank(old),
                overlap_rank(new, center=True) / overlap_rank(old, center=True),
                _metric_rank(end.weights[layer - 1], new) / _metric_rank(start.weights[layer - 1], old),
            )
        )
    names = ("coactivation_ratio", "pattern_ratio", "metric_ratio")
    means = dict(zip(names, torch.tensor(ratios).mean(0).tolist(), strict=True))
    return means | {"metric_ratio_first": ratios[0][2], "metric_ratio_last": ratios[-1][2]}


def _metric_rank(weight: Tensor, masks: Tensor) -> float:
    values = metric_spectrum(weight, masks)
    return float(values.sum() ** 2 / values.square().sum())


def figure(table, path: Path) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = picture.subplots(1, 3)
    depths = sorted(table["depth"].unique())
    bottom = [0.0] * len(depths)
    for layer in range(1, MOST + 1):
        shares = [table.loc[table["depth"] == depth, f"share_{layer}"].mean() for depth in depths]
        height = [0.0 if share != share else 100 * share for share in shares]
        bars = left.bar(depths, height, bottom=bottom, color=f"C{layer - 1}")
        numbers = [str(layer) if part else "" for part in height]
        left.bar_label(bars, numbers, label_type="center", color="white", fontsize=8)
        bottom = [a + b for a, b in zip(bottom, height, strict=True)]
    left.set(xlabel="depth", ylabel="share of the loss decrease, %", ylim=(0, 100.5))
    left.set_title("Which layer learns (its number)")
    for task, part in table.groupby("task", sort=False):
        for width, some in part.groupby("width"):
            grouped = some.groupby("depth")
            style = {"color": COLORS[str(task)], "marker": "o", "ms": 3, "ls": "-" if width > 100 else "--"}
            label = f"{task}, width {width}"
            middle.plot(grouped["metric_ratio"].mean(), label=label, **style)
            right.plot(100 * grouped["step_error"].mean(), label=label, **style)
    middle.axhline(1, color="0.6", lw=0.8)
    middle.set(xlabel="depth", ylabel="effective rank of ⟨M⟩, end / start", title="Do the metrics concentrate?")
    right.set(xlabel="depth", ylabel="% of the true change of f", yscale="log", title="Missed by first order, one step")
    right.legend(fontsize=7)
    for axis in (left, middle, right):
        for side in (axis.xaxis, axis.yaxis):
            if side.get_scale() == "log":
                side.set_major_formatter("{x:g}")
                side.set_minor_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    picture.savefig(path, dpi=110)


def findings(table) -> str:  # type: ignore[no-untyped-def]
    """Means over tasks, widths and seeds by depth, and what the one-step error goes with."""
    from gramscope.reproduce import rank_correlation

    shares = [f"share_{layer}" for layer in range(1, MOST + 1)]
    names = [
        "metric_ratio",
        "pattern_ratio",
        "coactivation_ratio",
        "step_error",
        "step_second_order",
        "step_mask_flips",
    ]
    names += ["drift_follow", "drift_held", "explained"]
    lines = [f"| depth | {' | '.join(shares + names)} |", "|---" * (len(shares + names) + 1) + "|"]
    for depth, part in table.groupby("depth"):
        means = part[shares + names].replace(float("inf"), float("nan")).mean()
        lines.append(f"| {depth} | " + " | ".join("" if v != v else f"{v:.3g}" for v in means) + " |")
    groups = (table["task"] + table["depth"].astype(str) + "-" + table["width"].astype(str)).tolist()
    lines += ["", "Spearman correlations with 95 % intervals (whole cases resampled):", ""]
    for a, b in (
        ("depth", "metric_ratio"), ("depth", "step_error"), ("width", "step_error"), ("width", "metric_ratio"),
        ("step_flipped", "step_error"), ("metric_ratio", "explained"), ("depth", "drift_follow"),
    ):  # fmt: skip
        lines.append(f"- {a} with {b}: {rank_correlation(table[a], table[b], groups=groups)}")
    deep = table["depth"] > 1
    columns = [table.loc[deep, name] for name in ("width", "share_1", "depth")]
    chosen = [group for group, kept in zip(groups, deep, strict=True) if kept]
    told = rank_correlation(columns[0], columns[1], given=columns[2], groups=chosen)
    lines.append(f"- width with share_1 at the same depth, from depth 2 on: {told}")
    leads = table.loc[table["depth"] > 2, shares].idxmax(axis=1).str.removeprefix("share_").value_counts()
    lines += ["", "Jobs of depth 3 and more by the layer with the largest share: "]
    lines[-1] += ", ".join(f"layer {layer} in {count}" for layer, count in leads.items()) + "."
    ended = int((table["drift_follow"] == float("inf")).sum())
    lines += ["", f"The integrated equations diverged in {ended} of {len(table)} jobs."]
    return "\n".join(lines)
