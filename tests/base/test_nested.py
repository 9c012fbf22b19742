"""Tensors are found in, and replaced inside, whatever holds them."""

from collections import OrderedDict, namedtuple
from types import MappingProxyType

import torch

from gramscope.base.nested import map_tensors, tensors_in

Pair = namedtuple("Pair", ["first", "second"])
a, b, c, d = (torch.full((), float(i)) for i in range(4))


def test_every_tensor_is_found_in_order():
    nested = (a, [1, "text", None, {"x": b, "y": (c,)}], Pair(2.0, d), torch.Size([3]), {"z"})
    assert all(found is given for found, given in zip(tensors_in(nested), (a, b, c, d), strict=True))
    assert tensors_in(a) == [a]
    assert tensors_in(OrderedDict(x=a)) == tensors_in(MappingProxyType({"x": a})) == [a]
    assert tensors_in((1, True, None, "text", 2j, [])) == []


def test_tensors_are_replaced_and_the_rest_is_kept():
    nested = (a, [1, {"x": b}], Pair("text", c))
    first, (one, inside), pair = map_tensors(lambda t: t + 10, nested)
    assert (float(first), one, float(inside["x"]), float(pair.second)) == (10, 1, 11, 12)
    assert isinstance(pair, Pair)
    assert pair.first == "text"
