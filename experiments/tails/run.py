"""Section 10.3 of arXiv:2606.09744: does concentrated co-activation cause the large eigenvalues of ``WᵀW``?

The paper suggests a mechanism: during training the co-activation projectors ``P_{μν}`` concentrate, the pullback
metrics ``M_{μν} = WᵀP_{μν}W`` filter the gradient, and heavy tails of ``WᵀW`` are what adds up. Five networks tell the
parts of this apart. They differ in one thing each, and see the same batches:

- ``relu``: the paper's case.
- ``frozen``: weights train, the ReLU masks stay those of the start. Co-activation cannot change.
- ``linear``: no masks at all. There is no co-activation to concentrate.
- ``shuffled``: ReLU with permuted training labels. There are no classes whose examples could share units.
- ``frozen-shuffled``: both; co-activation cannot change and there are no classes.

If concentration is what makes large eigenvalues, ``frozen`` and ``linear`` must grow fewer of them than ``relu`` at the
same size of the weights' change, and runs that concentrate more must have heavier tails.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gramscope.hierarchy import (
    AccumulatedFlow,
    coactivation_subspace,
    frozen_masks,
    metric_spectrum,
    overlap_rank,
    shared_activation,
    update_alignment,
)
from gramscope.spectra import analyze
from gramscope.tasks import Task, digits, mlp

TITLE = "Heavy tails and co-activation"
QUESTION = "Does the concentration of co-activation during training cause the large eigenvalues of the weights?"
SEEDS = 5
Case = dict[str, str | int | float | bool]
NETWORKS = ("relu", "frozen", "linear", "shuffled", "frozen-shuffled")
COLORS = {
    "relu": "#1b4f8f",
    "frozen": "#d9772b",
    "linear": "#2f855a",
    "shuffled": "#8b3a8b",
    "frozen-shuffled": "#999999",
}
PROBE = 300


def cases(quick: bool) -> list[Case]:
    rates = (1e-3,) if quick else (3e-4, 1e-3, 3e-3)
    width, epochs = (128, 12) if quick else (512, 60)
    return [{"network": n, "lr": lr, "width": width, "epochs": epochs} for n in NETWORKS for lr in rates]


def run(case: Case, seed: int, *, quick: bool, device: str, out: Path) -> dict[str, float]:
    task = _task(str(case["network"]), seed)
    width = int(case["width"])
    start = mlp((64, width, width, width, 10), seed)
    if case["network"] == "linear":
        start = nn.Sequential(*(layer for layer in start if isinstance(layer, nn.Linear)))
    model = copy.deepcopy(start)
    network = frozen_masks(model) if str(case["network"]).startswith("frozen") else model
    before, flows = _weights(model), [(AccumulatedFlow(), AccumulatedFlow()) for _ in range(2)]
    _train(network, model, task, case, seed, flows)
    with torch.no_grad():
        right = {part: float((network(x).argmax(1) == y).double().mean()) for part, x, y in _parts(task)}
        loss = float(cross_entropy(network(task.x), task.y))
    found = {"train_accuracy": right["train"], "test_accuracy": right["test"], "train_loss": loss}
    found |= _concentrations(start, network, task, before, _weights(model))
    found |= _tails(before, _weights(model), seed, bootstrap=20 if quick else 100)
    for place, (flow, control) in enumerate(flows):
        found[f"flow_share_{place + 2}"] = flow.share().path_share
        found[f"flow_share_all_on_{place + 2}"] = control.share().path_share
    return found


def _task(network: str, seed: int) -> Task:
    task = digits(seed)
    if not network.endswith("shuffled"):
        return task
    order = torch.randperm(len(task.y), generator=torch.Generator().manual_seed(1000 + seed))
    return Task(task.x, task.y[order], task.x_test, task.y_test)


def _parts(task: Task) -> list[tuple[str, Tensor, Tensor]]:
    return [("train", task.x, task.y), ("test", task.x_test, task.y_test)]


def _weights(model: nn.Sequential) -> list[Tensor]:
    """Of all hidden layers; the readout is left out."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [layer.weight.detach().clone() for layer in linear[:-1]]


