"""Representation learning at finite width (PDLT chapter 11, arXiv:2106.10165): theory beside real networks.

Four parts:

- ``growth``: P and Q of the dNTK, layer by layer, in ensembles of sampled networks, over the theory's recursion (1 is
  agreement). ReLU with ``s'' = 0`` as autograd has it, and tanh.
- ``depth``: the recursion far up, where the chapter has closed forms: ``Q / Θ²`` of ReLU grows as l/3, ``P / Θ²`` of
  tanh as -l/12 (one input, critical, no bias). Divided by n these are the corrections of order l/n.
- ``drift``: how the NTK of real networks moves in one real step of gradient descent, in the mean over thousands of
  networks, over the theory's ``-(2/n)(P + 2Q)``. For ReLU the step is also taken with all masks held.
- ``training``: networks of several widths trained to the end, and predicted from their start by the tangent kernel
  alone and by the nearly-kernel formula with the dNTK.
"""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import gramscope as gs
from gramscope.kernels import TangentKernels, layer_rates
from gramscope.theory import (
    FiniteWidthMLP,
    Flow,
    NearlyKernelRegressor,
    critical_point,
    ensemble,
    equivalent_learning_rates,
)

TITLE = "Finite width: the dNTK, its growth with depth, and what it predicts"
QUESTION = "Do the 1/n tensors of the theory describe real networks, and does the dNTK predict their training?"
SEEDS = 5
Case = dict[str, str | int | float | bool]
ONE = torch.tensor([[1.0, -0.5]], dtype=torch.float64)
X = torch.tensor([[1.0, 0.2], [-0.6, 1.0], [0.3, -1.1], [-1.0, -0.4]], dtype=torch.float64)
Y = torch.sin(2 * X[:, :1]) * torch.cos(X[:, 1:])
LAYERS = 4
SETTINGS = {"relu": (0.0, 2.0, 0.0, 1.0), "tanh": (0.1, 1.6, 0.4, 1.0)}  # C_b, C_W, λ_b, λ_W


def cases(quick: bool) -> list[Case]:
    widths = (16,) if quick else (16, 32, 64, 128)
    return [
        *({"part": part, "activation": a, "width": 0} for part in ("growth", "depth") for a in SETTINGS),
        *({"part": "drift", "activation": a, "width": n} for a in SETTINGS for n in widths),
        {"part": "training", "activation": "tanh", "width": 0},
    ]


def run(case: Case, seed: int, *, quick: bool, device: str, out: Path) -> dict[str, float]:
    activation = str(case["activation"])
    if case["part"] == "growth":
        return growth(activation, seed, 200 if quick else 4000)
    if case["part"] == "depth":
        return depth(activation, 50 if quick else 200)
    if case["part"] == "drift":
        return drift(activation, int(case["width"]), seed, 2000 if quick else 20_000)
    return training((16, 32) if quick else (32, 64, 128, 256), seed, 1 if quick else 6)


def _flow(activation: str, width: int, layers: int) -> Flow:
    C_b, C_W, lambda_b, lambda_W = SETTINGS[activation]
    widths = [ONE.shape[1], *[width] * (layers - 1), 1]
    return FiniteWidthMLP(widths, activation, C_b, C_W, lambda_b, lambda_W).flow(ONE, kink="autograd")


def growth(activation: str, seed: int, networks: int) -> dict[str, float]:
    """Measured over predicted, extrapolated to 1/n = 0 from two widths; P of ReLU is zero for one input."""
    flow = _flow(activation, 32, LAYERS)
    report = ensemble(flow, width=[16, 32], count=networks, seed=seed)
    found: dict[str, float] = {}
    for layer in range(2, LAYERS + 1):
        for name in "Q" if activation == "relu" else "PQ":
            expected = flow[layer].tensors()[name].item()
            found[f"{name}_{layer}"] = report.estimates[layer, name].value.item() / expected
    return found


def depth(activation: str, layer: int) -> dict[str, float]:
    """P and Q of the recursion at a deep layer, in units of Θ² l: the coefficients of l/n."""
    point = critical_point(activation)
    biases, weights = equivalent_learning_rates(activation, layer, lambda_b=0.0)
    mlp = FiniteWidthMLP(100, activation, point.C_b, point.C_W, biases, weights, depth=layer)
    at = mlp.flow(ONE)[layer]
    theta = at.Theta.item() ** 2
    return {"P_per_layer": at.P.item() / theta / layer, "Q_per_layer": at.Q.item() / theta / (layer - 1 / layer)}


