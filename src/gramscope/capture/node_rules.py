"""How backward nodes hand gradients to weights: one rule for each operation that a weight enters.

A rule is given a :class:`NodeUse`: the node, the slot of the weight among its inputs, and the signals, whose examples
are known. It returns the site (inputs and signals, ids and signals, or gradient rows), in the coordinates of the weight
as it entered, or several whose frames are parts of it, or None where it cannot; then the node itself is called for one
example at a time (see :func:`by_example`), which is exact for every operation, because a backward node is a linear map.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gramscope.capture.backward_graph import Directions, Node, incoming
from gramscope.capture.owners import Owner
from gramscope.capture.sites import Frame, LookupSite, OuterSite, RowSite, Site

# Operations whose rules know complex signals.
COMPLEX = {"Add", "Sub", "Mul", "Expand", "Repeat", "Mm", "Addmm", "Bmm", "Baddbmm"}


@dataclass(frozen=True, eq=False)
class NodeUse:
    """A weight of shape ``shape`` that enters ``node`` at ``slot``, and the signals of the node's outputs."""

    node: Node
    slot: int
    shape: torch.Size
    dtype: torch.dtype
    signals: tuple[Directions | None, ...]
    owners: tuple[Owner | None, ...]

    @property
    def directions(self) -> Directions:
        """The signals of the node's first output, one direction after the other."""
        assert self.signals[0] is not None
        return self.signals[0]

    @property
    def signal(self) -> Tensor:
        """The same in one tensor (k, ...)."""
        return self.directions.whole

    @property
    def channels(self) -> tuple[int, ...]:
        """The shape of a weight along axis 1, to be broadcast over images."""
        return (1, *self.shape, *[1] * (self.directions[0].dim() - 2))

    @property
    def owner(self) -> Owner:
        assert self.owners[0] is not None
        return self.owners[0]

    def owner_along(self, axis: int) -> Owner | None:
        """The owner, if the position along this axis tells the example; for a single example any axis does."""
        if self.owner.n == 1:
            return Owner(1, axis, self.signal.device, (1, self.signal.shape[1 + axis]))
        return self.owner if self.owner.axis == axis else None

    def saved(self, name: str) -> Any:
        """What the forward pass kept for this node."""
        found = getattr(self.node, f"_saved_{name}")
        return found.detach() if isinstance(found, Tensor) else found


