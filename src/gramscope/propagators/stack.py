"""Recurrent layers on top of and beside one another: a whole ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gramscope.propagators.recurrent_layer import COMPONENTS, RecurrentLayer, Weights, add_from_gates, run

Parts = list[Tensor]  # one (T, k, B, C, H) for each recurrent layer


@dataclass(frozen=True)
class Stack:
    """``layers`` layers of ``ways`` directions each; sites are their components, layer after layer."""

    kind: str
    recurrent_layers: tuple[RecurrentLayer, ...]
    ways: int
    valid: Bool[Tensor, "T B"] | None = field(repr=False)

    @property
    def components(self) -> int:
        return len(COMPONENTS[self.kind])

    @property
    def sites(self) -> tuple[str, ...]:
        names = []
        for place in range(len(self.recurrent_layers)):
            layer, way = divmod(place, self.ways)
            suffix = "_reverse" if way else ""
            names += [f"{component}_l{layer}{suffix}" for component in COMPONENTS[self.kind]]
        return tuple(names)

    def values(self) -> Float[Tensor, "B T S H"]:
        return torch.cat([recurrent_layer.states for recurrent_layer in self.recurrent_layers], dim=2).transpose(0, 1)

    # Between (k, B, T, S, H) and one time-first part for each recurrent layer -------------------------------

    def split(self, q: Float[Tensor, "k B T S H"]) -> Parts:
        """Copies, time first; the sweeps overwrite them."""
        step = self.components
        moved = q.permute(2, 0, 1, 3, 4)
        return [
            moved[:, :, :, place * step : (place + 1) * step].clone(memory_format=torch.contiguous_format)
            for place in range(len(self.recurrent_layers))
        ]

    def join(self, parts: Sequence[Tensor]) -> Float[Tensor, "k B T S H"]:
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=3)
        return whole.permute(1, 2, 0, 3, 4)

    def _masked(self, parts: Parts) -> tuple[Parts, Parts | None]:
        """The parts at valid steps, and at the others: no state lives there, so P is the identity on them."""
        if self.valid is None:
            return parts, None
        live = self.valid[:, None, :, None, None]
        return [part * live for part in parts], [part * ~live for part in parts]

    def _with(self, parts: Parts, rest: Parts | None) -> Parts:
        return parts if rest is None else [part.add_(more) for part, more in zip(parts, rest, strict=True)]

    # As a part of a network ------------------------------------------------------------------------

    def respond(self, own: Float[Tensor, "k B T S H"], arrived: list[Tensor], local: bool) -> Tensor:
        """Changes of the states from pushes ``own`` on them and from changes of (inputs, initial states).

        With ``local``, ``own`` is a frozen change of the states, of which each step sees that of the step before.
        """
        sweep = self.local if local else self.propagate
        return self.join(sweep(self.split(own), arrived[0].transpose(0, 1), arrived[1]))

    def respond_adjoint(self, own: Float[Tensor, "k B T S H"], local: bool) -> tuple[Tensor, list[Tensor]]:
        """Adjoints of the states, in total or with ``local`` what they send to one another; and of what drives them."""
        sweep = self.local_adjoint if local else self.propagate_adjoint_to_inputs
        parts, inputs, initial = sweep(self.split(own))
        return self.join(parts), [inputs.transpose(0, 1), initial]

    # Sweeps ----------------------------------------------------------------------------------------

    def propagate(
        self, parts: Parts, inputs: Tensor | None = None, initial: Float[Tensor, "k B S H"] | None = None
    ) -> Parts:
        """P, and the response to changes of the inputs (T, k, B, i) and of the initial states if given."""
        parts, rest = self._masked(parts)
        below = inputs
        for layer in range(0, len(self.recurrent_layers), self.ways):
            for place in range(layer, layer + self.ways):
                recurrent_layer = self.recurrent_layers[place]
                if below is not None:
                    parts[place] = parts[place].add_(recurrent_layer.drive(below))
                start = None if initial is None else self._initial(initial, place)
                parts[place] = recurrent_layer.scan(parts[place], start)
            below = self._shown(parts[layer : layer + self.ways])
        return self._with(parts, rest)

    def propagate_adjoint(self, parts: Parts) -> Parts:
        """P*."""
        return self._adjoint_sweep(parts, False)[0]

    def propagate_adjoint_to_inputs(self, parts: Parts) -> tuple[Parts, Tensor, Tensor]:
        """P*, with the adjoints of the inputs (T, k, B, i) and of the initial states (k, B, S, H)."""
        parts, inputs = self._adjoint_sweep(parts, True)
        assert inputs is not None
        starts = [
            recurrent_layer.initial_adjoint(part)
            for recurrent_layer, part in zip(self.recurrent_layers, parts, strict=True)
        ]
        return parts, inputs, torch.cat(starts, dim=2)

    def _adjoint_sweep(self, parts: Parts, to_inputs: bool) -> tuple[Parts, Tensor | None]:
        parts, rest = self._masked(parts)
        above: Tensor | None = None
        for layer in reversed(range(0, len(self.recurrent_layers), self.ways)):
            back: Tensor | None = None
            for way in range(self.ways):
                recurrent_layer, part = self.recurrent_layers[layer + way], parts[layer + way]
                if above is not None:
                    part[..., 0, :] += above.chunk(self.ways, dim=-1)[way]
                part = parts[layer + way] = recurrent_layer.scan_adjoint(part)
                if layer or to_inputs:
                    driven = recurrent_layer.drive_adjoint(part)
                    back = driven if back is None else back.add_(driven)
            above = back
        # A trial that runs backward starts from its initial state at its last step, not from the step after it.
        parts, _ = self._masked(parts)
        return self._with(parts, rest), above

    def local(
        self, parts: Parts, inputs: Tensor | None = None, initial: Float[Tensor, "k B S H"] | None = None
    ) -> Parts:
        """L: each step and layer sees the given changes of the states before it, not those it makes."""
        parts, _ = self._masked(parts)
        below, result = inputs, []
        for layer in range(0, len(self.recurrent_layers), self.ways):
            for place in range(layer, layer + self.ways):
                recurrent_layer = self.recurrent_layers[place]
                before = recurrent_layer.shifted(parts[place])
                if initial is not None:
                    before = before + self._initial(initial, place) * recurrent_layer.begins[:, None, :, None, None]
                after = recurrent_layer.step(slice(None), before)
                result.append(after if below is None else after + recurrent_layer.drive(below))
            below = self._shown(parts[layer : layer + self.ways])
        return result

    def local_adjoint(self, parts: Parts) -> tuple[Parts, Tensor, Tensor]:
        """L*, with the adjoints of the inputs and of the initial states."""
        result = []
        for recurrent_layer, part in zip(self.recurrent_layers, parts, strict=True):
            result.append(recurrent_layer.shifted(recurrent_layer.step_adjoint(slice(None), part), later=False))
        drives = [
            recurrent_layer.drive_adjoint(part)
            for recurrent_layer, part in zip(self.recurrent_layers, parts, strict=True)
        ]
        for layer in range(self.ways, len(self.recurrent_layers), self.ways):
            down = sum(drives[layer + 1 : layer + self.ways], drives[layer])
            for way, chunk in enumerate(down.chunk(self.ways, dim=-1)):
                result[layer - self.ways + way][..., 0, :] += chunk
        result, _ = self._masked(result)
        starts = [
            recurrent_layer.initial_adjoint(part)
            for recurrent_layer, part in zip(self.recurrent_layers, parts, strict=True)
        ]
        return result, sum(drives[1 : self.ways], drives[0]), torch.cat(starts, dim=2)

    def advance(
        self, t: int, before: Float[Tensor, "k B S H"], own: Float[Tensor, "k B S H"] | None = None
    ) -> Float[Tensor, "k B S H"]:
        """One step of all layers in time: the change of the states at t that a change of those before makes.

        ``own`` is a push on the states at t themselves; layers above see it at the same t.
        """
        below: Tensor | None = None
        result = []
        for place, recurrent_layer in enumerate(self.recurrent_layers):
            after = recurrent_layer.step(t, self._initial(before, place))
            if own is not None:
                after += self._initial(own, place)
            if below is not None:
                gates = below @ recurrent_layer.weights.w_ih.mT
                add_from_gates(after, gates, recurrent_layer.into[t])
            result.append(after)
            below = after[..., 0, :]
        return torch.cat(result, dim=2)

    def _initial(self, initial: Float[Tensor, "k B S H"], place: int) -> Float[Tensor, "k B C H"]:
        return initial[:, :, place * self.components : (place + 1) * self.components]

    def _shown(self, parts: Parts) -> Tensor:
        """What the next layer sees: h of each direction, side by side."""
        return torch.cat([part[..., 0, :] for part in parts], dim=-1)

    # Parameters ------------------------------------------------------------------------------------

    def pull(self, parts: Parts, names: Collection[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for recurrent_layer, part in zip(self.recurrent_layers, parts, strict=True):
            for name, gradient in recurrent_layer.pull(part, names).items():
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def push(self, changes: Mapping[str, Tensor], count: int) -> Parts:
        parts = []
        for recurrent_layer in self.recurrent_layers:
            moved = recurrent_layer.push(changes)
            if moved is None:
                steps, trials, components, width = recurrent_layer.states.shape
                moved = recurrent_layer.states.new_zeros(steps, count, trials, components, width)
            parts.append(moved)
        return parts


def run_stack(
    kind: str,
    weights: Sequence[Weights],
    inputs: Float[Tensor, "T B i"],
    initial: Float[Tensor, "B S H"],
    ways: int = 1,
    valid: Bool[Tensor, "T B"] | None = None,
) -> Stack:
    """Run a recurrent network of any number of layers and linearise it."""
    components = len(COMPONENTS[kind])
    recurrent_layers: list[RecurrentLayer] = []
    for place, own in enumerate(weights):
        way = place % ways
        if place and way == 0:
            inputs = torch.cat(
                [recurrent_layer.states[:, :, 0] for recurrent_layer in recurrent_layers[-ways:]], dim=-1
            )
        start = initial[:, place * components : (place + 1) * components]
        recurrent_layers.append(run(kind, own, inputs, start, way == 1, valid))
    return Stack(kind, tuple(recurrent_layers), ways, valid)
