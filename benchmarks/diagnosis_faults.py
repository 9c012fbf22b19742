"""What may be wrong with a run of diagnosis_loop.py: one option a fault, in data, network or optimiser."""

import math
from typing import Any

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y, x of the probe, y of the probe
Options = dict[str, Any]
NORMS = (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)


# Data ----------------------------------------------------------------------------------------------------------------
def split(x: Tensor, y: Tensor, held: int) -> Data:
    """The first examples are held out."""
    return x[held:], y[held:], x[:held], y[:held]


def spoil_data(o: Options, data: Data, rng: torch.Generator) -> tuple[Data, tuple[Tensor, Tensor] | None]:
    """The data with their faults, and fresh examples where the fault lies in how the probe was chosen."""
    x, y, x_test, y_test = _other_labels(o, _other_numbers(o, data), rng)
    fresh = None
    if "train_examples" in o:
        x, y = x[: o["train_examples"]], y[: o["train_examples"]]
    if "fresh" in o:  # so many of the training examples are held out as well
        fresh, x, y = (x[-o["fresh"] :], y[-o["fresh"] :]), x[: -o["fresh"]], y[: -o["fresh"]]
    if o.get("one"):
        keep = y_test == y_test[0]
        x_test, y_test = x_test[keep], y_test[keep]
    if o.get("held_out_first"):  # the first of the sorted examples are held out, as far as they are of one class
        x, y = (torch.cat([a, b])[torch.cat([y_test, y]).argsort(stable=True)] for a, b in ((x_test, x), (y_test, y)))
        held = min(len(x_test), int((y == y[0]).sum()))
        x, y, x_test, y_test = x[held:], y[held:], x[:held], y[:held]
    if "copies" in o:  # some of the probe occur twice
        twice = len(x_test) // o["copies"]
        x_test, y_test = torch.cat([x_test, x_test[:twice]]), torch.cat([y_test, y_test[:twice]])
    if "doubled" in o:
        fresh = x_test, y_test
        x, y, x_test, y_test = _split_with_copies(x, y, o["doubled"], rng)
    return (x, y, x_test, y_test), fresh