def _masks(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Masks of the three hidden layers; of a linear network all units are on."""
    with torch.no_grad():
        if hasattr(network, "masks"):
            found: list[Tensor] = network.masks(x)
            return found
        seen, value = [], x
        layers = list(network.children())
        for place, layer in enumerate(layers):
            value = layer(value)
            if isinstance(layer, nn.Linear) and place < len(layers) - 1:
                gated = isinstance(layers[place + 1], nn.ReLU)
                seen.append(value > 0 if gated else torch.ones_like(value, dtype=torch.bool))
        return seen


Flows = list[tuple[AccumulatedFlow, AccumulatedFlow]]


def _train(network: nn.Module, model: nn.Sequential, task: Task, case: Case, seed: int, flows: Flows) -> None:
    """Adam on mini-batches of 128; the weights' change is split by co-activation six times."""
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=float(case["lr"]))
    rng, epochs = torch.Generator().manual_seed(seed), int(case["epochs"])
    stretch = max(1, epochs // 6)
    for epoch in range(epochs):
        if epoch % stretch == 0:
            then, masks = _weights(model), _masks(network, task.x[:PROBE])
        for rows in torch.randperm(len(task.x), generator=rng).split(128):
            optimizer.zero_grad()
            cross_entropy(network(task.x[rows]), task.y[rows]).backward()
            optimizer.step()
        if (epoch + 1) % stretch == 0:
            _add_flows(flows, then, _weights(model), masks)


def _add_flows(flows: Flows, then: list[Tensor], now: list[Tensor], masks: list[Tensor]) -> None:
    """Layers 2 and 3; the control takes as many directions of ``WᵀW`` alone, all units on."""
    for place, (flow, control) in enumerate(flows, start=1):
        space = coactivation_subspace(then[place], masks[place])
        flow.add(now[place] - then[place], space)
        alone = coactivation_subspace(then[place], torch.ones_like(masks[place]), k=space.k)
        control.add(now[place] - then[place], alone)


def _concentrations(
    start: nn.Module, network: nn.Module, task: Task, before: list[Tensor], after: list[Tensor]
) -> dict[str, float]:
    x, y = task.x[:PROBE], task.y[:PROBE]
    first, last = _masks(start, x), _masks(network, x)
    found: dict[str, float] = {}
    for place in (1, 2):
        layer, old, new = place + 1, (before[place], first[place]), (after[place], last[place])
        found[f"coactivation_rank_{layer}"] = overlap_rank(last[place])
        found[f"coactivation_ratio_{layer}"] = overlap_rank(last[place]) / overlap_rank(first[place])
        found[f"pattern_ratio_{layer}"] = _patterns(last[place]) / _patterns(first[place])
        found[f"metric_ratio_{layer}"] = _metric_rank(*new) / _metric_rank(*old)
        found[f"update_in_metric_{layer}"] = update_alignment(new[0] - old[0], *new, k=10).excess
        found[f"class_gap_{layer}"] = shared_activation(last[place], y, permutations=0).gap
    return found


def _metric_rank(weight: Tensor, masks: Tensor) -> float:
    """Participation ratio of the mean pullback metric ``Wᵀ⟨P⟩W``."""
    values = metric_spectrum(weight, masks)
    return float(values.sum() ** 2 / values.square().sum())


def _patterns(masks: Tensor) -> float:
    """Participation ratio beside the mean pattern; NaN where all examples have one pattern (no masks)."""
    same = bool((masks == masks[0]).all())
    return float("nan") if same else overlap_rank(masks, center=True)


def _tails(before: list[Tensor], after: list[Tensor], seed: int, bootstrap: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for layer in (2, 3):
        old, new = before[layer - 1], after[layer - 1]
        table = analyze({"start": old, "end": new}, bootstrap=bootstrap, shuffles=10, seed=seed, workers=1)
        rows = table.set_index("name")
        end = rows.loc["end"]
        for name in ("alpha", "D", "n_tail", "p_value", "spikes", "stable_rank", "shuffled_alpha", "lambda_max"):
            found[f"{name}_{layer}"] = float(end[name])
        found[f"start_alpha_{layer}"] = float(rows.loc["start", "alpha"])
        found[f"start_lambda_max_{layer}"] = float(rows.loc["start", "lambda_max"])
        found[f"power_law_{layer}"] = float(end["verdict"] in ("power law", "truncated power law"))
        found[f"moved_{layer}"] = float((new - old).norm() / old.norm())
    return found


def figure(table, path: Path) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10.5, 3.6), layout="constrained")
    axes = picture.subplots(1, 3)
    for network, part in table.groupby("network", sort=False):
        style = {"s": 16, "color": COLORS[str(network)], "label": network, "alpha": 0.8}
        axes[0].scatter(part["moved_3"], part["spikes_3"], **style)
        axes[1].scatter(part["coactivation_ratio_3"], part["spikes_3"], **style)
        axes[2].scatter(part["alpha_3"], part["p_value_3"], **style)
    axes[0].set(xscale="log", xlabel="change of the weight |ΔW| / |W(0)|", ylabel="eigenvalues above the noise")
    axes[0].set(title="Spikes follow the size of the change")
    axes[1].set(xscale="log", xlabel="co-activation rank, end / start", ylabel="eigenvalues above the noise")
    axes[1].set(title="… against concentration (left: concentrated)")
    axes[2].set(xscale="log", xlabel="tail exponent α", ylabel="p-value of a power law", title="Is it a power law?")
    axes[2].axhline(0.1, color="0.6", lw=0.8, ls="--")
    for axis, ticks in zip(axes, ((0.5, 1, 2), (0.6, 0.8, 1, 1.5, 2), (2, 2.5, 3)), strict=True):
        axis.set_xticks(ticks)
    axes[0].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    picture.savefig(path, dpi=110)


