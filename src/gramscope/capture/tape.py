"""A tape of operations that treat every example by itself.

While every operation between input and output acts on each slice of axis 0 alone, the backward pass needs no proof of
that by numbers (see ``layout``), and may run over some examples at a time: the signals ``(n, k, ...)`` of n examples
and k directions lie example by example, where the contractions want them, and never leave the cache.

Each operation that a builder of ``TAPED`` knows to be of this kind becomes a ``Step``. Any other operation leaves its
result off the tape, and with it all that follows; the outputs are then captured by autograd as a whole.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jaxtyping import Float
from torch import Tensor

Back = Callable[[Tensor, slice], tuple[Tensor, ...]]
Builder = Callable[..., "Draft | None"]
TAPED: dict[Callable[..., Any], Builder] = {}


def taped(*functions: Callable[..., Any]) -> Callable[[Builder], Builder]:
    """Register a builder: ``builder(tape, output, func, *args, **kwargs) -> Draft``, or None if examples may mix."""

    def register(builder: Builder) -> Builder:
        TAPED.update(dict.fromkeys(functions, builder))
        return builder

    return register


_signature = cache(inspect.signature)


@dataclass(frozen=True)
class Draft:
    """What a builder says of an operation.

    ``inputs`` are the operands on the tape; ``back(signal, part)`` gives their signals (m, k, ...) from the output's,
    for the m examples ``part``; ``needs`` are tensors whose values it will read; ``uniform`` says that it is one
    linear map, the same for all examples.
    """

    inputs: tuple[Tensor, ...]
    back: Back
    needs: tuple[Tensor, ...] = ()
    uniform: bool = False


@dataclass(frozen=True)
class Scaling(Draft):
    """An operation whose way back multiplies by ``factor(part)``, broadcast over the directions."""

    back: Back = field(init=False, default=lambda signal, part: (signal,))
    factor: Callable[[slice], Tensor] = field(kw_only=True)


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

    def back(self, signal: Float[Tensor, "m k ..."], part: slice, spare: bool) -> tuple[Tensor, ...]:
        """Signals of the inputs; ``spare``: the memory of ``signal`` is free to be used for them."""
        m = len(signal)
        if self.draft.uniform and signal.stride(0) == 0 and m > 1:
            # The same signal for all examples through the same map: once is enough.
            return tuple(one.expand(m, *one.shape[1:]) for one in self.back(signal[:1], part, False))
        if isinstance(self.draft, Scaling):
            factor = self.draft.factor(part)
            return (signal.mul_(factor) if spare else signal * factor,)
        return self.draft.back(signal, part)


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
        try:
            _signature(builder).bind(self, output, func, *args, **kwargs)
        except TypeError:
            return None  # a way to call the function that the builder does not know
        return builder(self, output, func, *args, **kwargs)

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
        self, outputs: Tensor, cotangents: Float[Tensor, "m k C"], part: slice, copied: bool = False
    ) -> Iterator[tuple[tuple[Any, ...], Float[Tensor, "m k ..."]]]:
        """Uses with the signals at the output they made, for the examples ``part``, from the last to the first.

        ``copied``: the taker has no need of their memory once it asks for the next.
        """
        carried: dict[int, tuple[Tensor, bool]] = {id(outputs): (cotangents, False)}
        for step in reversed(self.steps):
            signal, spare = carried.pop(id(step.output), (None, False))
            if signal is None:
                continue
            if step.uses:
                yield step.uses, signal
                spare = spare and (copied or not any(use.form.keeps_signals for use in step.uses))
            if not any(t.requires_grad for t in step.draft.inputs):
                continue
            shares = step.back(signal, part, spare)
            for tensor, share in zip(step.draft.inputs, shares, strict=True):
                if tensor.requires_grad:
                    before = carried.get(id(tensor))
                    free = _nobody_elses(share, shares, () if spare else (signal,))
                    carried[id(tensor)] = (share, free) if before is None else (before[0] + share, True)


def _nobody_elses(share: Tensor, shares: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """The memory of ``share`` may be written: no other tensor lies in it, and no two of its entries in one place."""
    place = share.untyped_storage().data_ptr()
    holders = [t for t in (*shares, *others) if t.untyped_storage().data_ptr() == place]
    return len(holders) == 1 and share.is_contiguous()
