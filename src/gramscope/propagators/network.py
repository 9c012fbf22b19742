"""States of any network: sweeps over its sites in the order in which they ran, and back."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gramscope.base.axes import Axes
from gramscope.base.errors import UnsupportedError
from gramscope.capture.forms import Tap
from gramscope.capture.linear_map import Input, LinearMap, leaves_below
from gramscope.capture.recorder import Use
from gramscope.capture.weights import Weight
from gramscope.propagators.layout import Layout
from gramscope.propagators.pieces import Origin, Piece, Product
from gramscope.propagators.states import Changes, States
from gramscope.propagators.watch import Node


class Place:
    """A node with what leads to it: earlier states, uses of weights, and parameters met out of sight."""

    def __init__(
        self, node: Node, numbers: Mapping[int, int], parameters: Mapping[Any, Tensor], names: Mapping[int, str]
    ) -> None:
        self.node = node
        self.sites = [numbers[id(leaf)] for leaf in node.leaves]
        below = leaves_below(node.outputs)
        ancestors = [leaf for leaf in below.values() if id(leaf) in numbers]
        self.ancestors = [numbers[id(leaf)] for leaf in ancestors]
        self.flow = LinearMap(node.outputs, ancestors, [leaf.shape for leaf in ancestors])
        hidden = [parameters[graph_node] for graph_node in below if graph_node in parameters]
        self.direct: list[tuple[int, Piece]] = []  # (which output, piece): the use's result is that output itself
        self.indirect: list[Piece] = []
        edges: list[Input] = []
        for use, shape in node.uses:
            _check_intact(use, names)
            output = self._output_of(use)
            piece = Piece(use, shape, Origin(use.weight, names))
            if output is None:
                self.indirect.append(piece)
                edges.append(use.edge)
            else:
                self.direct.append((output, piece))
        for parameter in hidden:
            whole = Weight.of_parameter(parameter)
            use = Use(whole, parameter, get_gradient_edge(parameter), Tap(shape=tuple(parameter.shape)), ())
            self.indirect.append(Piece(use, parameter.shape, Origin(whole, names)))
            edges.append(parameter)
        self.inner = LinearMap(node.outputs, edges, [piece.shape for piece in self.indirect])
        self.stacked = {name: Origin(weight, names) for name, weight in node.weights.items()}

    def _output_of(self, use: Use) -> int | None:
        """Which output of the node this use made, if it made one as it stands."""
        if self.node.stack is not None:
            return None
        for place, output in enumerate(self.node.outputs):
            if output.requires_grad:
                edge = get_gradient_edge(output)
                if edge.node == use.edge.node and edge.output_nr == use.edge.output_nr:
                    return place
        return None

    # Each map takes and returns lists over the node's own sites or over its ancestors ---------------

    def forward(self, tangents: Sequence[Tensor | None], own: list[Tensor], local: bool) -> list[Tensor]:
        """States' changes from those of the ancestors plus ``own``; ``local`` keeps a recurrent layer to one step.

        With ``local``, ``own`` is the frozen change of the states themselves and is not added.
        """
        count = len(own[0])
        arrived = self.flow.jvp(tangents, count)
        stack = self.node.stack
        if stack is None:
            return arrived if local else [a + q for a, q in zip(arrived, own, strict=True)]
        inputs, initial = arrived[0].transpose(0, 1), arrived[1]
        sweep = stack.local if local else stack.propagate
        return [stack.join(sweep(stack.split(own[0]), inputs, initial))]

    def backward(self, own: list[Tensor], local: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        """Total adjoints of the node's states, and what they send to the ancestors.

        With ``local`` the first is the part that a recurrent layer sends to its own states.
        """
        stack = self.node.stack
        if stack is None:
            sent = self.flow.vjp(own)
            return ([torch.zeros_like(q) for q in own] if local else own), sent
        sweep = stack.local_adjoint if local else stack.propagate_adjoint_to_inputs
        parts, inputs, initial = sweep(stack.split(own[0]))
        return [stack.join(parts)], self.flow.vjp([inputs.transpose(0, 1), initial])

    def pull(self, own: list[Tensor], names: Collection[str], found: Changes) -> None:
        """Add ``J* q`` of this node to ``found``."""
        for output, piece in self.direct:
            if not set(piece.origin.names).isdisjoint(names):
                _gather(found, piece.pull(own[output]), names)
        if self.indirect:
            for piece, signal in zip(self.indirect, self.inner.vjp(self._at_outputs(own)), strict=True):
                if signal is not None:
                    _gather(found, piece.pull(signal), names)
        if self.node.stack is not None:
            wanted = [own_name for own_name, o in self.stacked.items() if not set(o.names).isdisjoint(names)]
            for own_name, gradient in self.node.stack.pull(self.node.stack.split(own[0]), wanted).items():
                _gather(found, self.stacked[own_name].pull(gradient), names)

    def push(self, changes: Mapping[str, Tensor], count: int) -> list[Tensor]:
        """``J dθ`` of this node."""
        made = [output.new_zeros(count, *output.shape) for output in self.node.outputs]
        for output, piece in self.direct:
            moved = piece.push(changes)
            if moved is not None:
                made[output] = made[output] + moved.reshape(made[output].shape)
        if self.indirect:
            tangents = [piece.push(changes) for piece in self.indirect]
            made = [a + b for a, b in zip(made, self.inner.jvp(tangents, count), strict=True)]
        stack = self.node.stack
        if stack is None:
            return made
        own = {name: moved for name, o in self.stacked.items() if (moved := o.push(changes)) is not None}
        parts = stack.push(own, count)
        if self.indirect:
            still = [torch.zeros_like(part) for part in parts]
            driven = stack.local(still, made[0].transpose(0, 1), made[1])
            parts = [a + b for a, b in zip(parts, driven, strict=True)]
        return [stack.join(parts)]

    def _at_outputs(self, own: list[Tensor]) -> list[Tensor]:
        stack = self.node.stack
        if stack is None:
            return own
        _, inputs, initial = stack.local_adjoint(stack.split(own[0]))
        return [inputs.transpose(0, 1), initial]


class NetworkStates(States):
    """The outputs of every weight site, and the hidden states of every recurrent layer, of one run of a network."""

    def __init__(
        self,
        nodes: Sequence[Node],
        layout: Layout,
        output: Tensor,
        output_axes: Axes,
        parameters: Mapping[str, Tensor],
        initial: LinearMap | None = None,
        valid: Tensor | None = None,
    ) -> None:
        self.valid = valid  # of a cell: which steps exist, (T, B)
        self.initial = initial  # of a cell: from its initial state to its first one
        leaves = [leaf for node in nodes for leaf in node.leaves]
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        names = {id(parameter): name for name, parameter in parameters.items()}
        by_node = {get_gradient_edge(parameter).node: parameter for parameter in parameters.values()}
        self.places = [Place(node, numbers, by_node, names) for node in nodes]
        self.layout = layout
        self._shapes = [leaf.shape for leaf in leaves]
        self.dtype = torch.promote_types(leaves[0].dtype, torch.float32)
        for leaf in leaves:
            self.dtype = torch.promote_types(self.dtype, leaf.dtype)
        self.device = leaves[0].device
        self.values = self._join([leaf.detach()[None] for leaf in leaves])[0]
        self.parameters = {name: parameter.shape for name, parameter in parameters.items()}
        self.output_axes = output_axes
        seen = [leaf for leaf in leaves_below([output]).values() if id(leaf) in numbers]
        self._seen = [numbers[id(leaf)] for leaf in seen]
        self._out = LinearMap([output], seen, [leaf.shape for leaf in seen])
        self.output = output.detach()
        self._grams = self._gram_products()

    def _gram_products(self) -> dict[str, tuple[int, Product]]:
        """Parameters whose part of K is one Gram matrix at one site: used once, in one contraction."""
        used: dict[str, int] = {}
        single: dict[str, tuple[int, Piece]] = {}
        for place in self.places:
            for output, piece in place.direct:
                single[piece.origin.names[0]] = (place.sites[output], piece)
            origins = [piece.origin for _, piece in place.direct] + [piece.origin for piece in place.indirect]
            for name in (name for origin in [*origins, *place.stacked.values()] for name in origin.names):
                used[name] = used.get(name, 0) + 1
        found = {}
        for name, (site, piece) in single.items():
            product = piece.gram_product() if used[name] == 1 else None
            if product is not None:
                found[name] = (site, product)
        return found

    def kernel(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Float[Tensor, "k N"]:
        grams = [self._grams[name] for name in names if name in self._grams]
        rest = [name for name in names if name not in self._grams]
        result = self.push(self.pull(q, rest), len(q))
        if not grams:
            return result
        states, made = self._split(q), self._split(result)
        for site, product in grams:
            made[site] = made[site] + product(states[site])
        return self._join(made)

    def _split(self, q: Float[Tensor, "k N"]) -> list[Tensor]:
        """Flat vectors as (k, *shape) of each state as the network had it."""
        parts = zip(self.layout.split(q), self._shapes, strict=True)
        return [part.reshape(len(q), *shape) for part, shape in parts]

    def _join(self, parts: Sequence[Tensor]) -> Float[Tensor, "k N"]:
        shaped = zip(parts, self.layout.sites, strict=True)
        return self.layout.join([part.reshape(len(part), *site.axes.shape) for part, site in shaped]).to(self.dtype)

    def propagate(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
        states = self._split(q)
        for place in self.places:
            moved = place.forward([states[a] for a in place.ancestors], [states[s] for s in place.sites], local=False)
            for site, value in zip(place.sites, moved, strict=True):
                states[site] = value
        return self._join(states)

    def propagate_adjoint(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
        states = self._split(q)
        for place in reversed(self.places):
            totals, sent = place.backward([states[s] for s in place.sites], local=False)
            for site, total in zip(place.sites, totals, strict=True):
                states[site] = total
            for ancestor, more in zip(place.ancestors, sent, strict=True):
                if more is not None:
                    states[ancestor] = states[ancestor] + more
        return self._join(states)

    def local(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
        states = self._split(q)
        result = list(states)
        for place in self.places:
            moved = place.forward([states[a] for a in place.ancestors], [states[s] for s in place.sites], local=True)
            for site, value in zip(place.sites, moved, strict=True):
                result[site] = value
        return self._join(result)

    def local_adjoint(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
        states = self._split(q)
        result = [torch.zeros_like(state) for state in states]
        for place in self.places:
            kept, sent = place.backward([states[s] for s in place.sites], local=True)
            for site, more in zip(place.sites, kept, strict=True):
                result[site] = result[site] + more
            for ancestor, send in zip(place.ancestors, sent, strict=True):
                if send is not None:
                    result[ancestor] = result[ancestor] + send
        return self._join(result)

    def pull(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Changes:
        states, found = self._split(q), dict[str, Tensor]()
        for place in self.places:
            place.pull([states[s] for s in place.sites], names, found)
        return found

    def push(self, changes: Mapping[str, Tensor], count: int) -> Float[Tensor, "k N"]:
        states: list[Tensor] = [torch.empty(0, device="cpu")] * len(self.layout.sites)
        for place in self.places:
            for site, value in zip(place.sites, place.push(changes, count), strict=True):
                states[site] = value
        return self._join(states)

    def read(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k M"]:
        states = self._split(q)
        (moved,) = self._out.jvp([states[site] for site in self._seen], len(q))
        return moved.reshape(len(q), -1).to(self.dtype)

    def read_adjoint(self, q: Float[Tensor, "k M"]) -> Float[Tensor, "k N"]:
        parts = [q.new_zeros(len(q), *shape) for shape in self._shapes]
        sent = self._out.vjp([q.reshape(len(q), *self.output.shape)])
        for site, more in zip(self._seen, sent, strict=True):
            if more is not None:
                parts[site] = more
        return self._join(parts)


def _gather(found: Changes, more: Mapping[str, Tensor], names: Collection[str]) -> None:
    for name, gradient in more.items():
        if name in names:
            found[name] = found[name] + gradient if name in found else gradient


def _check_intact(use: Use, names: Mapping[int, str]) -> None:
    if not use.inputs_intact():
        raise UnsupportedError(
            f"what {names[id(use.weight.roots[0])]!r} was multiplied with must be kept, but the model overwrote it in "
            "place afterwards. Replace the in-place operation (x += y by x = x + y)."
        )
