"""Questions about an autograd graph: who consumes what."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any


class Graph:
    """The graph above a tensor, with the consumers of each node."""

    def __init__(self, output: Tensor) -> None:
        self.root: Node = get_gradient_edge(output).node
        self.consumers: defaultdict[Node, set[Node]] = defaultdict(set)
        seen, stack = {self.root}, [self.root]
        while stack:
            node = stack.pop()
            for child, _ in node.next_functions:
                if child is None:
                    continue
                self.consumers[child].add(node)
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        self.nodes = seen
        # Where the gradients of leaves are gathered; to ask a leaf for its node takes a view of it each time.
        gathering: list[Node] = [node for node in seen if type(node).__name__ == "AccumulateGrad"]
        self._leaves = {id(node.variable): node for node in gathering}

    def _node(self, tensor: Tensor) -> Node | None:
        return self._leaves.get(id(tensor)) if tensor.is_leaf else get_gradient_edge(tensor).node

    def reaches(self, leaf: Tensor) -> bool:
        """Does the output depend on ``leaf`` at all?"""
        return self._node(leaf) in self.nodes

    def only_through(self, leaf: Tensor, edge: GradientEdge) -> bool:
        """Does every path from the output to ``leaf`` pass through ``edge``?

        False where the leaf was used once more behind our back, as in a double backward.
        """
        start = self._node(leaf)
        if start == edge.node:
            return True
        seen, stack = {start}, [start]
        while stack:
            node = stack.pop()
            if node == self.root:
                return False
            for consumer in self.consumers[node]:
                if consumer != edge.node and consumer not in seen:
                    seen.add(consumer)
                    stack.append(consumer)
        return True


class _Alias(torch.autograd.Function):
    """The same memory under a new node that is no view, so that in-place operations append to it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def settle(tensor: Tensor) -> Tensor:
    """``tensor`` with a gradient edge that later in-place operations cannot bypass."""
    return _Alias.apply(tensor) if tensor._is_view() else tensor  # type: ignore[no-untyped-call]
