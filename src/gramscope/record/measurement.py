"""One measurement of training: what the measures see, computed once and shared."""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.capture.backward_graph import UNLIMITED
from gramscope.capture.capturing import Opened, opened, outputs_of
from gramscope.capture.network import count_examples, named_parameters
from gramscope.diagnose.divergence import speaks_of_finite
from gramscope.kernels.empirical_ntk import kernel_of_pass
from gramscope.kernels.projected import ProjectedTrace, mean_and_error
from gramscope.measures.norms import norms
from gramscope.record.along_loss import AlongLoss, plain_squares, pull_back, sample_positions
from gramscope.record.condensed import Condensed, has_many_outputs, loss_and_residual, make_signs, mixing, precision_of
from gramscope.record.probe_pass import PlainPass, plain_pass
from gramscope.record.signals import LastInput, SignalWatch, share_in_training
from gramscope.record.subject import Memory, Subject, evaluating, layer_of, layers_by_id

SIGNALS = 2**28  # bytes of signals that are held at once, where outputs are very many
# Examples times mixtures up to which one kernel of all mixtures is cheaper than one for each: half the operations for
# two, and its products between mixtures, which are not needed, are small.
ROWS_TOGETHER = 32
OUTPUT_ROWS = 512  # positions at most, of which outputs are looked at


