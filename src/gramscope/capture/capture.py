"""``capture``: one forward pass, one batched backward pass, every weight site."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_finite
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError
from gramscope.base.nested import tensors_in
from gramscope.base.streams import RandomStreams
from gramscope.capture import rowwise as _taped  # noqa: F401  (importing registers the ways back)
from gramscope.capture import rules as _registered  # noqa: F401  (importing registers the rules)
from gramscope.capture.coupling import depends_on_others
from gramscope.capture.forms import Outer
from gramscope.capture.linear_map import check_differentiable
from gramscope.capture.network import (
    Outputs,
    check_model,
    count_examples,
    evaluate,
    named_parameters,
)  # fmt: skip
from gramscope.capture.precision import Precision, at_precision, check_precision
from gramscope.capture.recorder import Recorder
from gramscope.capture.signals import Backward, Place
from gramscope.capture.sites import Site, Snapshot
from gramscope.capture.surroundings import plain_execution, untouched

Coupled = Literal["refuse", "exact"]
Directions = Tensor | Callable[[Tensor], Tensor] | None


def capture(
    model: nn.Module,
    x: Any,
    *,
    outputs: Outputs = None,
    directions: Directions = None,
    frozen: bool = False,
    coupled: Coupled = "refuse",
    precision: Precision = None,
) -> Snapshot:
    """Inputs and backward signals of every weight site of ``model`` on the examples ``x``.

    For a site ``u = W v`` the snapshot holds v and ``s = ∂f/∂u``, from which ``∂f/∂W = Σ s ⊗ v`` and every Gram matrix
    of the network follow. The model, its gradients, buffers and flags and all random streams are left as they were.

    Args:
        model: any module; compiled and data-parallel wrappers are opened.
        x: a tensor with examples first, a tuple of positional arguments, or a dict of keyword arguments.
        outputs: columns of the flattened output, or a function of (model, x) that returns (n, ...).
        directions: cotangents (k, n, C), or a loss of the outputs (one direction, its gradient). All outputs if None.
        frozen: count parameters with requires_grad=False too.
        coupled: what to do if one example's output depends on another's: refuse, or exact plain autograd.
        precision: "float64" or "float32" runs a copy in that dtype if the model has another; "tf32" allows TF32 on the
            GPU. The model's own dtype if None.

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> print(gs.capture(model, torch.ones(5, 3)))
        Snapshot of 5 examples, 2 directions
          0.weight (4x3): linear
          0.bias (4): bias
          2.weight (2x4): linear
          2.bias (2): bias
    """
    _check_options(coupled, precision)
    with _watched_forward(model, x, outputs, frozen, coupled, precision) as watched:
        backward = watched.backward(directions)
        return watched.snapshot(backward.sites(), len(backward.cotangents))


@dataclass(frozen=True)
class Survey:
    """What a capture would hold: number of outputs, and signal entries of one example and one direction.

    ``largest`` is the largest single site; ``crowded`` says that some site has more positions than inputs.
    """

    outputs: int
    entries: int
    largest: int
    crowded: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class ByExample:
    """A forward pass of which some examples at a time can be taken backward, where ``apart``."""

    watched: "_Watched"
    backward: Backward

    @property
    def apart(self) -> bool:
        """The network treats every example by itself, and does nothing that the tape does not know."""
        return self.backward.by_example()

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        return self.watched.f.detach()

    @property
    def used_once(self) -> set[str]:
        """Names of the parameters that the network used in one place only."""
        return self.backward.used_once()

    def sites(self, part: slice) -> Iterator[tuple[Place, Site]]:
        """Sites of the examples ``part``, each with its place among the sites, the last of the network first.

        A site's signals are in memory that the next one may use: take what is needed before going on.
        """
        return self.backward.taped_sites(part, copied=True)

    def snapshot(self, sites: list[Site]) -> Snapshot:
        """The snapshot of all examples, of sites that were put together from parts, in order of their places."""
        return self.watched.snapshot(sites, len(self.backward.cotangents))

    def whole(self) -> Snapshot:
        """The snapshot of all examples at once, whether ``apart`` or not."""
        return self.snapshot(self.backward.sites())

    def survey(self) -> Survey:
        return self.watched.survey()


@contextmanager
def captured_by_example(
    model: nn.Module, x: Any, *, outputs: Outputs = None, frozen: bool = False, coupled: Coupled = "refuse",
    precision: Precision = None,
) -> Iterator[ByExample]:  # fmt: skip
    """Some examples at a time, all from one forward pass, while the context lasts (see ``gramscope.capture.tape``)."""
    _check_options(coupled, precision)
    with _watched_forward(model, x, outputs, frozen, coupled, precision) as watched:
        backward = watched.backward(None)
        yield ByExample(watched, backward)


@dataclass(frozen=True)
class _Watched:
    """A recorded forward pass: its outputs (n, C) and all that a backward pass needs."""

    f: Tensor
    recorder: Recorder
    parameters: dict[str, nn.Parameter]
    every: dict[str, nn.Parameter]

    def backward(self, directions: Directions) -> Backward:
        return Backward(self.f, _cotangents(self.f, directions), self.parameters, self.recorder)

    def survey(self) -> Survey:
        n, width = self.f.shape
        uses = self.recorder.uses
        sizes = {(use.edge.node, use.edge.output_nr): use.entries for use in uses}
        crowded = any(isinstance(use.form, Outer) and use.entries / n > use.weight.tensor.numel() for use in uses)
        largest = max(sizes.values(), default=0)
        return Survey(width, math.ceil(sum(sizes.values()) / n), math.ceil(largest / n), crowded, self.f.dtype)

    def snapshot(self, sites: list[Site], directions: int) -> Snapshot:
        used = {site.name for site in sites}
        return Snapshot(
            sites=tuple(sites),
            outputs=self.f.detach(),
            directions=directions,
            parameters={name: real_view(parameter).shape for name, parameter in self.parameters.items()},
            frozen=tuple(name for name in self.every if name not in self.parameters),
            fallback=tuple(dict.fromkeys(site.name for site in sites if site.rule == "autograd")),
            unreached=tuple(name for name in self.parameters if name not in used),
        )


def survey(
    model: nn.Module, x: Any, *, outputs: Outputs = None, frozen: bool = False, precision: Precision = None
) -> Survey:
    """The size of a capture of ``x``, from a forward pass alone."""
    with _watched_forward(model, x, outputs, frozen, "refuse", precision, taped=False) as watched:
        return watched.survey()


def outputs_of(
    model: nn.Module, x: Any, *, outputs: Outputs = None, frozen: bool = False, precision: Precision = None
) -> Float[Tensor, "n C"]:
    """The outputs alone, from the random state that a capture starts from."""
    model, x = at_precision(model, x, precision)
    # With gradients, because the outputs may themselves be derivatives (a PDE residual).
    with untouched(model), exact_arithmetic(tf32=precision == "tf32"), plain_execution():
        return evaluate(model, x, count_examples(x), outputs).detach()


@contextmanager
def _watched_forward(
    model: nn.Module, x: Any, outputs: Outputs, frozen: bool, coupled: Coupled, precision: Precision, taped: bool = True
) -> Iterator[_Watched]:
    """A recorded forward pass; everything is put back after."""
    n, given = count_examples(x), x
    model, x = at_precision(model, x, precision)
    with untouched(model, throughout=False) as written, exact_arithmetic(tf32=precision == "tf32"), plain_execution():
        parameters = check_model(model, x, frozen)
        for parameter in parameters.values():
            parameter.requires_grad_()
        # Complex parameters are left to plain autograd.
        real = {name: p for name, p in parameters.items() if not p.is_complex()}
        recorder = Recorder(real, n, refuse_coupled=coupled == "refuse", tf32=precision == "tf32")
        recorder.hint = _unequal_lengths(x)
        recorder.mark_data(x)
        for tensor in tensors_in(x) if taped else ():
            recorder.tape.begin(tensor)
        streams = RandomStreams()
        with recorder, written:  # in this order: what the recorder asks of tensors need not pass the other
            f = evaluate(model, x, n, outputs)
        _check_outputs(f, parameters)

        def run(x: Any) -> Tensor:
            streams.rewind()
            with written:
                return evaluate(model, x, n, outputs).detach()

        def is_coupled() -> bool:
            # Tensors of unequal lengths leave open which of them hold the examples.
            return bool(recorder.hint) or depends_on_others(run, at_precision(model, given, precision)[1], f.detach())

        recorder.is_coupled = is_coupled
        yield _Watched(f, recorder, parameters, named_parameters(model))


def _unequal_lengths(x: Any) -> str:
    lengths = list(dict.fromkeys(len(t) for t in tensors_in(x) if t.dim()))
    if len(lengths) < 2:
        return ""
    return f" The tensors of x have unequal lengths {lengths} on axis 0, where the examples should be."


def _check_options(coupled: str, precision: str | None) -> None:
    if coupled not in ("refuse", "exact"):
        raise InputError(f'coupled must be "refuse" or "exact", got {coupled!r}.')
    check_precision(precision)


def _check_outputs(f: Tensor, parameters: dict[str, nn.Parameter]) -> None:
    if not bool(torch.isfinite(f).all()):
        for name, parameter in parameters.items():
            check_finite(parameter, f"parameter {name!r}", "The run has diverged: load an earlier checkpoint.")
        check_finite(f, "the model's output", "Its parameters are finite: look for NaN in x, or for overflow.")
    if not f.requires_grad:
        raise InputError(
            "the model's output must depend on a measured parameter, but it carries no gradient. Is its forward pass "
            "under torch.no_grad() or detached, or do its parameters not enter?"
        )
    check_differentiable(f)


def _cotangents(f: Float[Tensor, "n C"], directions: Directions) -> Float[Tensor, "k n C"]:
    n, width = f.shape
    if directions is None:
        return torch.eye(width, dtype=f.dtype, device=f.device)[:, None, :].expand(width, n, width)
    if callable(directions):
        values = f.detach().requires_grad_()
        loss = directions(values)
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
            raise InputError("a loss given as directions must return one differentiable number for outputs (n, C).")
        return torch.autograd.grad(loss, values)[0][None]
    if directions.shape[1:] != f.shape:
        raise InputError(
            f"directions must have shape (k, {n}, {width}) to match the outputs, got {tuple(directions.shape)}."
        )
    return directions.detach().to(f)
