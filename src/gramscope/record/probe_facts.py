"""What the probe says before any training: inputs, examples that occur twice, labels and chance; and the outputs."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from gramscope.base.complex_numbers import real_view
from gramscope.base.nested import ModelInput, map_tensors, tensors_in
from gramscope.capture.network import count_examples
from gramscope.record.objective import IGNORED, Objective
from gramscope.record.probe_pass import probe_pass
from gramscope.record.signals import ratio_of_rows
from gramscope.record.subject import Subject

MOST = 1024  # examples of which distances are computed
FEW = 8  # fewer neighbours tell nothing
SYMBOLS = 4  # values, at most, of inputs that are taken for symbols though they are floats (one-hot)
VOCABULARY = 256  # tokens of more kinds are not compared
FOURTHS = 16  # triples of examples at which the outputs are compared
ROUNDED = 1e-3  # of one: probabilities of 16 bits sum to it no better


def probe_facts(x: ModelInput, y: Tensor | None, objective: Objective) -> dict[str, float]:
    """Numbers by name; each is a fact about the examples alone, whatever the network."""
    tensors = [t for t in tensors_in(x) if t.numel()]
    if not tensors:
        return {}
    some = real_view(tensors[0][:MOST].detach())
    rows = some.reshape(len(some), -1).cpu()
    discrete = not rows.is_floating_point() or len(rows.unique()) <= SYMBOLS
    found = {"probe/discrete": float(discrete), "probe/duplicates": duplicates(rows)}
    found["probe/chance_duplicates"] = chance_duplicates(rows)
    if rows.is_floating_point():
        found |= scales(rows.double())
    if y is not None and y.numel():
        found |= _targets(y.cpu(), objective)
        compared = _comparable(rows)
        if len(rows) >= FEW and compared is not None and not objective.by_position:
            targets = y[:MOST].cpu().reshape(len(rows), -1)
            agree = numbers_agree(compared, targets) if y.is_floating_point() else labels_agree(compared, targets)
            found["probe/neighbors_agree"] = agree
    return {name: value for name, value in found.items() if math.isfinite(value)}


def duplicates(rows: Tensor) -> float:
    """Share of the examples that an earlier one equals in every entry."""
    return 1.0 - len(torch.unique(rows, dim=0)) / len(rows)


def chance_duplicates(rows: Tensor) -> float:
    """The same share as chance would have it, for entries that are drawn independently with the probe's frequencies."""
    n = len(rows)
    collide = 0.0
    for column in rows.T:
        counts = column.unique(return_counts=True)[1].double()
        collide += math.log(float(counts.square().sum()) / n**2)
        if collide < -40:
            return 0.0
    return min(1.0, (n - 1) / 2 * math.exp(collide))


def scales(rows: Float64[Tensor, "n d"]) -> dict[str, float]:
    """Root mean square of all entries; mean against deviation; how far deviations of features differ (90 % to 10 %)."""
    spread = rows.std(0, correction=0)
    moving = spread[spread > 0]
    found = {"probe/rms": float(rows.square().mean().sqrt())}
    if len(moving):
        typical = float(rows.std(correction=0))
        found["probe/mean_over_std"] = float(rows.mean().abs()) / typical
        places = (torch.tensor([0.1, 0.9], device=moving.device) * (len(moving) - 1)).round().long()
        low, high = moving.sort()[0][places].tolist()
        found["probe/scale_spread"] = high / low
    return found


def _targets(y: Tensor, objective: Objective) -> dict[str, float]:
    """``probe/chance``: the loss of the best constant outputs; ``probe/target_rank``: directions of the targets.

    ``probe/zero_or_one``: 1 where numbers are 0 and 1 alone; the squared error need not be what is trained on then.
    """
    if y.is_floating_point():
        rows = y.reshape(-1, y.shape[-1]).double() if y.dim() > 1 else y[:, None].double()
        found = {"probe/target_rank": ratio_of_rows(rows[:MOST])}
        if objective.kind != "numbers" or objective.own is not None:
            return found
        whole = y.reshape(len(y), -1).double()
        chance = float((whole - whole.mean(0)).square().mean())
        found |= {"probe/chance": chance, "probe/zero_or_one": float(zero_or_one(y))}
        found["probe/targets_rms"] = float(whole.square().mean().sqrt())
        found["probe/targets_mean"] = float(whole.mean(0).square().mean().sqrt())
        return found | ({"yes_or_no/chance": _entropy(whole)} if zero_or_one(y) else {})
    labels = y.reshape(-1)
    counts = labels[labels != IGNORED].unique(return_counts=True)[1].double()
    shares = counts / counts.sum()
    found = {"probe/classes": float(len(counts)), "probe/target_rank": float(len(counts) - 1)}
    found |= {"probe/outputs": float(objective.count)} if objective.kind == "classes" else {}
    if objective.kind == "binary":
        rows = y.reshape(len(y), -1).double()
        found |= {"probe/target_rank": ratio_of_rows(rows[:MOST])} if rows.shape[1] > 1 else {}
        found |= {"probe/chance": _entropy(rows)} if objective.own is None else {}
    if objective.own is None and objective.kind == "classes":
        found["probe/chance"] = float(-(shares * shares.log()).sum())
    return found


