"""Named axes: what the entries of a flat vector mean."""

import math
from collections.abc import Iterator, Mapping
from typing import Union

from torch import Tensor

ANONYMOUS = "_"


class Axes(Mapping[str, int]):
    """Name and size, in order, of the axes that one side of an operator flattens row by row.

    A vector ``x`` of length ``size = ∏ sizes`` has entry ``x[(i₁ n₂ + i₂) n₃ + i₃ ...]`` at the named
    index ``(i₁, i₂, i₃, ...)``. No axes at all describe a scalar (size 1).

    ``a * b`` are the axes of a tensor product. Where no names are known (``Axes.anonymous(n)``) only the size counts;
    see :meth:`matches`.

    >>> kernel = Axes(example=4, output=3)
    >>> kernel.size, kernel.shape, kernel["output"]
    (12, (4, 3), 3)
    >>> kernel * Axes(time=2)
    Axes(example=4, output=3, time=2)
    """

    __slots__ = ("_sizes",)
    _sizes: dict[str, int]

    def __init__(self, /, **sizes: int) -> None:
        for name, size in sizes.items():
            # bool is an int in Python, and Axes(bias=True) is a mistaken flag rather than an axis.
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(
                    f"axis {name!r} must have an int as its size, got {size!r} of type "
                    f"{type(size).__name__}. Convert it, e.g. int(size)."
                )
            if size < 0:
                raise ValueError(f"axis {name!r} must have a size >= 0, got {size}. Check how it was computed.")
        if ANONYMOUS in sizes and len(sizes) > 1:
            raise ValueError(
                f"the name {ANONYMOUS!r} stands for 'no names known' and must be alone, got {list(sizes)}. "
                "Name every axis, or none: Axes.anonymous(size)."
            )
        object.__setattr__(self, "_sizes", dict(sizes))

    @classmethod
    def anonymous(cls, size: int) -> "Axes":
        """``size`` entries of which nothing more is known."""
        return cls(**{ANONYMOUS: size})

    @classmethod
    def of(cls, axes: Union["Axes", int]) -> "Axes":
        """``axes`` itself, or anonymous axes of that size."""
        return axes if isinstance(axes, Axes) else cls.anonymous(axes)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Axes are frozen: make new ones, e.g. Axes(example=8, output=2).")

    def __reduce__(self) -> tuple[object, ...]:
        # The default way of unpickling sets attributes one by one, which frozen axes refuse.
        return _rebuild, (dict(self._sizes),)

    def __getitem__(self, name: str) -> int:
        if name not in self._sizes:
            raise KeyError(f"{self!r} has no axis {name!r}.")
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __eq__(self, other: object) -> bool:
        # A plain Mapping would forget the order, and the order says how a vector is laid out.
        if not isinstance(other, Axes):
            return NotImplemented
        return tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        if all(name.isidentifier() for name in self):
            return f"Axes({', '.join(f'{name}={size}' for name, size in self.items())})"
        return f"Axes(**{self._sizes!r})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._sizes.values())

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_anonymous(self) -> bool:
        return ANONYMOUS in self._sizes

    def matches(self, other: "Axes") -> bool:
        """Whether a vector on one may be read as a vector on the other.

        Equal axes match. Anonymous axes match any of the same size: they make no claim to contradict.
        """
        if self.is_anonymous or other.is_anonymous:
            return self.size == other.size
        return self == other

    def merged(self, other: "Axes") -> "Axes":
        """Of two matching axes the one that knows the names."""
        if not self.matches(other):
            raise ValueError(
                f"axes must match, got {self!r} and {other!r}. "
                "Rename or reorder one side, or use Axes.anonymous(size) where names do not matter."
            )
        return other if self.is_anonymous else self

    def __mul__(self, other: "Axes") -> "Axes":
        if not isinstance(other, Axes):
            return NotImplemented
        if self.is_anonymous or other.is_anonymous:
            # Names known for only a part of the sizes would let wrong layouts pass as equal.
            return Axes.anonymous(self.size * other.size)
        shared = [name for name in self if name in other]
        if shared:
            raise ValueError(
                f"a product needs distinct axis names, got {shared} on both sides of {self!r} * {other!r}. "
                f"Rename one side, e.g. .renamed({shared[0]}='{shared[0]}_2')."
            )
        return Axes(**self._sizes, **other._sizes)

    def renamed(self, /, **names: str) -> "Axes":
        """The same sizes with some names changed, ``old="new"``."""
        unknown = [old for old in names if old not in self]
        if unknown:
            raise ValueError(f"only existing axes can be renamed, got {unknown} for {self!r}. Use one of {self.names}.")
        new_names = [names.get(name, name) for name in self]
        if len(set(new_names)) < len(new_names):
            raise ValueError(f"axis names must stay distinct, got {new_names}. Choose another new name.")
        return Axes(**dict(zip(new_names, self.shape, strict=True)))

    def unflatten(self, x: Tensor) -> Tensor:
        """``(size, ...)`` to ``(*shape, ...)``: the first axis of ``x`` seen as the named ones.

        >>> import torch
        >>> Axes(example=2, output=3).unflatten(torch.arange(6)).tolist()
        [[0, 1, 2], [3, 4, 5]]
        """
        if x.ndim == 0 or x.shape[0] != self.size:
            raise ValueError(
                f"the first axis of x must have {self.size} entries to be read as {self!r}, "
                f"got shape {tuple(x.shape)}. Pass the flat vector, or (size, k) for k of them."
            )
        return x.reshape(*self.shape, *x.shape[1:])

    def flatten(self, x: Tensor) -> Tensor:
        """``(*shape, ...)`` to ``(size, ...)``: the inverse of :meth:`unflatten`."""
        if tuple(x.shape[: len(self)]) != self.shape:
            raise ValueError(
                f"x must have shape {self.shape} (and any axes after it) to be flattened by {self!r}, "
                f"got {tuple(x.shape)}. Move the named axes to the front, in this order."
            )
        return x.reshape(self.size, *x.shape[len(self) :])


def _rebuild(sizes: dict[str, int]) -> Axes:
    return Axes(**sizes)
