"""Recurrent networks of torch, written out in plain operations.

Fused kernels hide the single time steps and have no second derivative. Here the same recursion is written with
operations that can be watched and differentiated any number of times. The input projections of all steps are one
contraction.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.ops.torch_calls import TorchFunction

State = tuple[Tensor, ...]  # (h,) or (h, c)


class Cell(NamedTuple):
    """The weights of one layer in one direction, in torch's order."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None

    def recurrent(self, h: Tensor) -> Tensor:
        return F.linear(h, self.w_hh, self.b_hh)


Step = Callable[[Cell, Tensor, State], State]


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    return lambda cell, projected, state: (activation(projected + cell.recurrent(state[0])),)


def _lstm_step(cell: Cell, projected: Tensor, state: State) -> State:
    h, c = state
    in_gate, forget, candidate, out_gate = (projected + cell.recurrent(h)).chunk(4, dim=-1)
    c = forget.sigmoid() * c + in_gate.sigmoid() * candidate.tanh()
    h = out_gate.sigmoid() * c.tanh()
    return (h if cell.w_hr is None else F.linear(h, cell.w_hr)), c


def _gru_step(cell: Cell, projected: Tensor, state: State) -> State:
    (h,) = state
    in_r, in_z, in_n = projected.chunk(3, dim=-1)
    re_r, re_z, re_n = cell.recurrent(h).chunk(3, dim=-1)
    reset, update = (in_r + re_r).sigmoid(), (in_z + re_z).sigmoid()
    candidate = (in_n + reset * re_n).tanh()
    return (candidate + update * (h - candidate),)


STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _rnn_step(torch.tanh),
    "rnn_relu": _rnn_step(torch.relu),
}


def _run(
    step: Step, cell: Cell, data: Tensor, sizes: Sequence[int], initial: State, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction over rows ``data`` (Σ sizes, in), step t holding ``sizes[t]`` rows.

    ``sizes`` never grows (torch sorts packed sequences by length). Running backward, a sequence joins with its
    initial state when its last step comes.
    """
    projected = F.linear(data, cell.w_ih, cell.b_ih).split(list(sizes))
    steps = range(len(sizes))
    state = tuple(s[: sizes[-1]] if reverse else s for s in initial)
    outputs: list[Tensor] = []
    finished: list[State] = []
    for t in reversed(steps) if reverse else steps:
        rows = len(state[0])
        if sizes[t] < rows:
            finished.append(tuple(s[sizes[t] :] for s in state))
            state = tuple(s[: sizes[t]] for s in state)
        elif sizes[t] > rows:
            state = tuple(torch.cat([s, s0[rows : sizes[t]]]) for s, s0 in zip(state, initial, strict=True))
        state = step(cell, projected[t], state)
        outputs.append(state[0])
    if finished:
        parts = [state, *reversed(finished)]
        state = tuple(torch.cat([part[i] for part in parts]) for i in range(len(state)))
    return torch.cat(outputs[::-1] if reverse else outputs), state


class Arguments(NamedTuple):
    """What ``torch.lstm`` and its like are called with; ``sizes`` are the rows of each step of a packed sequence."""

    data: Tensor
    sizes: Tensor | None
    initial: State
    weights: Sequence[Tensor]
    has_bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool = False

    @classmethod
    def of(cls, data: Tensor, *args: Any) -> "Arguments":
        """Packed sequences come as (data, sizes, hx, ...), all others as (data, hx, ..., batch_first)."""
        place = initial_place((data, *args)) - 1
        return cls(data, args[0] if place else None, _states(args[place]), *args[place + 1 :])

    @property
    def ways(self) -> int:
        return 2 if self.bidirectional else 1


def initial_place(args: Sequence[object]) -> int:
    """Which argument of a recurrent function the initial states are."""
    packed = isinstance(args[1], Tensor) and args[1].dtype == torch.int64 and args[1].dim() == 1
    return 2 if packed else 1


def _states(hx: Tensor | Sequence[Tensor]) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _unrolled(kind: str, *args: Any) -> tuple[Tensor, ...]:
    call = Arguments.of(*args)
    if call.sizes is not None:
        output, final = _layers(kind, call, call.data, call.sizes.tolist())
        return (output, *final)
    steps = call.data.transpose(0, 1) if call.batch_first else call.data
    output, final = _layers(kind, call, steps.flatten(0, 1), [steps.shape[1]] * steps.shape[0])
    output = output.unflatten(0, steps.shape[:2])
    return (output.transpose(0, 1) if call.batch_first else output, *final)


def _layers(kind: str, call: Arguments, data: Tensor, sizes: Sequence[int]) -> tuple[Tensor, State]:
    """All layers over rows ``data``; see :func:`_run`."""
    each = len(call.weights) // (call.layers * call.ways)
    finals: list[State] = []
    for layer in range(call.layers):
        outputs = []
        for way in range(call.ways):
            place = layer * call.ways + way
            own = call.weights[place * each : (place + 1) * each]
            biases, projection = (own[2:4], own[4:]) if call.has_bias else ((None, None), own[2:])
            cell = Cell(*own[:2], *biases, *projection)
            out, final = _run(STEPS[kind], cell, data, sizes, tuple(s[place] for s in call.initial), reverse=way == 1)
            outputs.append(out)
            finals.append(final)
        data = torch.cat(outputs, dim=-1) if call.ways == 2 else outputs[0]
        if call.dropout and call.training and layer < call.layers - 1:
            data = F.dropout(data, call.dropout, call.training)
    return data, tuple(torch.stack([final[i] for final in finals]) for i in range(len(call.initial)))


def _unrolled_cell(
    kind: str, input: Tensor, hx: Tensor | Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor | State:  # fmt: skip
    final = STEPS[kind](Cell(w_ih, w_hh, b_ih, b_hh), F.linear(input, w_ih, b_ih), _states(hx))
    return final if kind == "lstm" else final[0]


# Functions of torch, and by which plain ones they can be replaced, with the same arguments.
RECURRENT: dict[TorchFunction, str] = {getattr(torch, kind): kind for kind in STEPS}
CELLS: dict[TorchFunction, str] = {getattr(torch, f"{kind}_cell"): kind for kind in STEPS}
UNROLLED: dict[TorchFunction, TorchFunction] = {
    **{func: partial(_unrolled, kind) for func, kind in RECURRENT.items()},
    **{func: partial(_unrolled_cell, kind) for func, kind in CELLS.items()},
}