def zero_or_one(y: Tensor) -> bool:
    """Whether the targets are 0 and 1 alone, as binary cross-entropy takes them."""
    return bool(((y == 0) | (y == 1)).all())


def _entropy(rows: Float64[Tensor, "n k"]) -> float:
    """Binary cross-entropy of the best constant outputs, of targets 0 and 1."""
    share = rows.mean(0)
    return float((torch.special.entr(share) + torch.special.entr(1 - share)).mean())


def _comparable(rows: Tensor) -> Float64[Tensor, "n d"] | None:
    """Rows whose distances mean something: numbers as they are; tokens as one-hot by position, and counted."""
    if rows.is_floating_point():
        return rows.double()
    low, high = int(rows.min()), int(rows.max())
    if high - low >= VOCABULARY:
        return None
    hot = F.one_hot(rows.long() - low, high - low + 1).double()
    return torch.cat([hot.flatten(1), hot.sum(1)], 1)


def _nearest(x: Float64[Tensor, "n d"]) -> Tensor:
    apart = torch.cdist(x, x)
    apart.fill_diagonal_(math.inf)
    return apart.argmin(1)


def labels_agree(x: Float64[Tensor, "n d"], y: Tensor) -> float:
    """How often the nearest other example has the same label: 1 always, 0 as often as any other example has it."""
    same = float((y == y[_nearest(x)]).all(1).double().mean())
    chance = (float((y[:, None] == y[None]).all(2).double().sum()) - len(y)) / (len(y) * (len(y) - 1))
    return (same - chance) / (1 - chance) if chance < 1 else math.nan


def numbers_agree(x: Float64[Tensor, "n d"], y: Float[Tensor, "n k"]) -> float:
    """``1 - E|y - y_nearest|² / E|y - y'|²``: 1 where neighbours share targets, 0 where they do not."""
    wide = y.double()
    scatter = 2 * float((wide - wide.mean(0)).square().sum(1).mean()) * len(y) / (len(y) - 1)
    return 1 - float((wide - wide[_nearest(x)]).square().sum(1).mean()) / scatter if scatter else math.nan


def are_probabilities(f: Float[Tensor, "n C"], objective: Objective) -> bool | None:
    """Whether all outputs lie in [0, 1], and of several classes sum to one; None where they are no logits of labels."""
    if objective.kind == "binary":
        return bool(((f >= 0) & (f <= 1)).all())
    if objective.kind != "classes" or objective.count < 2:
        return None
    rows = objective.by_class(f).float()
    return bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < ROUNDED).all())


def not_affine(subject: Subject) -> float:
    """How far ``f(a) + f(b) - f(c)`` lies from ``f(a + b - c)``, against ``f(a) - f(c)``: 0 for affine outputs.

    One forward pass in evaluation mode, over examples a, b, c of the probe. NaN where it cannot be told: inputs that
    are no numbers, a single matrix of weights, fewer than three examples, outputs that do not vary, or a network that
    refuses such inputs.
    """
    x, model = subject.x, subject.model
    third = min(FOURTHS, count_examples(x) // 3)
    matrices = sum(p.dim() > 1 for p in model.parameters())
    if third < 1 or matrices < 2 or not all(t.is_floating_point() for t in tensors_in(x)):
        return math.nan
    try:
        with torch.no_grad(), probe_pass(replace(subject, x=_with_sums(x, third))) as f:
            found = f.double()
    except Exception:  # these inputs are ours: a network may refuse them
        return math.nan
    a, b, c, fourth = found.split(third)
    size = float((a - c).square().mean().sqrt())
    return float((a + b - c - fourth).square().mean().sqrt()) / size if size > 0 else math.nan


def _with_sums(x: ModelInput, third: int) -> ModelInput:
    def rows(t: Tensor) -> Tensor:
        a, b, c = t[: 3 * third].detach().split(third)
        return torch.cat([a, b, c, a + b - c])

    return map_tensors(rows, x)
