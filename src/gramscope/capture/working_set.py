"""What a backward pass holds at once beside the forward pass: counted on the graph, before anything is computed."""

from collections.abc import Collection, Sequence

from gramscope.capture.backward_graph import BackwardGraph, Edge, incoming
from gramscope.capture.node_rules import operation
from gramscope.capture.weight_sites import VIEWS

# Operations that pass a gradient on as it came.
SAME = VIEWS | {"Add", "Expand"}
# Copies of its signals that a site takes beside them: all directions side by side and in the order of the products, or
# the normalised inputs of a norm and their product with the signals.
SITE_COPIES = 2


def working_bytes(graph: BackwardGraph, wanted: Sequence[Edge], waiting: Collection[Edge]) -> int:
    """The most bytes at one moment of the signals of one direction, in parts as small as the graph can be cut into.

    Signals of the edges ``waiting`` are held to the end. A gradient that an operation passes on as it came takes no
    memory of its own: gradients are noted with the one whose memory they are in.
    """
    most, kept = 0, {graph.root: graph.root}  # what crossed from one part to the next, or waits for its parameter
    for part, targets, crossing in graph._parts(wanted, 0):
        ends = {*targets, *crossing}
        live = {edge: memory for edge, memory in kept.items() if edge[0] in part}
        given = live.keys() - waiting
        for node in (node for node in graph.nodes if node in part):
            arrived = [edge for edge in live if edge[0] is node]
            for edge in (edge for edge in graph.leaving[node] if edge in ends or edge[0] in part):
                passed_on = operation(node) in SAME and len(arrived) == 1
                if edge in live:  # a sum of two
                    most, passed_on = max(most, gradient_bytes(edge) + _bytes(kept, live)), False
                memory = live[arrived[0]] if passed_on else edge
                live[edge] = memory if gradient_bytes(memory) == gradient_bytes(edge) else edge
            most = max(most, _bytes(kept, live))
            live = {edge: memory for edge, memory in live.items() if edge not in arrived or edge in ends}
        kept = {edge: memory for edge, memory in kept.items() if edge not in given}
        beside = SITE_COPIES * max(map(gradient_bytes, targets), default=0)
        most = max(most, beside + _bytes(kept, live))
        kept |= {edge: memory for edge, memory in live.items() if edge in crossing or edge in waiting}
    return most


def gradient_bytes(edge: Edge) -> int:
    """Of the gradient that arrives at an edge."""
    shape, dtype = incoming(edge)
    return shape.numel() * dtype.itemsize


def _bytes(*held: dict[Edge, Edge]) -> int:
    return sum(map(gradient_bytes, {memory for each in held for memory in each.values()}))