Rule = Callable[[NodeUse], "Site | list[Site] | None"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for backward nodes of these names, without the "Backward" and the number at their end."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def operation(node: Node) -> str:
    """``AddmmBackward0`` -> ``Addmm``."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def sites_of(use: NodeUse) -> list[Site]:
    """The sites of a use, by the rule for its operation or, without one, example by example."""
    found, name = None, operation(use.node)
    first, owner = use.signals[0], use.owners[0]
    if first is not None and owner is not None and (name in COMPLEX or not first[0].is_complex()):
        known = RULES.get(name)
        found = None if known is None else known(use)
    if found is None:
        found = by_example(use)
    return found if isinstance(found, list) else [found]


# Products -----------------------------------------------------------------------------------------


@rule("Addmm", "Mm", "Baddbmm", "Bmm")
def matrix_product(use: NodeUse) -> Site | None:
    """``u = A B``, possibly with an offset: ``∂B = Aᵀ s``, ``∂A = s Bᵀ``. A batch of matrices is a weight in groups."""
    names = {"Addmm": ("mat1", "mat2"), "Baddbmm": ("batch1", "batch2")}.get(operation(use.node))
    slot = use.slot - (names is not None)
    if slot < 0:
        return summed(use, None, scale=use.saved("beta"))
    scale = 1 if names is None else use.saved("alpha")
    left, right = names or ("self", "mat2")
    if slot == 1:  # (P, i) (i, o)
        signal, inputs, axis, order = use.signal, use.saved(left), 0, (1, 0)
    else:
        signal, inputs, axis, order = use.signal.mT, use.saved(right).mT, 1, (0, 1)
    if len(use.shape) == 2:
        return _outer(use, signal[..., None, :], inputs[:, None], axis, scale, order)
    groups_last = signal.transpose(1, 2), inputs.transpose(0, 1)
    return _outer(use, *groups_last, 1 + axis, scale, (0, 1 + order[0], 1 + order[1]))


@rule("Mv")
def matrix_times_vector(use: NodeUse) -> Site | None:
    """``u = A b`` with the weight b: ``∂b = Aᵀ s``."""
    if use.slot == 0:
        return None
    left = use.saved("self")
    return _outer(use, use.signal[..., None, None], left[:, None], 0, 1, (1, 0))


@rule("Trilinear")
def bilinear(use: NodeUse) -> Site | None:
    """``u_po = Σ_ij a_pi W_oij b_pj``, as torch.nn.functional.bilinear calls it: inputs are all products of a and b."""
    if use.slot != 1 or [*use.saved("expand1"), *use.saved("expand2")] != [1, 3, 0]:
        return None
    owner = use.owner_along(0)
    if owner is None:
        return None
    products = use.saved("i1")[:, :, None] * use.saved("i3")[:, None, :]
    o, fan_in = use.shape[0], use.shape[1] * use.shape[2]
    inputs = owner.gather(products.reshape(len(products), 1, fan_in), 0)
    signals = owner.gather(use.signal[..., None, :], 1).transpose(0, 1)
    return OuterSite("", "bilinear", None, inputs.__getitem__, signals, fan_in, (o, fan_in), (0, 1))


@rule("GroupedMm")
def experts(use: NodeUse) -> list[Site] | None:
    """``u_p = a_p W_e`` for the rows p that are given to expert e, which lie side by side: a site for each expert."""
    owner = use.owner_along(0)
    ends, rows = use.saved("offs"), use.saved("self")
    if use.slot != 1 or owner is None or ends is None or rows.dim() != 2:
        return None
    _, i, o = use.shape
    entries = torch.arange(use.shape.numel(), device=rows.device).reshape(use.shape)
    found: list[Site] = []
    for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        if start == stop:
            continue
        mine = Owner(owner.n, 0, rows.device, found=owner.labels[start:stop])
        inputs = mine.gather(rows[start:stop, None], 0)
        signals = mine.gather(use.signal[:, start:stop, None], 1).transpose(0, 1)
        frame = Frame(entries[expert].flatten(), tuple(use.shape))
        found.append(OuterSite("", "experts", frame, inputs.__getitem__, signals, i, (o, i), (1, 0)))
    return found


def _outer(
    use: NodeUse, signal: Tensor, inputs: Tensor, axis: int, scale: int | float, order: tuple[int, ...]
) -> Site | None:
    """A site of signals (k, P, g, o) and inputs (P, g, i), P the positions along ``axis`` of the signal as it came.

    ``order`` permutes (g, o, i), or (o, i) in one group, to the weight's own axes.
    """
    owner = use.owner_along(axis)
    if owner is None:
        return None
    gathered = owner.gather(signal, 1)  # (k, n, T, g, o)
    if scale != 1:
        gathered = gathered * scale
    held = owner.gather(inputs, 0)
    g, o, i = signal.shape[2], signal.shape[3], inputs.shape[2]
    axes = (g, o, i) if len(order) == 3 else (o, i)
    if gathered.is_complex():  # as rows, which a real weight takes the real part of
        held = held.to(gathered.dtype).conj().resolve_conj()
    site = OuterSite("", "linear", None, held.__getitem__, gathered.transpose(0, 1), i, axes, order)
    if not gathered.is_complex():
        return site
    return RowSite("", "linear", None, site.rows() if use.dtype.is_complex else site.rows().real)


# Convolutions -------------------------------------------------------------------------------------


@rule("Convolution")
def convolution(use: NodeUse) -> Site | None:
    """``u[:, p] = W · patch_p(x)``; transposed, the roles swap: patches of the signals meet the pixels of the input."""
    if use.slot == 2:
        return summed(use, None, shape=use.channels)
    owner = use.owner_along(0)
    if use.slot != 1 or owner is None:
        return None
    image, groups = use.saved("input"), use.saved("groups")
    stride, dilation = tuple(use.saved("stride")), tuple(use.saved("dilation"))
    kernel = tuple(use.shape[2:])
    edges = tuple(use.saved("padding"))
    padding = tuple((p, p) for p in (edges * len(kernel) if len(edges) == 1 else edges))
    signal = use.signal
    if use.saved("transposed"):
        unfolded = patches(signal.flatten(0, 1), kernel, stride, padding, dilation, groups, tuple(image.shape[2:]))
        signals = unfolded.unflatten(0, signal.shape[:2])  # (k, P, T, g, o)
        fan_in, fan_out = use.shape[0] // groups, math.prod(use.shape[1:])
        axes, order, name = (groups, fan_out, fan_in), (0, 2, 1), "transposed convolution"

        def unfold(part: Tensor) -> Tensor:
            return part.flatten(2).unflatten(1, (groups, -1)).permute(0, 3, 1, 2)
    else:
        signals = signal.flatten(3).unflatten(2, (groups, -1)).permute(0, 1, 4, 2, 3)
        fan_in = math.prod(use.shape[1:])
        axes, order, name = (groups, use.shape[0] // groups, fan_in), (0, 1, 2), "convolution"

        def unfold(part: Tensor) -> Tensor:
            return patches(part, kernel, stride, padding, dilation, groups, tuple(signal.shape[3:]))

    def inputs(examples: slice) -> Tensor:
        if owner.regular is not None and owner.regular[0] == 1:
            each, (start, stop, _) = owner.regular[1], examples.indices(owner.n)
            return unfold(image[start * each : stop * each]).unflatten(0, (stop - start, each)).flatten(1, 2)
        return owner.gather(unfold(image), 0).flatten(1, 2)[examples]

    gathered = owner.gather(signals, 1).flatten(2, 3).transpose(0, 1)
    return OuterSite("", name, None, inputs, gathered, fan_in, axes, order)


def patches(
    image: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...], groups: int, places: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """(B, channels, *image) -> (B, T, g, channels/g · kernel): what each of T = Π ``places`` kernel positions sees."""
    # Positions that reach past the far edge (an output padding, a stride that does not divide) see zeros.
    spans = [(p - 1) * s + (k - 1) * d + 1 for p, s, k, d in zip(places, stride, kernel, dilation, strict=True)]
    far = [max(hi, span - size - lo) for size, span, (lo, hi) in zip(image.shape[2:], spans, padding, strict=True)]
    flat = [edge for (low, _), high in reversed(list(zip(padding, far, strict=True))) for edge in (low, high)]
    padded = F.pad(image, flat) if any(flat) else image
    base = padded.stride()
    windows = padded.as_strided(
        (*padded.shape[:2], *places, *kernel),
        (*base[:2], *(b * s for b, s in zip(base[2:], stride, strict=True)),
         *(b * d for b, d in zip(base[2:], dilation, strict=True))),
        padded.storage_offset(),
    )  # fmt: skip
    # Gathered with the positions innermost, where memory runs on, and seen with the entries innermost.
    spatial = len(kernel)
    grouped = windows.unflatten(1, (groups, -1))  # (B, g, c, *places, *kernel)
    order = (0, 1, 2, *range(3 + spatial, 3 + 2 * spatial), *range(3, 3 + spatial))
    gathered = grouped.permute(order).reshape(len(image), groups, -1, math.prod(places))
    return gathered.permute(0, 3, 1, 2)


# Tables -------------------------------------------------------------------------------------------


@rule("Embedding")
def embedding(use: NodeUse) -> Site | None:
    """``u = W[ids]``. ``scale_grad_by_freq`` and ``sparse`` change how torch keeps gradients, not the function."""
    ids, ignored = use.saved("indices"), use.saved("padding_idx")
    return _lookup(use, ids, None if ignored < 0 else ignored)


@rule("Index")
def indexed(use: NodeUse) -> Site | None:
    """``u = W[ids]`` by one tensor of ids along the first axis."""
    first, *others = use.saved("indices")
    if first is None or any(other is not None for other in others) or first.dtype == torch.bool:
        return None
    return _lookup(use, first % use.shape[0], None)


@rule("IndexSelect")
def selected(use: NodeUse) -> Site | None:
    """``u = W[ids]``."""
    return _lookup(use, use.saved("index"), None) if use.saved("dim") == 0 else None


@rule("EmbeddingBag")
def embedding_bag(use: NodeUse) -> Site | None:
    """``u_b = Σ_e a_e W[id_e]`` over the entries e of bag b; the mean has ``a_e = 1 / count``."""
    mode, owner = use.saved("mode"), use.owner_along(0)
    if use.slot != 0 or mode not in (0, 1) or owner is None:  # sum or mean
        return None
    ids, factors = use.saved("indices"), use.saved("per_sample_weights")
    starts = use.saved("offsets")[: use.signal.shape[1]]
    bags = torch.searchsorted(starts, torch.arange(len(ids), device=ids.device), right=True) - 1
    counted = (ids != use.saved("padding_idx")).to(use.signal.dtype)
    factors = counted if factors is None else counted * factors
    if mode == 1:
        counts = factors.new_zeros(len(starts)).index_add_(0, bags, counted)
        factors = factors / counts.clamp_min(1)[bags]
    entries = Owner(owner.n, 0, ids.device, found=owner.labels[bags])
    signals = entries.gather(use.signal[:, bags] * factors[:, None], 1).transpose(0, 1)
    return LookupSite("", "embedding bag", None, entries.gather(ids, 0), signals, use.shape[0])


def _lookup(use: NodeUse, ids: Tensor, ignored: int | None) -> Site | None:
    owner, axes = use.owner, ids.dim()
    if owner.axis is None or owner.axis >= axes:
        return None
    first = use.signal.movedim(1 + owner.axis, 1)
    signals = first.reshape(len(first), first.shape[1], ids.numel() // max(1, first.shape[1]), -1)
    own = ids.movedim(owner.axis, 0).reshape(signals.shape[1:3])
    gathered, ids = owner.gather(signals, 1).flatten(2, 3), owner.gather(own, 0).flatten(1, 2)
    if ignored is not None:
        gathered = gathered * (ids != ignored)[..., None]
    return LookupSite("", "embedding", None, ids, gathered.transpose(0, 1), use.shape[0])


# Entry by entry -----------------------------------------------------------------------------------


@rule("Add", "Sub")
def addition(use: NodeUse) -> Site | None:
    """``u = a ± α b``."""
    sign = -1 if operation(use.node) == "Sub" else 1
    return summed(use, None, scale=sign * use.saved("alpha") if use.slot == 1 else 1)


@rule("Expand")
def expansion(use: NodeUse) -> Site | None:
    """``u = w`` for many places."""
    return summed(use, None, rule="expanded")


@rule("Mul")
def multiplication(use: NodeUse) -> Site | None:
    """``u = a b``."""
    other = use.saved("other" if use.slot == 0 else "self")
    return summed(use, other, rule="elementwise") if isinstance(other, Tensor) else None


@rule("Div")
def division(use: NodeUse) -> Site | None:
    """``u = a / b``."""
    own, other = use.saved("self"), use.saved("other")
    if not isinstance(other, Tensor):
        return None
    if use.slot == 0:
        return summed(use, 1 / other, rule="elementwise")
    return summed(use, -own / other**2, rule="elementwise") if isinstance(own, Tensor) else None


@rule("NativeLayerNorm", "FusedRmsNorm")
def layer_norm(use: NodeUse) -> Site | None:
    """Gain and offset of the last axes."""

    def normalised() -> Tensor:
        if operation(use.node) == "FusedRmsNorm":
            return cast(Tensor, use.saved("input") * use.saved("result1"))
        return cast(Tensor, (use.saved("input") - use.saved("result1")) * use.saved("result2"))

    return _gain_or_offset(use, normalised, use.shape)


@rule("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
def batch_norm(use: NodeUse) -> Site | None:
    """Gain and offset of the channels."""

    def normalised() -> Tensor:
        image = use.saved("input")
        if use.saved("training"):
            mean, slope = use.saved("result1"), use.saved("result2")
        else:
            eps = use.saved("eps" if hasattr(use.node, "_saved_eps") else "epsilon")
            mean, slope = use.saved("running_mean"), (use.saved("running_var") + eps).rsqrt()
        return (image - mean.reshape(use.channels)) * slope.reshape(use.channels)

    return _gain_or_offset(use, normalised, use.channels)


@rule("NativeGroupNorm")
def group_norm(use: NodeUse) -> Site | None:
    """Gain and offset of the channels."""

    def normalised() -> Tensor:
        image, groups = use.saved("input"), use.saved("group")
        mean, slope = (use.saved(name)[..., None] for name in ("result1", "result2"))
        return ((image.reshape(len(image), groups, -1) - mean) * slope).reshape(image.shape)

    return _gain_or_offset(use, normalised, use.channels)


def _gain_or_offset(use: NodeUse, normalised: Callable[[], Tensor], shape: tuple[int, ...]) -> Site | None:
    if use.slot == 2:
        return summed(use, None, shape=shape)
    return summed(use, normalised(), shape=shape, rule="elementwise") if use.slot == 1 else None


def summed(
    use: NodeUse,
    factor: Tensor | None,
    *,
    shape: tuple[int, ...] | None = None,
    scale: int | float = 1,
    rule: str = "bias",
) -> Site | None:
    """Rows ``Σ s · factor`` over the places that a weight, broadcast as ``shape``, was copied to."""
    directions, owner = use.directions, use.owner
    size, dtype = directions[0].shape, directions[0].dtype
    sizes = (*[1] * (len(size) - len(shape or use.shape)), *(shape or use.shape))
    if owner.axis is None or owner.regular is None or sizes[owner.axis] != 1:
        places = torch.arange(math.prod(sizes), device=directions[0].device).reshape(sizes).expand(size)
        rows = _put_together(use.signal if factor is None else use.signal * factor.conj(), owner, places)
    else:
        axis, (outer, inner) = owner.axis, owner.regular  # of the examples
        by_example = (*sizes[:axis], 1, owner.n, 1, *sizes[axis + 1 :])
        layout = (outer, owner.n, inner)
        alone = size.numel() == owner.n * math.prod(sizes)  # nothing to sum: the memory of the weight's own signals
        other = None if factor is None else factor.to(dtype).conj().expand(size)
        if isinstance(directions.each, Tensor) or (alone and factor is None):
            signal = use.signal if other is None else use.signal * other
            whole = signal.unflatten(1 + axis, layout)
            rows = whole.sum_to_size(len(directions), *by_example).movedim(2 + axis, 0)
        else:  # one direction after the other: their products stay in the cache, and nothing is brought into order
            parts = (part if other is None else part * other for part in directions)
            each = [part.unflatten(axis, layout).sum_to_size(by_example).movedim(1 + axis, 0) for part in parts]
            rows = torch.stack(each, dim=1)
    rows = rows.reshape(owner.n, len(directions), -1)
    if rows.is_complex() and not use.dtype.is_complex:
        rows = rows.real
    return RowSite("", rule, None, rows * scale if scale != 1 else rows)


def _put_together(signal: Tensor, owner: Owner, places: Tensor) -> Tensor:
    """Rows from signals (k, ...) for examples in any order: ``places`` tells the entry of the weight for each."""
    size, entries = signal.shape[1:], int(places.max()) + 1 if places.numel() else 0
    labels = owner.everywhere(size)
    index = (labels.clamp_min(0) * entries + places).flatten()
    values = signal.masked_fill(labels < 0, 0).flatten(1)
    rows = values.new_zeros(len(signal), owner.n * entries).index_add_(1, index, values)
    return rows.unflatten(1, (owner.n, entries)).transpose(0, 1)


@rule("Repeat")
def repetition(use: NodeUse) -> Site | None:
    """``u = w`` for many places."""
    places = torch.arange(use.shape.numel(), device=use.signal.device).reshape(use.shape)
    rows = _put_together(use.signal, use.owner, places.repeat(tuple(use.saved("repeats"))))
    return RowSite("", "expanded", None, rows if use.dtype.is_complex else rows.real)


@rule("PreluKernel")
def prelu(use: NodeUse) -> Site | None:
    """``u = w x`` where x is negative."""
    return summed(use, use.saved("self").clamp_max(0), rule="elementwise") if use.slot == 1 else None


@rule("Where")
def choice(use: NodeUse) -> Site | None:
    """``u = a`` or ``b``."""
    chosen = use.saved("condition")
    return summed(use, (chosen if use.slot == 0 else ~chosen).to(use.directions[0].dtype), rule="elementwise")


# All other operations ------------------------------------------------------------------------------


def by_example(use: NodeUse) -> Site:
    """Rows from the node itself, called with the signals of one example and one direction at a time."""
    owner = next(owner for owner in use.owners if owner is not None)
    some = next(signal for signal in use.signals if signal is not None)
    labels = [
        None if signal is None or owner_ is None else owner_.everywhere(signal[0].shape)
        for signal, owner_ in zip(use.signals, use.owners, strict=True)
    ]
    rows = []
    for example in range(owner.n):
        for direction in range(len(some)):
            given = [
                None if signal is None or label is None else signal[direction].masked_fill(label != example, 0)
                for signal, label in zip(use.signals, labels, strict=True)
            ]
            rows.append(_called(use, given))
    return RowSite("", BY_EXAMPLE, None, torch.stack(rows).reshape(owner.n, len(some), -1))


BY_EXAMPLE = "autograd"  # the rule of sites that had none


def _called(use: NodeUse, signals: list[Tensor | None]) -> Tensor:
    """What the node hands to the weight for these signals."""
    node, slot = use.node, use.slot
    some = next(signal for signal in signals if signal is not None)
    if isinstance(node, BackwardCFunction):
        # A function of the user's own: it may have arguments that are no tensors, and expects zeros for no gradient.
        wanted = [incoming((node, number)) for number in range(len(signals))]
        pairs = zip(signals, wanted, strict=True)
        found = node.apply(*(some.new_zeros(shape, dtype=dtype) if s is None else s for s, (shape, dtype) in pairs))
        needed = [place for place, needs in enumerate(node.needs_input_grad) if needs]
        slot = needed[[place for place, (child, _) in enumerate(node.next_functions) if child is not None].index(slot)]
    else:
        found = node(*signals)
    gradient = found[slot] if isinstance(found, tuple) else found
    if gradient is None:
        return some.new_zeros(use.shape)
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex() and not use.dtype.is_complex:
        gradient = gradient.real
    return gradient.sum_to_size(use.shape) if gradient.shape != use.shape else gradient
