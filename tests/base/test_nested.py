"""Tensors are found in, and replaced inside, whatever holds them."""

from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from gramscope.base.nested import map_tensors, tensors_in

Pair = namedtuple("Pair", ["first", "second"])
a, b, c, d = (torch.full((), float(i)) for i in range(4))


@dataclass
class Fields:
    first: Any
    second: Any = None
    third: Any = field(init=False, default=None)


@dataclass(frozen=True)
class Frozen:
    first: Any


class Two(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Attributes(dict):
    __getattr__ = dict.__getitem__


def test_every_tensor_is_found_in_order():
    nested = (a, [1, "text", None, {"x": b, "y": (c,)}], Pair(2.0, d), torch.Size([3]), {"z"}, Fields)
    assert all(found is given for found, given in zip(tensors_in(nested), (a, b, c, d), strict=True))
    assert tensors_in(a) == [a]
    assert tensors_in((1, True, None, "text", 2j, [])) == []


HOLDERS = {
    "tuple": (a,),
    "list": [a],
    "deque": deque([a], maxlen=3),
    "namedtuple": Pair(a, 1),
    "tuple with a constructor": Two(a, 1),
    "dict": {"x": a},
    "OrderedDict": OrderedDict(x=a),
    "defaultdict": defaultdict(list, x=a),
    "UserDict": UserDict(x=a),
    "ChainMap": ChainMap({}, {"x": a}),
    "attributes": Attributes(x=a),
    "data class": Fields([a]),
    "frozen data class": Frozen((a, 1)),
    "mapping inside": (1, UserDict(x=Fields(Pair(1, a)))),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_are_replaced_and_the_container_is_kept(name):
    value = HOLDERS[name]
    (found,) = tensors_in(value)
    again = map_tensors(lambda t: t + 10, value)
    assert found is a
    assert type(again) is type(value)
    assert again is not value
    assert [float(t) for t in tensors_in(again)] == [10.0]
    assert tensors_in(value)[0] is a  # and the original has what it had
    assert float(a) == 0.0


def test_what_the_container_knows_besides_is_kept():
    assert map_tensors(lambda t: t, HOLDERS["deque"]).maxlen == 3
    assert map_tensors(lambda t: t, HOLDERS["defaultdict"])["y"] == []
    assert map_tensors(lambda t: t + 1, HOLDERS["attributes"]).x == 1.0
    assert map_tensors(lambda t: t + 1, Pair("text", a)) == Pair("text", torch.tensor(1.0))
    assert map_tensors(lambda t: t + 1, MappingProxyType({"x": a})) == {"x": torch.tensor(1.0)}  # cannot be copied
