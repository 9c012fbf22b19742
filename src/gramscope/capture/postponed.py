"""Gain and offset of a batch norm behind a convolution, from the gradients of the convolution itself.

With fixed statistics ``y_o = γ_o (u_o - μ_o) / σ_o + β_o`` and ``u_o = W_o · v + b_o``. The signals s at u are those at
y times γ/σ, and so

    ∂f/∂β_o = (σ_o / γ_o) Σ_p s_po        ∂f/∂γ_o = (W_o · ∂f/∂W_o + (b_o - μ_o) Σ_p s_po) / γ_o.

Nothing has to go through the signals at y, which may be many more numbers than the gradients, and which may then be
multiplied by all the slopes on their way at once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gramscope.capture.forms import FixedNorm, Gain, Outer
from gramscope.capture.recorder import Use
from gramscope.capture.sites import OuterSite, RowSite, Site
from gramscope.capture.tape import Signal, Step

# The smallest gain that signals may be divided by, and how far the mean may lie from zero, in units of σ, before the
# difference of two sums loses digits that u - μ has: one of the seven of float32 is what this costs at most.
SMALLEST, OFF_CENTRE = 1e-6, 8.0


@dataclass(frozen=True, eq=False)
class Postponed:
    """A use of γ or β, to be settled where the map before the norm is."""

    use: Use
    map: Outer
    weight: Tensor

    def site(self, name: str, before: Site, signal: Signal, first: int) -> RowSite:
        """The site, from that of the map and the signals there."""
        form = self.use.form
        assert isinstance(before, OuterSite)
        assert isinstance(form, Gain)
        assert form.norm is not None
        norm, gain = form.norm, _gain(form.norm)
        if form.factor is None:
            gradient = before.summed * (norm.spread / gain)
        elif before.made is None:  # nobody asked for products, and they may be large
            gradient = form.taped_site(name, None, signal, first).rows() * (norm.spread / gain)
        else:
            aligned = _aligned(before.made, self.weight.detach().reshape(self.map.axes))
            gradient = (aligned - _centre(norm, self.map.offset) * before.summed) / gain
        return RowSite(name, form.rule, self.use.weight.placement(), gradient)


def postpone(steps: Sequence[Step]) -> list[Step]:
    """The same steps, with the uses of such norms put behind those of the map before."""
    makers = {id(step.output): place for place, step in enumerate(steps)}
    readers = Counter(id(tensor) for step in steps for tensor in step.draft.inputs)
    moved = list(steps)
    for place, step in enumerate(steps):
        before = makers.get(id(step.draft.inputs[0])) if step.uses and len(step.draft.inputs) == 1 else None
        if before is None or readers[id(steps[before].output)] > 1:
            continue
        later = _later(step.uses, steps[before])
        if later:
            moved[place] = replace(step, uses=())
            moved[before] = replace(steps[before], uses=(*steps[before].uses, *later))
    return moved


def _later(uses: Sequence[Use], step: Step) -> list[Postponed]:
    """The uses of a norm, if all of them can wait for the map that made its input."""
    first = step.uses[0] if step.uses else None
    if not isinstance(first, Use) or not isinstance(first.form, Outer) or first.weight.frame is None:
        return []
    form, weight, dtype = first.form, first.weight.tensor, step.output.dtype
    if form.rule != "convolution" or dtype not in (torch.float32, torch.float64):
        return []
    norms = [use.form.norm for use in uses if isinstance(use.form, Gain) and use.weight.frame is not None]
    fits = all(norm is not None and norm.mean.dtype == dtype and _safe(norm, form.offset) for norm in norms)
    return [Postponed(use, form, weight) for use in uses] if fits and len(norms) == len(uses) else []


def _safe(norm: FixedNorm, offset: Tensor | None) -> bool:
    size, centre = _gain(norm).abs(), _centre(norm, offset).abs()
    return bool((size > SMALLEST * size.max().clamp(min=1)).all() and (centre <= OFF_CENTRE * norm.spread).all())


def _aligned(gradient: Tensor, weight: Tensor) -> Tensor:
    """``W_o · ∂f/∂W_o`` for each channel."""
    return (gradient.unflatten(2, weight.shape) * weight).sum(-1).flatten(2)


def _gain(norm: FixedNorm) -> Tensor:
    return torch.ones_like(norm.mean) if norm.gain is None else norm.gain.detach()


def _centre(norm: FixedNorm, offset: Tensor | None) -> Tensor:
    """μ - b."""
    return norm.mean if offset is None else norm.mean - offset
