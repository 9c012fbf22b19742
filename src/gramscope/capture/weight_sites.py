"""The weight sites of a network, found in its backward graph.

A weight site is an edge N → M of the backward graph where the gradient at N still splits by example and the gradient at
M no longer does: there the sum over the examples happens, and there a weight meets data. Nothing is recorded in the
forward pass, and no operation is replaced. From each parameter one climbs to the first nodes that split; their signals
are all that a backward pass computes, gradients of weights never.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.capture.backward_graph import (
    UNLIMITED,
    BackwardGraph,
    Directions,
    Edge,
    Node,
    batched_gradients,
    incoming,
    is_leaf,
    nodes_below,
    nodes_under,
)
from gramscope.capture.known_sites import Cut, FoundSites, KnownSites
from gramscope.capture.node_rules import BY_EXAMPLE, NodeUse, operation, sites_of
from gramscope.capture.owners import (
    Owner,
    exponents,
    find_owner,
    mixes,
    power_of_two,
    regular_owner,
    tells_layout,
    without_vanished,
)
from gramscope.capture.sites import Frame, LookupSite, OuterSite, RowSite, Site

# Operations whose result holds entries of their argument, each once at most: views, copies and casts.
VIEWS = frozenset(
    "T Transpose Permute View UnsafeView ReshapeAlias Slice Select Squeeze Unsqueeze ToCopy Split SplitWithSizes "  # noqa: SIM905
    "Unbind Clone Alias Narrow Chunk MovedimInt Movedim Contiguous Flatten Unflatten Diagonal Unfold Real Imag".split()
)
# Those that keep the order of the entries.
RESHAPES = frozenset({"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"})
# Operations all of whose tensors have a slot among the node's own: what they make of parameters holds no data.
CLOSED = VIEWS | frozenset(
    "Add Sub Mul Div Neg Exp Expm1 Log Log1p Sigmoid Tanh Relu Softplus Softmax LogSoftmax Silu Gelu Elu Abs Sqrt "  # noqa: SIM905
    "Rsqrt Pow Reciprocal Sin Cos Mm Bmm Mv Dot Addmm Sum Mean Prod Cumsum Tril Triu LinalgVectorNorm Norm "
    "NativeLayerNorm WeightNormInterface ViewAsComplex ViewAsReal LinalgMatrixExp LinalgSolveEx Flip Roll Sgn".split()
)
# Operations that take entries of a table, any number of times: no data are mixed in them.
TAKES = CLOSED | {"Embedding", "Index", "IndexSelect", "Gather", "Expand", "Repeat", "Stack", "Cat"}
# Operations that take entries of one of their tensors, and constants for the others.
COPIES = VIEWS | {"Embedding", "Index", "IndexSelect", "Gather", "Expand", "Repeat", "Where", "MaskedFill"}
# Operations that move, choose and add entries: constants beside the weights change nothing in their gradients.
MOVES = VIEWS | frozenset(
    "Add Sub Neg Where MaskedFill Sum Mean Cat Stack Expand Repeat Embedding Index IndexSelect Gather "  # noqa: SIM905
    "UpsampleLinear1D UpsampleNearest2D UpsampleBilinear2D UpsampleBicubic2D UpsampleTrilinear3D".split()
)
# Words in the names of operations that move entries by the values of data, or that hide what they do.
ROUTES = ("Index", "Scatter", "Gather", "Masked", "Sort", "Topk", "Take", "Put", "Grouped", "Pack", "Unique", "jit")
# Bits of a number that every floating dtype holds.
BITS = 8
# Entries of gradients that are pulled back to parameters at once.
PULLED_AT_ONCE = 2**26
# Layers of so many outputs are looked through for outputs without signals (a GPU must stop to answer); at most one in
# SPARSE may have some.
WIDE, SPARSE = {"cpu": 2**8, "cuda": 2**12}, 8


class WeightSites:
    """The sites of the outputs ``graph.f``; ``room`` bytes of signals may be held at once while they are sought.

    ``refuse_mixing`` is called with the parameters at which examples may be mixed. ``recalled`` are the sites of a
    graph that is built in the same way; nothing is sought then.
    """

    def __init__(
        self, graph: BackwardGraph, refuse_mixing: Callable[[Sequence[str]], None], room: int = UNLIMITED,
        recalled: FoundSites | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.room = graph, room
        self.n = len(graph.f)
        self.slow: dict[str, float] = {}  # seconds that parameters without a rule took, one example at a time
        self._owners: dict[Edge, Owner | None] = {}
        self._covered: dict[Edge, Tensor] = {}  # has every position a signal? Such tell of one layout alone
        self._splits: dict[Node, bool] = {}
        self._copied: dict[Edge, Int[Tensor, " p"]] = {}  # by edges of weights: which entries they are copies of
        if recalled is not None and self._confirms(recalled):
            self.cuts = recalled.cuts
            self._owners = {**recalled.owners}
        else:
            self.cuts = self._find()
            doubtful = [name for node, cuts in self.cuts.items() for name in self._doubtful(node, cuts)]
            if doubtful and self.n > 1:
                refuse_mixing(doubtful)
        self.edges = [edge for node in self.cuts for edge in _edges(node) if self._owners.get(edge) is not None]

    def keep_in(self, known: KnownSites, few: bool = False) -> list[Edge]:
        """Tell where the sites are, for other passes, unless the values of data may move them.

        Returned are edges where many signals are zero, so that the examples may lie in another layout than they seem
        to: later passes confirm it.
        """
        unsure: list[Edge] = []
        if not self.edges or any(map(_may_route, self.graph.above(self.cuts))):
            return unsure
        flags = torch.stack([self._covered[edge] for edge in self.edges]).tolist()  # a GPU must stop to answer: once
        sparse = [edge for edge, covered in zip(self.edges, flags, strict=True) if not covered]
        for found in self.graph.signals(self._mixture[None], sparse, self.room):
            pairs = [(edge, signals[0], self._owners[edge]) for edge, signals in found.items()]
            unsure += [edge for edge, signal, owner in pairs if owner and not tells_layout(signal, owner)]
        known.remember(self.graph, self.cuts, self._owners, unsure, few)
        return unsure

    @property
    def waiting(self) -> set[Edge]:
        """Edges whose signals are held until other uses of the same parameter are reached."""
        names = {node: {name for cut in cuts for name in self._names(cut.weight)} for node, cuts in self.cuts.items()}
        uses = Counter(name for own in names.values() for name in own)
        return {edge for node, own in names.items() if any(uses[name] > 1 for name in own) for edge in _edges(node)}

    def _names(self, weight: Edge) -> list[str]:
        """The parameters that a weight is made of."""
        return [self.graph.names[leaf] for leaf in self.graph.leaves_below(weight[0])]

    # The search ------------------------------------------------------------------------------------

    def _find(self) -> dict[Node, list[Cut]]:
        """The cuts of each node. A cut below another would count twice: there the climb goes on."""
        passed: set[Node] = set()
        while True:
            cuts: dict[Node, list[Cut]] = {}
            climbed = set(self.graph.names)
            todo, waiting = list(self.graph.names), list[tuple[Node, Node, int, int]]()
            while todo or waiting:
                if todo:
                    weight = todo.pop()
                    uses = [(weight, *use) for use in self.graph.consumers[weight]]
                    waiting += [use for use in uses if not self._is_closed(use[1])]
                    above = [node for _, node, _, _ in uses if self._is_closed(node)]
                else:
                    self._probe([node for _, node, _, _ in waiting])
                    above = []
                    for weight, node, slot, number in waiting:
                        if self._splits[node] and node not in passed:
                            cuts.setdefault(node, []).append(Cut(slot, (weight, number)))
                        else:
                            above.append(node)
                    waiting = []
                fresh = dict.fromkeys(node for node in above if node not in climbed)
                climbed.update(fresh)
                todo += fresh
            below = nodes_under([child for node in climbed for child in self.graph.children(node)])
            nested = cuts.keys() & below.keys()
            if not nested:
                return {node: cuts[node] for node in self.graph.nodes if node in cuts}
            passed |= nested

    def _doubtful(self, node: Node, cuts: Sequence[Cut]) -> list[str]:
        """Parameters that enter here, if examples may be mixed: their weight may hold data, or examples lie oddly."""
        owners = [self._owners.get(edge) for edge in _edges(node)]
        odd = any(owner is not None and owner.regular is None for owner in owners)
        weights = [cut.weight for cut in cuts if odd or not self._is_pure(cut.weight[0])]
        return [name for weight in weights for name in self._names(weight)]

    def _probe(self, nodes: Sequence[Node]) -> None:
        """Settle which of the nodes split by example."""
        probed = [node for node in self._with_broadcasts(nodes) if node not in self._splits]
        edges = [edge for node in probed for edge in _edges(node)]
        if not edges:
            return
        self._seek_owners(edges)
        for node in probed:
            found = [self._owners[edge] for edge in _edges(node) if edge in self._owners]
            self._splits[node] = bool(found) and all(owner is not None for owner in found)

    def _confirms(self, recalled: FoundSites) -> bool:
        """Do examples lie as recalled where this was not sure?"""
        self._seek_owners(recalled.unsure)
        pairs = [(self._owners.pop(edge, None), recalled.owners[edge]) for edge in recalled.unsure]
        return all(found and (found.axis, found.regular) == (owner.axis, owner.regular) for found, owner in pairs)

    def _seek_owners(self, edges: Sequence[Edge]) -> None:
        digits = exponents(self.n, self.graph.f.dtype, self.graph.f.device)
        unsettled = self._owned(edges, digits[:1], complete=len(digits) == 1)
        if unsettled:
            self._owned(unsettled, digits, complete=True)

    @property
    def _mixture(self) -> Float[Tensor, "n C"]:
        """A cotangent in which all outputs have a part, and none cancels another."""
        f = self.graph.f
        generator = torch.Generator().manual_seed(0)
        return torch.rand(f.shape, generator=generator, dtype=torch.float64, device="cpu").add_(0.5).to(f)

    def _with_broadcasts(self, nodes: Sequence[Node]) -> list[Node]:
        """And, where a gradient may be the same for all examples, whoever sends it: one pass then tells of both.

        Such have no axis of examples in front, or copy entries of a table.
        """
        found = dict.fromkeys(nodes)
        stack = list(found)
        while stack:
            node = stack.pop()
            shapes = [incoming(edge)[0] for edge in _edges(node)]
            if operation(node) not in COPIES and any(shape and shape[0] % self.n == 0 for shape in shapes):
                continue
            fresh = [consumer for consumer, _, _ in self.graph.consumers[node] if consumer not in found]
            found.update(dict.fromkeys(fresh))
            stack += fresh
        return list(found)

    @exact_arithmetic()  # TF32 would round sums that differ in their last bits to others that differ in their eleventh
    def _owned(self, edges: Sequence[Edge], digits: list[Tensor], complete: bool) -> list[Edge]:
        """Note the owners of the edges; return those that need more digits, unless these are ``complete``."""
        mixture = self._mixture
        weights = [power_of_two(digit, mixture.dtype) for digit in digits]
        cotangents = torch.stack([mixture, *(weight[:, None] * mixture for weight in weights)])
        unsettled: list[Edge] = []
        for found in self.graph.signals(cotangents, edges, self.room):
            for edge, (plain, *scaled) in found.items():
                owner = regular_owner(plain, scaled[0], weights[0])
                if owner is None:
                    plain, *scaled = without_vanished(plain, scaled)
                    owner = regular_owner(plain, scaled[0], weights[0])
                if owner is None and not mixes(plain, scaled[0]):
                    if not complete:
                        unsettled.append(edge)
                        continue
                    owner = find_owner(plain, scaled, digits)
                self._owners[edge] = owner
                if owner is not None:
                    self._covered[edge] = plain.movedim(owner.axis or 0, 0).unsqueeze(-1).flatten(1).any(1).all()
        return unsettled

    def _is_closed(self, node: Node) -> bool:
        """Does a node differentiate what is made of weights alone? Then it need not be probed."""
        if node not in self._splits and node != self.graph.root[0] and operation(node) in CLOSED:
            slots = [child for child, _ in node.next_functions]
            if all(child is not None and (is_leaf(child) or self._splits.get(child) is False) for child in slots):
                self._splits[node] = False
        return self._splits.get(node) is False

    def _is_pure(self, node: Node) -> bool:
        """Is the gradient that a node passes on to parameters free of data?"""
        return self._made_by(node, TAKES) or self._made_by(node, MOVES, constants=True)

    def _made_by(self, node: Node, operations: frozenset[str], constants: bool = False) -> bool:
        """Is what a node differentiates made by these operations alone, of parameters alone, or of constants too?"""
        return all(
            is_leaf(below)
            or (operation(below) in operations and (constants or all(child for child, _ in below.next_functions)))
            for below in nodes_under([node])
        )

    # Sites -----------------------------------------------------------------------------------------

    def sites(self, cotangents: Float[Tensor, "k n C"], room: int = UNLIMITED) -> Iterator[dict[str, tuple[Site, ...]]]:
        """All sites of some parameters at a time, of these cotangents; each parameter as soon as it is complete."""
        left = Counter(name for cuts in self.cuts.values() for cut in cuts for name in self._names(cut.weight))
        held: dict[str, list[Site]] = {name: [] for name in left}
        made: dict[Edge, RowSite] = {}  # gradients with respect to weights that are made of parameters
        with torch.no_grad():
            for found in self.graph.signals(cotangents, self.edges, room):
                for node in dict.fromkeys(node for node, _ in found):
                    self._add(node, {edge: found.pop(edge) for edge in _edges(node) if edge in found}, held, made)
                    for cut in self.cuts[node]:
                        left.subtract(self._names(cut.weight))
                    done = [name for name in held if left[name] == 0]
                    if done:
                        for weight in [weight for weight in made if any(name in done for name in self._names(weight))]:
                            self._pull_back(made.pop(weight), weight, held)
                        yield {name: tuple(held.pop(name)) for name in done}
            for weight, site in made.items():  # no signal reached some other use
                self._pull_back(site, weight, held)
            if held:
                yield {name: tuple(sites) for name, sites in held.items()}

    def _add(
        self, node: Node, signals: dict[Edge, Directions], held: dict[str, list[Site]], made: dict[Edge, RowSite]
    ) -> None:
        """Add the sites of a node to those of their parameters, or to the gradient of a weight that is made of them."""
        edges = _edges(node)
        owners = tuple(self._owners.get(edge) if edge in signals else None for edge in edges)
        if all(owner is None or owner.silent for owner in owners):
            return
        for cut in self.cuts[node]:
            given = tuple(signals.get(edge) for edge in edges)
            use = NodeUse(node, cut.slot, *incoming(cut.weight), given, owners)
            begun = time.perf_counter()
            sites = sites_of(use)
            if any(site.rule == BY_EXAMPLE for site in sites):
                names = self._names(cut.weight)
                for name in names:
                    self.slow[name] = self.slow.get(name, 0.0) + (time.perf_counter() - begun) / len(names)
            for site in sites:
                placed = self._placed(site, cut.weight)
                if placed is not None:
                    held[placed.name].append(placed)
                    continue
                rows, rule, before = site.whole_rows(), site.rule, made.get(cut.weight)
                if before is not None:
                    rows, rule = rows + before.gradient, before.rule if rule != BY_EXAMPLE else rule
                made[cut.weight] = RowSite("", rule, None, rows)

    def _placed(self, site: Site, weight: Edge) -> Site | None:
        """The site of a parameter from that of a weight which is the parameter or a view of it; else None."""
        node = below = weight[0]
        turned = False
        while isinstance(site, RowSite) and operation(below) in RESHAPES:
            below = below.next_functions[0][0]
        while operation(below) == "T":
            below, turned = below.next_functions[0][0], not turned
        if is_leaf(below) and not turned:
            return _sparse(_real(replace(site, name=self.graph.names[below]), below))
        leaves = self.graph.leaves_below(node)
        if len(leaves) != 1 or not self._made_by(node, VIEWS) or leaves[0].variable.is_complex():
            return None
        name = self.graph.names[leaves[0]]
        if (isinstance(site, OuterSite) and site.frame is None and len(site.order) == 2) and (
            is_leaf(below) or self._frame(weight, leaves[0]).is_transpose
        ):
            return _sparse(replace(site, name=name, order=site.order[::-1]))
        frame = self._frame(weight, leaves[0])
        if site.frame is not None:
            frame = Frame(frame.entries[site.frame.entries], frame.shape)
        return _real(replace(site, name=name, frame=frame), leaves[0])

    def _frame(self, weight: Edge, leaf: Node) -> Frame:
        """Where the entries of a view of a parameter lie."""
        return Frame(self._entries(weight, (leaf, 0)), tuple(leaf.variable.shape))

    def _source(self, weight: Edge) -> Edge:
        """The edge whose entries a weight is a copy of, as deep as that goes."""
        while _copies(weight[0]) and len(self.graph.leaving[weight[0]]) == 1:
            weight = self.graph.leaving[weight[0]][0]
        return weight

    def _entries(self, weight: Edge, source: Edge) -> Int[Tensor, " p"]:
        """Of which entry of its source each entry of a weight is a copy, -1 for none: J times their numbers, less 1."""
        if weight not in self._copied:
            (shape, dtype), (below, kind) = incoming(weight), incoming(source)
            numbers = torch.arange(1, 1 + below.numel(), device=self.graph.f.device).reshape(below)
            cotangent = torch.zeros(shape, dtype=dtype, device=numbers.device, requires_grad=True)
            end = source[0].variable if is_leaf(source[0]) else GradientEdge(*source)
            entries = torch.zeros(shape, dtype=torch.long, device=numbers.device)
            with torch.enable_grad():
                (back,) = torch.autograd.grad([GradientEdge(*weight)], [end], [cotangent], create_graph=True)
            for place in range(0, below.numel().bit_length(), BITS):
                digit = ((numbers >> place) & ((1 << BITS) - 1)).to(kind)
                (found,) = torch.autograd.grad(back, cotangent, digit, retain_graph=True)
                entries += found.real.to(torch.long) << place
            self._copied[weight] = entries.flatten() - 1
        return self._copied[weight]

    def _pull_back(self, site: RowSite, weight: Edge, held: dict[str, list[Site]]) -> None:
        """Add the sites of the parameters that a weight is made of."""
        leaves = self.graph.leaves_below(weight[0])
        rule = f"{site.rule}, derived weight" if site.rule != BY_EXAMPLE else site.rule
        for leaf, gradient in zip(leaves, self._pulled_back(site.gradient, weight, leaves), strict=True):
            name = self.graph.names[leaf]
            held[name].append(_real(RowSite(name, rule, None, gradient), leaf))

    def _pulled_back(self, rows: Inexact[Tensor, "n k p"], weight: Edge, leaves: Sequence[Node]) -> list[Tensor]:
        """Gradients with respect to the parameters, from gradients with respect to what was made of them."""
        turned = rows.transpose(0, 1)  # as they lie in memory, where they are signals
        flat = turned.flatten(0, 1).to(incoming(weight)[1])
        source = weight if self.graph.whole else self._source(weight)  # hooks may change what passes
        shape, dtype = incoming(source)
        if source != weight:
            entries = self._entries(weight, source) + 1
            flat = flat.new_zeros(len(flat), shape.numel() + 1).index_add_(1, entries, flat)[:, 1:].to(dtype)
        if is_leaf(source[0]):
            return [flat.unflatten(0, turned.shape[:2]).transpose(0, 1)]
        flat = flat.reshape(len(flat), *shape)
        parts: list[list[Tensor]] = [[] for _ in leaves]
        for some in flat.split(max(1, PULLED_AT_ONCE // max(1, shape.numel()))):
            found = batched_gradients([GradientEdge(*source)], [leaf.variable for leaf in leaves], [some])
            for pieces, leaf, gradient in zip(parts, leaves, found, strict=True):
                whole = leaf.variable.new_zeros(len(some), *leaf.variable.shape) if gradient is None else gradient
                pieces.append(whole.detach().reshape(len(some), -1))
        return [torch.cat(pieces).unflatten(0, turned.shape[:2]).transpose(0, 1) for pieces in parts]


def may_route_by_data(f: Tensor) -> bool:
    """May the values of data decide where entries go, on the way to these outputs?"""
    return any(map(_may_route, nodes_below([f])))


def _may_route(node: Node) -> bool:
    """May the values of data decide where entries go? Then few examples tell nothing of the others."""
    if isinstance(node, BackwardCFunction):  # one of ours may say that it moves nothing
        return not getattr(getattr(node, "_forward_cls", None), "keeps_places", False)
    name = node.name()
    return any(word in name for word in ROUTES)


def _copies(node: Node) -> bool:
    """Is what a node makes of one tensor copies of its entries, by a derivative that torch can differentiate?"""
    unusual = operation(node) == "Embedding" and (node._saved_sparse or node._saved_scale_grad_by_freq)
    return operation(node) in COPIES and not unusual


def _edges(node: Node) -> list[Edge]:
    return [(node, number) for number in range(len(node._input_metadata))]


def _real(site: Site, leaf: Node) -> Site:
    """A complex parameter is two real ones; a real one that was cast takes the real part."""
    rows = site.gradient if isinstance(site, RowSite) else None
    if rows is None or not rows.is_complex():
        return site
    own = torch.view_as_real(rows.resolve_conj()).flatten(2) if leaf.variable.is_complex() else rows.real
    return RowSite(site.name, site.rule, site.frame, own)


def _sparse(site: Site) -> Site:
    """A wide layer of which few outputs have signals (chosen logits) is a table of which few rows were looked up."""
    if not isinstance(site, OuterSite) or site.order != (0, 1) or site.groups > 1:
        return site
    if site.fan_out < WIDE.get(site.signals.device.type, WIDE["cuda"]):
        return site
    used = torch.zeros(site.fan_out, dtype=torch.bool, device=site.signals.device)
    for signals in (site.signals[:1, 0], *site.signals.unbind(1)):  # the first example of one direction mostly tells
        used |= (signals != 0).flatten(0, -2).any(0)
        if int(used.sum()) > site.fan_out // SPARSE:
            return site
    channels = used.nonzero()[:, 0]
    few = replace(site, signals=site.signals[..., channels], axes=(len(channels), site.fan_in))
    rows = few.rows().unflatten(2, (len(channels), site.fan_in))
    return LookupSite(site.name, site.rule, site.frame, channels.expand(len(rows), -1), rows, site.fan_out)
