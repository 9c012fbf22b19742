"""A tape of operations that treat every example by itself.

While every operation between input and output acts on each slice of axis 0 alone, the backward pass needs no proof of
that by numbers (see ``layout``), and may run over some examples at a time: the signals ``(n, k, ...)`` of n examples
and k directions lie example by example, where the contractions want them, and never leave the cache.

Each operation that a builder of ``TAPED`` knows to be of this kind becomes a ``Step``. Any other operation leaves its
result off the tape, and with it all that follows; the outputs are then captured by autograd as a whole.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import EllipsisType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gramscope.capture.channels import channels_last, like

Back = Callable[[Tensor, slice], tuple[Tensor, ...]]
Places = tuple[EllipsisType | slice, ...]
Builder = Callable[..., "Draft | None"]
TAPED: dict[Callable[..., Any], Builder] = {}


def taped(*functions: Callable[..., Any]) -> Callable[[Builder], Builder]:
    """Register a builder: ``builder(tape, output, func, *args, **kwargs) -> Draft``, or None if examples may mix."""

    def register(builder: Builder) -> Builder:
        TAPED.update(dict.fromkeys(functions, builder))
        return builder

    return register


@cache
def _takes(builder: Builder, positional: int, named: tuple[str, ...]) -> bool:
    """Does the builder know this way to call its function?"""
    try:
        inspect.signature(builder).bind(*(None,) * positional, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Draft:
    """What a builder says of an operation.

    ``inputs`` are the operands on the tape; ``back(signal, part)`` gives their signals (m, k, ...) from the output's,
    for the m examples ``part``; ``needs`` are tensors whose values it will read; ``uniform`` says that it is one
    linear map, the same for all examples, and ``moves`` that it moves entries to other places and does nothing else.
    ``places``: it reads its one input there alone, and gives signals for these places only.
    """

    inputs: tuple[Tensor, ...]
    back: Back
    needs: tuple[Tensor, ...] = ()
    uniform: bool = False
    moves: bool = False
    places: Places = ()

    def spread(self, share: Tensor) -> Tensor:
        """Signals of ``places`` among zeros."""
        if not self.places:
            return share
        whole = share.new_zeros(*share.shape[:2], *self.inputs[0].shape[1:])
        whole[self.places] = share
        return whole


@dataclass(frozen=True)
class Scaling(Draft):
    """An operation whose way back multiplies by ``factor(part)``, broadcast over the directions."""

    back: Back = field(init=False, default=lambda signal, part: (signal,))
    factor: Callable[[slice], Tensor] = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class Product:
    """Signals ``s_{μc} = F_c m_μ``: F (1, k, ...) is shared by the examples, m (m, 1, ...) by the directions.

    Signals begin the same for all examples, pass maps that all examples share, and are then multiplied by a slope of
    each example, entry by entry. From there on they are such a product until the next map mixes entries.
    """

    shared: Float[Tensor, "1 k ..."]
    own: Float[Tensor, "m 1 ..."] | None = None  # None: one, for all examples

    def scaled(self, factor: Tensor, uniform: bool) -> "Product":
        if uniform:
            return Product(self.shared * factor, self.own)
        return Product(self.shared, factor.to(self.shared.dtype) if self.own is None else self.own * factor)


@dataclass(frozen=True, eq=False)
class Signal:
    """Signals (m, k, ...) on their way back; ``spare``: nobody else holds their memory; the product that they are.

    ``slope`` (m or 1, 1, ...): what the values are still to be multiplied by. Slopes of several operations in a row are
    gathered first, which is k times less work than going through the signals each time. ``sparse``: the operation that
    gave values for some places alone, to be spread.
    """

    values: Float[Tensor, "m k ..."]
    spare: bool = False
    product: Product | None = None
    slope: Float[Tensor, "a 1 ..."] | None = None
    sparse: Draft | None = None

    @classmethod
    def alike(cls, one: Float[Tensor, "1 k ..."], examples: int) -> "Signal":
        """The same for all examples."""
        return cls(one.expand(examples, *one.shape[1:]), False, Product(one))

    def scaled(self, factor: Tensor, uniform: bool) -> "Signal":
        whole = self if self.sparse is None else self.settled()
        slope = factor if whole.slope is None else whole.slope * factor
        return Signal(whole.values, whole.spare, whole.product and whole.product.scaled(factor, uniform), slope)

    def settled(self) -> "Signal":
        """The same, spread and multiplied out."""
        if self.sparse is not None:
            return Signal(self.sparse.spread(self.values), True)
        if self.slope is None:
            return self
        slope = like(self.slope, self.values)
        values = self.values.mul_(slope) if self.spare else self.values * slope
        return Signal(values, _nobody_elses(values, (values,)), self.product)

    def __add__(self, other: "Signal") -> "Signal":
        mine, theirs = self.product, other.product
        if mine is not None and theirs is not None and mine.own is None and theirs.own is None:
            return Signal.alike(mine.shared + theirs.shared, len(self.values))
        if self.sparse is not None and other.sparse is None:
            return other + self
        whole, more = self.settled(), other if other.sparse is not None else other.settled()
        if not whole.spare and more.spare and more.sparse is None:
            whole, more = more, whole
        values = whole.values if whole.spare else whole.values.clone()
        seen = values if more.sparse is None else values[more.sparse.places]
        seen += more.values
        return Signal(values, True)


@dataclass(frozen=True, eq=False)
class Step:
    """One operation on the tape, with the uses of weights that made its output."""

    draft: Draft
    output: Tensor
    versions: tuple[int, ...]
    uses: tuple[Any, ...]

    def intact(self) -> bool:
        """Nothing overwrote the values that the way back reads."""
        return all(t._version == version for t, version in zip(self.draft.needs, self.versions, strict=True))

    def back(self, signal: Signal, part: slice) -> tuple[Signal, ...]:
        """Signals of the inputs."""
        draft, product, m = self.draft, signal.product, len(signal.values)
        if draft.uniform and product is not None and product.own is None:
            # The same signal for all examples through the same map: once is enough.
            one = product.shared
            shared = (one * draft.factor(part),) if isinstance(draft, Scaling) else draft.back(one, part)
            return tuple(Signal.alike(draft.spread(share), m) for share in shared)
        if isinstance(draft, Scaling):
            return (signal.scaled(draft.factor(part), draft.uniform),)
        signal = signal.settled()
        shares = draft.back(signal.values, part)
        if draft.places:
            return (Signal(shares[0], True, sparse=draft),)
        held = shares if signal.spare else (*shares, signal.values)
        free = (_nobody_elses(one, held) for one in shares)
        return tuple(map(Signal, shares, free, self._moved(product, part, len(shares))))

    def _moved(self, product: Product | None, part: slice, shares: int) -> Sequence[Product | None]:
        if product is None or product.own is None or not self.draft.moves:
            return [None] * shares
        return list(map(Product, *(self.draft.back(factor, part) for factor in (product.shared, product.own))))


@dataclass(frozen=True)
class _Entry:
    """One entry of what a function returns."""

    func: Callable[..., Any]
    place: int

    @property
    def __name__(self) -> str:
        return str(self.func.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)[self.place]


class Tape:
    """Tensors whose axis 0 is the examples, and the steps that made them."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.steps: list[Step] = []
        self._held: dict[int, tuple[Tensor, int]] = {}
        self._operands: frozenset[int] = frozenset()

    def begin(self, tensor: Tensor) -> None:
        """``tensor`` has the examples on axis 0."""
        if tensor.dim() and len(tensor) == self.examples:
            self._held[id(tensor)] = tensor, tensor._version

    def held(self, operands: Iterable[Tensor]) -> frozenset[int]:
        """Which of these tensors are on the tape."""
        return frozenset(id(tensor) for tensor in operands if self.has(tensor))

    def has(self, value: Any) -> bool:
        """``value`` is on the tape and was not overwritten since."""
        entry = self._held.get(id(value))
        return entry is not None and entry[0] is value and entry[1] == value._version

    def holds(self, operand: Any) -> bool:
        """Builders ask: was this operand on the tape when the operation began?"""
        return id(operand) in self._operands

    def record(
        self, output: Any, func: Callable[..., Any], args: Any, kwargs: Any, uses: tuple[Any, ...], held: frozenset[int]
    ) -> None:
        """Note ``output = func(*args, **kwargs)``, or leave the output off the tape.

        ``held`` are the operands that were on the tape before.
        """
        self._operands = held
        if func not in TAPED or not held or (self.holds(output) and self.has(output)):
            return  # unknown, no business of ours, or the operand itself given back as it was
        if isinstance(output, tuple | list):
            for place, one in enumerate(output):
                self._append(one, self._draft(one, _Entry(func, place), TAPED[func], args, kwargs), uses)
        elif isinstance(output, Tensor):
            self._append(output, self._draft(output, func, TAPED[func], args, kwargs), uses)

    def _draft(
        self, output: Tensor, func: Callable[..., Any], builder: Builder, args: Any, kwargs: Any
    ) -> Draft | None:
        known = _takes(builder, 3 + len(args), tuple(kwargs))
        return builder(self, output, func, *args, **kwargs) if known else None

    def _append(self, output: Tensor, draft: Draft | None, uses: tuple[Any, ...]) -> None:
        proper = (
            draft is not None
            and output.dim() > 0
            and len(output) == self.examples
            and output.is_floating_point()
            and all(t.dtype == output.dtype for t in (*draft.inputs, *draft.needs) if t.is_floating_point())
        )
        if draft is None or not proper:
            return
        if output.requires_grad:
            self.steps.append(Step(draft, output, tuple(t._version for t in draft.needs), uses))
        self._held[id(output)] = output, output._version

    def intact(self) -> bool:
        """No value was overwritten, and no hook of the user's waits for a gradient on the way."""
        return all(step.intact() and not step.output._backward_hooks for step in self.steps)

    def signals(
        self, outputs: Tensor, cotangents: Signal, part: slice, steps: Sequence[Step], copied: bool = False
    ) -> Iterator[tuple[tuple[Any, ...], Signal]]:
        """Uses with the signals at the output they made, for the examples ``part``, from the last to the first.

        ``steps`` are those of the tape, whose uses may have been moved; ``copied``: the taker has no need of their
        memory once it asks for the next.
        """
        carried = {id(outputs): cotangents}
        for step in reversed(steps):
            signal = carried.pop(id(step.output), None)
            if signal is None:
                continue
            if step.uses:
                signal = signal.settled()
                yield step.uses, signal
                kept = not copied and any(use.form.keeps_signals for use in step.uses)
                signal = replace(signal, spare=signal.spare and not kept)
            if not any(t.requires_grad for t in step.draft.inputs):
                continue
            for tensor, share in zip(step.draft.inputs, step.back(signal, part), strict=True):
                if tensor.requires_grad:
                    before = carried.get(id(tensor))
                    carried[id(tensor)] = share if before is None else before + share


def _nobody_elses(share: Tensor, held: Sequence[Tensor]) -> bool:
    """The memory of ``share`` may be written: nothing else of ``held`` is there, nor two entries in one place."""
    place = share.untyped_storage().data_ptr()
    alone = sum(t.untyped_storage().data_ptr() == place for t in held) == 1
    return alone and (share.is_contiguous() or channels_last(share))
