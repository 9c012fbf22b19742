"""How large the signals of a forward pass are at each layer, how many units are saturated, and how alike tokens are."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.effective_rank import ratio_of_traces
from gramscope.base.moments import centered_rows
from gramscope.record.relu_units import UNITS_SECOND, ReluUnits

TANHS: set[Any] = {F.tanh, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_}
SIGMOIDS: set[Any] = {F.sigmoid, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_}
CELLS = {"gru", "lstm", "rnn_tanh"}  # whole recurrent layers: their states lie between -1 and 1
RANK_ROWS = 512  # examples and positions, at most about so many
WIDEST_LAYER = 2**13  # units; of a vocabulary's logits only the size is noted
FLAT = 0.06  # of the greatest slope: a unit that is flatter passes next to no gradient
_TANH_FLAT = math.sqrt(1 - FLAT)  # tanh' = 1 - tanh²
_MODES = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


class SignalWatch(ReluUnits):
    """Also notes the root mean square of each layer's outputs, saturated units, and how far tokens differ.

    ``n``: the number of examples. A layer that is used several times counts as the mean over its uses.
    """

    def __init__(self, layers: Mapping[int, str], n: int) -> None:
        super().__init__(layers)
        self._n = n
        self._squares: dict[str, list[Tensor]] = {}
        self._flat: dict[str, list[Tensor]] = {}
        self._within: dict[str, list[Tensor]] = {}
        self._ranks: dict[str, list[Tensor]] = {}

    def _saw(self, func: Any, layer: str | None, result: Any) -> None:
        values = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
            return
        values = values.detach()
        if func in TANHS:
            self._flat.setdefault(self._layer, []).append((values.abs() > _TANH_FLAT).float().mean())
        elif func in SIGMOIDS:
            self._flat.setdefault(self._layer, []).append(((2 * values - 1).abs() > _TANH_FLAT).float().mean())
        elif layer is not None:
            if getattr(func, "__name__", "") in CELLS:
                self._flat.setdefault(layer, []).append((values.abs() > _TANH_FLAT).float().mean())
            size = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
            self._squares.setdefault(layer, []).append(size.square() / values.numel())
            if values.shape[-1] > WIDEST_LAYER:
                return
            self._note_rank(func, layer, values)
            if values.dim() == 3 and self._n in values.shape[:2]:
                self._within.setdefault(layer, []).append(_within_share(values.float(), self._n))

    def _note_rank(self, func: Any, layer: str, values: Tensor) -> None:
        second = values.dim() > 2 and any(part in getattr(func, "__name__", "") for part in UNITS_SECOND)
        rows = values.movedim(1 if second else -1, -1).flatten(0, -2) if values.dim() > 1 else values[:, None]
        if rows.shape[1] > 1 and len(rows) > 1:
            self._ranks.setdefault(layer, []).append(ratio_of_rows(rows[:: max(1, len(rows) // RANK_ROWS)]))

    def ranks(self) -> dict[str, float]:
        """Participation ratio of each layer's outputs, centred, over examples and positions."""
        return {layer: rank for layer, rank in _means(self._ranks).items() if rank > 0}

    def sizes(self) -> dict[str, float]:
        """Root mean square of the outputs of each layer, before its activation, in order of first use."""
        return {layer: math.sqrt(value) for layer, value in _means(self._squares).items()}

    def saturated(self) -> dict[str, float]:
        """Share of the entries of tanh and sigmoid units, by layer, at which the slope is below 6 % of the greatest."""
        return _means(self._flat)

    def token_variance(self) -> dict[str, float]:
        """Share of the variance of a layer's outputs that lies between the tokens of one example."""
        return _means(self._within)


def ratio_of_rows(rows: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
    """Participation ratio of the rows' covariance: how many directions they vary along; 0 where they do not vary."""
    centered = centered_rows(rows.double())
    gram = centered @ centered.T if len(centered) <= centered.shape[1] else centered.T @ centered
    return ratio_of_traces(gram.trace(), gram.square().sum()).nan_to_num(0.0)


def _within_share(tokens: Tensor, n: int) -> Tensor:
    """``Σ|v_np - v̄_n|² / Σ|v_np - v̄|²`` of tokens p of examples n: 0 where all tokens of an example are alike."""
    tokens = tokens if len(tokens) == n else tokens.transpose(0, 1)
    whole = (tokens - tokens.mean((0, 1))).square().sum()
    return (tokens - tokens.mean(1, keepdim=True)).square().sum() / whole.clamp(min=1e-30)


def _means(noted: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """The mean for each layer; a device is waited for once."""
    if not noted:
        return {}
    means = torch.stack([torch.stack(values).double().mean().cpu() for values in noted.values()])
    return dict(zip(noted, means.tolist(), strict=True))


def share_in_training(model: nn.Module) -> float | None:
    """Share of the modules whose outputs depend on the mode (dropout, batch norm) that are in training mode."""
    flags = [module.training for module in model.modules() if depends_on_mode(module)]
    return sum(flags) / len(flags) if flags else None


def depends_on_mode(module: nn.Module) -> bool:
    """Does this module do another thing in training than in evaluation?"""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    dropout = getattr(module, "p" if isinstance(module, _MODES) else "dropout", 0.0)
    return isinstance(dropout, float) and dropout > 0
