"""Running a network so that what each use of a weight gives out, and each recurrent layer, is a state of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gramscope.base.errors import UnsupportedError
from gramscope.base.nested import map_tensors, tensors_in
from gramscope.capture.backward_graph import leaves_below
from gramscope.capture.weight_uses import WeightUses, settle
from gramscope.ops.torch_calls import Args, Kwargs, TorchFunction, writes
from gramscope.ops.unrolled import CELLS, RECURRENT, Arguments
from gramscope.propagators.recurrent_layer import COMPONENTS, Weights
from gramscope.propagators.scan import SCANS, DiagonalScan
from gramscope.propagators.stack import Stack, run_stack

T = TypeVar("T")


@dataclass(eq=False)
class Node:
    """A place where states are made.

    ``outputs`` end the stretch of graph that leads here, from earlier states and from parameters; ``leaves`` are the
    states themselves, from which the network went on. Mostly the two are the same numbers; for a recurrent layer the
    outputs are its inputs and initial states (of a diagonal scan its coefficients), and ``recurrence`` makes the states
    of them.
    """

    operation: str
    outputs: list[Tensor]
    leaves: list[Tensor]
    named_after: Tensor | None = None  # the weight whose use it is
    recurrence: Stack | DiagonalScan | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)  # of a stack, by its own names for them


class StateRecorder(WeightUses):
    """Cuts the graph after each use of a weight; with ``inside`` only where :meth:`cut` is called."""

    def __init__(self, parameters: Iterable[Tensor], examples: int, inside: bool = False) -> None:
        self._parameters = list(parameters)
        super().__init__(self._parameters, examples)
        self.nodes: list[Node] = []
        self.inside = inside

    def cut(self, value: T, operation: str, named_after: Tensor | None = None) -> T:
        """Every floating tensor of ``value`` replaced by a fresh state with the same numbers."""
        node = Node(operation, [], [], named_after)

        def renew(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            leaf = tensor.detach().clone().requires_grad_()
            node.outputs.append(settle(tensor))
            node.leaves.append(leaf)
            return leaf.clone()  # not the leaf itself: models may write in place

        result = map_tensors(renew, value)
        self.nodes.append(node)
        return result

    def depends_on_parameters(self, value: object) -> bool:
        """Whether a parameter reaches ``value`` past all states."""
        below = {id(leaf) for leaf in leaves_below(tensors_in(value)).values()}
        return any(id(parameter) in below for parameter in self._parameters)

    def __torch_function__(
        self, func: TorchFunction, types_: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise UnsupportedError(
                "the model must not differentiate inside its forward pass: the graph is cut into states there, and "
                "such derivatives would be lost. For its outputs alone use gramscope.ntk_operator."
            )
        if func in SCANS and not self.inside:
            return self._scan(*SCANS[func](*args, **(kwargs or {})))
        return super().__torch_function__(func, types_, args, kwargs)

    def use(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        written = args[0] if writes(func) else None
        operands = tensors_in((args, kwargs))
        output = func(*args, **kwargs)
        made = tensors_in(output)
        # States are real: a complex result belongs to the next state that is.
        if self.inside or any(t.is_complex() for t in made) or not self.depends_on_parameters(made):
            return output
        name, weight = getattr(func, "__name__", ""), next(filter(self.is_weight, operands))
        if written is not None and written is output:
            # The written tensor lives on under its own name: what it was becomes the output, and the state enters it.
            state = self.cut(output.clone(), name, weight)
            return (written if written._is_view() else written.detach_()).copy_(state)
        return self.cut(output, name, weight)

    # Recurrent layers ------------------------------------------------------------------------------

    def recurrent(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if self.inside:
            return super().recurrent(func, args, kwargs)
        if func in CELLS:
            return self._cell(CELLS[func], *args, **kwargs)
        return self._layer(RECURRENT[func], Arguments.of(*args))

    def _layer(self, kind: str, call: Arguments) -> tuple[Tensor, ...]:
        each, ways = len(call.weights) // (call.layers * call.ways), call.ways
        if each not in (2, 4) or (each == 4) != bool(call.has_bias):
            raise UnsupportedError(
                "a recurrent layer must have proj_size=0: projected LSTM states are not supported. Use proj_size=0."
            )
        if call.dropout and call.training and call.layers > 1:
            raise UnsupportedError(
                f"a recurrent layer must not drop out between its layers, got dropout={call.dropout} in training mode: "
                "its states are then random. Call model.eval() first."
            )
        if call.sizes is not None:
            steps, valid = _padded(call.data, call.sizes)
        else:
            steps, valid = (call.data.transpose(0, 1) if call.batch_first else call.data), None
        groups = [call.weights[start : start + each] for start in range(0, len(call.weights), each)]
        state = self._stack(kind, groups, steps, call.initial, ways, valid)
        components = len(COMPONENTS[kind])
        top = state.shape[2] - ways * components
        shown = state[:, :, top::components].flatten(2).transpose(0, 1)  # (T, B, ways H)
        output = shown if valid is None else shown[valid]
        ends = [_last(state[:, :, place], place // components % ways == 1, valid) for place in range(state.shape[2])]
        return (
            output.transpose(0, 1) if call.batch_first else output,
            *(torch.stack(ends[c::components]) for c in range(components)),
        )

    def _cell(
        self, kind: str, data: Tensor, hx: Tensor | tuple[Tensor, ...] | list[Tensor], w_ih: Tensor, w_hh: Tensor,
        b_ih: Tensor | None = None, b_hh: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        states = tuple(s[None] for s in hx) if isinstance(hx, tuple | list) else (hx[None],)
        group = [weight for weight in (w_ih, w_hh, b_ih, b_hh) if weight is not None]
        state = self._stack(kind, [group], data[None], states, 1, None)[:, 0]
        return (state[:, 0], state[:, 1]) if kind == "lstm" else state[:, 0]

    def _stack(
        self,
        kind: str,
        groups: Sequence[Sequence[Tensor]],
        steps: Tensor,
        initial: Sequence[Tensor],
        ways: int,
        valid: Tensor | None,
    ) -> Tensor:
        """The states (B, T, S, H) of a recurrent layer as a new node, from inputs (T, B, i)."""
        if any(self.is_data(weight) for group in groups for weight in group):
            raise UnsupportedError("the weights of a recurrent layer must not depend on the data. Use a custom cell.")
        start = torch.stack(list(initial), dim=1).flatten(0, 1).transpose(0, 1)  # each (S / C, B, H)
        own, weights = [], dict[str, Tensor]()
        for place, group in enumerate(groups):
            names = tuple(f"{place}:{role}" for role in range(len(group)))
            own.append(Weights(names, *(tensor.detach() for tensor in group)))
            weights |= {name: tensor for name, tensor in zip(names, group, strict=True) if self.is_weight(tensor)}
        stack = run_stack(kind, own, steps.detach(), start.detach(), ways, valid)
        leaf = stack.values().clone().requires_grad_()
        self.nodes.append(Node("recurrent", [steps, start], [leaf], next(iter(weights.values()), None), stack, weights))
        state = leaf.clone()
        self.mark_data(state)
        return state

    def _scan(self, a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
        """The states of a diagonal recurrence as a new node, from its coefficients."""
        scan, states = DiagonalScan.run(a, b, h0)
        real = [torch.view_as_real(t) if t.is_complex() else t for t in (a, b, h0, states)]
        leaf = real.pop().clone().requires_grad_()
        operation = "complex scan" if states.is_complex() else "scan"
        self.nodes.append(Node(operation, real, [leaf], None, scan))
        state = torch.view_as_complex(leaf.clone()) if states.is_complex() else leaf.clone()
        self.mark_data(state)
        return state


def _padded(data: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Packed rows as (T, B, i) with zeros after the end of each sequence, and which entries are valid (T, B)."""
    counts = sizes.to(data.device)
    valid = torch.arange(int(sizes[0]), device=data.device) < counts[:, None]
    padded = data.new_zeros(*valid.shape, data.shape[1])
    return padded.index_put(tuple(valid.nonzero().unbind(1)), data), valid


def _last(state: Tensor, reverse: bool, valid: Tensor | None) -> Tensor:
    """The state (B, H) at the end of the run of one recurrent layer (B, T, H)."""
    if reverse:
        return state[:, 0]
    if valid is None:
        return state[:, -1]
    ends = valid.long().sum(0) - 1
    return state[torch.arange(len(ends), device=state.device), ends]
