"""Every network of the zoo by name. Nothing is built until `CASES[name].build(seed, dtype)`.

>>> model, x, x2 = CASES["mlp_tanh"].build()
>>> x.shape, x2.shape, x.dtype
(torch.Size([3, 5]), torch.Size([2, 5]), torch.float64)
"""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from zoo import (
    attention,
    axes,
    bare,
    broadcast,
    convolutions,
    coupled,
    huggingface,
    layers,
    once,
    recurrent,
    sharing,
    wrapped,
)
from zoo.case import Case, cast

FAMILIES: dict[str, dict[str, Case]] = {
    module.__name__.removeprefix("zoo."): module.CASES
    for module in (
        layers,
        convolutions,
        attention,
        recurrent,
        bare,
        sharing,
        broadcast,
        axes,
        once,
        wrapped,
        huggingface,
    )
}

CASES: dict[str, Case] = {name: case for family in FAMILIES.values() for name, case in family.items()}
if len(CASES) != sum(map(len, FAMILIES.values())):
    raise ValueError("Case names must be unique across families. Rename the one that occurs twice.")

COUPLED: dict[str, Case] = coupled.CASES


def all_in_full(names: Iterable[str], each: int) -> list[ParameterSet]:
    """Parameters of a test: one in `each` in `make test`, all of them in `make test-full`."""
    return [pytest.param(name, marks=[pytest.mark.full] if place % each else []) for place, name in enumerate(names)]


__all__ = ["CASES", "COUPLED", "FAMILIES", "Case", "all_in_full", "cast"]
