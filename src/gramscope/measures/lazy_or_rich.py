"""Dynamical richness: how far the features of the last layer are spanned by what the network puts out."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gramscope.base.checks import check_choice
from gramscope.base.errors import InputError
from gramscope.base.moments import centered_rows
from gramscope.base.nested import ModelInput
from gramscope.base.rounding import above_rounding, column_basis, floor
from gramscope.base.user_warnings import undefined
from gramscope.capture.activations import Mode
from gramscope.measures.hsic import LayerState, tiled_products
from gramscope.measures.last_linear_layer import last_layer_batches
from gramscope.measures.layer_features import Batch, Batches, Channels, Reduce, streams_kept
from gramscope.measures.linear_cka import CKA, SimilarityMatrix, cka
from gramscope.measures.measure import Measure
from gramscope.measures.norms import norms
from gramscope.measures.rows import Rows

Target = Literal["raw", "projection"]


class Richness(Measure[LayerState, float]):
    """:func:`richness` batch by batch: ``update(features, outputs)``."""

    def __init__(self, target: Target = "raw") -> None:
        check_choice(target, "target", get_args(Target))
        self.target = target

    def update(self, features: Tensor, outputs: Tensor) -> LayerState:
        return LayerState.of({"features": features, "outputs": outputs})

    def compute(self, state: LayerState) -> float:
        if state.n < 2:
            return undefined("D_LR", f"it needs at least 2 examples, got {state.n}")
        products = state.products()
        reasons = products.degenerate(state.roundings, debiased=False)
        for name, reason in zip(state.names, reasons, strict=True):
            if reason:
                return undefined("D_LR", f"the set of {name} {reason}")
        own, cross = float(products.inner[0, 0]), float(products.inner[0, 1])
        if self.target == "raw":
            aligned = cross / math.sqrt(own) / math.sqrt(float(products.inner[1, 1]))
        else:
            squared, rank = _in_span_of_outputs(state)
            if rank == 0:
                return undefined("D_LR", "the outputs vary by no more than the rounding of their dtype")
            aligned = squared / math.sqrt(own * rank)
        return min(max(1.0 - aligned, 0.0), 1.0)


def richness(features: Tensor, outputs: Tensor, target: Target = "raw") -> float:
    """Dynamical richness ``D_LR`` of the last layer; 0 is richest, lazy networks are near ``1 - √(C/p)``.

    ``D_LR = 1 - |ΦᵀF|² / (|ΦᵀΦ| |FᵀF|)`` with column-centred Φ and F (``"raw"``), one minus biased linear CKA; or with
    F replaced by an orthonormal basis of its centred columns (``"projection"``).

    Args:
        features: Φ (n, ...), the inputs of the last linear layer; other layers are allowed.
        outputs: F (n, ...), the outputs of the network on the same examples.
        target: "raw" (the published numbers) or "projection" (Definition 1).

    Reference: arXiv:2410.04264, Definition 1 (it can be taken in two ways: see the page on richness).

    Example:
        >>> import torch, gramscope as gs
        >>> labels = torch.arange(30) % 3
        >>> one_hot = torch.nn.functional.one_hot(labels).double()
        >>> abs(gs.measures.richness(one_hot @ torch.eye(3, 8).double(), one_hot)) < 1e-12      # collapsed: rich
        True
    """
    return Richness(target)(features, outputs)


def network_richness(
    model: nn.Module,
    data: Batches,
    *,
    layer: str | None = None,
    target: Target = "raw",
    reduce: Reduce = "flatten",
    inputs: Callable[[Batch], ModelInput] | None = None,
    channels: Channels = None,
    mode: Mode = "eval",
) -> float:
    """``D_LR`` of a model over ``data``, with the last linear layer found by itself or given by name.

    Args:
        model: any module; it is left as it was, and so are the random streams, also where a DataLoader draws from them.
        data: an iterable of batches, or one input tensor.
        layer: name of a layer whose *inputs* are the features; None finds the last linear layer that is called.
        target: as in :func:`richness`.
        reduce: of spatial and token axes of features and outputs alike ("last" for language models).
        inputs: takes the model's input out of a batch.
        channels, mode: as for :func:`gramscope.measures.features`.

    Reference: arXiv:2410.04264, section 3.1 and appendix E.1.

    Example:
        >>> import torch, gramscope as gs
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        >>> 0.0 < gs.measures.network_richness(model, torch.randn(50, 4)) < 1.0
        True
    """
    with streams_kept(data):
        return Richness(target).over(
            last_layer_batches(model, data, layer, reduce=reduce, inputs=inputs, channels=channels, mode=mode)
        )


def initial_similarity(initial: Tensor, features: Tensor) -> float:
    """Similarity to the features at initialisation on the same examples, ``S_init = CKA(Φ_0, Φ_t)``; 1 is lazy.

    Reference: arXiv:2410.04264, section 4.1; Yang & Hu 2021.

    Example:
        >>> import torch
        >>> x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
        >>> round(initial_similarity(x, 2 * x), 12)
        1.0
    """
    return cka(initial, features)


@torch.inference_mode()
def richness_and_similarity(initial: Tensor, features: Tensor, outputs: Tensor) -> tuple[float, float]:
    """:func:`richness` and :func:`initial_similarity`, in one pass over the features if all examples have outputs.

    Else ``outputs`` are those of the first examples.
    """
    if len(outputs) < len(features):
        return richness(features[: len(outputs)], outputs), initial_similarity(initial, features)
    found = CKA()({"initial": initial, "features": features, "outputs": outputs})
    assert isinstance(found, SimilarityMatrix)
    return 1.0 - found["features", "outputs"], found["initial", "features"]


def parameter_norm(model: nn.Module) -> float:
    """Euclidean norm ``|θ|`` of all parameters, in float64; tied parameters count once.

    Reference: arXiv:2410.04264, section 4.1 (which lists ``|θ|²``).

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> _ = layer.weight.data.fill_(2.0), layer.bias.data.fill_(1.0)
        >>> parameter_norm(layer)
        3.0
    """
    sizes = norms({name: p for name, p in model.named_parameters() if p.is_floating_point()})
    if not sizes:
        raise InputError("the model must have parameters to have a norm, but it has none.")
    return math.hypot(*sizes.values())  # scales by itself, so that squares stay within float64


def _in_span_of_outputs(state: LayerState) -> tuple[float, int]:
    """|ΦᵀQ|² and rank for an orthonormal basis Q of the centred outputs, without directions that are rounding."""
    phi, outputs = state.rows
    if state.moments is None:
        f = outputs.all()
        q = column_basis(centered_rows(f), outputs.rounding, len(f), f.norm(dim=0))
        return float(tiled_products((phi, Rows.of(q))).inner[0, 1]), q.shape[1]
    moments = state.all_moments()
    gram = moments.block(1, 1)
    squares = gram.diagonal() + moments.n * moments.centre.mean[-len(gram) :].square()
    errors = outputs.rounding.errors(squares.sqrt())
    values, vectors = torch.linalg.eigh(gram / torch.outer(errors, errors))
    kept = above_rounding(values, floor(state.n, outputs.width) ** 2)
    along = moments.block(0, 1) / errors @ (vectors[:, kept] / values[kept].sqrt())
    return float(along.square().sum()), int(kept.sum())
