"""What the probe itself says, before any training: scale of the inputs, examples that occur twice, labels and chance."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.nested import tensors_in
from gramscope.record.judge import IGNORED, Judge

MOST = 1024  # examples of which distances are computed
FEW = 8  # fewer neighbours tell nothing


def probe_facts(x: Any, y: Tensor | None, judge: Judge) -> dict[str, float]:
    """Numbers by name; each is a fact about the examples alone, whatever the network."""
    tensors = [t for t in tensors_in(x) if t.numel()]
    if not tensors:
        return {}
    rows = tensors[0][:MOST].detach().reshape(len(tensors[0][:MOST]), -1).cpu()
    found = {"probe/discrete": float(not rows.is_floating_point()), "probe/duplicates": duplicates(rows)}
    if rows.is_floating_point():
        found |= scales(rows.double())
    if y is not None and y.numel():
        found |= _targets(y.cpu(), judge)
        if len(rows) >= FEW and not judge.by_position:
            found |= neighbours(rows.double(), y[:MOST].cpu().reshape(len(rows), -1), discrete=not y.is_floating_point())
    return {name: value for name, value in found.items() if math.isfinite(value)}


def duplicates(rows: Tensor) -> float:
    """Share of the examples that an earlier one equals in every entry."""
    return 1.0 - len(torch.unique(rows, dim=0)) / len(rows)


def scales(rows: Float[Tensor, "n d"]) -> dict[str, float]:
    """Root mean square of all entries; mean against deviation; how far deviations of features differ (90 % to 10 %)."""
    spread = rows.std(0, correction=0)
    moving = spread[spread > 0]
    found = {"probe/rms": float(rows.square().mean().sqrt())}
    if len(moving):
        typical = float(rows.std(correction=0))
        found["probe/mean_over_std"] = float(rows.mean().abs()) / typical
        low, high = torch.quantile(moving, torch.tensor([0.1, 0.9], dtype=torch.float64, device="cpu")).tolist()
        found["probe/scale_spread"] = high / low
    return found


def _targets(y: Tensor, judge: Judge) -> dict[str, float]:
    """``probe/chance``: the loss of the best constant outputs; ``probe/classes``: how many classes occur."""
    if y.is_floating_point():
        rows = y.reshape(len(y), -1).double()
        return {"probe/chance": float((rows - rows.mean(0)).square().mean())} if judge.kind == "numbers" else {}
    labels = y.reshape(-1)
    counts = labels[labels != IGNORED].unique(return_counts=True)[1].double()
    found = {"probe/classes": float(len(counts)), "probe/commonest": float(counts.max() / counts.sum())}
    if judge.own is None and judge.kind == "classes":
        shares = counts / counts.sum()
        found["probe/chance"] = float(-(shares * shares.log()).sum())
    return found


def neighbours(x: Float[Tensor, "n d"], y: Tensor, discrete: bool) -> dict[str, float]:
    """How far the nearest other example has the same target: 1 always, 0 no more than any example has.

    For labels ``(agree - chance) / (1 - chance)``; for numbers ``1 - E|y - y_nearest|² / E|y - y'|²``.
    """
    apart = torch.cdist(x, x)
    apart.fill_diagonal_(math.inf)
    nearest = apart.argmin(1)
    if discrete:
        same = (y == y[nearest]).all(1).double().mean()
        chance = float((y[:, None] == y[None]).all(2).double().sum() - len(y)) / (len(y) * (len(y) - 1))
        return {"probe/neighbors_agree": (float(same) - chance) / (1 - chance) if chance < 1 else math.nan}
    wide = y.double()
    scatter = 2 * float((wide - wide.mean(0)).square().sum(1).mean()) * len(y) / (len(y) - 1)
    return {"probe/neighbors_agree": 1 - float((wide - wide[nearest]).square().sum(1).mean()) / scatter if scatter else math.nan}
