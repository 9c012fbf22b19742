"""Centred kernel alignment of features: biased, debiased, for two tensors or for all pairs of many layers."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.charts import axes_or_new, heat_map
from gramscope.base.errors import InputError
from gramscope.base.html import html_table
from gramscope.base.pyplot import Axes, Figure, figure_of
from gramscope.base.user_warnings import UndefinedMeasureWarning, undefined, warn
from gramscope.capture.activations import Layers
from gramscope.measures.hsic import LayerState
from gramscope.measures.layer_features import Batches, FeatureOptions, Reduce, feature_batches, streams_kept
from gramscope.measures.measure import Measure

if TYPE_CHECKING:
    from pandas import DataFrame

LEFT, RIGHT = "a:", "b:"


@dataclass(frozen=True, eq=False, repr=False)
class SimilarityMatrix:
    """CKA of every layer of ``rows`` with every layer of ``columns``; NaN where it is not defined."""

    values: Float[Tensor, "rows columns"]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    examples: int

    def __getitem__(self, pair: tuple[str, str]) -> float:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f'a similarity needs the names of two layers, found["0", "2"], got {pair!r}.')
        return float(self.values[_place(pair[0], self.rows), _place(pair[1], self.columns)])

    def __repr__(self) -> str:
        sides = f"{len(self.rows)} x {len(self.columns)} layers, {self.examples} examples"
        return f"SimilarityMatrix({sides}, mean {float(self.values.nanmean()):.4g})"

    def to_dataframe(self) -> "DataFrame":
        """A table with layer names on both sides."""
        import pandas

        return pandas.DataFrame(self.values.cpu().numpy(), index=list(self.rows), columns=list(self.columns))

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """A heat map of the similarities between 0 and 1, layers in order from the lower left; a figure."""
        size = 2.2 + 0.32 * max(len(self.rows), len(self.columns))
        axes = axes_or_new(axes, (size + 0.8, size))
        title = f"CKA over {self.examples:,} examples"
        heat_map(self.values.double(), title, "", "", axes=axes, cmap="magma", vmin=0, vmax=1, origin="lower")
        axes.set_xticks(range(len(self.columns)), list(self.columns), rotation=90, fontsize="small")
        axes.set_yticks(range(len(self.rows)), list(self.rows), fontsize="small")
        return figure_of(axes)

    def _repr_html_(self) -> str:
        """In a notebook: the matrix with two digits."""
        rows = [
            [name, *(f"{value:.2f}" for value in line)]
            for name, line in zip(self.rows, self.values.tolist(), strict=True)
        ]
        return html_table(f"CKA over {self.examples:,} examples", ["", *self.columns], rows)


def _place(name: str, layers: tuple[str, ...]) -> int:
    if name not in layers:
        raise InputError(f"the layer must be one of those compared, {list(layers)}, got {name!r}.")
    return layers.index(name)


class CKA(Measure[LayerState, float | SimilarityMatrix]):
    """Centred kernel alignment, batch by batch, exactly.

    As :func:`cka`, over the whole data set, unlike an average over batches. ``update(a, b)`` takes two tensors (n,
    ...), two dicts of tensors by layer name, or one dict to compare its layers among themselves.

    Reference: Nguyen et al. 2021 (arXiv:2010.15327), eq. 3.

    >>> x = torch.arange(12.0).reshape(6, 2) ** 2
    >>> measure = CKA(debiased=True)
    >>> whole = measure(x, x.flip(0))
    >>> parts = measure.merge(measure.update(x[4:], x.flip(0)[4:]), measure.update(x[:4], x.flip(0)[:4]))
    >>> abs(whole - measure.compute(parts)) < 1e-12
    True
    """

    def __init__(self, *, debiased: bool = False) -> None:
        self.debiased = debiased

    def update(self, a: Tensor | Mapping[str, Tensor], b: Tensor | Mapping[str, Tensor] | None = None) -> LayerState:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return LayerState.of({"a": a, "b": b})
        if not isinstance(a, Mapping) or not (b is None or isinstance(b, Mapping)):
            raise InputError(
                "a and b must be two tensors, or two dicts of tensors by layer name (or one, to compare its layers), "
                f"got {type(a).__name__} and {type(b).__name__}. Convert arrays: torch.as_tensor(...)."
            )
        if not a or (b is not None and not b):
            raise InputError("CKA needs at least one layer on each side, got an empty dict.")
        sides = {LEFT: a, RIGHT: b or {}}
        return LayerState.of({prefix + name: x for prefix, side in sides.items() for name, x in side.items()})

    def compute(self, state: LayerState) -> float | SimilarityMatrix:
        values = _normalised(state, debiased=self.debiased)
        if state.names == ("a", "b"):
            return float(values[0, 1])
        left, right = (
            tuple(name.removeprefix(prefix) for name in state.names if name.startswith(prefix))
            for prefix in (LEFT, RIGHT)
        )
        shown = values[: len(left), len(left) :] if right else values
        return SimilarityMatrix(shown, left, right or left, state.n)


def cka(a: Tensor, b: Tensor, debiased: bool = False) -> float:
    """Linear centred kernel alignment of two sets of features of the same examples.

    ``CKA = |XᵀY|² / (|XᵀX| |YᵀY|)`` of column-centred rows; ``debiased`` replaces each term by HSIC₁, which is unbiased
    in the number of examples (the biased value tends to 1 for n < p even for independent features).

    Args:
        a: features (n, ...) of any floating dtype; axes after the first are flattened.
        b: features (n, ...) of the same examples; the width may differ.
        debiased: use HSIC₁; needs n ≥ 4.

    Reference: Kornblith et al. 2019 (arXiv:1905.00414), eq. 4; Song et al. 2012 (JMLR 13), eq. 5.

    Example:
        >>> import torch, gramscope as gs
        >>> x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
        >>> round(gs.measures.cka(x, 3 * x.flip(1)), 12)
        1.0
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        advice = (
            "For dicts of layers use CKA(...)(a, b) or layer_similarity(...)."
            if isinstance(a, Mapping) or isinstance(b, Mapping)
            else "Convert arrays: torch.as_tensor(...)."
        )
        raise InputError(f"cka compares two tensors, got {type(a).__name__} and {type(b).__name__}. {advice}")
    value = CKA(debiased=debiased)(a, b)
    assert isinstance(value, float)
    return value


