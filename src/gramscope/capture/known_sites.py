"""Where the weight sites of a network are, remembered from one forward pass of some examples to the next.

The search for the sites takes two backward passes and looks at every signal. A network that is measured many times on
the same examples needs it once: the sites are where they were, as long as the backward graph is built in the same way.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gramscope.capture.backward_graph import BackwardGraph, Edge, Node, is_leaf
from gramscope.capture.owners import Owner

Place = tuple[int, int]  # of an edge: its node's place in the graph, and its number


class FoundSites(NamedTuple):
    """The slots and weights at which each node is cut, and the owners of the signals there."""

    cuts: dict[Node, list[tuple[int, Edge]]]
    owners: dict[Edge, Owner]


class KnownSites:
    """What was found in the last pass that was searched."""

    def __init__(self) -> None:
        self._plan: list[Any] | None = None
        self._cuts: dict[int, list[tuple[int, Place]]] = {}
        self._owners: dict[Place, Owner] = {}

    def recall(self, graph: BackwardGraph) -> FoundSites | None:
        """The sites of a graph that is built as the remembered one was; None for any other."""
        if self._plan is None or _plan(graph) != self._plan:
            return None
        nodes = graph.nodes
        cuts = {
            nodes[place]: [(slot, (nodes[weight], number)) for slot, (weight, number) in own]
            for place, own in self._cuts.items()
        }
        return FoundSites(cuts, {(nodes[place], number): owner for (place, number), owner in self._owners.items()})

    def remember(
        self, graph: BackwardGraph, cuts: Mapping[Node, Sequence[tuple[int, Edge]]], owners: Mapping[Edge, Owner | None]
    ) -> None:
        """Keep the sites, unless the values of data decided where they are."""
        own = {edge: owner for edge, owner in owners.items() if edge[0] in cuts and owner is not None}
        self._plan = None
        if any(owner.axis is None or owner.regular is None for owner in own.values()):
            return  # a signal that was zero, or examples that lie irregularly
        place = {node: number for number, node in enumerate(graph.nodes)}
        self._cuts = {
            place[node]: [(slot, (place[weight], number)) for slot, (weight, number) in slots]
            for node, slots in cuts.items()
        }
        self._owners = {(place[node], number): owner for (node, number), owner in own.items()}
        self._plan = _plan(graph)


def _plan(graph: BackwardGraph) -> list[Any]:
    """How a graph is built: operations, parameters, connections, and shapes of gradients."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    return [
        (
            node.name(),
            graph.names.get(node),
            [(place.get(child, -1), number) for child, number in node.next_functions],
            None if is_leaf(node) else [(tuple(each.shape), each.dtype) for each in node._input_metadata],
        )
        for node in graph.nodes
    ]
