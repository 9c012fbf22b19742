"""Contractions written in words, on torch's own einsum."""

from functools import lru_cache
from string import ascii_letters

import torch
from torch import Tensor


def contract(pattern: str, *tensors: Tensor) -> Tensor:
    """Einstein summation over named axes: an axis missing on the right of ``->`` is summed over.

    >>> contract("row col, col -> row", torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 4.0])).tolist()
    [11.0]
    """
    return torch.einsum(_in_letters(pattern), *tensors)


@lru_cache(maxsize=256)
def _in_letters(pattern: str) -> str:
    inputs, _, output = pattern.partition("->")
    sides = [side.split() for side in (*inputs.split(","), output)]
    words = dict.fromkeys(word for side in sides for word in side)
    letter = dict(zip(words, ascii_letters, strict=False))
    *operands, result = ["".join(letter[word] for word in side) for side in sides]
    return f"{','.join(operands)}->{result}"
