"""Where the weight sites of a network are, carried over from one forward pass to another.

The search for the sites takes two backward passes and looks at every signal. It is not repeated where the backward
graph is built as one that was searched: of the same examples at an earlier step, or of a few of the examples alone.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from gramscope.capture.backward_graph import BackwardGraph, Edge, Node, incoming
from gramscope.capture.network import same_outputs
from gramscope.capture.owners import Owner

Place = tuple[int, int]  # of an edge: its node's place in the graph, and its number
Step = tuple[str, str | None, list[Place]]  # of a node: its name, the parameter it gathers, and where it leads


class Cut(NamedTuple):
    """Where a weight enters: the slot of a node, and the edge behind it, from which the weight was made."""

    slot: int
    weight: Edge


class FoundSites(NamedTuple):
    """The cuts of each node, the owners of the signals there, and the edges whose owners must be confirmed."""

    cuts: dict[Node, list[Cut]]
    owners: dict[Edge, Owner]
    unsure: list[Edge]


class KnownSites:
    """What was found in the last pass that was searched."""

    def __init__(self) -> None:
        self._plan: list[Step] | None = None
        self._examples = 0
        self._cuts: dict[int, list[tuple[int, Place]]] = {}
        self._owners: dict[Place, Owner] = {}
        self._unsure: list[Place] = []
        self._few: Tensor | None = None  # outputs of the examples searched, if their sites may serve larger batches
        self._agreed = False  # with the outputs of the same examples in the first larger batch

    @property
    def found(self) -> bool:
        """Whether there is anything to recall."""
        return self._plan is not None

    def recall(self, graph: BackwardGraph) -> FoundSites | None:
        """The sites of a graph that is built as the remembered one was; None for any other.

        It must be of as many examples; or of more, if a few were searched for that.
        """
        n, nodes = len(graph.f), graph.nodes
        known = n == self._examples or self._carries_over(graph.f.detach())
        if self._plan is None or not known or _plan(graph) != self._plan:
            return None
        owners: dict[Edge, Owner] = {}
        for (place, number), owner in self._owners.items():
            edge = nodes[place], number
            mine = owner.like(n, incoming(edge)[0])
            if mine is None:
                return None
            owners[edge] = mine
        cuts = {
            nodes[place]: [Cut(slot, (nodes[weight], number)) for slot, (weight, number) in own]
            for place, own in self._cuts.items()
        }
        return FoundSites(cuts, owners, [(nodes[place], number) for place, number in self._unsure])

    def _carries_over(self, f: Float[Tensor, "n C"]) -> bool:
        """Do the few have the same outputs in another batch? The first that comes begins with them, and decides."""
        if self._few is None:
            return False
        if not self._agreed:
            count = min(len(self._few), len(f))
            self._agreed = same_outputs(self._few[:count], f[:count])
            self._few = self._few if self._agreed else None
        return self._agreed

    def remember(
        self, graph: BackwardGraph, cuts: Mapping[Node, Sequence[Cut]], owners: Mapping[Edge, Owner | None],
        unsure: Sequence[Edge] = (), few: bool = False,
    ) -> None:  # fmt: skip
        """Keep the sites, unless the values of data decided where they are. Those of a ``few`` serve larger batches.

        At ``unsure`` edges many signals were zero: other ones may show that the examples lie in another layout.
        """
        own = {edge: owner for edge, owner in owners.items() if edge[0] in cuts and owner is not None}
        self._plan, self._few, self._agreed = None, graph.f.detach() if few else None, False
        if any(owner.axis is None or owner.regular is None for owner in own.values()):
            return  # a signal that was zero, or examples that lie irregularly
        place = {node: number for number, node in enumerate(graph.nodes)}
        self._cuts = {
            place[node]: [(slot, (place[weight], number)) for slot, (weight, number) in slots]
            for node, slots in cuts.items()
        }
        self._owners = {(place[node], number): owner for (node, number), owner in own.items()}
        self._unsure = [(place[node], number) for node, number in unsure]
        self._plan, self._examples = _plan(graph), len(graph.f)


def _plan(graph: BackwardGraph) -> list[Step]:
    """How a graph is built: operations, parameters and connections."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    return [
        (node.name(), graph.names.get(node), [(place.get(child, -1), number) for child, number in node.next_functions])
        for node in graph.nodes
    ]
