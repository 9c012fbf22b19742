"""How large the signals of a forward pass are at each layer, how many units are saturated, and how alike tokens are."""

import math
from collections.abc import Iterator, Mapping
from operator import truediv
from statistics import fmean
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from gramscope.base.nested import tensors_in
from gramscope.ops.unrolled import UNROLLED
from gramscope.record.objective import Objective
from gramscope.record.relu_units import UNITS_SECOND, Operation, ReluUnits

K = TypeVar("K")
Noted: TypeAlias = dict[str, list[tuple[Tensor, ...]]]  # by layer, for each of its uses: numbers, on their device
TANHS: set[Operation] = {F.tanh, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_}
SIGMOIDS: set[Operation] = {F.sigmoid, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_}
CELLS = {"gru", "lstm", "rnn_tanh"}  # whole recurrent layers: their states lie between -1 and 1
RANK_ROWS = 512  # examples and positions, at most about so many
HELD = 2**23  # entries of such rows that are held at once
WIDEST_LAYER = 2**13  # units; of a vocabulary's logits only the size is noted
FLAT = 0.06  # of the greatest slope: a unit that is flatter passes next to no gradient
_TANH_FLAT = math.sqrt(1 - FLAT)  # tanh' = 1 - tanh²
_MODES = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


class LastInput:
    """Notes what the last operation was given that makes all outputs of ``examples`` examples: ``rows``, one a label.

    It is found by shapes alone. So it is compared once with what the weight sites say, and used only if both agree.
    """

    def __init__(self, objective: Objective, examples: int) -> None:
        self._entries, self._classes = examples * objective.size, objective.count
        self.rows: Float[Tensor, "rows d"] | None = None

    def look_at(self, given: tuple[object, ...], result: object) -> None:
        if isinstance(result, Tensor) and result.numel() == self._entries:
            inputs = next(filter(self._may_be_input, tensors_in(given)), None)
            if inputs is not None:
                self.rows = inputs.detach().reshape(-1, inputs.shape[-1])

    def _may_be_input(self, given: Tensor) -> bool:
        if not given.is_floating_point() or given.dim() < 2 or given.numel() == self._entries:
            return False
        return given.numel() * self._classes == self._entries * given.shape[-1]

    def agrees(self, features: Tensor | None, places: Int64[Tensor, " rows"]) -> bool:
        """Whether the rows at these places are the features that the weight sites found in the same forward pass."""
        if features is None or self.rows is None or self.rows.shape[1:] != features.shape[1:]:
            return False
        return torch.equal(self.rows[places.to(self.rows.device)].to(features.dtype), features)


