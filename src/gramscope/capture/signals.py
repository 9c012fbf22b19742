"""From recorded uses to sites: one batched backward pass, the layout of each site, and the autograd fallback."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import CoupledExamplesError
from gramscope.capture.batched import batched_gradients
from gramscope.capture.forms import Gain, Lookup, Outer, Tap
from gramscope.capture.graph import Graph
from gramscope.capture.layout import (
    TF32_TOLERANCE,
    TOLERANCE,
    Layout,
    Regular,
    exact_layout,
    example_weights,
    find_layout,
    power_of_two_weights,
)  # fmt: skip
from gramscope.capture.postponed import Postponed, postpone
from gramscope.capture.recorder import Recorder, Use
from gramscope.capture.sites import RowSite, Site
from gramscope.capture.tape import Signal, Step
from gramscope.capture.weights import Weight

# Entries of gradients that the fallback holds at once.
FALLBACK_ENTRIES = 2**26
# Passes whose signals must scale exactly, where they are too small to tell rounding from coupling.
EXACT_CHECKS = 3
# Where a site stands in a snapshot: the number of the use, and of the root of its weight.
Place = tuple[int, int]


class Backward:
    """Signals of the outputs ``f`` (n, C) along the cotangents (k, n, C)."""

    def __init__(
        self, f: Float[Tensor, "n C"], cotangents: Float[Tensor, "k n C"], parameters: Mapping[str, Tensor],
        recorder: Recorder,
    ) -> None:  # fmt: skip
        self.f, self.cotangents, self.recorder = f, cotangents, recorder
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.graph = Graph(f)
        self.weights = example_weights(f.shape[0], f.dtype, f.device)
        generator = torch.Generator().manual_seed(0)
        self.mixture = torch.randn(len(cotangents), generator=generator, device="cpu").to(f)

        reached = [use for use in recorder.uses if self.graph.reaches(use.leaf)]
        self.structured = [
            use for use in reached if use.inputs_intact() and self.graph.only_through(use.leaf, use.edge)
        ]
        known = {id(use) for use in self.structured}
        self.hidden = [use for use in reached if id(use) not in known]
        # Parameters that the graph still reaches were used in ways the recorder cannot see.
        self.unseen = [p for p in parameters.values() if p.requires_grad and self.graph.reaches(p)]

    def by_example(self) -> bool:
        """The tape leads from the outputs to every use: each example has signals of its own, in any parts."""
        tape = self.recorder.tape
        taped = {id(use) for step in tape.steps for use in step.uses}
        complete = not self.hidden and not self.unseen and all(id(use) in taped for use in self.structured)
        return complete and tape.has(self.f) and tape.intact()

    def used_once(self) -> set[str]:
        """Names of the parameters that entered one operation only."""
        uses = Counter(self.names[id(root)] for use in self.structured for root in use.weight.roots)
        return {name for name, count in uses.items() if count == 1}

    def taped_sites(self, part: slice, copied: bool = False) -> Iterator[tuple[Place, Site]]:
        """Sites of some examples, where ``by_example``: each as soon as its signals are there, with its place.

        ``copied``: who takes a site keeps none of its memory, so that the next signals may be written there.
        """
        first = part.indices(len(self.f))[0]
        places = {id(use): place for place, use in enumerate(self.structured)}
        steps = self._postponed if copied else self.recorder.tape.steps
        for uses, signal in self.recorder.tape.signals(self.f, self._cotangents_of(part), part, steps, copied):
            made: list[Site] = []
            for use in uses:
                if isinstance(use, Postponed):
                    later = use.site(self._name(use.use.weight), made[0], signal, first)
                    yield (places[id(use.use)], 0), later
                elif id(use) in places:
                    made += (found := self._taped_site(use, signal, first))
                    yield from (((places[id(use)], root), site) for root, site in enumerate(found))

    @cached_property
    def _postponed(self) -> list[Step]:
        return postpone(self.recorder.tape.steps)

    def _cotangents_of(self, part: slice) -> Signal:
        by_example = self.cotangents.transpose(0, 1)
        if by_example.stride(0) == 0 or len(by_example) == 1:
            return Signal.alike(by_example[:1], len(by_example[part]))
        return Signal(by_example[part])

    def _taped_site(self, use: Use, signal: Signal, first: int) -> list[Site]:
        if use.weight.frame is not None:
            return [use.form.taped_site(self._name(use.weight), use.weight.placement(), signal, first)]
        site = use.form.taped_site("", None, signal, first)
        return self._pulled_back(use.weight, site.rows(), f"{site.rule}, derived weight")

    def sites(self) -> list[Site]:
        """Sites of all uses and all examples."""
        if self.by_example():
            by_place = dict(self.taped_sites(slice(0, len(self.f))))
            return [by_place[place] for place in sorted(by_place)]
        found: list[Site] = []
        hidden = list(self.hidden)
        if self.structured:
            for use, site in self._structured_sites(self.structured):
                if site is None:
                    hidden.append(use)
                else:
                    found += site
        leaves: list[tuple[Weight, Tensor]] = [(use.weight, use.leaf) for use in hidden]
        leaves += [(Weight.of_parameter(p), p) for p in self.unseen]
        return found + self._fallback_sites(leaves)

    # Structured uses -------------------------------------------------------------------------------

    def _structured_sites(self, uses: Sequence[Use]) -> list[tuple[Use, list[Site] | None]]:
        edges = list({(use.edge.node, use.edge.output_nr): use.edge for use in uses}.values())
        place = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges)}
        checked = self.f.shape[0] > 1
        signals = self._signals(edges, checked)
        result: list[tuple[Use, list[Site] | None]] = []
        for use in uses:
            raw = signals[place[(use.edge.node, use.edge.output_nr)]]
            result.append((use, [] if raw is None else self._site(use, raw, checked)))
        return result

    def _signals(self, edges: Sequence[Any], checked: bool) -> list[Tensor | None]:
        cotangents = self.cotangents
        if checked:
            scaled = torch.einsum("k,knC->nC", self.mixture, cotangents) * self.weights[:, None]
            cotangents = torch.cat([cotangents, scaled[None]])
        self.recorder.demand.directions = len(cotangents)
        return batched_gradients([self.f], edges, [cotangents])

    def _site(self, use: Use, raw: Tensor, checked: bool) -> list[Site] | None:
        """Sites of one use, one for each root of its weight; None where only plain autograd will do."""
        layout = self._layout(use, raw, checked)
        if layout is None:
            return None
        rows = use.form.as_rows(raw[: len(self.cotangents)])
        if isinstance(use.form, Tap):
            gathered = use.form.per_example(rows, layout)
            if gathered is None:
                return None
            axis, gradient = gathered
            return self._pulled_back(use.weight.slice(axis), gradient, use.form.rule)
        if raw.is_complex():
            return self._complex_site(use, rows, layout)
        if use.weight.frame is not None:
            site = use.form.site(self._name(use.weight), use.weight.placement(), rows, layout)
            return None if site is None else [site]
        site = use.form.site("", None, rows, layout)
        return None if site is None else self._pulled_back(use.weight, site.rows(), f"{site.rule}, derived weight")

    def _complex_site(self, use: Use, rows: Tensor, layout: Layout) -> list[Site] | None:
        """Complex signals inside a real network (Fourier layers): gradients as rows, real where the weight is."""
        site = use.form.site("", None, rows, layout)
        if site is None:
            return None
        complex_weight = use.weight.tensor.is_complex() and use.weight.frame is None  # a cast parameter is still real
        gradient = site.rows() if complex_weight else site.rows().real
        if use.weight.frame is None:
            return self._pulled_back(use.weight, gradient, f"{site.rule}, derived weight")
        return [RowSite(self._name(use.weight), site.rule, use.weight.placement(), gradient)]

    def _layout(self, use: Use, raw: Tensor, checked: bool) -> Layout | None:
        n = self.f.shape[0]
        if not checked:
            return Regular(1, 1, use.form.flat_rows(raw[:1]).shape[1])
        flat = use.form.flat_rows(raw)
        flat = torch.view_as_real(flat).flatten(2) if flat.is_complex() else flat
        plain = torch.einsum("k,kMo->Mo", self.mixture.to(flat.dtype), flat[:-1])
        coarsest = max(self.f.dtype, self.recorder.coarsest, key=lambda dtype: torch.finfo(dtype).eps)
        tolerance = max(TOLERANCE.get(coarsest, 1e-1), TF32_TOLERANCE if self.recorder.tf32 else 0.0)
        layout = find_layout(flat[-1], plain, self.weights.to(flat.dtype), tolerance) or self._exact_layout(use)
        # Entries of a tap, or of a weight as large as its result, need not be rows of examples at all.
        certain = isinstance(use.form, Outer | Lookup) or (isinstance(use.form, Gain) and flat.shape[1] % n == 0)
        # Nor need those of a constant, or of a weight that was copied for every example and then worked on.
        copied = use.weight.frame is None and n in use.weight.tensor.shape
        certain = certain and not use.doubtful and not copied
        if layout is None and self.recorder.refuse_coupled and certain and self.recorder.is_coupled():
            raise CoupledExamplesError(
                "each example's output must depend on that example alone, but the signals at "
                f"{self._name(use.weight)!r} ({use.form.rule}) mix the {n} examples. "
                "Put layers that mix a batch into eval mode, or pass "
                'coupled="exact" for the kernel of the coupled outputs.' + self.recorder.hint
            )
        return layout

    def _exact_layout(self, use: Use) -> Layout | None:
        """The layout of signals that cancel to rounding (at logits under a sum of probabilities, say), or None."""
        if self.f.dtype == torch.float16:
            return None  # five powers of two are all that its range has room for
        self.recorder.demand.directions = 1
        mixed = torch.einsum("k,knC->nC", self.mixture, self.cotangents)

        def rows(cotangent: Tensor) -> Tensor:
            (signal,) = torch.autograd.grad(self.f, [use.edge], cotangent, retain_graph=True)
            flat = use.form.flat_rows(signal[None])[0]
            return torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat

        plain, scaled = rows(mixed), []
        for seed in range(EXACT_CHECKS):
            weights = power_of_two_weights(len(mixed), mixed.dtype, mixed.device, seed)
            scaled.append((weights.to(plain.dtype), rows(mixed * weights[:, None])))
        return exact_layout(plain, scaled)

    def _pulled_back(self, weight: Weight, gradient: Inexact[Tensor, "n k p"], rule: str) -> list[Site]:
        chunk = max(1, FALLBACK_ENTRIES // max(1, gradient.shape[2]))
        with torch.enable_grad():
            by_root = weight.pull_back(gradient, chunk)
        return [RowSite(self.names[key], rule, None, rows) for key, rows in by_root.items()]

    def _name(self, weight: Weight) -> str:
        return self.names[id(weight.roots[0])]

    # The fallback ----------------------------------------------------------------------------------

    def _fallback_sites(self, leaves: Sequence[tuple[Weight, Tensor]]) -> list[Site]:
        """One row of the Jacobian for each example and direction, by plain autograd: exact for anything."""
        if not leaves:
            return []
        self.recorder.demand.weight_gradients = True
        n, k = self.f.shape[0], len(self.cotangents)
        entries = sum(leaf.numel() for _, leaf in leaves)
        at_once = max(1, FALLBACK_ENTRIES // max(1, k * (entries + self.f.numel())))
        parts: list[list[Tensor]] = [[] for _ in leaves]
        for examples in torch.arange(n, device=self.f.device).split(at_once):
            one_hot = self.f.new_zeros(len(examples), k, *self.f.shape)
            for row, example in enumerate(examples):
                one_hot[row, :, example] = self.cotangents[:, example]
            gradients = batched_gradients([self.f], [leaf for _, leaf in leaves], [one_hot.flatten(0, 1)])
            for pieces, (_, leaf), gradient in zip(parts, leaves, gradients, strict=True):
                full = leaf.new_zeros(len(examples) * k, *leaf.shape) if gradient is None else gradient
                full = real_view(full) if id(leaf) in self.names else full  # a complex parameter is two real ones
                pieces.append(full.reshape(len(examples), k, -1))
        sites: list[Site] = []
        for (weight, _), pieces in zip(leaves, parts, strict=True):
            rows = torch.cat(pieces)
            if weight.frame is not None:
                sites.append(RowSite(self._name(weight), "autograd", weight.placement(), rows))
            else:
                sites += self._pulled_back(weight, rows, "autograd")
        return sites
