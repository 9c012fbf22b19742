"""The protocol of all measures: a batch gives a state, states merge, a state gives the value.

One rule serves batches and ranks: ``compute(merge(update(a), update(b)))`` is the value on both batches together,
whoever computed the two states and in whatever order they are merged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin, runtime_checkable

from gramscope.base.errors import InputError
from gramscope.base.results import in_short
from gramscope.base.user_warnings import UndefinedMeasureWarning as UndefinedMeasureWarning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class State(Protocol):
    """What a measure keeps of the examples seen: a frozen, picklable object of float64 tensors that can be merged."""

    # A state merges with its own kind, which a protocol cannot say where types are checked at run time.
    def merged(self, other: Any) -> Any:
        """The state of both sets of examples."""


S = TypeVar("S", bound=State)
V = TypeVar("V")


class Measure(ABC, Generic[S, V]):
    """A number (or a few) of a data set, computed batch by batch.

    A subclass defines :meth:`update` and :meth:`compute`. Its state is immutable; :meth:`merge` is commutative and
    associative up to float64 rounding.

    >>> import torch, gramscope as gs
    >>> measure = gs.measures.Richness()
    >>> features, outputs = torch.eye(6), torch.eye(6)[:, :3]
    >>> state = measure.merge(measure.update(features[:2], outputs[:2]), measure.update(features[2:], outputs[2:]))
    >>> abs(measure.compute(state) - gs.measures.richness(features, outputs)) < 1e-12
    True
    """

    _kind_of_state: ClassVar[type] = State

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):  # S of Measure[S, V]
            if get_origin(base) is Measure and isinstance(get_args(base)[0], type):
                cls._kind_of_state = get_args(base)[0]

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> S:
        """The state of one batch."""

    def merge(self, a: S, b: S) -> S:
        """The state of both."""
        kind = self._kind_of_state
        if not (isinstance(a, kind) and isinstance(b, kind)):
            raise InputError(
                f"{type(self).__name__} merges states of its own ({kind.__name__}), got {type(a).__name__} and "
                f"{type(b).__name__}. Merge what its update() returned."
            )
        return a.merged(b)

    @abstractmethod
    def compute(self, state: S) -> V:
        """The value; NaN with an :class:`UndefinedMeasureWarning` where it is not defined."""

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={in_short(value)}' for name, value in settings.items())})"

    def over(self, batches: Iterable[object]) -> V:
        """The value over an iterable of batches; a tuple, list or dict is spread over the arguments of ``update``."""
        states = (self._update_with(batch) for batch in batches)
        first = next(states, None)
        if first is None:
            raise InputError(f"{type(self).__name__} needs at least one batch, got an empty iterable.")
        return self.compute(reduce(self.merge, states, first))

    def __call__(self, *args: Any, **kwargs: Any) -> V:
        """The value on one batch."""
        return self.compute(self.update(*args, **kwargs))

    def _update_with(self, batch: object) -> S:
        if isinstance(batch, Mapping):
            return self.update(**batch)
        return self.update(*batch) if isinstance(batch, tuple | list) else self.update(batch)


def gather_state(state: S, group: "ProcessGroup | None" = None) -> S:
    """The merged state of all ranks of a ``torch.distributed`` group; the same on every rank, in rank order.

    Outside a process group the state comes back as it is, so one script serves one and many processes.

    >>> import torch, gramscope as gs
    >>> measure = gs.measures.Richness()
    >>> state = measure.update(torch.eye(3), torch.eye(3))
    >>> gather_state(state) is state
    True
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return state
    states = [state] * dist.get_world_size(group)
    dist.all_gather_object(states, state, group=group)
    return reduce(lambda a, b: a.merged(b), states)
