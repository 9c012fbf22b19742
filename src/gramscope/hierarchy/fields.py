"""The fields of a fixed-readout ReLU network on a batch of examples, and their Gram matrices (arXiv:2606.09744).

Index names: μ, ν examples (``n``, ``m`` in einsums), c, d outputs, i, j neurons. A readout given as a vector (or left
out) makes a network with one number as its output, and every shape below loses its output axis.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_count, check_finite, check_lr, check_one_device, check_tensor
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.shares import shares
from gramscope.hierarchy.chain import Chain, Weights, make_chain
from gramscope.hierarchy.chain_of_module import ADVICE, read_chain
from gramscope.hierarchy.mask_concentration import class_metric

if TYPE_CHECKING:
    from gramscope.hierarchy.pullback import Pullback
    from gramscope.hierarchy.step import StepComparison, StepPrediction

# |module(x) - f| / |f| up to which the chain read from a module is taken to be the module, by dtype of the module.
WITNESS = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


class Fields:
    """Activation fields, masks, conjugate fields and signals of ``f = A relu(W^L ... relu(W^1 x))``.

    - ``activations[ℓ]``: ``x^ℓ``, (n, N_ℓ), ℓ = 0..L
    - ``preactivations[ℓ]``: ``h^ℓ = W^ℓ x^{ℓ-1} + b^ℓ``; ``masks[ℓ]``: ``σ^ℓ = 1[h^ℓ > 0]``; None for ℓ = 0
    - ``conjugates[ℓ]``: ``g^ℓ_μ = ∂f_μ/∂x^ℓ_μ = W^{ℓ+1,T} D^{ℓ+1}_μ g^{ℓ+1}_μ``, (n, N_ℓ) or (n, C, N_ℓ)
    - ``signals[ℓ]``: ``b^ℓ_μ = ∂f_μ/∂h^ℓ_μ = D^ℓ_μ g^ℓ_μ``; None for ℓ = 0
    - ``outputs``: f, (n,) or (n, C)

    Args:
        weights: W^1..W^L as matrices (N_ℓ, N_{ℓ-1}).
        x: examples (n, N_0).
        readout: fixed A, (C, N_L) or (N_L,); the mean over neurons if None (the paper's convention).
        biases: b^1..b^L, None where a layer has none; a bias is the weight of a constant input 1.
        negative_slope: of the activation left of zero, one number or one for each layer (0: ReLU, 1: linear).
        offset: a constant added to f.

    Inner products are plain; methods that divide by the width are called ``..._per_unit``.

    Reference: arXiv:2606.09744, sections 2 to 4.

    Example:
        >>> import torch, gramscope as gs
        >>> w = torch.eye(2, dtype=torch.float64)
        >>> f = gs.hierarchy.Fields([w, w], torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64))
        >>> f.outputs
        tensor([0.5000, 3.5000], dtype=torch.float64)
        >>> f.kernels()[1]
        tensor([[ 0.2500,  0.7500],
                [ 0.7500, 12.5000]], dtype=torch.float64)
    """

    def __init__(
        self,
        weights: Weights,
        x: Tensor,
        readout: Tensor | None = None,
        *,
        biases: Sequence[Tensor | None] | None = None,
        negative_slope: float | Sequence[float] = 0.0,
        offset: Tensor | None = None,
    ) -> None:
        chain = make_chain(weights, biases, negative_slope, readout, offset)
        self._build(chain, _checked_input(x, chain), single=readout is None or readout.dim() == 1)

    @classmethod
    def from_module(cls, module: nn.Module, x: Tensor, readout: Tensor | None = None) -> "Fields":
        """Fields of a module that is a chain of Linear layers and ReLU-like activations.

        A last Linear layer without activation is taken as the fixed readout (then C is its width), unless ``readout``
        is given. The chain that was read is compared with the module's own output.

        Example:
            >>> import torch, gramscope as gs
            >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
            >>> gs.hierarchy.Fields.from_module(net, torch.ones(4, 3))
            Fields of 4 examples, widths 3-5, 2 outputs
        """
        chain, single = read_chain(module, readout)
        check_tensor(x, "x")
        fields = cls._of_chain(chain, _checked_input(x.flatten(1) if x.dim() > 2 else x, chain), single)
        if readout is None:
            _compare(module, x, fields)
        return fields

    @staticmethod
    def _of_chain(chain: Chain, x: Float[Tensor, "n N_0"], single: bool) -> "Fields":
        """The fields of a chain that was checked before."""
        fields = Fields.__new__(Fields)
        fields._build(chain, x, single)
        return fields

    def _build(self, chain: Chain, x: Float[Tensor, "n N_0"], single: bool) -> None:
        self.chain, self.single = chain, single
        self.preactivations, self.activations = chain.forward(x)
        self.masks: list[Bool[Tensor, "n N"] | None] = [None if h is None else h > 0 for h in self.preactivations]
        self._conjugates, self._signals = chain.backward(len(x), self.masks)
        remedy = (
            f"They overflow {x.dtype}: rescale x or the weights, pass them in float64, or lower the learning rate if a "
            "step led here."
        )
        for layer in range(chain.depth + 1):
            check_finite(self.activations[layer], f"the activations of layer {layer}", remedy)
            check_finite(self._conjugates[layer], f"the conjugate fields of layer {layer}", remedy)

    # Facts ---------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        return len(self.activations[0])

    @property
    def depth(self) -> int:
        return self.chain.depth

    @property
    def widths(self) -> tuple[int, ...]:
        return self.chain.widths

    @property
    def weights(self) -> list[Tensor]:
        return list(self.chain.weights)

    @cached_property
    def conjugates(self) -> list[Tensor]:
        return [self._public(g) for g in self._conjugates]

    @cached_property
    def signals(self) -> list[Tensor | None]:
        return [None if b is None else self._public(b) for b in self._signals]

    @cached_property
    def outputs(self) -> Tensor:
        return self._public(self.chain.read_out(self.activations[-1]))

    def slopes(self, layer: int) -> Float[Tensor, "n N"]:
        """The diagonals of ``D^ℓ_μ``: the masks as numbers (with the negative slope where there is one)."""
        mask = self.masks[self._layer(layer, 1)]
        assert mask is not None
        return self.chain.slopes(layer, mask)

    def _public(self, t: Float[Tensor, "n C ..."]) -> Tensor:
        return t[:, 0] if self.single else t

    def _layer(self, layer: object, first: int, last: int | None = None) -> int:
        return check_count(layer, "layer", first, self.depth if last is None else last)

    def _example(self, place: object) -> int:
        return check_count(place, "an example", -self.n, self.n - 1, "its row in x")

    def _signal(self, layer: int) -> Float[Tensor, "n C N"]:
        signal = self._signals[self._layer(layer, 1)]
        assert signal is not None
        return signal

    def _residual(self, residual: Tensor) -> Float[Tensor, "n C"]:
        """A checked residual ``e = ∂loss/∂f`` with its output axis."""
        e = check_tensor(residual, "residual").detach().to(self.chain.readout)
        wanted = tuple(self.outputs.shape)
        if tuple(e.shape) != wanted:
            raise InputError(
                f"residual must have shape {wanted}, one entry for each output, got {tuple(e.shape)}. For the squared "
                "error it is fields.outputs - y."
            )
        check_finite(e, "residual", "Is there a NaN in the targets?")
        return e[:, None] if self.single else e

    # Gram matrices on example space -----------------------------------------------------------------

    @exact_arithmetic()
    def overlap(self, layer: int) -> Float[Tensor, "n n"]:
        """Activation overlap ``Q^ℓ_{μν} = x^ℓ_μ · x^ℓ_ν``, ℓ = 0..L."""
        x = self.activations[self._layer(layer, 0)]
        return x @ x.T

    def overlap_per_unit(self, layer: int) -> Float[Tensor, "n n"]:
        """``Q^ℓ / N_ℓ``, the paper's ``⟨x_μ x_ν⟩``."""
        return self.overlap(layer) / self.widths[layer]

    def drive_overlap(self, layer: int) -> Float[Tensor, "n n"]:
        """What layer ℓ's weights see: ``Q^{ℓ-1}``, plus 1 where the layer has a bias (a constant input)."""
        overlap = self.overlap(self._layer(layer, 1) - 1)
        return overlap if self.chain.biases[layer - 1] is None else overlap + 1

    def correlator(self, layer: int) -> Tensor:
        """Conjugate correlator ``G^ℓ_{μν} = b^ℓ_μ · b^ℓ_ν``, (n, n) or (n, C, n, C), ℓ = 1..L."""
        return self._pairs(_gram(self._signal(layer)))

    def correlator_per_unit(self, layer: int) -> Tensor:
        """``G^ℓ / N_ℓ``."""
        return self.correlator(layer) / self.widths[layer]

    @exact_arithmetic()
    def coactivation(self, layer: int) -> Float[Tensor, "n n"]:
        """Co-activation overlap ``C^ℓ_{μν} = σ^ℓ_μ · σ^ℓ_ν``: neurons that are on for both examples."""
        mask = self.masks[self._layer(layer, 1)]
        assert mask is not None
        on = mask.to(self.chain.readout.dtype)
        return on @ on.T

    def coactivation_per_unit(self, layer: int) -> Float[Tensor, "n n"]:
        """``C^ℓ / N_ℓ``, a fraction of the neurons."""
        return self.coactivation(layer) / self.widths[layer]

    def projector(self, layer: int, mu: int, nu: int) -> Float[Tensor, "N N"]:
        """``P^ℓ_{μν} = D^ℓ_μ D^ℓ_ν``: for ReLU symmetric, PSD and idempotent."""
        slopes = self.slopes(layer)
        return torch.diag(slopes[self._example(mu)] * slopes[self._example(nu)])

    def _pairs(self, t: Float[Tensor, "n C m D"]) -> Tensor:
        return t[:, 0, :, 0] if self.single else t

    # Kernels and the residual flow ---------------------------------------------------------------------

    def kernels(self) -> list[Tensor]:
        """``K^ℓ_{μν} = Q^{ℓ-1}_{μν} G^ℓ_{μν}`` for ℓ = 1..L, (n, n) or (n, C, n, C); their sum is J Jᵀ of the layers.

        With a bias, ``Q^{ℓ-1} + 1`` takes the place of ``Q^{ℓ-1}``.
        """
        return [
            self._pairs(self.drive_overlap(layer)[:, None, :, None] * _gram(self._signal(layer)))
            for layer in range(1, self.depth + 1)
        ]

    def kernel(self) -> Tensor:
        """``K = Σ_ℓ K^ℓ``."""
        return torch.stack(self.kernels()).sum(0)

    @exact_arithmetic()
    def gradients(self, residual: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """``∂loss/∂W^ℓ = Σ_ν e_ν b^ℓ_ν x^{ℓ-1}_νᵀ`` and ``∂loss/∂b^ℓ`` for ℓ = 1..L."""
        e = self._residual(residual)
        weights, biases = [], []
        for layer in range(1, self.depth + 1):
            pulled = torch.einsum("nc,nci->ni", e, self._signal(layer))
            weights.append(pulled.T @ self.activations[layer - 1])
            biases.append(None if self.chain.biases[layer - 1] is None else pulled.sum(0))
        return weights, biases

    def loss_decrease(self, residual: Tensor) -> Float[Tensor, " L"]:
        """``eᵀ K^ℓ e`` for each layer, without a kernel: the loss falls at this rate, times the learning rate."""
        return squared_norms(*self.gradients(residual))

    def shares(self, residual: Tensor) -> Float[Tensor, " L"]:
        """Share of each layer in the loss decrease of a small step, ``eᵀ K^ℓ e / eᵀ K e``."""
        decrease = self.loss_decrease(residual)
        named = {str(layer): float(part) for layer, part in enumerate(decrease)}
        found = shares(named, why="the loss does not change to first order: is the residual zero?")
        return decrease.new_tensor(list(found.values()))

    def residual_flow(self, residual: Tensor) -> Tensor:
        """``de/dt = -K e``, the speed of the outputs under gradient flow."""
        return self.predict_step(residual, 1.0).outputs

    # The hierarchy ---------------------------------------------------------------------------------

    def pullback(self, layer: int) -> "Pullback":
        """``A^ℓ`` of the conjugate dynamics ``Δg^ℓ_μ = -η Σ_ν A^ℓ_{μν} x^ℓ_ν e_ν``, ℓ = 0..L, as an operator."""
        from gramscope.hierarchy.pullback import Pullback

        return Pullback(self, self._layer(layer, 0))

    @exact_arithmetic()
    def metric(self, layer: int, mu: int, nu: int) -> Float[Tensor, "N N"]:
        """The pullback Gram metric ``M^ℓ_{μν} = W^{ℓ+1,T} P^{ℓ+1}_{μν} W^{ℓ+1}``, ℓ = 0..L-1."""
        weight = self.chain.weights[self._layer(layer, 0, self.depth - 1)]
        slopes = self.slopes(layer + 1)
        return torch.einsum("oi,o,oj->ij", weight, slopes[self._example(mu)] * slopes[self._example(nu)], weight)

    def class_metric(
        self, layer: int, labels: Tensor | None = None, pairs: str | tuple[int, int] = "all", *, self_pairs: bool = True
    ) -> Float[Tensor, "N N"]:
        """``⟨M^ℓ_{μν}⟩`` over pairs of examples: all, of the "same" or "different" classes, or of two given classes.

        See :func:`gramscope.hierarchy.class_metric`; its eigenvalues are :func:`gramscope.hierarchy.metric_spectrum`.
        """
        weight = self.chain.weights[self._layer(layer, 0, self.depth - 1)]
        return class_metric(weight, self.slopes(layer + 1), labels, pairs, self_pairs=self_pairs)

    def predict_step(self, residual: Tensor, lr: float) -> "StepPrediction":
        """First-order changes of all fields under one gradient step; see :mod:`gramscope.hierarchy.step`."""
        from gramscope.hierarchy.step import predict_step

        return predict_step(self, residual, lr)

    def take_step(self, residual: Tensor, lr: float) -> "Fields":
        """The fields after the true step ``W ← W - η ∂loss/∂W``."""
        check_lr(lr)
        return self._of_chain(self.chain.stepped(*self.gradients(residual), lr), self.activations[0], self.single)

    def compare_step(self, residual: Tensor, lr: float) -> "StepComparison":
        """Prediction and truth of one step, with the error split into second order and mask flips."""
        from gramscope.hierarchy.step import compare_step

        return compare_step(self, residual, lr)

    def __repr__(self) -> str:
        widths = "-".join(map(str, self.widths))
        count = self.chain.readout.shape[0]
        return f"Fields of {self.n} examples, widths {widths}, {count} output{'s' if count > 1 else ''}"


def check_fields(fields: object) -> None:
    """Raise for a model, say, where its fields are meant."""
    if not isinstance(fields, Fields):
        raise InputError(
            f"fields must be Fields, got {type(fields).__name__}. Of a module they are "
            "gramscope.hierarchy.Fields.from_module(module, x)."
        )


def targets_like(fields: Fields, y: Tensor) -> Tensor:
    """Checked targets with the shape, dtype and device of the outputs."""
    check_fields(fields)
    target = check_tensor(y, "y").detach().to(fields.outputs)
    if target.shape != fields.outputs.shape:
        raise InputError(f"y must have shape {tuple(fields.outputs.shape)} like the outputs, got {tuple(y.shape)}.")
    check_finite(target, "y", "Clean the targets first.")
    return target


def squared_norms(weights: list[Tensor], biases: list[Tensor | None]) -> Float[Tensor, " L"]:
    """``|∂loss/∂W^ℓ|² + |∂loss/∂b^ℓ|² = eᵀ K^ℓ e`` for each layer."""
    return torch.stack(
        [w.square().sum() + (0 if b is None else b.square().sum()) for w, b in zip(weights, biases, strict=True)]
    )


@exact_arithmetic()
def _gram(signals: Float[Tensor, "n C N"]) -> Float[Tensor, "n C n C"]:
    flat = signals.flatten(0, 1)
    return (flat @ flat.T).unflatten(1, signals.shape[:2]).unflatten(0, signals.shape[:2])


def _checked_input(x: Tensor, chain: Chain) -> Float[Tensor, "n N_0"]:
    check_tensor(x, "x")
    width = chain.widths[0]
    if x.dim() != 2 or x.shape[1] != width:
        advice = "Add a batch axis." if x.dim() == 1 else "Flatten it to one row an example."
        raise InputError(f"x must have shape (n, {width}) to match the first layer, got {tuple(x.shape)}. {advice}")
    if len(x) == 0:
        raise InputError(f"x must have at least one example, got shape {tuple(x.shape)}. Pass a non-empty batch.")
    check_finite(x, "x", "Clean the data first.")
    check_one_device([("x", x)], chain.readout.device, "the weights")
    return x.detach().to(chain.readout.dtype)


def _compare(module: nn.Module, x: Tensor, fields: Fields) -> None:
    """The chain must be the module: every step was recognised, and this is the witness."""
    from gramscope.capture.network import evaluate, prepare_input, unwrap
    from gramscope.capture.side_effects import untouched

    model = unwrap(module)
    parameter = next(model.parameters())
    with untouched(model), exact_arithmetic(users={}), torch.no_grad():
        own = evaluate(model, prepare_input(x, parameter.dtype), len(x), None).to(fields.chain.readout.dtype)
    ours = fields.chain.read_out(fields.activations[-1])
    ours = ours if own.shape == ours.shape else fields.activations[-1]
    error = float((own - ours).norm()) if own.shape == ours.shape else float("inf")
    if error > WITNESS.get(parameter.dtype, 1e-3) * max(float(own.norm()), 1e-30):
        raise UnsupportedError(
            f"the module must be the chain that was read from it, but its output differs by {error:.2g}. {ADVICE}"
        )
