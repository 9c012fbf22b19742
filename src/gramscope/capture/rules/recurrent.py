"""Recurrent networks, unrolled.

Fused kernels hide the signals of single time steps. Here the same recursion is written with plain operations under
the recorder, which then sees each use of each matrix. The input projections of all steps are one contraction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.recorder import Recorder, rule

State = tuple[Tensor, ...]  # (h,) or (h, c)


@dataclass(frozen=True)
class Cell:
    """The weights of one layer in one direction, in torch's order."""

    step: Callable[["Cell", Tensor, State], State]
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None = None

    def recurrent(self, h: Tensor) -> Tensor:
        return F.linear(h, self.w_hh, self.b_hh)


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Callable[[Cell, Tensor, State], State]:
    def step(cell: Cell, projected: Tensor, state: State) -> State:
        return (activation(projected + cell.recurrent(state[0])),)

    return step


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


STEPS: dict[str, Callable[[Cell, Tensor, State], State]] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _rnn_step(torch.tanh),
    "rnn_relu": _rnn_step(torch.relu),
}


def _run(cell: Cell, data: Tensor, sizes: Sequence[int], initial: State, reverse: bool) -> tuple[Tensor, State]:
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
        state = cell.step(cell, projected[t], state)
        outputs.append(state[0])
    if finished:
        parts = [state, *reversed(finished)]
        state = tuple(torch.cat([part[i] for part in parts]) for i in range(len(state)))
    return torch.cat(outputs[::-1] if reverse else outputs), state


def _cells(kind: str, flat: Sequence[Tensor], has_bias: bool, count: int) -> list[Cell]:
    each = len(flat) // count
    cells = []
    for start in range(0, len(flat), each):
        part = list(flat[start : start + each])
        b_ih, b_hh = (part[2], part[3]) if has_bias else (None, None)
        extra = part[4 if has_bias else 2 :]
        cells.append(Cell(STEPS[kind], part[0], part[1], b_ih, b_hh, extra[0] if extra else None))
    return cells


def network(
    kind: str, data: Tensor, sizes: Sequence[int], initial: State, flat: Sequence[Tensor], has_bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool,
) -> tuple[Tensor, State]:  # fmt: skip
    ways = 2 if bidirectional else 1
    cells = _cells(kind, flat, has_bias, layers * ways)
    finals: list[State] = []
    for layer in range(layers):
        outputs = []
        for way in range(ways):
            place = layer * ways + way
            out, final = _run(cells[place], data, sizes, tuple(s[place] for s in initial), reverse=way == 1)
            outputs.append(out)
            finals.append(final)
        data = torch.cat(outputs, dim=-1) if ways == 2 else outputs[0]
        if dropout and training and layer < layers - 1:
            data = F.dropout(data, dropout, training)
    return data, tuple(torch.stack([final[i] for final in finals]) for i in range(len(initial)))


def _recurrent(recorder: Recorder, kind: str, args: tuple[Any, ...]) -> Any:
    packed = isinstance(args[1], Tensor) and args[1].dtype == torch.int64 and args[1].dim() == 1
    if packed:
        data, batch_sizes, hx, flat, has_bias, layers, dropout, training, bidirectional = args
    else:
        data, hx, flat, has_bias, layers, dropout, training, bidirectional, batch_first = args
    initial = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    with recorder:
        initial = tuple(recorder.enter(state) for state in initial)
        if packed:
            sizes, rows = batch_sizes.tolist(), data
        else:
            steps = data.transpose(0, 1) if batch_first else data
            sizes, rows = [steps.shape[1]] * steps.shape[0], steps.flatten(0, 1)
        output, final = network(kind, rows, sizes, initial, flat, has_bias, layers, dropout, training, bidirectional)
        if not packed:
            output = output.unflatten(0, steps.shape[:2])
            output = output.transpose(0, 1) if batch_first else output
    return (output, *final)


@rule(torch.lstm)
def lstm(recorder: Recorder, func: Any, *args: Any) -> Any:
    return _recurrent(recorder, "lstm", args)


@rule(torch.gru)
def gru(recorder: Recorder, func: Any, *args: Any) -> Any:
    return _recurrent(recorder, "gru", args)


@rule(torch.rnn_tanh)
def rnn_tanh(recorder: Recorder, func: Any, *args: Any) -> Any:
    return _recurrent(recorder, "rnn_tanh", args)


@rule(torch.rnn_relu)
def rnn_relu(recorder: Recorder, func: Any, *args: Any) -> Any:
    return _recurrent(recorder, "rnn_relu", args)


@rule(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(
    recorder: Recorder,
    func: Any,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    kind = func.__name__.removesuffix("_cell")
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    with recorder:
        states = tuple(recorder.enter(state) for state in states)
        one = Cell(STEPS[kind], w_ih, w_hh, b_ih, b_hh)
        final = one.step(one, F.linear(recorder.enter(input), w_ih, b_ih), states)
    return final if kind == "lstm" else final[0]
