"""Embedding tables."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.capture.forms import Lookup
from gramscope.capture.recorder import Recorder, rule


@rule(F.embedding)
def embedding(
    recorder: Recorder, func: Any, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    """``scale_grad_by_freq`` and ``sparse`` change how torch stores gradients, not the function: both are dropped."""
    if recorder.weight(weight) is None or not recorder.is_data(input):
        return recorder.tap(
            func, (input, weight), {"padding_idx": padding_idx, "max_norm": max_norm, "norm_type": norm_type}
        )
    leaf = recorder.stand_in(weight)
    if max_norm is not None:
        # torch renormalises the table in place; do it on a copy, the user's table stays as it is.
        with torch.no_grad():
            table = torch.embedding_renorm_(weight.detach().clone(), input.detach().reshape(-1), max_norm, norm_type)
        leaf = table.requires_grad_()
    ignored = None if padding_idx is None else padding_idx % weight.shape[0]
    output = recorder.settle(torch.embedding(leaf, input, -1 if ignored is None else ignored))
    recorder.note(weight, leaf, output, Lookup("embedding", input.detach(), weight.shape[0], ignored))
    return output
