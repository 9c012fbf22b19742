"""What a backward pass holds at once beside the forward pass: counted on the graph, before anything is computed."""

from collections.abc import Collection, Iterable, Sequence

from gramscope.capture.backward_graph import BackwardGraph, Edge, Node, incoming
from gramscope.capture.node_rules import operation
from gramscope.capture.weight_sites import VIEWS

# Operations that pass a gradient on as it came.
SAME = VIEWS | {"Add", "Expand"}

# Copies of its signals that a site takes beside them: all directions side by side and in the order of the products, or
# the normalised inputs of a norm and their product with the signals.
SITE_COPIES = 2


class WorkingSet:
    """Signals of one direction as they come and go, in parts as small as the graph can be cut into.

    A gradient that an operation passes on as it came takes no memory of its own.
    """

    def __init__(self, graph: BackwardGraph) -> None:
        self.graph = graph
        self.most = 0
        self._kept: dict[Edge, int] = {}  # what crossed from one part to the next, or waits for its parameter
        self._sizes: dict[int, int] = {}  # bytes of each piece of memory, by a number

    def most_bytes(self, wanted: Sequence[Edge], waiting: Collection[Edge]) -> int:
        """The most bytes at one moment; signals of the edges ``waiting`` are held to the end."""
        self._kept = {self.graph.root: self._new(self.graph.root)}
        for part, targets, crossing in self.graph._parts(wanted, 0):
            given = {edge: self._kept[edge] for edge in self._kept if edge[0] in part}
            found = self._part([node for node in self.graph.nodes if node in part], given, {*targets, *crossing})
            beside = SITE_COPIES * max((gradient_bytes(edge) for edge in targets), default=0)
            for edge in given:
                if edge not in waiting:
                    del self._kept[edge]
            self._note([*self._kept.values(), *found.values()], beside)
            self._kept |= {edge: found[edge] for edge in found if edge in crossing or edge in waiting}
        return self.most

    def _part(self, nodes: Sequence[Node], given: dict[Edge, int], ends: Collection[Edge]) -> dict[Edge, int]:
        """The gradients at the ``ends`` of a part, each by the number of its memory."""
        live, part = dict(given), set(nodes)
        for node in nodes:
            mine = [live[edge] for edge in live if edge[0] is node]
            for edge in self.graph.leaving[node]:
                if edge not in ends and edge[0] not in part:
                    continue
                if edge not in live:
                    same = operation(node) in SAME and len(mine) == 1 and self._sizes[mine[0]] == gradient_bytes(edge)
                    live[edge] = mine[0] if same else self._new(edge)
                else:  # a sum of two
                    self._note([*self._kept.values(), *live.values()], gradient_bytes(edge))
                    live[edge] = self._new(edge)
            self._note([*self._kept.values(), *live.values()])
            for edge in [edge for edge in live if edge[0] is node and edge not in ends]:
                del live[edge]
        return {edge: memory for edge, memory in live.items() if edge in ends}

    def _new(self, edge: Edge) -> int:
        self._sizes[len(self._sizes)] = gradient_bytes(edge)
        return len(self._sizes) - 1

    def _note(self, memories: Iterable[int], beside: int = 0) -> None:
        self.most = max(self.most, beside + sum(self._sizes[memory] for memory in set(memories)))


def gradient_bytes(edge: Edge) -> int:
    """Of the gradient that arrives at an edge."""
    shape, dtype = incoming(edge)
    return shape.numel() * dtype.itemsize
