"""One layer of a recurrent network in one direction, linearised at its run, in closed form.

With the pre-activations ``a = W_ih x + b_ih`` and ``r = W_hh h_- + b_hh`` of G gates, a step is

    dy = into · da + across · dr + carry · dy_-

where y is h, or (h, c) for an LSTM, and the three factors are numbers for each unit. They are all that is kept of a
step: ``A_t = ∂y_t/∂y_{t-1}`` is never formed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
# Rows (trials times steps) of one block of a product with weights; 256 rows of 1,024 gates are one megabyte.
ROWS = 256
ROLES = ("w_ih", "w_hh", "b_ih", "b_hh")
COMPONENTS = {"rnn_tanh": ("h",), "rnn_relu": ("h",), "gru": ("h",), "lstm": ("h", "c")}


@dataclass(frozen=True)
class Weights:
    """The weights of one layer and direction, in torch's layout, and the names they go by."""

    names: tuple[str, ...]  # of w_ih, w_hh and, if there are any, b_ih, b_hh
    w_ih: Float[Tensor, "GH i"]
    w_hh: Float[Tensor, "GH H"]
    b_ih: Float[Tensor, " GH"] | None = None
    b_hh: Float[Tensor, " GH"] | None = None

    def by_name(self) -> dict[str, Tensor]:
        """The weights that there are."""
        return {name: getattr(self, role) for role, name in zip(ROLES, self.names, strict=False)}


