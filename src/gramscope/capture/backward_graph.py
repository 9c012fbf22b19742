"""The backward graph of a network's outputs, and backward passes through it that stop wherever one asks.

Nodes stand in order: every node before those that it passes gradients on to. An *edge* is a node and the number of one
of its incoming gradients; the *signal* of an edge is that gradient.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import Node as AutogradNode

from gramscope.base.errors import UnsupportedError
from gramscope.capture.side_effects import gradients_returned

Node = Any  # an AutogradNode, with what its own kind has beside
Edge = tuple[Node, int]
Ends = Sequence[Tensor] | Sequence[GradientEdge]  # where a backward pass starts, or ends
UNLIMITED = 2**62
# Bytes that the backward pass of one direction writes, up to which all directions run in one batched pass: small
# operations cost their overhead, large ones their arithmetic, and these need no batching rules when taken one direction
# at a time.
TOGETHER = {"cpu": 2**26, "cuda": 2**28}
# Bytes that an operation of a backward pass writes on the average, up to which its overhead counts most.
SMALL = 2**16
# Steps from which the gradient of a tensor that a loop goes through is put together once.
STEPS = 3
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory", "failed to allocate")


def is_leaf(node: Node) -> bool:
    """Whether a node gathers the gradient of a leaf tensor."""
    return type(node).__name__ == "AccumulateGrad"


def incoming(edge: Edge) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the gradient that arrives at an edge."""
    node, number = edge
    if is_leaf(node):
        return node.variable.shape, node.variable.dtype
    metadata = node._input_metadata[number]
    if metadata.is_nested_tensor:
        raise UnsupportedError(
            "weights must multiply dense tensors, but the model applies one to a nested tensor. Pad and mask it."
        )
    return torch.Size(metadata.shape), metadata.dtype


class Directions:
    """The signals of k directions at one edge: k tensors, or one (k, ...)."""

    def __init__(self, each: Sequence[Tensor] | Tensor) -> None:
        self.each = each

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.each)

    def __getitem__(self, place: int) -> Tensor:
        return self.each[place]

    def __add__(self, other: "Directions") -> "Directions":
        if isinstance(self.each, Tensor) and isinstance(other.each, Tensor):
            return Directions(self.each + other.each)
        return Directions([mine + theirs for mine, theirs in zip(self, other, strict=True)])

    @property
    def whole(self) -> Inexact[Tensor, "k *rest"]:
        """All in one tensor: in memory, those of one example side by side. Copied at most once."""
        if not isinstance(self.each, Tensor):
            self.each = _side_by_side(self.each)
        return self.each


def _side_by_side(each: Sequence[Tensor]) -> Tensor:
    first = each[0]
    if len(each) == 1:
        return first[None]
    if first.dim() == 0:
        return torch.stack(list(each))
    inner = sorted(range(1, first.dim()), key=first.stride, reverse=True)  # as each of them lies in memory
    laid = first.new_empty(first.shape[0], len(each), *(first.shape[axis] for axis in inner))
    whole = laid.permute(1, 0, *(2 + inner.index(axis) for axis in range(1, first.dim())))
    for place, gradient in enumerate(each):
        whole[place] = gradient
    return whole