def _split_with_copies(x: Tensor, y: Tensor, doubled: float, rng: torch.Generator) -> Data:
    """Training examples and probe (three of ten) from one pool, in which this share occurs two more times."""
    count = int(doubled * len(x))
    chosen = torch.cat([torch.arange(len(x)), *2 * (torch.arange(count),)])
    chosen = chosen[torch.randperm(len(chosen), generator=rng)]
    probe, train = chosen[: 3 * len(chosen) // 10], chosen[3 * len(chosen) // 10 :]
    return x[train], y[train], x[probe], y[probe]


def _other_labels(o: Options, data: Data, rng: torch.Generator) -> Data:
    """Labels of other examples, in another code, in an order, or of too few classes."""
    x, y, x_test, y_test = data
    if "shift" in o:
        y = (y + 1) % 10 if y.dim() == 1 else y.roll(-1, 1)
    if o.get("sorted"):
        order = (y if y.dim() < 3 else y[:, 0]).reshape(len(y), -1)[:, 0].argsort(stable=True)
        x, y = x[order], y[order]
    if o.get("without") is not None:
        x, y = x[y != o["without"]], y[y != o["without"]]
    if o.get("shuffle"):
        y = _exchanged(y, o["shuffle"], rng)
        y_test = _exchanged(y_test, o["shuffle"], rng) if o.get("probe_too") else y_test
    return x, y, x_test, y_test


def _exchanged(y: Tensor, share: float, rng: torch.Generator) -> Tensor:
    chosen = (torch.rand(len(y), generator=rng) < share).nonzero()[:, 0]
    y = y.clone()
    y[chosen] = y[chosen[torch.randperm(len(chosen), generator=rng)]]
    return y


def _other_numbers(o: Options, data: Data) -> Data:
    """Units, lags, colours, and what is no number."""
    x, y, x_test, y_test = data
    if "late" in o:
        x, y = x[:, : -o["late"]], y[:, o["late"] :]
    if "pixels" in o:
        x, x_test = ((t - t.min()) / (t.max() - t.min()) * o["pixels"] for t in (x, x_test))
    if "inputs" in o:
        x, x_test = (t * o["inputs"][0] + o["inputs"][1] for t in (x, x_test))
    if o.get("negatives"):  # every second image has its colours exchanged: a sum over pixels tells nothing then
        x, x_test = (torch.where(_every_second(t), -t, t) for t in (x, x_test))
    if "column" in o:
        times = torch.ones(x.shape[-1])
        times[0] = o["column"]
        x, x_test = x * times, x_test * times
    if "targets" in o:
        y, y_test = (t * o["targets"][0] + o["targets"][1] for t in (y, y_test))
    if "nan" in o:
        x = x.clone()
        x[100].view(-1)[3] = math.nan
    return x, y, x_test, y_test


def _every_second(t: Tensor) -> Tensor:
    return (torch.arange(len(t)) % 2 == 1).reshape(-1, *(1 for _ in t.shape[1:]))


# Network -------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def spoil_network(o: Options, model: nn.Module) -> None:
    weighted = [m for m in model.modules() if isinstance(getattr(m, "weight", None), Tensor)]
    linear = [m for m in weighted if isinstance(m, nn.Linear)]
    for module in linear if o.get("zero") == "all" else linear[1:2] if o.get("zero") else []:
        module.weight.zero_(), module.bias.zero_()
    for module in weighted[:-1] if "bias" in o else []:
        if isinstance(module.bias, Tensor):
            module.bias.fill_(o["bias"])
    for p in model.parameters():
        if "scale" in o and p.dim() > 1:
            p *= o["scale"]
        if "constant" in o:
            p.fill_(1 / p[0].numel() ** 0.5 if p.dim() > 1 else 0.0)
    for module in hidden_layers(model):
        for name, p in module.named_parameters(recurse=False):
            _spoil_hidden(o, name, p)
    for p in _parameters(o.get("frozen"), model):
        p.requires_grad_(False)


def _spoil_hidden(o: Options, name: str, p: Tensor) -> None:
    if p.dim() > 1:
        p *= o.get("hidden_scale", 1.0)
    if o.get("hidden_constant"):
        p.fill_(1 / p[0].numel() ** 0.5 if p.dim() > 1 else 0.0)
    if "hidden_bias" in o and name == "bias":
        p.fill_(o["hidden_bias"])


def hidden_layers(model: nn.Module) -> list[nn.Module]:
    """Modules with weights below the last, without norms and embeddings."""
    own = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    return [m for m in own[:-1] if not isinstance(m, (*NORMS, nn.Embedding))]


def _parameters(what: str | None, model: nn.Module) -> list[nn.Parameter]:
    """Of the largest hidden layer, or of names that begin so."""
    if not what:
        return []
    if what == "largest":
        largest = max(hidden_layers(model), key=lambda m: sum(p.numel() for p in m.parameters(recurse=False)))
        return list(largest.parameters(recurse=False))
    return [p for n, p in model.named_parameters() if n.startswith(what)]


# Optimiser -----------------------------------------------------------------------------------------------------------
def optimizer_of(o: Options, model: nn.Module) -> torch.optim.Optimizer:
    """``left`` are left out, ``slow`` (or all but the head) are a group of their own with ``body`` of the rate."""
    left = {id(p) for p in _parameters(o.get("left"), model)}
    free = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in left]
    slow = [(n, p) for n, p in free if _is_slow(o, n, p, model)] if o.get("body", 1.0) != 1.0 else []
    fast = [p for n, p in free if not any(p is q for _, q in slow)]
    groups = [{"params": part} for part in (fast, [p for _, p in slow]) if part]
    made: torch.optim.Optimizer = o["optimizer"](groups)
    for place, group in enumerate(made.param_groups):
        group["lr"] *= o.get("lr", 1.0) * (o["body"] if place else 1.0)
        group |= {name: o[name] for name in ("weight_decay", "momentum") if name in o}
    return made


def _is_slow(o: Options, name: str, p: Tensor, model: nn.Module) -> bool:
    if "slow" in o:
        return name.startswith(o["slow"])
    heads = [n for n, _ in model.named_parameters() if n.startswith("head")]
    last = {id(q) for q in list(model.modules())[-1].parameters()}
    return name not in heads if heads else id(p) not in last