@dataclass(frozen=True)
class RecurrentLayer:
    """A linearised run. C is the number of components of the state (1, or 2 for h and c), G the number of gates."""

    weights: Weights
    order: tuple[int, ...]  # time steps in the order of the run
    inputs: Float[Tensor, "T B i"] = field(repr=False)
    before: Float[Tensor, "T B H"] = field(repr=False)  # h before each step
    states: Float[Tensor, "T B C H"] = field(repr=False)
    into: Float[Tensor, "T B C G H"] = field(repr=False)
    across: Float[Tensor, "T B C G H"] = field(repr=False)
    carry: Float[Tensor, "T B C C H"] | None = field(repr=False)
    begins: Bool[Tensor, "T B"] = field(repr=False)  # steps that start from the initial state

    # One step, or all steps at once where t is a slice ---------------------------------------------

    def step(self, t: int | slice, before: Float[Tensor, "*t k B C H"]) -> Float[Tensor, "*t k B C H"]:
        """``A_t`` applied: the change of a state that a change of the state before makes."""
        after = _from_gates(before[..., 0, :] @ self.weights.w_hh.mT, _rows(self.across, t))
        if self.carry is not None:
            after = after + _carried(_rows(self.carry, t), before)
        return after

    def step_adjoint(self, t: int | slice, after: Float[Tensor, "*t k B C H"]) -> Float[Tensor, "*t k B C H"]:
        """``A_tᵀ`` applied."""
        back = (_to_gates(after, _rows(self.across, t)) @ self.weights.w_hh)[..., None, :]
        if self.carry is None:
            return back
        direct = _carried(_rows(self.carry, t).transpose(-3, -2), after)
        if direct.shape[-2] == 1:
            return direct.add_(back)
        direct[..., :1, :] += back
        return direct

    def drive(self, inputs: Float[Tensor, "T k B i"]) -> Float[Tensor, "T k B C H"]:
        """The change of the states that a change of the inputs makes at once."""
        return _from_gates(inputs @ self.weights.w_ih.mT, _rows(self.into, slice(None)))

    def drive_adjoint(self, states: Float[Tensor, "T k B C H"]) -> Float[Tensor, "T k B i"]:
        return _to_gates(states, _rows(self.into, slice(None))) @ self.weights.w_ih

    # The run ---------------------------------------------------------------------------------------

    def scan(
        self, q: Float[Tensor, "T k B C H"], initial: Float[Tensor, "k B C H"] | None = None
    ) -> Float[Tensor, "T k B C H"]:
        """``y_t = q_t + A_t y_{t-1}``; ``q`` is overwritten."""
        before = None
        for t in self.order:
            if initial is not None:
                start = initial * self.begins[t][:, None, None]
                before = start if before is None else before + start
            if before is not None:
                q[t] += self.step(t, before)
            before = q[t]
        return q

    def scan_adjoint(self, q: Float[Tensor, "T k B C H"]) -> Float[Tensor, "T k B C H"]:
        """``λ_t = q_t + A_{t+1}ᵀ λ_{t+1}``; ``q`` is overwritten."""
        for t, before in pairwise(self.order[::-1]):
            q[before] += self.step_adjoint(t, q[t])
        return q

    def local(
        self, q: Float[Tensor, "T k B C H"], initial: Float[Tensor, "k B C H"] | None = None
    ) -> Float[Tensor, "T k B C H"]:
        """``A_t q_{t-1}``, all steps at once."""
        before = self._shifted(q, later=True)
        if initial is not None:
            before += initial * self.begins[:, None, :, None, None]
        return self.step(slice(None), before)

    def local_adjoint(self, q: Float[Tensor, "T k B C H"]) -> Float[Tensor, "T k B C H"]:
        """``A_{t+1}ᵀ q_{t+1}``."""
        return self._shifted(self.step_adjoint(slice(None), q), later=False)

    def initial_adjoint(self, total: Float[Tensor, "T k B C H"]) -> Float[Tensor, "k B C H"]:
        """The adjoint at the initial state, from the adjoint at all states."""
        result = torch.zeros_like(total[0])
        for t in self.begins.any(1).nonzero()[:, 0].tolist():
            result += self.step_adjoint(t, total[t] * self.begins[t][:, None, None])
        return result

    def _shifted(self, q: Float[Tensor, "T k B C H"], later: bool) -> Float[Tensor, "T k B C H"]:
        """The state before each step (zero where that is the initial one); ``later=False`` is the transpose."""
        ahead = (self.order[0] <= self.order[-1]) == later
        moved = torch.zeros_like(q)
        if ahead:
            moved[1:] = q[:-1]
        else:
            moved[:-1] = q[1:]
        return moved

    # Parameters ------------------------------------------------------------------------------------

    def pull(self, q: Float[Tensor, "T k B C H"], names: Collection[str]) -> dict[str, Tensor]:
        """Gradients of ``⟨q, states⟩`` at frozen states, (k, *shape) for each named weight: ``Σ (D q) ⊗ v``."""
        mine = {role: name for role, name in zip(ROLES, self.weights.names, strict=False) if name in names}
        found = {role: q.new_zeros(q.shape[1], *getattr(self.weights, role).shape) for role in mine}
        for columns, steps in self._blocks(q.shape[1]):
            made: Tensor | None = None
            for kind, factor, data in self._sides:
                weight, bias = found.get(f"w_{kind}"), found.get(f"b_{kind}")
                if weight is None and bias is None:
                    continue
                if made is None or self.into is not self.across:
                    made = _to_gates(q[steps, columns], factor[steps, None]).transpose(0, 1).flatten(1, 2)
                if weight is not None:
                    weight[columns].baddbmm_(made.mT, data[steps].flatten(0, 1).expand(len(made), -1, -1))
                if bias is not None:
                    bias[columns] += made.sum(1)
        return {name: found[role] for role, name in mine.items()}

    def push(self, changes: Mapping[str, Tensor]) -> Float[Tensor, "T k B C H"] | None:
        """The change of the states that changes of the weights make at frozen states; None if no weight is ours."""
        named = zip(ROLES, self.weights.names, strict=False)
        mine = {role: changes[name] for role, name in named if name in changes}
        if not mine:
            return None
        count = len(next(iter(mine.values())))
        total = self.states.new_zeros(len(self.states), count, *self.states.shape[1:])
        for columns, steps in self._blocks(count):
            made = [
                (gates, factor)
                for kind, factor, data in self._sides
                if (gates := _gates(data[steps], mine.get(f"w_{kind}"), mine.get(f"b_{kind}"), columns)) is not None
            ]
            if len(made) == 2 and self.into is self.across:
                made = [(made[0][0].add_(made[1][0]), self.into)]
            for gates, factor in made:
                add_from_gates(total[steps, columns], gates, factor[steps, None])
        return total

    @property
    def _sides(self) -> tuple[tuple[str, Tensor, Tensor], ...]:
        """Weights of the inputs and of the states: their kind, their factor and what they meet."""
        return ("ih", self.into, self.inputs), ("hh", self.across, self.before)

    def _blocks(self, count: int) -> list[tuple[slice, slice]]:
        """Some of the k vectors and some time steps at a time.

        A block of gates then stays in the cache between its products. A short run is one block, with all k vectors; a
        GPU has no cache to spare for.
        """
        steps, trials = self.states.shape[:2]
        if self.states.is_cuda or steps * trials <= ROWS:
            return [(slice(0, count), slice(0, steps))]
        few = max(1, ROWS // trials)
        return [(slice(k, k + 1), slice(t, t + few)) for k in range(count) for t in range(0, steps, few)]


def _rows(factor: Tensor, t: int | slice) -> Tensor:
    """A factor at time t, or at all times with room for the k vectors."""
    return factor[t] if isinstance(t, int) else factor[t][:, None]


def _from_gates(gates: Tensor, factor: Tensor) -> Tensor:
    """(..., B, G H) with (..., B, C, G, H) to (..., B, C, H): ``Σ_g factor_cg · gate_g``."""
    components, count = factor.shape[-3:-1]
    if count == 1:
        return gates[..., None, :] * factor[..., 0, :]
    split = gates.unflatten(-1, (count, -1))
    if components == 1:
        return (split * factor[..., 0, :, :]).sum(-2, keepdim=True)
    return (split[..., None, :, :] * factor).sum(-2)


def _gates(data: Tensor, weight: Tensor | None, bias: Tensor | None, columns: slice) -> Tensor | None:
    """``W v + b`` over rows (T, B, i) for some of the k weights and biases, of what is there: (T, k, B, G H)."""
    rows = data.flatten(0, 1)
    made = None if weight is None else rows @ weight[columns].mT
    if bias is not None:
        shift = bias[columns, None].expand(-1, len(rows), -1)
        made = shift.clone() if made is None else made.add_(shift)
    return None if made is None else made.unflatten(1, data.shape[:2]).transpose(0, 1)


def add_from_gates(to: Tensor, gates: Tensor, factor: Tensor) -> None:
    """``to += Σ_g factor_cg · gate_g`` in place, with shapes as in :func:`_from_gates`."""
    components, count = factor.shape[-3:-1]
    for place, gate in enumerate(gates.chunk(count, dim=-1)):
        for component in range(components):
            to[..., component, :].addcmul_(gate, factor[..., component, place, :])


def _to_gates(states: Tensor, factor: Tensor) -> Tensor:
    """(..., B, C, H) with (..., B, C, G, H) to (..., B, G H): ``Σ_c factor_cg · state_c``."""
    if factor.shape[-3] == 1:
        return (states * factor[..., 0, :, :]).flatten(-2)
    return (states[..., None, :] * factor).sum(-3).flatten(-2)


def _carried(carry: Tensor, states: Tensor) -> Tensor:
    """``Σ_c' carry_cc' · state_c'``."""
    if carry.shape[-3] == 1:
        return carry[..., 0, :, :] * states
    return (carry * states[..., None, :, :]).sum(-2)


@torch.no_grad()
def run(
    kind: str,
    weights: Weights,
    inputs: Float[Tensor, "T B i"],
    initial: Float[Tensor, "B C H"],
    reverse: bool = False,
    valid: Bool[Tensor, "T B"] | None = None,
) -> RecurrentLayer:
    """Run one layer in one direction and linearise it; steps that are not ``valid`` leave the state as it is."""
    steps, trials = inputs.shape[:2]
    order = tuple(reversed(range(steps))) if reverse else tuple(range(steps))
    width = weights.w_hh.shape[1]
    previous = inputs.new_empty(steps, trials, initial.shape[1], width)
    states = torch.empty_like(previous)
    gates = inputs.new_empty(steps, trials, GATES[kind] + (kind == "gru"), width)
    projected = F.linear(inputs, weights.w_ih, weights.b_ih)
    now = initial
    for t in order:
        previous[t] = now
        recurrent = F.linear(now[:, 0], weights.w_hh, weights.b_hh)
        new = _advance(kind, projected[t], recurrent, now, gates[t])
        now = new if valid is None else torch.where(valid[t][:, None, None], new, now)
        states[t] = now
    into, across, carry = _factors(kind, gates, previous, states)
    begins = torch.zeros(steps, trials, dtype=torch.bool, device=inputs.device)
    begins[order[0]] = True
    if valid is not None:
        begins = valid & (valid.long().cumsum(0) == (valid.long().sum(0) if reverse else 1))
        gone = ~valid[:, :, None, None]
        states = states.masked_fill(gone, 0.0)
        into, across = into.masked_fill(gone[..., None], 0.0), across.masked_fill(gone[..., None], 0.0)
        carry = None if carry is None else carry.masked_fill(gone[..., None], 0.0)
    before = previous[:, :, 0].contiguous()
    return RecurrentLayer(weights, order, inputs.contiguous(), before, states, into, across, carry, begins)


def _advance(kind: str, a: Tensor, r: Tensor, state: Tensor, gates: Tensor) -> Tensor:
    """The next state (B, C, H); what the factors need of the gates is written to ``gates`` (B, G, H)."""
    width = state.shape[-1]
    if kind in ("rnn_tanh", "rnn_relu"):
        pre = a + r
        new = pre.tanh() if kind == "rnn_tanh" else pre.relu()
        gates[:, 0] = pre
        return new[:, None]
    if kind == "gru":
        reset, update = (a[:, : 2 * width] + r[:, : 2 * width]).sigmoid().chunk(2, dim=1)
        inner = r[:, 2 * width :]
        candidate = (a[:, 2 * width :] + reset * inner).tanh()
        for place, gate in enumerate((reset, update, candidate, inner)):
            gates[:, place] = gate
        return (candidate + update * (state[:, 0] - candidate))[:, None]
    squashed = (a + r).unflatten(1, (4, width))
    enter, forget, candidate, leave = squashed.unbind(1)
    enter, forget, candidate, leave = enter.sigmoid(), forget.sigmoid(), candidate.tanh(), leave.sigmoid()
    for place, gate in enumerate((enter, forget, candidate, leave)):
        gates[:, place] = gate
    memory = forget * state[:, 1] + enter * candidate
    return torch.stack([leave * memory.tanh(), memory], dim=1)


def _factors(kind: str, gates: Tensor, previous: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """``into``, ``across`` (T, B, C, G, H) and ``carry`` (T, B, C, C, H) of a run."""
    if kind in ("rnn_tanh", "rnn_relu"):
        # torch's ReLU has the derivative 0 at 0.
        slope = 1 - states**2 if kind == "rnn_tanh" else (gates > 0).to(gates.dtype)
        factor = slope[:, :, :, None]
        return factor, factor, None
    if kind == "gru":
        reset, update, candidate, inner = gates.unbind(2)
        dn = (1 - update) * (1 - candidate**2)
        dz = (previous[:, :, 0] - candidate) * update * (1 - update)
        dr = dn * inner * reset * (1 - reset)
        into = torch.stack([dr, dz, dn], dim=2)[:, :, None]
        across = torch.stack([dr, dz, dn * reset], dim=2)[:, :, None]
        return into, across, update[:, :, None, None].contiguous()
    enter, forget, candidate, leave = gates.unbind(2)
    shown = states[:, :, 1].tanh()
    open_ = leave * (1 - shown**2)  # ∂h/∂c
    to_c = torch.stack(
        [
            candidate * enter * (1 - enter),
            previous[:, :, 1] * forget * (1 - forget),
            enter * (1 - candidate**2),
            torch.zeros_like(enter),
        ],
        dim=2,
    )
    to_h = to_c * open_[:, :, None]
    to_h[:, :, 3] = shown * leave * (1 - leave)
    factor = torch.stack([to_h, to_c], dim=2)
    none = torch.zeros_like(forget)
    rows = [torch.stack([none, open_ * forget], dim=2), torch.stack([none, forget], dim=2)]
    return factor, factor, torch.stack(rows, dim=2)
