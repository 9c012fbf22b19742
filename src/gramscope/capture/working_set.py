"""What a backward pass holds at once beside the forward pass: counted on the graph, before anything is computed."""

from collections.abc import Collection, Sequence

from gramscope.capture.backward_graph import BackwardGraph, Edge, incoming

# Copies of its signals that a site takes beside them: all directions side by side and in the order of the products, or
# the normalised inputs of a norm and their product with the signals.
SITE_COPIES = 2


def working_bytes(graph: BackwardGraph, wanted: Sequence[Edge], waiting: Collection[Edge]) -> int:
    """The most bytes at one moment of the signals of one direction, in parts as small as the graph can be cut into.

    Signals of the edges ``waiting`` are held to the end. Each gradient counts with memory of its own, though an
    addition passes one on as it came: where most is held, in blocks of networks, that makes 1 % or less.
    """
    most, kept = 0, {graph.root}  # what crossed from one part to the next, or waits for its parameter
    for part, targets, crossing in graph._parts(wanted, 0):
        ends = {*targets, *crossing}
        live = {edge for edge in kept if edge[0] in part}
        given = live.difference(waiting)
        for node in (node for node in graph.nodes if node in part):
            arrived = {edge for edge in live if edge[0] is node}
            for edge in (edge for edge in graph.leaving[node] if edge in ends or edge[0] in part):
                both = gradient_bytes(edge) if edge in live else 0  # a sum of two
                live.add(edge)
                most = max(most, both + _bytes(kept | live))
            live -= arrived - ends
        kept -= given
        beside = SITE_COPIES * max(map(gradient_bytes, targets), default=0)
        most = max(most, beside + _bytes(kept | live))
        kept |= {edge for edge in live if edge in crossing or edge in waiting}
    return most


def gradient_bytes(edge: Edge) -> int:
    """Of the gradient that arrives at an edge."""
    shape, dtype = incoming(edge)
    return shape.numel() * dtype.itemsize


def _bytes(held: Collection[Edge]) -> int:
    return sum(map(gradient_bytes, held))
