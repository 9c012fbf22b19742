"""A chain: linear layers with an activation that is linear on each side of zero, and a fixed readout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_finite, check_number, check_one_device, check_tensor
from gramscope.base.errors import InputError

Weights = Sequence[Tensor]  # (N_ℓ, N_{ℓ-1}) each


@dataclass(frozen=True, eq=False)
class Chain:
    """``h^ℓ = W^ℓ x^{ℓ-1} + b^ℓ``, ``x^ℓ = relu(h^ℓ)``, ``f = A x^L + c`` with A and c fixed.

    Lists run over the layers 1..L, so ``weights[0]`` is W^1. ``negative_slopes[ℓ-1]`` is the slope of layer ℓ's
    activation left of zero: 0 for ReLU, 0.01 for a leaky one, 1 for none at all.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    negative_slopes: tuple[float, ...]
    readout: Float[Tensor, "C N_L"]
    offset: Float[Tensor, " C"]

    @property
    def depth(self) -> int:
        return len(self.weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """N_0, ..., N_L."""
        return (*(w.shape[1] for w in self.weights), self.readout.shape[1])

    def slopes(self, layer: int, mask: Bool[Tensor, "n N"]) -> Float[Tensor, "n N"]:
        """The diagonal of ``D^ℓ``: 1 where the mask is on, the negative slope elsewhere."""
        on = mask.to(self.readout.dtype)
        slope = self.negative_slopes[layer - 1]
        return on if slope == 0 else on + slope * (1 - on)

    @exact_arithmetic()
    def forward(
        self, x: Float[Tensor, "n N_0"], masks: Sequence[Tensor | None] | None = None
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Pre-activations (None for layer 0) and activations of layers 0..L; with ``masks`` given, these are held."""
        h: list[Tensor | None] = [None]
        activations = [x]
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), start=1):
            drive = activations[-1] @ weight.T
            drive = drive if bias is None else drive + bias
            mask = drive > 0 if masks is None else masks[layer]
            assert mask is not None
            h.append(drive)
            activations.append(self.slopes(layer, mask) * drive)
        return h, activations

    @exact_arithmetic()
    def backward(self, n: int, masks: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Conjugate fields ``g^ℓ`` (layers 0..L) and signals ``b^ℓ = D^ℓ g^ℓ`` (None for layer 0), (n, C, N_ℓ) each."""
        conjugates, signals = [self.readout.expand(n, *self.readout.shape)], list[Tensor | None]()
        for layer in range(self.depth, 0, -1):
            mask = masks[layer]
            assert mask is not None
            signal = self.slopes(layer, mask)[:, None] * conjugates[-1]
            signals.append(signal)
            conjugates.append(signal @ self.weights[layer - 1])
        return conjugates[::-1], [None, *signals[::-1]]

    @exact_arithmetic()
    def read_out(self, x: Float[Tensor, "n N_L"]) -> Float[Tensor, "n C"]:
        return x @ self.readout.T + self.offset

    def stepped(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], lr: float) -> "Chain":
        """The chain after ``W ← W - η ∂loss/∂W`` with the given gradients; the readout stays."""
        moved = tuple(w - lr * g for w, g in zip(self.weights, weights, strict=True))
        shifted = tuple(b if b is None or g is None else b - lr * g for b, g in zip(self.biases, biases, strict=True))
        return replace(self, weights=moved, biases=shifted)


def make_chain(
    weights: Weights,
    biases: Sequence[Tensor | None] | None,
    negative_slope: float | Sequence[float],
    readout: Tensor | None,
    offset: Tensor | None = None,
) -> Chain:
    """A chain of checked tensors in one dtype on one device, detached from any graph."""
    if isinstance(weights, Tensor) or not isinstance(weights, Iterable) or not len(weights):
        raise InputError("weights must be a list of at least one matrix (N_ℓ, N_{ℓ-1}), first layer first.")
    given = list(biases) if biases is not None else [None] * len(weights)
    if len(given) != len(weights):
        raise InputError(f"biases must have one entry for each of the {len(weights)} layers, got {len(given)}.")
    tensors = [(f"weights[{i}]", w) for i, w in enumerate(weights)]
    tensors += [(f"biases[{i}]", b) for i, b in enumerate(given) if b is not None]
    tensors += [(name, t) for name, t in (("readout", readout), ("offset", offset)) if t is not None]
    for name, tensor in tensors:
        check_tensor(tensor, name)
        check_finite(tensor, name, "The run has diverged, or the file is damaged: load an earlier checkpoint.")
    check_one_device(tensors, weights[0].device, "weights[0]")
    dtype = weights[0].dtype
    for _, tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    for i, weight in enumerate(weights):
        if weight.dim() != 2:
            raise InputError(f"weights[{i}] must be a matrix (N_{i + 1}, N_{i}), got shape {tuple(weight.shape)}.")
        if i and weight.shape[1] != weights[i - 1].shape[0]:
            raise InputError(
                f"weights[{i}] must have {weights[i - 1].shape[0]} columns to follow weights[{i - 1}] of shape "
                f"{tuple(weights[i - 1].shape)}, got shape {tuple(weight.shape)}. Matrices are (outputs, inputs), as "
                "in torch.nn.Linear."
            )
        bias = given[i]
        if bias is not None and bias.shape != (weight.shape[0],):
            raise InputError(f"biases[{i}] must have shape ({weight.shape[0]},), got {tuple(bias.shape)}.")
    last = weights[-1]
    clean = _readout(readout, last.shape[0], last.device, dtype)
    shift = torch.zeros(len(clean), dtype=dtype, device=last.device) if offset is None else offset
    return Chain(
        weights=tuple(w.detach().to(dtype) for w in weights),
        biases=tuple(None if b is None else b.detach().to(dtype) for b in given),
        negative_slopes=_slopes(negative_slope, len(weights)),
        readout=clean,
        offset=shift.detach().to(dtype),
    )


def _slopes(given: float | Sequence[float], depth: int) -> tuple[float, ...]:
    each = list(given) if isinstance(given, Sequence) else [given] * depth
    slopes = tuple(check_number(slope, "negative_slope") for slope in each)
    if len(slopes) != depth:
        raise InputError(f"negative_slope must be a number or one for each of the {depth} layers, got {len(slopes)}.")
    return slopes


def _readout(readout: Tensor | None, width: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "C N_L"]:
    if readout is None:
        return torch.full((1, width), 1.0 / width, dtype=dtype, device=device)
    matrix = readout.detach().to(dtype)
    matrix = matrix[None] if matrix.dim() == 1 else matrix
    if matrix.dim() != 2 or matrix.shape[1] != width or len(matrix) == 0:
        raise InputError(
            f"readout must have shape ({width},) or (C, {width}) to match the last layer's width, got "
            f"{tuple(readout.shape)}. Leave it out for the mean over neurons."
        )
    return matrix
