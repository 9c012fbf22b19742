"""The global NTK as P K P* (arXiv:2507.06381, 2511.10796, 2605.08746): traces, ranks over training, bias, attention.

Four parts:

- ``trace``: the exact traces of the two networks of the trace paper, and the median error of 60 one-sided probes.
- ``gain``: how many dimensions in time K, P P* and P K P* have, by the gain of a recurrent network (the poster's figure
  4). The trials of the poster come from a generator of its own, so that only the order can be compared.
- ``training``: a recurrent network learns memory-pro; participation ratio of ``NTK_S`` and Rayleigh quotients on the
  network's own activity, on the targets and on random modes, at the start and at the end.
- ``attention``: the structural rank bound and the true rank of ``NTK_S`` of a transformer block, over all its states.
"""

import copy
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.linalg import one_sided_trace
from gramscope.propagators import (
    GlobalNTK,
    explained_variance_dimension,
    mean_response,
    participation_ratio,
    self_referential_bias,
    structural_rank_bound,
)
from gramscope.tasks import memory_pro

TITLE = "State operators: traces, ranks, and what a network sees of its task"
QUESTION = (
    "Do the published figures of the global NTK come out, and is learning biased towards the network's own activity?"
)
SEEDS = 5
Case = dict[str, str | int | float | bool]
OVER = ["trial", "site", "unit"]


def cases(quick: bool) -> list[Case]:
    networks, gains, tokens = (("mlp",), (1.0,), (4,)) if quick else (("mlp", "gru"), (1.0, 2.0, 3.0), (4, 8, 16))
    return [
        *({"part": "trace", "network": name, "size": 0.0} for name in networks),
        *({"part": "gain", "network": "rnn", "size": gain} for gain in gains),
        *({"part": "training", "network": name, "size": 0.0} for name in (("rnn",) if quick else ("rnn", "gru"))),
        *({"part": "attention", "network": "transformer", "size": float(t)} for t in tokens),
    ]


def run(case: Case, seed: int, *, quick: bool, device: str, out: Path) -> dict[str, float]:
    network, size = str(case["network"]), float(case["size"])
    if case["part"] == "trace":
        return traces(network, seed, 3 if quick else 21)
    if case["part"] == "gain":
        return dimensions(size, seed, width=32 if quick else 256, trials=4 if quick else 20)
    if case["part"] == "training":
        return trained(network, seed, steps=40 if quick else 600)
    return attention(int(size), seed)


class TrialFirst(nn.Module):
    """A time-first GRU, read with trials first and all hidden states of a trial as its outputs."""

    def __init__(self, cell: nn.GRU) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.transpose(0, 1))[0].transpose(0, 1).flatten(1)