class _Loop:
    """The gradient of a tensor that a loop goes through step by step, put together once.

    autograd makes a gradient of the whole tensor for each step, nearly all of it zero, and adds them up. Here only the
    first step that comes does so; the others wait until all have come.
    """

    def __init__(self, whole: Edge, steps: Sequence[Node]) -> None:
        self.whole, self.steps = whole, steps
        shape = incoming(whole)[0]
        self.axis = _unwrapped(steps[0]._saved_dim) % len(shape)
        self.length = shape[self.axis]
        self.nodes = {whole[0], *steps}
        self._came: dict[int, Tensor] | None = None  # gradients of steps, from the second on

    def watch(self, stack: ExitStack) -> None:
        """Take part in backward passes, until ``stack`` is closed."""
        for step in self.steps:
            place = _unwrapped(step._saved_index) % self.length
            stack.callback(step.register_prehook(partial(self._keep, place)).remove)
        stack.callback(self.whole[0].register_prehook(self._put_together).remove)

    def begin(self) -> None:
        """Before each pass: what an earlier one left unfinished is forgotten."""
        self._came = None

    def _keep(self, place: int, arriving: tuple[Tensor | None]) -> tuple[Tensor | None]:
        (gradient,) = arriving
        if gradient is None:
            return arriving
        if self._came is None:
            self._came = {}
            return arriving
        self._came[place] = self._came[place] + gradient if place in self._came else gradient
        return (None,)

    def _put_together(self, arriving: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        first, came = arriving[self.whole[1]], self._came
        self._came = None
        if not came or first is None:
            return arriving
        nothing = torch.zeros_like(next(iter(came.values())))
        others = torch.stack([came.get(place, nothing) for place in range(self.length)], self.axis)
        return (*arriving[: self.whole[1]], others.add_(first), *arriving[self.whole[1] + 1 :])


def _unwrapped(saved: int) -> int:
    """torch saves a negative number as a large one."""
    return saved - 2**64 if saved >= 2**63 else saved


class BackwardGraph:
    """The nodes between the outputs ``f`` and the measured parameters.

    ``whole`` graphs are not cut into parts: hooks on tensors would run on both sides of a cut.
    """

    def __init__(self, f: Float[Tensor, "n C"], parameters: Mapping[str, Tensor], whole: bool = False) -> None:
        self.whole = whole
        root = get_gradient_edge(f)
        self.f, self.root = f, (root.node, root.output_nr)
        self.parameters = list(parameters.values())
        names = {id(parameter): name for name, parameter in parameters.items()}
        ordered: list[Node] = list(nodes_under([root.node]))
        self.names: dict[Node, str] = {
            node: names[id(node.variable)] for node in ordered if is_leaf(node) and id(node.variable) in names
        }
        self._leaves: dict[Node, list[Node]] = {}
        leading = set(self.names)
        for node in reversed(ordered):
            if any(child in leading for child, _ in node.next_functions):
                leading.add(node)
        self.nodes = [node for node in ordered if node in leading]
        self.consumers: dict[Node, list[tuple[Node, int, int]]] = {node: [] for node in self.nodes}
        self.leaving: dict[Node, list[Edge]] = {}
        for node in self.nodes:
            used = [(slot, edge) for slot, edge in enumerate(node.next_functions) if edge[0] in self.consumers]
            self.leaving[node] = [edge for _, edge in used]
            for slot, (child, number) in used:
                self.consumers[child].append((node, slot, number))

    @cached_property
    def _loops(self) -> list[_Loop]:
        """Tensors that are taken apart step by step, at least half of them."""
        found: dict[tuple[Edge, int], list[Node]] = {}
        for node in self.nodes:
            if node.name() == "SelectBackward0" and not is_leaf(self.leaving[node][0][0]):
                found.setdefault((self.leaving[node][0], node._saved_dim), []).append(node)
        loops = [_Loop(whole, steps) for (whole, _), steps in found.items() if len(steps) >= STEPS]
        return [loop for loop in loops if 2 * len(loop.steps) >= loop.length]

    @cached_property
    def size(self) -> int:
        """Bytes that one backward pass writes, the gradients of weights aside: what nodes pass on to one another."""
        steps = {step for loop in self._loops for step in loop.steps[1:]}
        edges = [
            edge for node in self.nodes if node not in steps for edge in self.leaving[node] if not is_leaf(edge[0])
        ]
        passed_on = [node._input_metadata[number] for node, number in edges]
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in passed_on if not each.is_nested_tensor)

    @property
    def _one_by_one(self) -> bool:
        """Would a batched pass take directions one by one in any case? torch goes back through convolutions so.

        It pays nevertheless where operations are small: in a loop over time steps behind a convolution, say.
        """
        passing = (node for node in self.nodes if node.name().startswith("ConvolutionBackward"))
        large = self.size > SMALL * len(self.nodes)
        return large and any(node.next_functions[0][0] in self.consumers for node in passing)

    def leaves_below(self, node: Node) -> list[Node]:
        """The nodes of the measured parameters that a node's gradient goes on to."""
        if node not in self._leaves:
            below = nodes_under([node])
            self._leaves[node] = [leaf for leaf in self.names if leaf in below]
        return self._leaves[node]

    def children(self, node: Node) -> list[Node]:
        """The nodes that a node passes gradients on to, of those that lead to measured parameters."""
        return [child for child, _ in self.leaving.get(node, ())]

    def above(self, nodes: Collection[Node]) -> set[Node]:
        """These nodes, and all whose gradients lead to them."""
        found, stack = set(nodes), list(nodes)
        while stack:
            fresh = {consumer for consumer, _, _ in self.consumers[stack.pop()]} - found
            found |= fresh
            stack += fresh
        return found

    def signals(
        self, cotangents: Float[Tensor, "k n C"], wanted: Sequence[Edge], room: int = UNLIMITED
    ) -> Iterator[dict[Edge, Directions]]:
        """The signals of the edges wanted, in the order of the graph, as many at once as ``room`` bytes hold.

        The graph is cut behind the nodes whose signals fill the room, where it can be (between the blocks of a
        transformer, say); only what crosses a cut is kept for the next part. Edges that no gradient reaches are left
        out.
        """
        together = not self._one_by_one and self.size <= TOGETHER.get(self.f.device.type, TOGETHER["cuda"])
        pending = {self.root: Directions(cotangents)}
        for part, targets, crossing in self._parts(wanted, room // len(cotangents)):
            sources = [edge for edge in pending if edge[0] in part]
            ends = [*targets, *crossing] if sources else []
            given = [pending.pop(edge) for edge in sources]
            outputs, inputs = ([GradientEdge(*edge) for edge in edges] for edges in (sources, ends))
            inside = [each for each in self._loops if each.whole not in ends and part.issuperset(each.nodes)]
            with gradients_returned(self.parameters):
                arrived = _gradients(outputs, inputs, given, together, inside) if sources else []
            found = {edge: signals for edge, signals in zip(ends, arrived, strict=True) if signals is not None}
            for edge in crossing:
                if edge in found:
                    pending[edge] = pending[edge] + found[edge] if edge in pending else found[edge]
            leaving = {edge: found[edge] for edge in targets if edge in found}
            del given, arrived, found  # or they would be held throughout the next part
            yield leaving

    def _parts(self, wanted: Sequence[Edge], room: int) -> Iterator[tuple[set[Node], list[Edge], list[Edge]]]:
        """Parts of the graph: their nodes, the edges wanted there, and the edges by which gradients leave them."""
        by_node: dict[Node, list[Edge]] = {}
        for edge in wanted:
            by_node.setdefault(edge[0], []).append(edge)
        leading = self.above(by_node)
        part: set[Node] = set()
        targets: list[Edge] = []
        crossing: dict[Node, dict[Edge, None]] = {}
        held = 0
        for node in self.nodes:
            if node not in leading:
                continue
            own = by_node.get(node, [])
            mine = sum(shape.numel() * dtype.itemsize for shape, dtype in map(incoming, own))
            if held and held + mine > room and not self.whole and self._may_cut(crossing):
                yield part, targets, [edge for edges in crossing.values() for edge in edges]
                part, targets, crossing, held = set(), [], {}, 0
            part.add(node)
            targets += own
            crossing.pop(node, None)
            for edge in self.leaving[node]:
                if edge[0] in leading:
                    crossing.setdefault(edge[0], {})[edge] = None
            held += mine
        if part:
            yield part, targets, []

    def _may_cut(self, ends: Collection[Node]) -> bool:
        """A pass that ends at these nodes must not run on from one to another, or gradients would count twice."""
        return not any(self._reach[end] >> self._place[other] & 1 for end in ends for other in ends if other is not end)

    @cached_property
    def _place(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def _reach(self) -> dict[Node, int]:
        """All nodes below each node, as bits of a number."""
        reach: dict[Node, int] = {}
        for node in reversed(self.nodes):
            reach[node] = 1 << self._place[node]
            for child in self.children(node):
                reach[node] |= reach[child]
        return reach


def batched_gradients(outputs: Ends, inputs: Ends, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    """``Jᵀ c`` for k cotangents, (k, *output shape) for each output: (k, *input shape) for each input.

    Outputs and inputs are tensors or gradient edges; None where the outputs do not depend on an input.
    """
    found = _gradients(outputs, inputs, [Directions(c) for c in cotangents], together=True)
    return [None if gradients is None else gradients.whole for gradients in found]


def _gradients(
    outputs: Ends, inputs: Ends, cotangents: Sequence[Directions], together: bool, loops: Sequence[_Loop] = ()
) -> list[Directions | None]:
    """All directions in one traversal of the graph if ``together`` and where torch can batch its operations.

    Else one after the other, with the same numbers. The graph is kept.
    """

    def passed(given: Sequence[Tensor], batched: bool = False) -> tuple[Tensor | None, ...]:
        for loop in loops:
            loop.begin()
        return torch.autograd.grad(
            outputs, inputs, given, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )

    with torch.enable_grad(), ExitStack() as stack:
        for loop in loops:
            loop.watch(stack)
        if len(cotangents[0]) > 1 and together:
            whole = [c.whole for c in cotangents]
            try:
                found = passed(whole, batched=True)
                return [None if gradient is None else Directions(dense(gradient)) for gradient in found]
            except (RuntimeError, ValueError) as error:  # an operation without a batching rule
                if is_out_of_memory(error):
                    raise
        each = [passed(some) for some in zip(*cotangents, strict=True)]
    return [_filled(column) for column in zip(*each, strict=True)]


def _filled(column: Sequence[Tensor | None]) -> Directions | None:
    """The gradients of one input, zero where a direction does not reach it; None where none does."""
    found = [gradient if gradient is None else dense(gradient) for gradient in column]
    some = next((gradient for gradient in found if gradient is not None), None)
    if some is None:
        return None
    return Directions([torch.zeros_like(some) if gradient is None else gradient for gradient in found])


def dense(gradient: Tensor) -> Tensor:
    """Embeddings may give sparse gradients."""
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, for which torch has a class, of the machine or of ``ulimit -v``, for which it has only words."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error).lower() for words in OUT_OF_MEMORY)


def check_differentiable(output: Tensor) -> None:
    """Raise where the way from the output to the parameters leads through an operation without a derivative.

    torch's backward passes then give zero for all that lies behind it, and only warn.
    """
    if any(node.name().endswith("NotImplemented") for node in nodes_below([output])):
        raise UnsupportedError(
            "every operation of the model must have a derivative, but one on the way from the parameters to the output "
            "has none. Is a layer quantised? Measure the model in floating point, before quantisation."
        )


def leaves_below(outputs: Iterable[Tensor]) -> dict[AutogradNode, Tensor]:
    """The leaf tensors that some outputs were computed from, by their graph nodes."""
    found: list[Node] = [node for node in nodes_below(outputs) if is_leaf(node)]
    return {node: node.variable for node in found}


def nodes_below(outputs: Iterable[Tensor]) -> dict[AutogradNode, None]:
    """All nodes of the graph that some outputs came from."""
    return nodes_under([get_gradient_edge(output).node for output in outputs if output.requires_grad])


def nodes_under(nodes: Sequence[AutogradNode]) -> dict[AutogradNode, None]:
    """Some nodes and all that they lead to, each before those that it passes gradients on to."""
    ordered: dict[AutogradNode, None] = {}
    seen: set[AutogradNode] = set()
    stack = [(node, False) for node in nodes]
    while stack:
        node, done = stack.pop()
        if done:
            ordered[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in seen)
    return dict.fromkeys(reversed(ordered))
