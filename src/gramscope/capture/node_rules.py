"""How backward nodes hand gradients to weights: one rule for each operation that a weight enters.

A rule is given a :class:`Meeting`: the node, the slot of the weight among its inputs, and the signals, whose examples
are known. It returns the site (inputs and signals, ids and signals, or gradient rows), in the coordinates of the weight
as it entered, or several whose frames are parts of it, or None where it cannot; then the node itself is called for one
example at a time (see :func:`by_example`), which is exact for every operation, because a backward node is a linear map.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gramscope.capture.backward_graph import Directions, Node
from gramscope.capture.owners import Owner
from gramscope.capture.sites import Frame, LookupSite, OuterSite, RowSite, Site

# Operations whose rules know complex signals.
COMPLEX = {"Add", "Sub", "Mul", "Expand", "Repeat", "Mm", "Addmm", "Bmm", "Baddbmm"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, eq=False)
class Meeting:
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
            length = self.signal.shape[1 + axis]
            return Owner(1, axis, torch.zeros(length, dtype=torch.long, device=self.signal.device), (1, length))
        return self.owner if self.owner.axis == axis else None

    def saved(self, name: str) -> Any:
        """What the forward pass kept for this node."""
        found = getattr(self.node, f"_saved_{name}")
        return found.detach() if isinstance(found, Tensor) else found


Rule = Callable[[Meeting], "Site | list[Site] | None"]
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


def sites_of(meeting: Meeting) -> list[Site]:
    """The sites of a meeting, by the rule for its operation or, without one, example by example."""
    found, name = None, operation(meeting.node)
    first, owner = meeting.signals[0], meeting.owners[0]
    if first is not None and owner is not None and (name in COMPLEX or not first[0].is_complex()):
        known = RULES.get(name)
        found = None if known is None else known(meeting)
    if found is None:
        found = by_example(meeting)
    return found if isinstance(found, list) else [found]


# Products -----------------------------------------------------------------------------------------


@rule("Addmm", "Mm")
def matrix_product(meeting: Meeting) -> Site | None:
    """``u = A B``, possibly with an offset: ``∂B = Aᵀ s``, ``∂A = s Bᵀ``."""
    with_offset = operation(meeting.node) == "Addmm"
    slot, scale = (meeting.slot - 1, meeting.saved("alpha")) if with_offset else (meeting.slot, 1)
    if slot < 0:
        return summed(meeting, None, scale=meeting.saved("beta"))
    if slot == 1:
        left = meeting.saved("mat1" if with_offset else "self")
        return _outer(meeting, meeting.signal[..., None, :], left[:, None], 0, scale, "linear", (1, 0))
    right = meeting.saved("mat2")
    return _outer(meeting, meeting.signal.mT[..., None, :], right.mT[:, None], 1, scale, "linear", (0, 1))


@rule("Bmm", "Baddbmm")
def batched_matrix_product(meeting: Meeting) -> Site | None:
    """The same for a batch of matrices, which are groups of the weight."""
    with_offset = operation(meeting.node) == "Baddbmm"
    slot, scale = (meeting.slot - 1, meeting.saved("alpha")) if with_offset else (meeting.slot, 1)
    if slot < 0:
        return summed(meeting, None, scale=meeting.saved("beta"))
    if slot == 1:  # (g, P, i) (g, i, o)
        left = meeting.saved("batch1" if with_offset else "self")
        signal, inputs = meeting.signal.transpose(1, 2), left.transpose(0, 1)
        return _outer(meeting, signal, inputs, 1, scale, "linear", (0, 2, 1))
    right = meeting.saved("batch2" if with_offset else "mat2")
    signal, inputs = meeting.signal.permute(0, 3, 1, 2), right.permute(2, 0, 1)
    return _outer(meeting, signal, inputs, 2, scale, "linear", (0, 1, 2))


@rule("Mv")
def matrix_times_vector(meeting: Meeting) -> Site | None:
    """``u = A b`` with the weight b: ``∂b = Aᵀ s``."""
    if meeting.slot == 0:
        return None
    left = meeting.saved("self")
    return _outer(meeting, meeting.signal[..., None, None], left[:, None], 0, 1, "linear", (1, 0))


@rule("Trilinear")
def bilinear(meeting: Meeting) -> Site | None:
    """``u_po = Σ_ij a_pi W_oij b_pj``, as torch.nn.functional.bilinear calls it: inputs are all products of a and b."""
    if meeting.slot != 1 or [*meeting.saved("expand1"), *meeting.saved("expand2")] != [1, 3, 0]:
        return None
    owner = meeting.owner_along(0)
    if owner is None:
        return None
    products = meeting.saved("i1")[:, :, None] * meeting.saved("i3")[:, None, :]
    o, fan_in = meeting.shape[0], meeting.shape[1] * meeting.shape[2]
    inputs = owner.gather(products.reshape(len(products), 1, fan_in), 0)
    signals = owner.gather(meeting.signal[..., None, :], 1).transpose(0, 1)
    return OuterSite("", "bilinear", None, inputs.__getitem__, signals, fan_in, (o, fan_in), (0, 1))


@rule("GroupedMm")
def experts(meeting: Meeting) -> list[Site] | None:
    """``u_p = a_p W_e`` for the rows p that are given to expert e, which lie side by side: a site for each expert."""
    owner = meeting.owner_along(0)
    ends, rows = meeting.saved("offs"), meeting.saved("self")
    if meeting.slot != 1 or owner is None or ends is None or rows.dim() != 2:
        return None
    _, i, o = meeting.shape
    entries = torch.arange(meeting.shape.numel(), device=rows.device).reshape(meeting.shape)
    found: list[Site] = []
    for expert, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        if start == stop:
            continue
        mine = Owner(owner.n, 0, owner.labels[start:stop])
        inputs = mine.gather(rows[start:stop, None], 0)
        signals = mine.gather(meeting.signal[:, start:stop, None], 1).transpose(0, 1)
        frame = Frame(entries[expert].flatten(), tuple(meeting.shape))
        found.append(OuterSite("", "experts", frame, inputs.__getitem__, signals, i, (o, i), (1, 0)))
    return found


def _outer(
    meeting: Meeting, signal: Tensor, inputs: Tensor, axis: int, scale: Any, name: str, order: tuple[int, ...]
) -> Site | None:
    """A site of signals (k, P, g, o) and inputs (P, g, i), P the positions along ``axis`` of the signal as it came.

    ``order`` permutes (g, o, i), or (o, i) in one group, to the weight's own axes.
    """
    owner = meeting.owner_along(axis)
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
    site = OuterSite("", name, None, held.__getitem__, gathered.transpose(0, 1), i, axes, order)
    if not gathered.is_complex():
        return site
    return RowSite("", name, None, site.rows() if meeting.dtype.is_complex else site.rows().real)


# Convolutions -------------------------------------------------------------------------------------


@rule("Convolution")
def convolution(meeting: Meeting) -> Site | None:
    """``u[:, p] = W · patch_p(x)``; transposed, the roles swap: patches of the signals meet the pixels of the input."""
    if meeting.slot == 2:
        return summed(meeting, None, shape=meeting.channels)
    owner = meeting.owner_along(0)
    if meeting.slot != 1 or owner is None:
        return None
    image, groups = meeting.saved("input"), meeting.saved("groups")
    stride, dilation = tuple(meeting.saved("stride")), tuple(meeting.saved("dilation"))
    kernel = tuple(meeting.shape[2:])
    edges = tuple(meeting.saved("padding"))
    padding = tuple((p, p) for p in (edges * len(kernel) if len(edges) == 1 else edges))
    signal = meeting.signal
    if meeting.saved("transposed"):
        unfolded = patches(signal.flatten(0, 1), kernel, stride, padding, dilation, groups, tuple(image.shape[2:]))
        signals = unfolded.unflatten(0, signal.shape[:2])  # (k, P, T, g, o)
        fan_in, fan_out = meeting.shape[0] // groups, math.prod(meeting.shape[1:])
        axes, order, name = (groups, fan_out, fan_in), (0, 2, 1), "transposed convolution"

        def unfold(part: Tensor) -> Tensor:
            return part.flatten(2).unflatten(1, (groups, -1)).permute(0, 3, 1, 2)
    else:
        signals = signal.flatten(3).unflatten(2, (groups, -1)).permute(0, 1, 4, 2, 3)
        fan_in = math.prod(meeting.shape[1:])
        axes, order, name = (groups, meeting.shape[0] // groups, fan_in), (0, 1, 2), "convolution"

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
def embedding(meeting: Meeting) -> Site | None:
    """``u = W[ids]``. ``scale_grad_by_freq`` and ``sparse`` change how torch keeps gradients, not the function."""
    ids, ignored = meeting.saved("indices"), meeting.saved("padding_idx")
    return _lookup(meeting, ids, None if ignored < 0 else ignored)


@rule("Index")
def indexed(meeting: Meeting) -> Site | None:
    """``u = W[ids]`` by one tensor of ids along the first axis."""
    first, *others = meeting.saved("indices")
    if first is None or any(other is not None for other in others) or first.dtype == torch.bool:
        return None
    return _lookup(meeting, first % meeting.shape[0], None)


@rule("IndexSelect")
def selected(meeting: Meeting) -> Site | None:
    """``u = W[ids]``."""
    return _lookup(meeting, meeting.saved("index"), None) if meeting.saved("dim") == 0 else None


def _lookup(meeting: Meeting, ids: Tensor, ignored: int | None) -> Site | None:
    owner, axes = meeting.owner, ids.dim()
    if owner.axis is None or owner.axis >= axes:
        return None
    first = meeting.signal.movedim(1 + owner.axis, 1)
    signals = first.reshape(len(first), first.shape[1], ids.numel() // max(1, first.shape[1]), -1)
    own = ids.movedim(owner.axis, 0).reshape(signals.shape[1:3])
    gathered, ids = owner.gather(signals, 1).flatten(2, 3), owner.gather(own, 0).flatten(1, 2)
    if ignored is not None:
        gathered = gathered * (ids != ignored)[..., None]
    return LookupSite("", "embedding", None, ids, gathered.transpose(0, 1), meeting.shape[0])


# Entry by entry -----------------------------------------------------------------------------------


@rule("Add", "Sub")
def addition(meeting: Meeting) -> Site | None:
    """``u = a ± α b``."""
    sign = -1 if operation(meeting.node) == "Sub" else 1
    return summed(meeting, None, scale=sign * meeting.saved("alpha") if meeting.slot == 1 else 1)


@rule("Expand")
def expansion(meeting: Meeting) -> Site | None:
    """``u = w`` for many places."""
    return summed(meeting, None, rule="expanded")


@rule("Mul")
def multiplication(meeting: Meeting) -> Site | None:
    """``u = a b``."""
    other = meeting.saved("other" if meeting.slot == 0 else "self")
    return summed(meeting, other, rule="elementwise") if isinstance(other, Tensor) else None


@rule("Div")
def division(meeting: Meeting) -> Site | None:
    """``u = a / b``."""
    own, other = meeting.saved("self"), meeting.saved("other")
    if not isinstance(other, Tensor):
        return None
    if meeting.slot == 0:
        return summed(meeting, 1 / other, rule="elementwise")
    return summed(meeting, -own / other**2, rule="elementwise") if isinstance(own, Tensor) else None


@rule("NativeLayerNorm")
def layer_norm(meeting: Meeting) -> Site | None:
    """Gain and offset of the last axes."""
    return _gain_or_offset(
        meeting, lambda: (meeting.saved("input") - meeting.saved("result1")) * meeting.saved("result2"), meeting.shape
    )


@rule("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
def batch_norm(meeting: Meeting) -> Site | None:
    """Gain and offset of the channels."""

    def normalised() -> Tensor:
        image = meeting.saved("input")
        if meeting.saved("training"):
            mean, slope = meeting.saved("result1"), meeting.saved("result2")
        else:
            eps = meeting.saved("eps" if hasattr(meeting.node, "_saved_eps") else "epsilon")
            mean, slope = meeting.saved("running_mean"), (meeting.saved("running_var") + eps).rsqrt()
        return (image - mean.reshape(meeting.channels)) * slope.reshape(meeting.channels)

    return _gain_or_offset(meeting, normalised, meeting.channels)


@rule("NativeGroupNorm")
def group_norm(meeting: Meeting) -> Site | None:
    """Gain and offset of the channels."""

    def normalised() -> Tensor:
        image, groups = meeting.saved("input"), meeting.saved("group")
        mean, slope = (meeting.saved(name)[..., None] for name in ("result1", "result2"))
        return ((image.reshape(len(image), groups, -1) - mean) * slope).reshape(image.shape)

    return _gain_or_offset(meeting, normalised, meeting.channels)


@rule("FusedRmsNorm")
def rms_norm(meeting: Meeting) -> Site | None:
    """Gain of the last axes."""
    return _gain_or_offset(meeting, lambda: meeting.saved("input") * meeting.saved("result1"), meeting.shape)


def _gain_or_offset(meeting: Meeting, normalised: Callable[[], Tensor], shape: tuple[int, ...]) -> Site | None:
    if meeting.slot == 2:
        return summed(meeting, None, shape=shape)
    return summed(meeting, normalised(), shape=shape, rule="elementwise") if meeting.slot == 1 else None


def summed(
    meeting: Meeting, factor: Tensor | None, *, shape: tuple[int, ...] | None = None, scale: Any = 1, rule: str = "bias"
) -> Site | None:
    """Rows ``Σ s · factor`` over the places that a weight, broadcast as ``shape``, was copied to."""
    directions, owner = meeting.directions, meeting.owner
    size, dtype = directions[0].shape, directions[0].dtype
    sizes = (*[1] * (len(size) - len(shape or meeting.shape)), *(shape or meeting.shape))
    if owner.axis is None or owner.regular is None or sizes[owner.axis] != 1:
        places = torch.arange(math.prod(sizes), device=directions[0].device).reshape(sizes).expand(size)
        rows = _put_together(meeting.signal if factor is None else meeting.signal * factor.conj(), owner, places)
    else:
        axis, three = owner.axis, (owner.regular[0], owner.n, owner.regular[1])  # the axis of the examples
        letters = LETTERS[: len(size) + 2]
        example = letters[axis + 1]
        kept = "".join(
            letter
            for letter, length in zip(letters, (*sizes[:axis], 1, owner.n, 1, *sizes[axis + 1 :]), strict=True)
            if length != 1 and letter != example
        )
        if factor is None and size.numel() == owner.n * math.prod(sizes):
            # Nothing to sum: the memory of the weight's own signals.
            rows = meeting.signal.unflatten(1 + axis, three).movedim(2 + axis, 0)
        elif factor is None and isinstance(directions.each, Tensor):
            rows = torch.einsum(f"Z{letters}->{example}Z{kept}", meeting.signal.unflatten(1 + axis, three))
        else:
            # One direction after the other: their products stay in the cache, and nothing is brought into order.
            other = None if factor is None else factor.to(dtype).conj().expand(size)
            parts = (part if other is None else part * other for part in directions)
            each = [torch.einsum(f"{letters}->{example}{kept}", part.unflatten(axis, three)) for part in parts]
            rows = torch.stack(each, dim=1)
    rows = rows.reshape(owner.n, len(directions), -1)
    if rows.is_complex() and not meeting.dtype.is_complex:
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
def repetition(meeting: Meeting) -> Site | None:
    """``u = w`` for many places."""
    places = torch.arange(meeting.shape.numel(), device=meeting.signal.device).reshape(meeting.shape)
    rows = _put_together(meeting.signal, meeting.owner, places.repeat(tuple(meeting.saved("repeats"))))
    return RowSite("", "expanded", None, rows if meeting.dtype.is_complex else rows.real)


@rule("PreluKernel")
def prelu(meeting: Meeting) -> Site | None:
    """``u = w x`` where x is negative."""
    return summed(meeting, meeting.saved("self").clamp_max(0), rule="elementwise") if meeting.slot == 1 else None


@rule("Where")
def choice(meeting: Meeting) -> Site | None:
    """``u = a`` or ``b``."""
    chosen = meeting.saved("condition")
    return summed(
        meeting, (chosen if meeting.slot == 0 else ~chosen).to(meeting.directions[0].dtype), rule="elementwise"
    )


# Any other operation ------------------------------------------------------------------------------


def by_example(meeting: Meeting) -> Site:
    """Rows from the node itself, called with the signals of one example and one direction at a time."""
    owner = next(owner for owner in meeting.owners if owner is not None)
    some = next(signal for signal in meeting.signals if signal is not None)
    labels = [
        None if signal is None or owner_ is None else owner_.everywhere(signal[0].shape)
        for signal, owner_ in zip(meeting.signals, meeting.owners, strict=True)
    ]
    rows = []
    for example in range(owner.n):
        for direction in range(len(some)):
            given = [
                None if signal is None or label is None else signal[direction].masked_fill(label != example, 0)
                for signal, label in zip(meeting.signals, labels, strict=True)
            ]
            rows.append(_called(meeting, given))
    return RowSite("", BY_EXAMPLE, None, torch.stack(rows).reshape(owner.n, len(some), -1))


BY_EXAMPLE = "autograd"  # the rule of sites that had none


def _called(meeting: Meeting, signals: list[Tensor | None]) -> Tensor:
    """What the node hands to the weight for these signals."""
    node, slot = meeting.node, meeting.slot
    if isinstance(
        node, BackwardCFunction
    ):  # a function of the user's own, which may have arguments that are no tensors
        found = node.apply(*signals)
        needed = [place for place, needs in enumerate(node.needs_input_grad) if needs]
        slot = needed[[place for place, (child, _) in enumerate(node.next_functions) if child is not None].index(slot)]
    else:
        found = node(*signals)
    gradient = found[slot] if isinstance(found, tuple) else found
    if gradient is None:
        some = next(signal for signal in signals if signal is not None)
        return some.new_zeros(meeting.shape)
    gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_complex() and not meeting.dtype.is_complex:
        gradient = gradient.real
    return gradient.sum_to_size(meeting.shape) if gradient.shape != meeting.shape else gradient