def findings(table) -> str:  # type: ignore[no-untyped-def]
    """Rank correlations of spikes with concentration and with the size of the change; means of the five networks."""
    from gramscope.reproduce import rank_correlation

    groups = (table["network"] + table["lr"].astype(str)).tolist()
    lines = ["Spearman correlations over all jobs with 95 % intervals (whole cases resampled):", ""]
    lines += ["| layer | x | with the number of spikes | at the same size of the change | with the tail exponent |"]
    lines += ["|---|---|---|---|---|"]
    for layer in (2, 3):
        spikes, moved, alpha = (table[f"{name}_{layer}"] for name in ("spikes", "moved", "alpha"))
        for name, words in (
            ("moved", "size of the change"),
            ("coactivation_ratio", "co-activation rank, end / start"),
            ("metric_ratio", "metric rank, end / start"),
            ("flow_share", "share of the change in the metric's subspace"),
        ):
            x = table[f"{name}_{layer}"]
            partial = "–" if name == "moved" else str(rank_correlation(x, spikes, given=moved, groups=groups))
            plain, tail = rank_correlation(x, spikes, groups=groups), rank_correlation(x, alpha, groups=groups)
            lines.append(f"| {layer} | {words} | {plain} | {partial} | {tail} |")
    names = ["test_accuracy", "moved_3", "coactivation_ratio_3", "metric_ratio_3", "spikes_3", "alpha_3", "power_law_3"]
    lines += ["", f"| network | lr | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for (network, lr), part in table.groupby(["network", "lr"], sort=False):
        means = " | ".join(f"{value:.3g}" for value in part[names].mean())
        lines.append(f"| {network} | {lr:g} | {means} |")
    share = {place: (table[f"flow_share_{place}"] - table[f"flow_share_all_on_{place}"]).mean() for place in (2, 3)}
    lines += [
        "",
        f"Flow share minus that of the control with all masks on: {share[2]:+.3f} (layer 2), {share[3]:+.3f} (3).",
        "",
    ]
    relu = table[table["network"] == "relu"]
    for layer in (2, 3):
        ratio, spikes, moved = (relu[f"{name}_{layer}"] for name in ("coactivation_ratio", "spikes", "moved"))
        plain, partial = rank_correlation(ratio, spikes), rank_correlation(ratio, spikes, given=moved)
        lines.append(
            f"- Among the {len(relu)} ReLU jobs, layer {layer}: co-activation rank with spikes {plain}, "
            f"at the same size of the change {partial}."
        )
    return "\n".join(lines)
