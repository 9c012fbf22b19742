"""States of any network: sweeps over its sites in the order in which they ran, and back."""

from collections.abc import Collection, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import Node as GraphNode
from torch.autograd.graph import get_gradient_edge

from gramscope.base.axes import Axes
from gramscope.base.complex_numbers import real_view
from gramscope.capture.backward_graph import leaves_below
from gramscope.capture.linear_map import LinearMap, check_custom_functions
from gramscope.propagators.layout import StateLayout
from gramscope.propagators.stack import Stack
from gramscope.propagators.state_recorder import Node

Changes = dict[str, Tensor]  # parameter name -> (k, *shape of the parameter), a complex one as two real ones


class Place:
    """A node with the linear maps that lead to it: from earlier states, and from the parameters between them and it."""

    def __init__(self, node: Node, numbers: Mapping[int, int], names: Mapping[GraphNode, str]) -> None:
        self.node = node
        self.sites = [numbers[id(leaf)] for leaf in node.leaves]
        below = leaves_below(node.outputs)
        ancestors = [leaf for leaf in below.values() if id(leaf) in numbers]
        self.ancestors = [numbers[id(leaf)] for leaf in ancestors]
        self.flow = LinearMap(node.outputs, ancestors)
        self.direct = FromParameters(node.outputs, names)
        self.stacked = {own: FromParameters([weight], names) for own, weight in node.weights.items()}

    # Each map takes and returns lists over the node's own sites or over its ancestors ---------------

    def forward(self, tangents: Sequence[Tensor | None], own: list[Tensor], local: bool) -> list[Tensor]:
        """States' changes from those of the ancestors plus ``own``; ``local`` keeps a recurrent layer to one step.

        With ``local``, ``own`` is the frozen change of the states themselves and is not added.
        """
        arrived = self.flow.jvp(tangents, len(own[0]))
        recurrence = self.node.recurrence
        if recurrence is None:
            return arrived if local else [a + q for a, q in zip(arrived, own, strict=True)]
        return [recurrence.respond(own[0], arrived, local)]

    def backward(self, own: list[Tensor], local: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        """Total adjoints of the node's states, and what they send to the ancestors.

        With ``local`` the first is the part that a recurrent layer sends to its own states.
        """
        recurrence = self.node.recurrence
        if recurrence is None:
            sent = self.flow.vjp(own)
            return ([torch.zeros_like(q) for q in own] if local else own), sent
        total, sent_on = recurrence.respond_adjoint(own[0], local)
        return [total], self.flow.vjp(sent_on)

    def pull(self, own: list[Tensor], names: Collection[str], found: Changes) -> None:
        """Add ``J* q`` of this node to ``found``."""
        recurrence = self.node.recurrence
        if self.direct.has(names):
            at_outputs = own if recurrence is None else recurrence.respond_adjoint(own[0], True)[1]
            self.direct.pull(at_outputs, names, found)
        chosen = {weight: link for weight, link in self.stacked.items() if link.has(names)}
        if isinstance(recurrence, Stack) and chosen:
            gradients = recurrence.pull(recurrence.split(own[0]), chosen)
            for weight, link in chosen.items():
                link.pull([gradients[weight]], names, found)

    def push(self, changes: Mapping[str, Tensor], count: int) -> list[Tensor]:
        """``J dθ`` of this node."""
        made = self.direct.push(changes, count)
        recurrence = self.node.recurrence
        if recurrence is None:
            return made
        (leaf,) = self.node.leaves
        result = leaf.new_zeros(count, *leaf.shape)
        if isinstance(recurrence, Stack):
            links = self.stacked.items()
            moved = {weight: link.push(changes, count)[0] for weight, link in links if link.has(changes)}
            result = recurrence.join(recurrence.push(moved, count))
        if self.direct.has(changes):
            result = result + recurrence.respond(leaf.new_zeros(count, *leaf.shape), made, True)
        return [result]


class FromParameters:
    """How some tensors depend on the parameters that they were made of, at frozen states."""

    def __init__(self, tensors: Sequence[Tensor], names: Mapping[GraphNode, str]) -> None:
        self.parameters = {names[node]: leaf for node, leaf in leaves_below(tensors).items() if node in names}
        leaves = list(self.parameters.values())
        self._map = LinearMap(tensors, leaves)
        self._alike = len(leaves) == 1 and tensors[0] is leaves[0]  # most weights are parameters themselves

    def has(self, names: Collection[str]) -> bool:
        """Whether one of these parameters is among them."""
        return any(name in names for name in self.parameters)

    def pull(self, cotangents: Sequence[Tensor], names: Collection[str], found: Changes) -> None:
        """Add the gradients of the named parameters to ``found``."""
        gradients = cotangents if self._alike else self._map.vjp(cotangents)
        for name, complete in zip(self.parameters, gradients, strict=True):
            if complete is not None and name in names:
                gradient = real_view(complete)
                found[name] = found[name] + gradient if name in found else gradient

    def push(self, changes: Mapping[str, Tensor], count: int) -> list[Tensor]:
        """The change of each tensor."""
        given = [(changes.get(name), parameter.is_complex()) for name, parameter in self.parameters.items()]
        tangents = [torch.view_as_complex(c) if pair and c is not None else c for c, pair in given]
        if self._alike and tangents[0] is not None:
            return [tangents[0]]
        return self._map.jvp(tangents, count)


class NetworkStates:
    """The state equations ``s = f(s, θ)`` of one run of a network, linearised: ``ds = L ds + J dθ``.

    The states are the outputs of every weight site, and the hidden states of every recurrent layer. Vectors over the N
    states come as rows, ``(k, N)``, in the order of ``layout``; each method takes k of them at once.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        layout: StateLayout,
        output: Tensor,
        output_axes: Axes,
        parameters: Mapping[str, Tensor],
        initial: LinearMap | None = None,
        valid: Tensor | None = None,
    ) -> None:
        self.valid = valid  # of a cell: which steps exist, (T, B)
        self.initial = initial  # of a cell: from its initial state to its first one
        check_custom_functions([*(made for node in nodes for made in node.outputs), output], parameters.values())
        leaves = [leaf for node in nodes for leaf in node.leaves]
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        names = {get_gradient_edge(parameter).node: name for name, parameter in parameters.items()}
        self.places = [Place(node, numbers, names) for node in nodes]
        self.layout = layout
        self._shapes = [leaf.shape for leaf in leaves]
        self.dtype = torch.promote_types(leaves[0].dtype, torch.float32)
        for leaf in leaves:
            self.dtype = torch.promote_types(self.dtype, leaf.dtype)
        self.device = leaves[0].device
        self.values = self._join([leaf.detach()[None] for leaf in leaves])[0]
        self.parameters = {name: real_view(parameter).shape for name, parameter in parameters.items()}
        self.output_axes = output_axes
        seen = [leaf for leaf in leaves_below([output]).values() if id(leaf) in numbers]
        self._seen = [numbers[id(leaf)] for leaf in seen]
        self._out = LinearMap([output], seen)
        self.output = output.detach()

    def _split(self, q: Float[Tensor, "k N"]) -> list[Tensor]:
        """Flat vectors as (k, *shape) of each state as the network had it."""
        parts = zip(self.layout.split(q), self._shapes, strict=True)
        return [part.reshape(len(q), *shape) for part, shape in parts]

    def _join(self, parts: Sequence[Tensor]) -> Float[Tensor, "k N"]:
        shaped = zip(parts, self.layout.sites, strict=True)
        return self.layout.join([part.reshape(len(part), *site.axes.shape) for part, site in shaped]).to(self.dtype)

    def propagate(self, q: Float[Tensor, "k N"], local: bool = False) -> Float[Tensor, "k N"]:
        """``P q = (1 - L)^-1 q``; with ``local`` one step of influence, ``L q = ∂f/∂s q``."""
        states = self._split(q)
        made = list(states) if local else states
        for place in self.places:
            moved = place.forward([states[a] for a in place.ancestors], [states[s] for s in place.sites], local)
            for site, value in zip(place.sites, moved, strict=True):
                made[site] = value
        return self._join(made)

    def propagate_adjoint(self, q: Float[Tensor, "k N"], local: bool = False) -> Float[Tensor, "k N"]:
        """``P* q``, backpropagation, or ``L* q``."""
        states = self._split(q)
        made = [torch.zeros_like(state) for state in states] if local else states
        for place in reversed(self.places):
            totals, sent = place.backward([states[s] for s in place.sites], local)
            for site, total in zip(place.sites, totals, strict=True):
                made[site] = made[site] + total if local else total
            for ancestor, more in zip(place.ancestors, sent, strict=True):
                if more is not None:
                    made[ancestor] = made[ancestor] + more
        return self._join(made)

    def pull(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Changes:
        """``J* q`` for the named parameters, at frozen states."""
        states, found = self._split(q), dict[str, Tensor]()
        for place in self.places:
            place.pull([states[s] for s in place.sites], names, found)
        return found

    def push(self, changes: Mapping[str, Tensor], count: int) -> Float[Tensor, "k N"]:
        """``J dθ``; parameters that are not named stay as they are. ``count`` is the k of an empty mapping."""
        states: list[Tensor] = [torch.empty(0, device="cpu")] * len(self.layout.sites)
        for place in self.places:
            for site, value in zip(place.sites, place.push(changes, count), strict=True):
                states[site] = value
        return self._join(states)

    def kernel(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Float[Tensor, "k N"]:
        """``K q`` of the named parameters."""
        return self.push(self.pull(q, names), len(q))

    def step(self, q: Float[Tensor, "k N"], names: Collection[str]) -> Float[Tensor, "k N"]:
        """``P K P* q`` of the named parameters."""
        return self.propagate(self.kernel(self.propagate_adjoint(q), names))

    def read(self, q: Float[Tensor, "k N"]) -> Float[Tensor, "k M"]:
        """``C q``, the change of the outputs."""
        states = self._split(q)
        (moved,) = self._out.jvp([states[site] for site in self._seen], len(q))
        return moved.reshape(len(q), -1).to(self.dtype, copy=True)

    def read_adjoint(self, q: Float[Tensor, "k M"]) -> Float[Tensor, "k N"]:
        """``C* q``."""
        parts = [q.new_zeros(len(q), *shape) for shape in self._shapes]
        sent = self._out.vjp([q.reshape(len(q), *self.output.shape)])
        for site, more in zip(self._seen, sent, strict=True):
            if more is not None:
                parts[site] = more
        return self._join(parts)