def drift(activation: str, width: int, seed: int, networks: int) -> dict[str, float]:
    """Mean change of the NTK of three-layer networks in one step, over that of the theory; masks free, and held."""
    flow = _flow(activation, width, 3)
    rng = torch.Generator().manual_seed(seed)
    free, held = list[Tensor](), list[Tensor]()
    batch = 16_000 // width  # what stays in the cache
    for _ in range(networks // batch or 1):
        parameters, rates = _sampled(flow, batch, rng)
        free.append(_one_step(parameters, rates, activation, lr=1e-3))
        held.append(_one_step(parameters, rates, activation, lr=1e-3, held=True) if activation == "relu" else free[-1])
    theory = flow.ntk_drift().item()
    found = {}
    for name, change in (("free", torch.cat(free)), ("held", torch.cat(held))):
        found[f"{name}_ratio"] = float(change.mean()) / theory
        found[f"{name}_error"] = float(change.std()) / math.sqrt(len(change)) / abs(theory)
    flips = torch.cat(free) - torch.cat(held)
    return found | {"flips_times_width": width * float(flips.mean()), "theory_times_width": width * theory}


def _sampled(flow: Flow, count: int, rng: torch.Generator) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    tensors, rates, fan_in = list[Tensor](), list[float](), ONE.shape[1]
    for n, rate in zip(flow.widths, flow.rates, strict=True):
        tensors.append(torch.randn(count, n, fan_in, generator=rng).double() * math.sqrt(rate.C_W / fan_in))
        tensors.append(torch.randn(count, n, generator=rng).double() * math.sqrt(rate.C_b))
        rates += [rate.lambda_W / fan_in, rate.lambda_b]
        fan_in = n
    return tuple(tensors), tuple(rates)


def _one_step(
    parameters: tuple[Tensor, ...], rates: tuple[float, ...], activation: str, lr: float, held: bool = False
) -> Tensor:
    """``(H(1) - H(0)) / η`` of each network, for the loss ``½ z²`` on one input; ``held`` keeps all masks."""

    def output(flat: tuple[Tensor, ...], start: tuple[Tensor, ...]) -> Tensor:
        """With ``held`` the masks are those of a second network, that of the start."""
        z, gates = ONE[0], ONE[0]
        for place in range(0, len(flat), 2):
            if place and activation == "tanh":
                z = z.tanh()
            elif place:
                z, gates = z * ((gates if held else z) > 0), gates.relu()
            z = flat[place] @ z + flat[place + 1]
            gates = start[place] @ gates + start[place + 1]
        return z[0]

    gradients = vmap(grad(output))

    def ntk(parts: tuple[Tensor, ...]) -> Tensor:
        found = gradients(parts, parameters)
        return torch.stack([r * g.flatten(1).square().sum(1) for r, g in zip(rates, found, strict=True)]).sum(0)

    z = vmap(output)(parameters, parameters)
    moved = tuple(
        p - lr * r * z.reshape(-1, *[1] * (p.dim() - 1)) * g
        for p, r, g in zip(parameters, rates, gradients(parameters, parameters), strict=True)
    )
    return (ntk(moved) - ntk(parameters)) / lr


def training(widths: tuple[int, ...], seed: int, networks: int) -> dict[str, float]:
    """Root-mean-square errors of both predictions after real training, and their slopes in the width."""
    x_test = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = {n: np.mean([_trained(n, 1000 * seed + k, x_test) for k in range(networks)], axis=0) for n in widths}
    found: dict[str, float] = {}
    for place, name in enumerate(("linear", "nearly", "change")):
        errors = [float(rows[n][place]) for n in widths]
        found |= {f"{name}_{n}": error for n, error in zip(widths, errors, strict=True)}
        found[f"{name}_slope"] = float(np.polyfit(np.log(widths), np.log(errors), 1)[0])
    found["nearly_over_linear"] = found[f"nearly_{widths[-1]}"] / found[f"linear_{widths[-1]}"]
    return found


def _trained(width: int, seed: int, x_test: Tensor) -> tuple[float, float, float]:
    """Errors of the tangent kernel and of the nearly-kernel formula, and the relative change of the NTK."""
    model = _network(width, seed)
    rates = layer_rates(model, lambda_b=0.4, lambda_W=1.0)
    kernels = TangentKernels(model, metric=rates)
    before = kernels(X)
    step = 1.0 / float(np.linalg.eigvalsh(before)[-1])
    fit = NearlyKernelRegressor(kernels, algorithm="gradient-descent", step=step).fit(X, Y.numpy())
    nearly = fit.predict(x_test)
    linear = kernels.initial(x_test) + kernels(x_test, X) @ fit.dual_coef_
    start = gs.ntk(model, X, reduce="trace")
    _descend(model, rates, step)
    end = gs.ntk(model, X, reduce="trace")
    real = model(x_test).detach().numpy()
    errors = [float(np.sqrt(np.mean((guess - real) ** 2))) for guess in (linear, nearly)]
    return errors[0], errors[1], float((end - start).norm() / start.norm())


def _network(width: int, seed: int) -> nn.Sequential:
    """tanh, two hidden layers, C_b = 0.1, C_W = 1.6."""
    rng, layers = torch.Generator().manual_seed(seed), list[nn.Module]()
    for fan_in, fan_out in pairwise([2, width, width, 1]):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=math.sqrt(1.6 / fan_in), generator=rng)
        nn.init.normal_(linear.bias, std=math.sqrt(0.1), generator=rng)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def _descend(model: nn.Sequential, rates: dict[str, float], step: float) -> None:
    """Full-batch gradient descent until every residual is below 1e-6, or for 50,000 steps."""
    parameters = dict(model.named_parameters())
    for _ in range(50_000):
        residual = model(X) - Y
        if residual.abs().max() < 1e-6:
            return
        gradients = torch.autograd.grad(0.5 * residual.square().sum(), list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                p.sub_(step * rates[name] * g)


def figure(table, path: Path) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 3.5), layout="constrained")
    left, middle, right = picture.subplots(1, 3)
    for place, activation in enumerate(("relu", "tanh")):
        rows = table[(table["part"] == "growth") & (table["activation"] == activation)]
        for name in "PQ":
            columns = [
                c for c in rows.columns if c.startswith(f"{name}_") and c[2:].isdigit() and rows[c].notna().any()
            ]
            if columns:
                layers = [int(c[2:]) + 0.08 * place for c in columns]
                style = {"fmt": "o" if name == "Q" else "s", "ms": 4, "capsize": 2, "color": f"C{place}"}
                left.errorbar(layers, rows[columns].mean(), rows[columns].std(), label=f"{name}, {activation}", **style)
        rows = table[(table["part"] == "drift") & (table["activation"] == activation)]
        for name in ("free", "held") if activation == "relu" else ("free",):
            part = rows.groupby("width")[f"{name}_ratio"]
            label = f"{activation}, masks {name}" if activation == "relu" else activation
            middle.errorbar(part.mean().index, part.mean(), part.std(), marker="o", ms=4, capsize=2, label=label)
    for axis in (left, middle):
        axis.axhline(1, color="0.6", lw=0.8)
    left.set(xlabel="layer", ylabel="measured / theory", title="P and Q in ensembles", xticks=range(2, LAYERS + 1))
    left.legend(fontsize=7)
    middle.set(xlabel="width n", ylabel="measured / theory", title="Drift of the NTK in one real step", xscale="log")
    middle.set_xticks(sorted(table.loc[table["part"] == "drift", "width"].unique()))
    middle.legend(fontsize=7)
    rows = table[table["part"] == "training"]
    for name, label in (("linear", "tangent kernel"), ("nearly", "with the dNTK"), ("change", "change of the NTK")):
        columns = [c for c in rows.columns if c.startswith(f"{name}_") and c.split("_")[1].isdigit()]
        columns = [c for c in columns if rows[c].notna().any()]
        widths = [int(c.split("_")[1]) for c in columns]
        right.errorbar(widths, rows[columns].mean(), rows[columns].std(), marker="o", ms=4, capsize=2, label=label)
    right.set(xscale="log", yscale="log", xlabel="width n", ylabel="rms error; relative change")
    right.set_xticks(widths)
    right.set_title("Real training, predicted at the start", fontsize=10)
    right.legend(fontsize=7)
    for axis in (left, middle, right):
        for side in (axis.xaxis, axis.yaxis):
            if side.get_scale() == "log":
                side.set_major_formatter("{x:g}")
                side.set_minor_formatter("")
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    picture.savefig(path, dpi=110)


