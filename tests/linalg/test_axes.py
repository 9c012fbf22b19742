"""Named axes keep order, refuse nonsense and lay vectors out row by row."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramscope.base.axes import Axes

SIZES = st.lists(st.integers(0, 4), max_size=4)


def test_order_and_sizes_make_equality() -> None:
    assert Axes(a=2, b=3) == Axes(a=2, b=3)
    assert Axes(a=2, b=3) != Axes(b=3, a=2)
    assert Axes(a=2) != Axes(a=3)
    assert Axes(a=2) != {"a": 2}
    assert len({Axes(a=2), Axes(a=2), Axes(b=2)}) == 2


def test_is_a_frozen_mapping() -> None:
    axes = Axes(example=4, output=3)
    assert dict(axes) == {"example": 4, "output": 3}
    assert (axes.names, axes.shape, axes.size, len(axes)) == (("example", "output"), (4, 3), 12, 2)
    with pytest.raises(AttributeError, match="frozen"):
        axes.example = 3
    with pytest.raises(AttributeError, match="frozen"):
        axes._sizes = {}
    with pytest.raises(KeyError, match="has no axis 'time'"):
        axes["time"]
    assert pickle.loads(pickle.dumps(axes)) == axes


def test_repr_can_be_typed_in() -> None:
    for axes in (Axes(), Axes(a=1), Axes(**{"layer.0": 3, "b": 2})):
        assert eval(repr(axes)) == axes


def test_no_axes_are_a_scalar() -> None:
    assert Axes().size == 1
    assert Axes() * Axes(a=2) == Axes(a=2)


def test_anonymous_axes_match_by_size() -> None:
    assert Axes.anonymous(6).matches(Axes(a=2, b=3))
    assert not Axes.anonymous(5).matches(Axes(a=2, b=3))
    assert not Axes(a=6).matches(Axes(b=6))
    assert Axes.anonymous(6).merged(Axes(a=6)) == Axes(a=6)
    assert Axes(a=6).merged(Axes.anonymous(6)) == Axes(a=6)
    assert Axes.of(3) == Axes.anonymous(3)
    assert Axes.anonymous(2) * Axes(a=3) == Axes.anonymous(6)


def test_renamed() -> None:
    assert Axes(a=2, b=3).renamed(a="c") == Axes(c=2, b=3)
    with pytest.raises(ValueError, match="existing axes"):
        Axes(a=2).renamed(x="y")
    with pytest.raises(ValueError, match="distinct"):
        Axes(a=2, b=3).renamed(a="b")


@given(SIZES)
def test_flatten_undoes_unflatten(sizes: list[int]) -> None:
    axes = Axes(**{f"axis{i}": size for i, size in enumerate(sizes)})
    flat = torch.arange(2 * axes.size).reshape(axes.size, 2)
    named = axes.unflatten(flat)
    assert named.shape == (*sizes, 2)
    assert torch.equal(axes.flatten(named), flat)


def test_bad_sizes_and_shapes_are_named() -> None:
    with pytest.raises(TypeError, match=r"2\.0"):
        Axes(a=2.0)
    with pytest.raises(TypeError, match="int as its size, got True"):
        Axes(a=True)
    with pytest.raises(ValueError, match=">= 0, got -1"):
        Axes(a=-1)
    with pytest.raises(ValueError, match="must be alone"):
        Axes(_=1, a=2)
    with pytest.raises(ValueError, match=r"distinct axis names, got \['a'\]"):
        Axes(a=1) * Axes(a=2)
    with pytest.raises(ValueError, match="axes must match"):
        Axes(a=1).merged(Axes(b=1))
    with pytest.raises(ValueError, match=r"6 entries.*got shape \(5,\)"):
        Axes(a=2, b=3).unflatten(torch.zeros(5))
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*got \(3, 2\)"):
        Axes(a=2, b=3).flatten(torch.zeros(3, 2))
