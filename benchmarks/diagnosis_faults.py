"""What may be wrong with a run of diagnosis_loop.py: one option a fault, in data, network or optimiser."""

import math
from typing import Any

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y, x of the probe, y of the probe
Options = dict[str, Any]


def spoil_data(o: Options, data: Data, rng: torch.Generator) -> Data:
    x, y, x_test, y_test = _other_numbers(o, data)
    if "shift" in o:
        y = (y + 1) % 10 if y.dim() == 1 else y.roll(-1, 1)
    if "sorted" in o:
        order = (y if y.dim() < 3 else y[:, 0]).reshape(len(y), -1)[:, 0].argsort(stable=True)
        x, y = x[order], y[order]
    if "without" in o:
        x, y = x[y != o["without"]], y[y != o["without"]]
    if "imbalance" in o:
        keep = (y == 3) | (torch.rand(len(y), generator=rng) < 0.001)
        x, y = x[keep], y[keep]
    if "shuffle" in o:
        chosen = (torch.rand(len(y), generator=rng) < o["shuffle"]).nonzero()[:, 0]
        y = y.clone()
        y[chosen] = y[chosen[torch.randperm(len(chosen), generator=rng)]]
    if "rare" in o:
        parts = [(t > 0.5)[:, 0] & (torch.rand(len(t), generator=rng) > 0.15) for t in (y, y_test)]
        x, y, x_test, y_test = x[~parts[0]], y[~parts[0]], x_test[~parts[1]], y_test[~parts[1]]
    if "train_examples" in o:
        x, y = x[: o["train_examples"]], y[: o["train_examples"]]
    if "one" in o:
        x_test, y_test = x_test[y_test == 0], y_test[y_test == 0]
    if "copies" in o:  # before the split: some of the probe occur twice
        twice = len(x_test) // o["copies"]
        x_test, y_test = torch.cat([x_test, x_test[:twice]]), torch.cat([y_test, y_test[:twice]])
    return x, y, x_test, y_test


def _other_numbers(o: Options, data: Data) -> Data:
    """Faults of single numbers: units, lags, and what is no number."""
    x, y, x_test, y_test = data
    if "late" in o:
        x, y = x[:, : -o["late"]], y[:, o["late"] :]
    if "pixels" in o:
        x, x_test = ((t - t.min()) / (t.max() - t.min()) * o["pixels"] for t in (x, x_test))
    if "column" in o:
        times = torch.ones(x.shape[-1])
        times[0] = o["column"]
        x, x_test = x * times, x_test * times
    if "targets" in o:
        y, y_test = 1000 * y + 5000, 1000 * y_test + 5000
    if "nan" in o:
        x = x.clone()
        x[100, 3] = math.nan
    return x, y, x_test, y_test


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
    if "frozen" in o:
        _freeze(o["frozen"], model)


def _freeze(what: str, model: nn.Module) -> None:
    """All norms, all but the last linear layer ("body"), or the parameters whose names begin so."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if what == "body":
        chosen = [p for m in linear[:-1] for p in m.parameters()]
    elif what == "norm":
        chosen = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    else:
        chosen = [p for n, p in model.named_parameters() if n.startswith(what)]
    for p in chosen:
        p.requires_grad_(False)


def groups_of(o: Options, model: nn.Module) -> Any:
    """Parameters for the optimiser; ``left`` are left out, ``body`` makes two groups: head and body."""
    free = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if "left" in o:
        return [p for n, p in free if not n.startswith(o["left"])]
    if "body" not in o:
        return [p for _, p in free]
    return [{"params": [p for n, p in free if n.startswith("head") == own]} for own in (True, False)]