def findings(table) -> str:  # type: ignore[no-untyped-def]
    """With which power of the width mask flips change the NTK of ReLU networks, with a bootstrap over the seeds."""
    rows = table[(table["part"] == "drift") & (table["activation"] == "relu")]
    values = rows.pivot_table(index="width", columns="seed", values="flips_times_width").dropna(axis=1)
    if len(values) < 2 or values.shape[1] < 2:
        return ""
    rng, drawn = np.random.default_rng(0), list[float]()
    for _ in range(2000):
        means = np.array([-rng.choice(row, len(row)).mean() for row in values.to_numpy()])
        if (means > 0).all():
            drawn.append(float(np.polyfit(np.log(values.index), np.log(means / values.index), 1)[0]))
    whole = float(np.polyfit(np.log(values.index), np.log(-values.mean(axis=1) / values.index), 1)[0])
    low, high = np.quantile(drawn, [0.025, 0.975])
    times = ", ".join(f"{mean:.1f} at {width}" for width, mean in values.mean(axis=1).items())
    return (
        f"Mask flips in ReLU networks: their part of the change of the NTK, times the width, is {times} (the theory's "
        f"whole change is {rows['theory_times_width'].iloc[0]:.1f}). It falls as n to the power {whole:.2f} "
        f"({low:.2f} to {high:.2f}, seeds resampled at each width)."
    )