def layer_similarity(
    model: nn.Module,
    data: Batches,
    layers: Layers = "*",
    *,
    other: nn.Module | None = None,
    other_layers: Layers | None = None,
    debiased: bool = True,
    reduce: Reduce = "flatten",
    **options: Unpack[FeatureOptions],
) -> SimilarityMatrix:
    """CKA of all pairs of layers of one model, or of two models, in one pass over ``data``.

    Args:
        model: any module; it is left as it was, and so are the random streams, also where a DataLoader draws from them.
        data: an iterable of batches (of a tuple or list the first entry is the input), or one input tensor.
        layers: names or globs.
        other: a second model, compared with the first; its layers by ``other_layers`` (``layers`` if None).
        debiased: HSIC₁ (default) or the biased form.
        reduce: what happens to spatial and token axes; see :func:`gramscope.measures.features`.
        options: further options of ``features`` (``at``, ``channels``, ``mode``).

    Reference: Kornblith et al. 2019 (arXiv:1905.00414), section 6; HSIC₁ in one pass: see the page on similarity.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> batches = torch.randn(40, 4).split(16)
        >>> found = gs.measures.layer_similarity(model, batches, ["0", "1", "2"])
        >>> found.values.shape, found.examples, round(found["1", "1"], 12)
        (torch.Size([3, 3]), 40, 1.0)
    """
    batches: Iterable[tuple[dict[str, Tensor], ...]]
    if other is None:
        batches = ((seen,) for seen, _ in feature_batches(model, data, layers, reduce=reduce, **options))
    else:
        wanted = layers if other_layers is None else other_layers
        batches = _side_by_side(model, other, data, layers, wanted, reduce, options)
    with streams_kept(data):
        found = CKA(debiased=debiased).over(batches)
    assert isinstance(found, SimilarityMatrix)
    return found


def _side_by_side(
    model: nn.Module,
    other: nn.Module,
    data: Batches,
    layers: Layers,
    wanted: Layers,
    reduce: Reduce,
    options: FeatureOptions,
) -> Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    # A loader that shuffles would show the two models different batches, so each batch is taken once and used twice.
    for seen, batch in feature_batches(model, data, layers, reduce=reduce, **options):
        for also_seen, _ in feature_batches(other, [batch], wanted, reduce=reduce, **options):
            yield seen, also_seen


def _normalised(state: LayerState, *, debiased: bool) -> Float[Tensor, "L L"]:
    """HSIC over the root of the two HSICs with themselves, NaN (said once) where that is zero over zero."""
    least = 4 if debiased else 2
    if state.n < least:
        nan = undefined("debiased CKA" if debiased else "CKA", f"it needs at least {least} examples, got {state.n}")
        return torch.full((len(state.names),) * 2, nan, dtype=torch.float64, device="cpu")
    products = state.products()
    hsic = products.hsic(debiased=debiased)
    reasons = products.degenerate(state.roundings, debiased=debiased)
    own = hsic.diagonal().clamp(min=0).sqrt()
    own[[bool(reason) for reason in reasons]] = math.nan
    # Divided one after the other: the product of two fourth powers of bfloat16 numbers may leave float64's range.
    values = hsic / own / own[:, None]
    # Rounding may carry a value past its bounds by a few units in the last place.
    values = values.clamp(-1.0 if debiased else 0.0, 1.0)
    if any(reasons):
        named = [
            f"{name.removeprefix(LEFT).removeprefix(RIGHT)!r} {reason}"
            for name, reason in zip(state.names, reasons, strict=True)
            if reason
        ]
        warn(f"CKA is not defined where a layer {'; '.join(named)}. NaN is returned there.", UndefinedMeasureWarning)
    return values