def published(name: str) -> tuple[nn.Module, Tensor]:
    """The networks of arXiv:2511.10796, drawn as its code draws them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "gru":
            x = torch.randn(50, 15, 10)  # drawn before the weights
            return nn.GRU(10, 64), x
        x, layers = torch.randn(50, 100), list[nn.Module]([nn.Linear(100, 64)])
        for _ in range(14):
            layers += [nn.ReLU(), nn.Linear(64, 64)]
        return nn.Sequential(*layers, nn.ReLU()), x


def traces(name: str, seed: int, repeats: int) -> dict[str, float]:
    model, x = published(name)
    plain = TrialFirst(model) if isinstance(model, nn.GRU) else model
    exact = float(gs.ntk(plain, x if name == "mlp" else x.transpose(0, 1), reduce="trace").diagonal().double().sum())
    g = GlobalNTK(model, x)
    jacobian = g.C @ g.jacobian if name == "mlp" else g.jacobian
    found = {"exact_trace": exact}
    for side in ("reverse", "forward"):
        guesses = [one_sided_trace(jacobian, 60, side=side, seed=1000 * seed + k).value for k in range(repeats)]
        found[f"{side}_error"] = median(abs(guess / exact - 1) for guess in guesses)
    return found


def _recurrent(name: str, inputs: int, width: int, seed: int) -> nn.RNN | nn.GRU:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {"rnn": nn.RNN, "gru": nn.GRU}[name](inputs, width, batch_first=True)


def dimensions(gain: float, seed: int, width: int, trials: int) -> dict[str, float]:
    """Principal components that hold 95 % of each operator, averaged to time x time."""
    model = _recurrent("rnn", 3, width, seed)
    with torch.no_grad():
        model.weight_hh_l0.mul_(gain)
    g = GlobalNTK(model, memory_pro(trials, seed=seed).x)
    operators = {"K": g.K, "PP": g.P @ g.P.T, "PKP": g.operator}
    return {
        f"dimension_{name}": explained_variance_dimension(mean_response(operator, OVER).matrix)
        for name, operator in operators.items()
    }


def trained(name: str, seed: int, steps: int) -> dict[str, float]:
    task = memory_pro(10, seed=seed, fixation=4, stimulus=6, delay=8, response=6)
    cell, readout = _recurrent(name, 3, 64, seed), nn.Linear(64, 3)
    nn.init.normal_(readout.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(readout.bias)
    start, parameters = copy.deepcopy(cell), [*cell.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-3)
    for _ in range(steps):
        loss = task.loss(readout(cell(task.x)[0]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.3)
        optimizer.step()
    with torch.no_grad():
        found = {"loss": float(task.loss(readout(cell(task.x)[0])))}
    for when, model in (("start", start), ("end", cell)):
        g = GlobalNTK(model, task.x, precision="float64")
        bias = self_referential_bias(g, k=3, targets=task.y, seed=seed)
        assert bias.target is not None
        found[f"rank_{when}"] = participation_ratio(g.operator, products=200, seed=seed).value
        found[f"own_over_random_{when}"] = bias.ratio
        found[f"worst_target_over_random_{when}"] = float(bias.target.min() / bias.random.mean())
        found[f"own_over_best_target_{when}"] = float(bias.activity[0] / bias.target.max())
    found["rank_ratio"] = found["rank_end"] / found["rank_start"]
    return found


def attention(tokens: int, seed: int, width: int = 16) -> dict[str, float]:
    """Ranks of ``NTK_S`` over the number of states, of one block with ``tokens`` tokens and two trials."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        x = torch.randn(2, tokens, width)
    g = GlobalNTK(block.double().eval(), x.double())
    matrix = g.operator.dense()
    values = torch.linalg.eigvalsh((matrix + matrix.T) / 2).clamp_min(0)
    states = len(values)
    return {
        "states": float(states),
        "bound_share": structural_rank_bound(g) / states,
        "rank_share": float((values > 1e-10 * values[-1]).sum()) / states,
        "effective_rank": float(values.sum() ** 2 / values.square().sum()),
    }


def figure(table, path: Path) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 3.5), layout="constrained")
    left, middle, right = picture.subplots(1, 3)
    rows = table[table["part"] == "gain"].groupby("size")
    for name, label in (("K", "K"), ("PP", "P P*"), ("PKP", "P K P*")):
        part = rows[f"dimension_{name}"]
        middle_seed = part.median()
        reach = (middle_seed - part.min(), part.max() - middle_seed)  # from the smallest to the largest seed
        left.errorbar(middle_seed.index, middle_seed, reach, marker="o", ms=4, capsize=2, label=label)
    left.set(yscale="log", xlabel="gain", ylabel="dimensions in time (95 %)", title="Operators of an untrained RNN")
    left.set_xticks(list(rows.groups))
    left.legend(fontsize=7)
    names = ("own_over_random", "own_over_best_target", "worst_target_over_random")
    for place, (network, part) in enumerate(table[table["part"] == "training"].groupby("network")):
        for offset, when in ((-0.2, "start"), (0.2, "end")):
            own = part[[f"{name}_{when}" for name in names]]
            values, spread = own.median(), (own.median() - own.min(), own.max() - own.median())
            at = [k + offset + 0.08 * place for k in range(len(names))]
            middle.errorbar(at, values, spread, fmt="os"[place], ms=5, capsize=2, label=f"{network}, {when}")
    middle.axhline(1, color="0.6", lw=0.8)
    middle.set_xticks(range(3), ["own /\nrandom", "own /\nbest target", "worst target /\nrandom"], fontsize=8)
    middle.set(yscale="log", ylabel="ratio of Rayleigh quotients", title="What the network sees")
    middle.legend(fontsize=7)
    rows = table[table["part"] == "attention"].groupby("size")
    for name, label in (("bound_share", "structural bound"), ("rank_share", "rank")):
        right.plot(rows[name].mean(), marker="o", ms=4, label=label)
    right.plot(rows["effective_rank"].mean() / rows["states"].mean(), marker="o", ms=4, label="effective rank")
    right.set(xlabel="tokens", ylabel="share of the states", ylim=(0, 1), title="NTK$_S$ of a transformer block")
    right.legend(fontsize=7)
    for axis in (left, middle, right):
        if axis.get_yscale() == "log":
            axis.yaxis.set_minor_formatter("")
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    picture.savefig(path, dpi=110)
