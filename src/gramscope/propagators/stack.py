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
        return self.join(self.sweep(self.split(own), local, arrived[0].transpose(0, 1), arrived[1]))

    def respond_adjoint(self, own: Float[Tensor, "k B T S H"], local: bool) -> tuple[Tensor, list[Tensor]]:
        """Adjoints of the states, in total or with ``local`` what they send to one another; and of what drives them."""
        parts, inputs, initial = self.sweep_adjoint(self.split(own), local, outside=True)
        assert inputs is not None
        return self.join(parts), [inputs.transpose(0, 1), torch.cat(initial, dim=2)]

    # Sweeps ----------------------------------------------------------------------------------------

    def sweep(
        self, parts: Parts, local: bool = False, inputs: Tensor | None = None,
        initial: Float[Tensor, "k B S H"] | None = None,
    ) -> Parts:  # fmt: skip
        """P, and the response to changes of the inputs (T, k, B, i) and of the initial states if given.

        With ``local`` it is L: each step and layer sees the given changes of the states before it, not those it makes.
        """
        parts, rest = self._masked(parts)
        below, made = inputs, list[Tensor]()
        for place, recurrent_layer in enumerate(self.recurrent_layers):
            start = None if initial is None else self._initial(initial, place)
            moved = recurrent_layer.local(parts[place], start) if local else parts[place]
            if below is not None:
                moved = moved.add_(recurrent_layer.drive(below))
            made.append(moved if local else recurrent_layer.scan(moved, start))
            if (place + 1) % self.ways == 0:
                below = self._shown((parts if local else made)[place + 1 - self.ways : place + 1])
        return made if local else self._with(made, rest)

    def sweep_adjoint(
        self, parts: Parts, local: bool = False, outside: bool = False
    ) -> tuple[Parts, Tensor | None, list[Tensor]]:
        """P* or L*; from ``outside`` also the adjoints of the inputs (T, k, B, i) and of the initial states."""
        parts, rest = self._masked(parts)
        made, initial, back = list(parts), list[Tensor](), None
        for layer in reversed(range(0, len(parts), self.ways)):
            above, back = back, None
            for way, place in enumerate(range(layer, layer + self.ways)):
                recurrent_layer, total = self.recurrent_layers[place], parts[place]
                made[place] = recurrent_layer.local_adjoint(total) if local else total
                if above is not None:
                    made[place][..., 0, :] += above.chunk(self.ways, dim=-1)[way]
                if not local:
                    total = made[place] = recurrent_layer.scan_adjoint(total)
                if layer or outside:
                    driven = recurrent_layer.drive_adjoint(total)
                    back = driven if back is None else back.add_(driven)
                if outside:
                    initial.insert(way, recurrent_layer.initial_adjoint(total))
        # A trial that runs backward starts from its initial state at its last step, not from the step after it.
        made, _ = self._masked(made)
        return (made if local else self._with(made, rest)), back, initial

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