class SignalWatch(ReluUnits):
    """Also notes the root mean square of each layer's outputs, saturated units, and how far tokens differ.

    ``n``: the number of examples. A layer that is used several times counts as the mean over its uses. ``gates``: keep
    what recurrent layers are given, so that their gates can be looked at. ``last`` looks at every operation too.
    """

    def __init__(self, layers: Mapping[int, str], n: int, gates: bool = False, last: LastInput | None = None) -> None:
        super().__init__(layers)
        self._n, self._look_at_gates, self.last = n, gates, last
        self._recurrent: list[tuple[str, Operation, tuple[object, ...]]] = []
        self._gelu = False  # a power since the last layer: the tanh that comes is part of a GELU, and no unit
        self._sizes: Noted = {}  # norms of all outputs
        self._entries: dict[str, list[int]] = {}  # how many outputs
        self._flat: Noted = {}
        # Of T tokens p of each example n: layer, T and √Σ|v_np - v̄_n|², beside v̄_n.
        self._tokens: list[tuple[tuple[str, int, Tensor], Tensor]] = []
        self._rows: list[tuple[str, Tensor]] = []  # copies: the network may go on to write into its own
        self._held = 0  # entries of these copies
        self._variation: Noted = {}  # of the covariance: √tr(C), √tr(C²)

    def _look_at(self, func: Operation, given: tuple[object, ...], result: object) -> None:
        if self.last is not None:
            self.last.look_at(given, result)
        super()._look_at(func, given, result)

    def _saw(self, func: Operation, layer: str | None, given: tuple[object, ...], result: object) -> None:
        values = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel() or not values.dim():
            return  # a single number, such as the exponential of a learned temperature, is no layer's output
        name = getattr(func, "__name__", "")
        self._gelu = layer is None and (self._gelu or name == "pow")
        flat = None if self._gelu else flat_share(func, values)
        if flat is not None:
            self._flat.setdefault(self._layer, []).append((flat,))
        elif layer is not None:
            values = values.detach()
            if name in CELLS:
                self._flat.setdefault(layer, []).append((_tanh_flat(values),))
            if self._look_at_gates and func in UNROLLED:
                self._recurrent.append((layer, func, given))
            wider = torch.float32 if values.dtype.itemsize < 4 else None
            self._sizes.setdefault(layer, []).append((torch.linalg.vector_norm(values, dtype=wider),))
            self._entries.setdefault(layer, []).append(values.numel())
            if values.shape[-1] <= WIDEST_LAYER:
                second = values.dim() > 2 and any(part in name for part in UNITS_SECOND)
                self._note_rows(layer, values.movedim(1, -1) if second else values)

    def _note_rows(self, layer: str, values: Tensor) -> None:
        rows = values.flatten(0, -2) if values.dim() > 1 else values[:, None]
        if rows.shape[1] > 1 and len(rows) > 1:
            some = rows[:: max(1, len(rows) // RANK_ROWS)].clone()
            self._rows.append((layer, some))
            self._held += some.numel()
            if self._held > HELD:
                self._note_variation()
        if values.dim() == 3 and self._n in values.shape[:2]:
            tokens = (values if len(values) == self._n else values.transpose(0, 1)).float()
            means = tokens.mean(1, keepdim=True)
            within = torch.linalg.vector_norm(tokens - means)
            self._tokens.append(((layer, tokens.shape[1], within), means))

    def _note_variation(self) -> None:
        for layers, rows in _of_one_shape(self._rows):
            for layer, *sizes in zip(layers, *map(Tensor.unbind, _variation(rows)), strict=True):
                self._variation.setdefault(layer, []).append(tuple(sizes))
        self._rows.clear()
        self._held = 0

    def ranks(self) -> dict[str, float]:
        """Participation ratio of each layer's outputs, centred, over examples and positions."""
        self._note_variation()
        ranks = {layer: fmean(_rank(t, s) for t, s in uses) for layer, uses in _numbers(self._variation).items()}
        return {layer: ranks[layer] for layer in self._sizes if ranks.get(layer, 0.0) > 0}  # in order of first use

    def sizes(self) -> dict[str, float]:
        """Root mean square of the outputs of each layer, before its activation, in order of first use."""
        noted = _numbers(self._sizes)
        squares = {layer: [size * size for (size,) in uses] for layer, uses in noted.items()}
        return {layer: math.sqrt(fmean(map(truediv, each, self._entries[layer]))) for layer, each in squares.items()}

    def saturated(self) -> dict[str, float]:
        """Share of the entries of tanh and sigmoid units, by layer, at which the slope is below 6 % of the greatest."""
        return _mean_shares(self._flat)

    def saturated_gates(self) -> dict[str, float]:
        """The same of the gates and candidate states of recurrent layers: they are run again, step by step."""
        noted: Noted = {}
        for layer, func, given in self._recurrent:
            if len({one.dtype for one in tensors_in(given) if one.is_floating_point()}) == 1:  # not so in autocast
                with torch.no_grad(), SignalWatch({}, self._n) as gates:
                    UNROLLED[func](*given)
                noted.setdefault(layer, []).extend(use for uses in gates._flat.values() for use in uses)
        return _mean_shares(noted)

    def token_variance(self) -> dict[str, float]:
        """Share of the variance of a layer's outputs that lies between the tokens of one example."""
        noted: Noted = {}
        lengths: dict[str, list[int]] = {}
        for uses, means in _of_one_shape(self._tokens):
            between = torch.linalg.vector_norm(means - means.mean(1, keepdim=True), dim=(1, 2, 3)).unbind()
            for (layer, length, within), size in zip(uses, between, strict=True):
                noted.setdefault(layer, []).append((within, size))
                lengths.setdefault(layer, []).append(length)
        shares = {
            layer: fmean(_ratio(w * w, w * w + T * b * b) for (w, b), T in zip(uses, lengths[layer], strict=True))
            for layer, uses in _numbers(noted).items()
        }
        return {layer: shares[layer] for layer in self._sizes if layer in shares}  # in order of first use


def flat_share(func: Operation, values: Tensor) -> Float[Tensor, ""] | None:
    """Share of the outputs of a tanh or a sigmoid at which its slope is below 6 % of the greatest; None of others."""
    if func in TANHS:
        return _tanh_flat(values.detach())
    return _tanh_flat(2 * values.detach() - 1) if func in SIGMOIDS else None  # σ(u) = (1 + tanh(u/2)) / 2


def _tanh_flat(values: Tensor) -> Float[Tensor, ""]:
    return (values.abs() > _TANH_FLAT).float().mean()


def ratio_of_rows(rows: Float[Tensor, "n d"]) -> float:
    """Participation ratio of the rows' covariance: how many directions they vary along; 0 where they do not vary."""
    return _rank(*(float(number) for number in _variation(rows)))


def _variation(rows: Float[Tensor, "*k n d"]) -> tuple[Float[Tensor, "*k"], Float[Tensor, "*k"]]:
    """``√tr(C)`` and ``√tr(C²)`` of the rows' covariance; zero up to rounding where all rows are the same."""
    centered = rows - rows.mean(-2, keepdim=True, dtype=torch.float64)
    gram = centered @ centered.mT if rows.shape[-2] <= rows.shape[-1] else centered.mT @ centered
    return torch.linalg.vector_norm(centered, dim=(-2, -1)), torch.linalg.vector_norm(gram, dim=(-2, -1))


def _of_one_shape(kept: list[tuple[K, Tensor]]) -> Iterator[tuple[list[K], Float[Tensor, "k *rest"]]]:
    """Tensors of one shape in one, with what belongs to each: a GPU takes a few operations, not some for each."""
    together: dict[object, list[tuple[K, Tensor]]] = {}
    for own, one in kept:
        together.setdefault((one.shape, one.dtype, one.device), []).append((own, one))
    for same in together.values():
        yield [own for own, _ in same], torch.stack([one for _, one in same])


def _rank(trace_root: float, square_root: float) -> float:
    """``tr(C)² / tr(C²)``."""
    return _ratio(trace_root**4, square_root**2)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 1e-30 else 0.0


def _mean_shares(noted: Noted) -> dict[str, float]:
    return {layer: fmean(share for (share,) in uses) for layer, uses in _numbers(noted).items()}


def _numbers(noted: Noted) -> dict[str, list[tuple[float, ...]]]:
    """What was noted, as numbers; a device is waited for once."""
    scalars = [one for uses in noted.values() for use in uses for one in use]
    if len({one.device for one in scalars}) > 1:  # a model that lies on several devices
        scalars = [one.cpu() for one in scalars]
    read = iter(torch.stack(scalars).tolist() if scalars else ())
    return {layer: [tuple(next(read) for _ in use) for use in uses] for layer, uses in noted.items()}


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
