"""The reduced state (Q, G, M) of a fixed-readout ReLU network, and its equations of motion (arXiv:2606.09744, prop. 3).

The residuals move by overlaps alone, ``Δe = -η K e`` with ``K = Σ_ℓ Q^{ℓ-1} ∘ G^ℓ`` (eqs. 171 to 175, 202). The state
that the paper names ``{Q, G, M}`` (eqs. 3, 203) is no autonomous one: "the elementary transports remain the
non-eliminated carriers of the internal dynamics". What can be eliminated for good is the first weight: in the field
``h^1`` its step is ``h^1_μ ← h^1_μ - η Σ_ν Q^0_{μν} b^1_ν e_ν``, which needs the input overlap only. With the
transports ``W^2..W^L`` carried along, every step is then exact, for any η and whatever the masks do. One hidden layer
has no transports and closes.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_count, check_lr
from gramscope.base.errors import InputError
from gramscope.base.progress_bar import progress
from gramscope.base.results import TableResult
from gramscope.hierarchy.chain import Chain
from gramscope.hierarchy.fields import Fields, targets_like
from gramscope.hierarchy.trajectory import relative_size


@dataclass(frozen=True, eq=False)
class ReducedState:
    """Residual, activation overlaps Q, correlators G and pullback metrics M of a network, without its first weight.

    Build it with :meth:`of`. What is carried: ``input_overlap`` Q^0 (n, n) and ``drive_overlap``, the same plus 1 where
    the first layer has a bias; ``field`` h^1 (n, N_1); ``transports``, the layers 2..L with the readout; ``targets``.
    Everything else is derived:

    - ``residual`` e = f - y and ``outputs`` f, (n,) or (n, C)
    - ``overlap(ℓ)`` Q^ℓ (n, n), ℓ = 0..L; ``correlator(ℓ)`` G^ℓ, (n, n) or (n, C, n, C), ℓ = 1..L
    - ``metric(ℓ, μ, ν)`` M^ℓ_{μν} (N_ℓ, N_ℓ), ℓ = 1..L-1
    - ``kernel()`` K = Σ_ℓ Q^{ℓ-1} ∘ G^ℓ

    Reference: arXiv:2606.09744, proposition 3, eqs. 3, 202 and 203.

    Example:
        >>> import gramscope as gs
        >>> w, x = [torch.eye(2, dtype=torch.float64)] * 2, torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)
        >>> fields = gs.hierarchy.Fields(w, x)
        >>> state = ReducedState.of(fields, torch.zeros(2, dtype=torch.float64))
        >>> torch.equal(state.kernel(), fields.kernel())
        True
        >>> true = fields.take_step(fields.outputs, lr=0.1)
        >>> torch.allclose(state.stepped(0.1).outputs, true.outputs)
        True
    """

    input_overlap: Float[Tensor, "n n"]
    drive_overlap: Float[Tensor, "n n"]
    field: Float[Tensor, "n N_1"]
    slope: float
    transports: Chain
    targets: Float[Tensor, "n C"]
    single: bool

    @classmethod
    def of(cls, fields: Fields, y: Tensor) -> "ReducedState":
        """The reduced state of a network on its examples with targets ``y``, (n,) or (n, C) as the outputs."""
        targets = targets_like(fields, y).reshape(len(y), -1)
        chain, first = fields.chain, fields.preactivations[1]
        assert first is not None
        above = replace(
            chain, weights=chain.weights[1:], biases=chain.biases[1:], negative_slopes=chain.negative_slopes[1:]
        )
        overlaps = fields.overlap(0), fields.drive_overlap(1)
        return cls(*overlaps, first, chain.negative_slopes[0], above, targets, fields.single)

    @property
    def depth(self) -> int:
        return 1 + self.transports.depth

    @cached_property
    def _first_slopes(self) -> Float[Tensor, "n N_1"]:
        on = (self.field > 0).to(self.field)
        return on + self.slope * (1 - on)

    @cached_property
    def _above(self) -> Fields:
        """The layers 2..L as a network of their own, which reads x^1; for L = 1 the readout alone."""
        return Fields._of_chain(self.transports, self._first_slopes * self.field, self.single)

    @cached_property
    def _first_signals(self) -> Float[Tensor, "n C N_1"]:
        """``b^1 = D^1 g^1``."""
        return self._first_slopes[:, None] * self._above._conjugates[0]

    @property
    def outputs(self) -> Tensor:
        return self._above.outputs

    @property
    def residual(self) -> Tensor:
        return self.outputs - (self.targets[:, 0] if self.single else self.targets)

    def overlap(self, layer: int) -> Float[Tensor, "n n"]:
        """Activation overlap ``Q^ℓ_{μν} = x^ℓ_μ · x^ℓ_ν``, ℓ = 0..L (eq. 155)."""
        return self._above.overlap(layer - 1) if check_count(layer, "layer", 0, self.depth) else self.input_overlap

    @exact_arithmetic()
    def correlator(self, layer: int) -> Tensor:
        """Conjugate correlator ``G^ℓ_{μν} = b^ℓ_μ · b^ℓ_ν``, ℓ = 1..L (eq. 160)."""
        if check_count(layer, "layer", 1, self.depth) > 1:
            return self._above.correlator(layer - 1)
        b = self._first_signals
        gram = torch.einsum("nci,mdi->ncmd", b, b)
        return gram[:, 0, :, 0] if self.single else gram

    def metric(self, layer: int, mu: int, nu: int) -> Float[Tensor, "N N"]:
        """The pullback Gram metric ``M^ℓ_{μν} = W^{ℓ+1,T} P^{ℓ+1}_{μν} W^{ℓ+1}``, ℓ = 1..L-1 (eq. 165)."""
        if self.depth == 1:
            raise InputError("a network of one hidden layer has no pullback metric: no trained layer lies above it.")
        return self._above.metric(check_count(layer, "layer", 1, self.depth - 1) - 1, mu, nu)

    def kernel(self) -> Tensor:
        """``K = Σ_ℓ Q^{ℓ-1} ∘ G^ℓ`` (eqs. 171 to 175), with ``Q + 1`` where a layer has a bias."""
        first = self.drive_overlap if self.single else self.drive_overlap[:, None, :, None]
        return torch.stack([first * self.correlator(1), *self._above.kernels()]).sum(0)

    def residual_step(self, lr: float) -> Tensor:
        """``Δe = -η K e``, the residual-level equation (eq. 171): first order in η, exact for L = 1 without flips."""
        check_lr(lr)
        e = self.residual
        return -lr * (self.kernel().reshape(e.numel(), -1) @ e.flatten()).reshape(e.shape)

    @exact_arithmetic()
    def stepped(self, lr: float) -> "ReducedState":
        """The state after one gradient step on ``½ Σ e²``; exact for any η, mask flips included.

        ``h^1_μ ← h^1_μ - η Σ_ν Q^0_{μν} b^1_ν e_ν`` and, with L > 1, ``W^ℓ ← W^ℓ - η Σ_ν e_ν b^ℓ_ν x^{ℓ-1}_νᵀ``.
        """
        check_lr(lr)
        e = self.residual
        pulled = torch.einsum("nc,nci->ni", e[:, None] if self.single else e, self._first_signals)
        above = self.transports.stepped(*self._above.gradients(e), lr)
        return replace(self, field=self.field - lr * (self.drive_overlap @ pulled), transports=above)

    def __repr__(self) -> str:
        carried = self.transports.depth
        kept = "closed: no weight is carried" if not carried else f"{carried} of {carried + 1} weights are carried"
        return f"ReducedState of {len(self.field)} examples, {self.depth} hidden layers; {kept}"


@dataclass(frozen=True, eq=False, repr=False)
class ReducedComparison(
    TableResult, shown=("largest", "residual", "overlaps"), columns=("residual", "overlap", "correlator")
):
    """A reduced state and weight-space training side by side, at steps 0..S.

    Relative differences ``|ours - true| / |true|``: ``residual`` (S+1,), ``overlaps`` and ``correlators`` (S+1, L) for
    Q^1..Q^L and G^1..G^L.
    """

    residual: Float[Tensor, " steps"]
    overlaps: Float[Tensor, "steps L"]
    correlators: Float[Tensor, "steps L"]
    state: ReducedState

    @property
    def overlap(self) -> Float[Tensor, " steps"]:
        """The largest difference of Q^1..Q^L at each step."""
        return self.overlaps.amax(1)

    @property
    def correlator(self) -> Float[Tensor, " steps"]:
        """The largest difference of G^1..G^L at each step."""
        return self.correlators.amax(1)

    @property
    def largest(self) -> float:
        """The largest difference of any of them at any step: rounding, if the equations hold."""
        return max(float(t.max()) for t in (self.residual, self.overlaps, self.correlators))


def compare_reduced(fields: Fields, y: Tensor, lr: float, steps: int) -> ReducedComparison:
    """Train by the equations of the reduced state and in weight space, from one start, and compare the two.

    Args:
        fields: the network on its examples.
        y: targets, of the outputs' shape; the loss is ``½ Σ (f - y)²``.
        lr, steps: of full-batch gradient descent.

    Reference: arXiv:2606.09744, proposition 3. The first-order equations of the paper, which drift, are
    :func:`gramscope.hierarchy.predict_trajectory`.

    Example:
        >>> import gramscope as gs
        >>> rng = torch.Generator().manual_seed(0)
        >>> w = [torch.randn(5, 3, generator=rng).double(), torch.randn(4, 5, generator=rng).double()]
        >>> x, y = torch.randn(6, 3, generator=rng).double(), torch.randn(6, generator=rng).double()
        >>> compare_reduced(gs.hierarchy.Fields(w, x), y, lr=0.1, steps=20).largest < 1e-10
        True
    """
    check_lr(lr)
    check_count(steps, "steps")
    targets = targets_like(fields, y)
    state, true = ReducedState.of(fields, y), fields
    rows = [_differences(state, true, targets)]
    with progress("steps of the reduced state", steps) as advance:
        for _ in range(steps):
            state, true = state.stepped(lr), true.take_step(true.outputs - targets, lr)
            rows.append(_differences(state, true, targets))
            advance()
    residual, overlaps, correlators = (torch.stack(column) for column in zip(*rows, strict=True))
    return ReducedComparison(residual, overlaps, correlators, state)


def _differences(state: ReducedState, true: Fields, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layers, residual = range(1, state.depth + 1), true.outputs - targets
    overlaps = [(state.overlap(layer), true.overlap(layer)) for layer in layers]
    correlators = [(state.correlator(layer), true.correlator(layer)) for layer in layers]
    return (
        relative_size(state.residual - residual, residual),
        torch.stack([relative_size(ours - theirs, theirs) for ours, theirs in overlaps]),
        torch.stack([relative_size(ours - theirs, theirs) for ours, theirs in correlators]),
    )
