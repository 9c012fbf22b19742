"""How far two tensors agree: in direction (the cosine, of which alignment, CKA and correlation are cases), and in all.

A prediction and what was measured are compared by these two everywhere.
"""

import math

from jaxtyping import Float
from torch import Tensor

from gramscope.base.user_warnings import undefined


def cosine(a: Float[Tensor, "..."], b: Float[Tensor, "..."], what: str, why: str = "one of the two is zero") -> float:
    """``⟨a, b⟩ / (|a| |b|)`` over all entries, in float64; NaN, with a warning that says ``why``, where one is zero.

    >>> import torch
    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]), "a cosine")
    0.7071067811865475
    """
    x, y = (t.detach().double().flatten() for t in (a, b))
    x, y = (t / largest if t.numel() and bool(largest := t.abs().max()) else t for t in (x, y))  # squares stay finite
    value = float(cosine_of_sums(x @ y, x @ x, y @ y))
    return undefined(what, why) if math.isnan(value) else value


def cosine_of_sums(
    inner: Float[Tensor, "*k"], square_a: Float[Tensor, "*k"], square_b: Float[Tensor, "*k"]
) -> Float[Tensor, "*k"]:
    """The cosine from ``⟨a, b⟩``, ``|a|²`` and ``|b|²``; within ±1 whatever the rounding, NaN where one is zero."""
    return (inner / square_a.sqrt() / square_b.sqrt()).clamp(-1.0, 1.0)


def relative_error(predicted: Float[Tensor, "..."], measured: Float[Tensor, "..."]) -> float:
    """``|predicted - measured| / |measured|``: 0 for a right prediction, 1 for a prediction of nothing.

    Infinite where only the prediction is not zero; NaN where both are zero, since nothing was there to predict.

    >>> import torch
    >>> relative_error(torch.tensor([0.9]), torch.tensor([1.0])) < 0.11
    True
    """
    return ratio_of_norms(predicted.detach().double() - measured.detach().double(), measured)


def ratio_of_norms(part: Float[Tensor, "..."], whole: Float[Tensor, "..."]) -> float:
    """``|part| / |whole|``, infinite where the whole is zero and the part is not; NaN where both are zero."""
    size, of = float(part.detach().double().norm()), float(whole.detach().double().norm())
    return size / of if of else (math.inf if size else math.nan)
