"""Running a network so that each use of a weight, and each recurrent layer, becomes a state variable of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gramscope.base.errors import UnsupportedError
from gramscope.base.nested import map_tensors, tensors_in
from gramscope.capture.forms import Form, Tap
from gramscope.capture.recorder import Recorder, Use, writes
from gramscope.capture.weights import Weight
from gramscope.propagators.stack import Stack, run_stack
from gramscope.propagators.strand import COMPONENTS, Weights

RECURRENT = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "rnn_tanh", torch.rnn_relu: "rnn_relu"}
CELLS = {
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
    torch.rnn_tanh_cell: "rnn_tanh",
    torch.rnn_relu_cell: "rnn_relu",
}


@dataclass(eq=False)
class Node:
    """A place where states are made.

    ``outputs`` end the stretch of graph that leads here, ``leaves`` are the states themselves, from which the network
    went on. Mostly the two are the same numbers; for a recurrent layer the outputs are its inputs and initial states,
    and ``stack`` makes the states of them.
    """

    rule: str
    outputs: list[Tensor]
    leaves: list[Tensor]
    uses: list[tuple[Use, torch.Size]]  # with the shape of what each made
    stack: Stack | None = None
    weights: dict[str, Weight] = field(default_factory=dict)  # of the stack, by its own names for them


class Watch(Recorder):
    """A recorder that cuts the graph after each use of a weight; with ``inside`` only where :meth:`cut` is called."""

    def __init__(self, parameters: Mapping[str, Tensor], examples: int, inside: bool = False) -> None:
        super().__init__(parameters, examples)
        self.nodes: list[Node] = []
        self.inside = inside
        self._taken = 0  # uses that belong to a node already
        self._shapes: list[torch.Size] = []

    def note(self, value: Any, leaf: Any, output: Tensor, form: Form) -> None:
        super().note(value, leaf, output, form)
        self._shapes += [output.shape] * (len(self.uses) - len(self._shapes))

    @property
    def has_fresh(self) -> bool:
        """Whether there are uses since the last node."""
        return self._taken < len(self.uses)

    def _fresh(self) -> list[tuple[Use, torch.Size]]:
        """Uses since the last node, which now belong to the next one."""
        start, self._taken = self._taken, len(self.uses)
        return list(zip(self.uses[start:], self._shapes[start:], strict=True))

    def _tap_fresh(self) -> None:
        """Uses since the last node as seen at the weight itself."""
        for place in range(self._taken, len(self.uses)):
            use = self.uses[place]
            edge, shape = get_gradient_edge(use.leaf), use.leaf.shape
            self.uses[place] = replace(use, edge=edge, form=Tap(shape=tuple(shape)))
            self._shapes[place] = shape

    def cut(self, value: Any, rule: str = "") -> Any:
        """Every floating tensor of ``value`` replaced by a fresh state with the same numbers."""
        node = Node(rule, [], [], self._fresh())

        def renew(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaf = tensor.detach().clone().requires_grad_()
            node.outputs.append(tensor)
            node.leaves.append(leaf)
            return leaf.clone()  # not the leaf itself: models may write in place

        result = map_tensors(renew, value)
        self.nodes.append(node)
        return result

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise UnsupportedError(
                "the model must not differentiate inside its forward pass: its states are cut apart there, and such "
                "derivatives would lose their way. For its outputs alone use gramscope.ntk_operator."
            )
        return super().__torch_function__(func, types_, args, kwargs)

    def _meet(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.inside:
            return super()._meet(func, args, kwargs)
        if func in RECURRENT:
            return self._layer(RECURRENT[func], args)
        if func in CELLS:
            return self._cell(CELLS[func], *args, **kwargs)
        output = super()._meet(func, args, kwargs)
        if len(self.uses) == self._taken:
            return output
        if any(tensor.is_complex() for tensor in tensors_in(output)):
            self._tap_fresh()  # states are real: this use belongs to the next state that is
            return output
        rule = self.uses[self._taken].form.rule
        if writes(func) and isinstance(output, Tensor):
            # The written tensor lives on under its own name: what it was becomes the output, and the state enters it.
            return args[0].copy_(self.cut(output.clone(), rule)) if args[0] is output else self.cut(output, rule)
        return self.cut(output, rule)

    # Recurrent layers ------------------------------------------------------------------------------

    def _layer(self, kind: str, args: Sequence[Any]) -> Any:
        """``torch.gru`` and its like: (data, hx, weights, ...) or (data, batch_sizes, hx, weights, ...)."""
        packed = isinstance(args[1], Tensor) and args[1].dtype == torch.int64 and args[1].dim() == 1
        data, (hx, flat, has_bias, layers, dropout, training, bidirectional) = args[0], args[1 + packed : 8 + packed]
        batch_first = not packed and args[8]
        ways = 2 if bidirectional else 1
        each = len(flat) // (layers * ways)
        if each not in (2, 4) or (each == 4) != bool(has_bias):
            raise UnsupportedError(
                "a recurrent layer must have proj_size=0: projected LSTM states are not supported. Use proj_size=0."
            )
        if dropout and training and layers > 1:
            raise UnsupportedError(
                f"a recurrent layer must not drop out between its layers, got dropout={dropout} in training mode: its "
                "states are then random. Call model.eval() first."
            )
        if packed:
            steps, valid = _padded(data, args[1])
        else:
            steps, valid = (data.transpose(0, 1) if batch_first else data), None
        groups = [flat[start : start + each] for start in range(0, len(flat), each)]
        state = self._stack(kind, groups, steps, hx, ways, valid)
        components = len(COMPONENTS[kind])
        top = state.shape[2] - ways * components
        shown = state[:, :, top::components].flatten(2).transpose(0, 1)  # (T, B, ways H)
        output = shown[valid] if packed else shown.transpose(0, 1) if batch_first else shown
        ends = [_last(state[:, :, place], place // components % ways == 1, valid) for place in range(state.shape[2])]
        return (output, *(torch.stack(ends[c::components]) for c in range(components)))

    def _cell(
        self, kind: str, data: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        states = tuple(s[None] for s in hx) if isinstance(hx, tuple | list) else hx[None]
        group = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, b_hh]
        state = self._stack(kind, [group], data[None], states, 1, None)[:, 0]
        return (state[:, 0], state[:, 1]) if kind == "lstm" else state[:, 0]

    def _stack(
        self, kind: str, groups: Sequence[Sequence[Tensor]], steps: Tensor, hx: Any, ways: int, valid: Tensor | None
    ) -> Tensor:
        """The states (B, T, S, H) of a recurrent layer as a new node, from inputs (T, B, i)."""
        if self.is_data(list(groups)):
            raise UnsupportedError("the weights of a recurrent layer must not depend on the data. Use a custom cell.")
        initial = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        entered = [self._initial(part) for part in initial]  # each (S / C, B, H)
        start = torch.stack(entered, dim=1).flatten(0, 1).transpose(0, 1)
        own, weights = [], dict[str, Weight]()
        for place, group in enumerate(groups):
            names = tuple(f"{place}:{role}" for role in range(len(group)))
            own.append(Weights(names, *(tensor.detach() for tensor in group)))
            found = {name: self.weight(tensor) for name, tensor in zip(names, group, strict=True)}
            weights |= {name: weight for name, weight in found.items() if weight is not None}
        stack = run_stack(kind, own, steps.detach(), start.detach(), ways, valid)
        leaf = stack.values().clone().requires_grad_()
        self.nodes.append(Node("recurrent", [steps, start], [leaf], self._fresh(), stack, weights))
        state = leaf.clone()
        self.mark_data(state)
        return state

    def _initial(self, value: Tensor) -> Tensor:
        weight = self.weight(value)
        if weight is None:
            return value
        leaf: Tensor = self.stand_in(value)
        self.note(value, leaf, leaf, Tap(shape=tuple(leaf.shape), copies=weight.copies))
        return leaf


def _padded(data: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Packed rows as (T, B, i) with zeros after the end of each sequence, and which entries are valid (T, B)."""
    counts = sizes.to(data.device)
    valid = torch.arange(int(sizes[0]), device=data.device) < counts[:, None]
    padded = data.new_zeros(*valid.shape, data.shape[1])
    return padded.index_put(tuple(valid.nonzero().unbind(1)), data), valid


def _last(state: Tensor, reverse: bool, valid: Tensor | None) -> Tensor:
    """The state (B, H) at the end of the run of one strand (B, T, H)."""
    if reverse:
        return state[:, 0]
    if valid is None:
        return state[:, -1]
    ends = valid.long().sum(0) - 1
    return state[torch.arange(len(ends), device=state.device), ends]