@dataclass(eq=False)
class Measurement:
    """The model as it stands. Measures ask for what they need; all share one forward pass, in evaluation mode.

    A context manager: the pass stays open inside, for backward passes. With few outputs an example the kernel goes back
    along each of them; with very many, along a few random mixtures (see :class:`gramscope.record.condensed.Condensed`).
    Where labels belong to positions, only the first measurement and the kernel need the weight sites: everything else
    comes from a plain pass of the loss (``plain``), and the kernel from a forward pass of its own.
    """

    subject: Subject
    step: int
    memory: Memory = field(default_factory=Memory)
    share_in_training: float | None = None  # as the loop left the flags, before this pass sets its own
    overflow: Exception | None = None  # why the shared pass gave no finite numbers: no other pass will
    _inside: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> "Measurement":
        self.share_in_training = share_in_training(self.subject.model)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Make the shared pass. An error is left to the measures, which meet it again and say so."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _ = self.along_loss
            except Exception as error:
                self.overflow = error if speaks_of_finite(str(error)) else None

    def close(self) -> None:
        """Let go of the forward pass and its outputs; the model's own modes are back."""
        self._inside.close()
        for name in ("network", "condensed", "loss_and_residual", "_units"):
            vars(self).pop(name, None)

    @cached_property
    def plain(self) -> PlainPass | None:
        """The plain pass of the loss; None where the weight sites must tell what it would."""
        y, places, last = self.subject.y, self.sampled_positions, self.memory.last
        if y is None or places is None or last is None:
            return None
        return plain_pass(self.subject, y, last, places, OUTPUT_ROWS, self._units)

    @cached_property
    def condensed(self) -> Condensed | None:
        """What stands for very many outputs; the mixtures alone, where a plain pass has the loss."""
        subject, memory = self.subject, self.memory
        if not has_many_outputs(subject.objective):
            return None
        if memory.signs is None:
            memory.signs = make_signs(subject.objective, next(subject.model.parameters()).device)
        places = None if self.sampled_positions is None else self.sampled_positions[:OUTPUT_ROWS]
        y = subject.y if self.plain is None else None
        return Condensed(subject.objective, y, subject.outputs, memory.signs, places)

    @cached_property
    def network(self) -> Opened:
        """The forward pass whose weight sites are known."""
        subject, few = self.subject, self.condensed
        with ExitStack() as stack:
            stack.enter_context(evaluating(subject.model))
            made = stack.enter_context(
                opened(
                    subject.model,
                    subject.x,
                    outputs=few or subject.outputs,
                    room=self._room,
                    large=few is not None,
                    precision=None if few is None else precision_of(subject.model),
                    known=self.memory.sites,
                    watch=self._units if self.plain is None else None,
                )
            )
            self._inside = stack.pop_all()
        return made

    @property
    def units(self) -> SignalWatch:
        """Which ReLU units the forward pass turned on, and how large its signals were."""
        if self.plain is None:
            _ = self.network
        return self._units

    @cached_property
    def _units(self) -> SignalWatch:
        layers, n = layers_by_id(self.subject.model), count_examples(self.subject.x)
        last = None if self.sampled_positions is None else LastInput(self.subject.objective, n)
        return SignalWatch(layers, n, gates=self.memory.at_start, last=last)

    @property
    def f(self) -> Float[Tensor, "n C"]:
        """The outputs. Very many are not kept: each time that they are asked for costs a forward pass."""
        if not has_many_outputs(self.subject.objective):
            return self.network.f.detach()
        with evaluating(self.subject.model):
            return outputs_of(self.subject.model, self.subject.x, outputs=self.subject.outputs)

    @property
    def labels_or_values(self) -> Tensor:
        if self.subject.y is None:
            raise InputError("this measure needs targets: pass probe=(x, y).")
        return self.subject.y

    @property
    def loss(self) -> float:
        """The loss on the probe."""
        _ = self.labels_or_values
        return self.loss_and_residual[0] if self.plain is None else self.plain.loss

    @cached_property
    def loss_and_residual(self) -> tuple[float, Float[Tensor, "n C"]]:
        """The loss and its gradient at the outputs."""
        y, few = self.labels_or_values, self.condensed
        if few is None:
            return loss_and_residual(self.subject.objective, self.f, y)
        _ = self.network
        if few.failure is not None:
            raise few.failure
        assert few.residual is not None
        return few.value, few.residual

    @property
    def accuracy(self) -> float | None:
        """Share of labels that are met; None where there are none."""
        if self.plain is not None:
            return self.plain.accuracy
        _, few = self.loss_and_residual, self.condensed
        if few is not None:
            return few.accuracy
        return self.subject.objective.accuracy(self.f, self.labels_or_values.to(self.f.device))

    @cached_property
    def along_loss(self) -> AlongLoss:
        """One backward pass of the loss (of the sum of the outputs, where there is none)."""
        if self.plain is not None:
            return self.plain.along
        network, places = self.network, self.sampled_positions
        if self.condensed is not None:
            direction = network.cotangents(some=slice(1))
        elif self.subject.y is None:
            direction = torch.ones_like(network.f)[None]
        else:
            direction = self.loss_and_residual[1][None]
        if not self.memory.coupled:
            try:
                found = pull_back(network, direction, self.subject.objective, places, self._room)
            except CoupledExamplesError:
                self.memory.coupled = True
        if self.memory.coupled:
            return AlongLoss(plain_squares(network.f, network.parameters, direction[0], retain_graph=True))
        if self.condensed is not None and places is not None and found.last is not None:
            noted = self._units.last
            same = noted is not None and noted.agrees(found.features.get(found.last), places)
            self.memory.last = found.last if same else None
        return found

    def _check_uncoupled(self) -> None:
        """Kernels and features are of single examples; losses and gradients are not."""
        _ = self.along_loss
        if self.memory.coupled:
            raise CoupledExamplesError(
                "each example's outputs must depend on that example alone for this measure, but here they depend on "
                "other examples of the probe (neighbours in a graph, or statistics of the batch)."
            )

    @property
    def _room(self) -> int:
        return SIGNALS if has_many_outputs(self.subject.objective) else UNLIMITED

    @cached_property
    def sampled_positions(self) -> Int64[Tensor, " rows"] | None:
        """Where labels belong to positions: which of all (example, position) are looked at."""
        y, objective = self.subject.y, self.subject.objective
        return None if y is None or not objective.by_position else sample_positions(y)

    @cached_property
    def kernel(self) -> Float[Tensor, "n n"]:
        """The tangent kernel, traced over outputs; an estimate where they are very many."""
        self._check_uncoupled()
        if self.condensed is None:
            return kernel_of_pass(self.network, self.network.cotangents())
        return self.estimate.kernel

    @cached_property
    def estimate(self) -> ProjectedTrace:
        """The kernel of random mixtures of very many outputs, with its standard error."""
        network, mixtures = self.network, mixing(self.subject.objective)
        k = mixtures.k
        if k * len(network.f) <= ROWS_TOGETHER:
            whole = kernel_of_pass(network, network.cotangents(some=slice(1, 1 + k)), "none", SIGNALS)
            return mean_and_error(iter(k * torch.einsum("njmj->jnm", whole)), mixtures)
        one_each = (network.cotangents(some=slice(j, j + 1)) for j in range(1, 1 + k))
        return mean_and_error((k * kernel_of_pass(network, one, room=SIGNALS) for one in one_each), mixtures)

    @cached_property
    def weight_norms(self) -> dict[str, float]:
        """Norm of every parameter."""
        named = named_parameters(self.subject.model)
        return norms({name: p for name, p in named.items() if p.is_floating_point()})

    @property
    def features(self) -> dict[str, Float[Tensor, "rows d"]]:
        """What each weight is given, by parameter name; see :class:`gramscope.record.along_loss.AlongLoss`."""
        self._check_uncoupled()
        return {name: v for name, v in self.along_loss.features.items() if self.subject.layers(layer_of(name))}

    @property
    def last(self) -> str | None:
        """The last weight that makes the outputs; None where none makes one row of them for each example (or label)."""
        self._check_uncoupled()
        return self.along_loss.last

    @cached_property
    def targets(self) -> Float[Tensor, "rows C"]:
        """Targets as rows: one-hot for classes; at the sampled positions, of the classes that are there."""
        y = self.labels_or_values
        if self.sampled_positions is None:
            return self.subject.targets
        _, labels = y.reshape(-1)[self.sampled_positions.to(y.device)].unique(return_inverse=True)
        return torch.nn.functional.one_hot(labels).double().to(next(self.subject.model.parameters()).device)

    @property
    def output_rows(self) -> Float[Tensor, "rows C"]:
        """The outputs that belong to the first rows of ``targets`` and ``features``; of a few hundred positions."""
        if self.plain is not None:
            return self.plain.output_rows
        _, few, places = self.network, self.condensed, self.sampled_positions
        if few is not None:
            assert few.rows is not None
            return few.rows
        return (
            self.f
            if places is None
            else self.subject.objective.by_class(self.f)[places[:OUTPUT_ROWS].to(self.f.device)]
        )
