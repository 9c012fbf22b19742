"""``capture``: one forward pass, backward passes that stop at the weights, every weight site."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_choice, check_finite
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import CoupledExamplesError, InputError
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.backward_graph import UNLIMITED, BackwardGraph, check_differentiable
from gramscope.capture.known_sites import KnownSites
from gramscope.capture.network import (
    Outputs,
    Precision,
    at_precision,
    check_model,
    check_precision,
    count_examples,
    depends_on_others,
    evaluate,
    loss_gradient,
    named_parameters,
)
from gramscope.capture.node_rules import BY_EXAMPLE
from gramscope.capture.side_effects import open_recurrences, plain_execution, unscale_tables, untouched
from gramscope.capture.sites import OuterSite, Site, Snapshot
from gramscope.capture.weight_sites import WeightSites
from gramscope.capture.working_set import gradient_bytes, working_bytes

Coupled = Literal["refuse", "exact"]
Directions = Tensor | Callable[[Tensor], Tensor] | None


class ForwardOptions(TypedDict):
    """Which outputs of which parameters a forward pass is made for, and in what precision; see :func:`capture`."""

    outputs: Outputs
    frozen: bool
    precision: Precision


def capture(
    model: nn.Module,
    x: ModelInput,
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
    with opened(model, x, outputs=outputs, frozen=frozen, coupled=coupled, precision=precision) as network:
        return network.snapshot(network.cotangents(directions))


@dataclass(frozen=True, eq=False)
class Opened:
    """A forward pass of a network: its outputs (n, C), from which backward passes may be made.

    ``room`` bytes of signals are held at once while the sites are sought; where they are ``known``, nothing is sought.
    ``hooked``: tensors carry hooks.
    """

    f: Tensor
    parameters: dict[str, nn.Parameter]
    frozen: tuple[str, ...]
    refuse_mixing: Callable[[Sequence[str]], None]
    room: int
    hooked: bool
    known: KnownSites | None = None

    @cached_property
    def weight_sites(self) -> WeightSites:
        graph = BackwardGraph(self.f, self.parameters, whole=self.hooked)
        recalled = None if self.known is None else self.known.recall(graph)
        found = WeightSites(graph, self.refuse_mixing, self.room, recalled)
        if self.known is not None and recalled is None:
            found.keep_in(self.known)
        return found

    def sites(self, cotangents: Float[Tensor, "k n C"], room: int = UNLIMITED) -> Iterator[dict[str, tuple[Site, ...]]]:
        """All sites of some parameters at a time, the last of the network first."""
        return self.weight_sites.sites(cotangents, room)

    def cotangents(self, directions: Directions = None, some: slice = slice(None)) -> Float[Tensor, "k n C"]:
        """One-hot for ``some`` of the outputs, or as given."""
        return unit_cotangents(self.f, some) if directions is None else _given_cotangents(self.f, directions)

    def snapshot(self, cotangents: Float[Tensor, "k n C"]) -> Snapshot:
        groups = [site for group in self.sites(cotangents) for sites in group.values() for site in reversed(sites)]
        sites = tuple(reversed(groups))
        used = {site.name for site in sites}
        return Snapshot(
            sites=sites,
            outputs=self.f.detach(),
            directions=len(cotangents),
            parameters={name: real_view(parameter).shape for name, parameter in self.parameters.items()},
            frozen=self.frozen,
            fallback=tuple(dict.fromkeys(site.name for site in sites if site.rule == BY_EXAMPLE)),
            unreached=tuple(name for name in self.parameters if name not in used),
        )


@contextmanager
def opened(
    model: nn.Module, x: ModelInput, *, outputs: Outputs = None, frozen: bool = False, coupled: Coupled = "refuse",
    precision: Precision = None, room: int = UNLIMITED, large: bool = False,
    watch: AbstractContextManager[object] | None = None, known: KnownSites | None = None,
) -> Iterator[Opened]:  # fmt: skip
    """A forward pass, made inside ``watch``, and backward passes from it; everything is put back at the end.

    ``large`` passes may use fused attention, whose backward pass takes one direction at a time. ``known`` are the sites
    of earlier passes of the same examples, or of a few of them: they are sought once.
    """
    check_choice(coupled, "coupled", ("refuse", "exact"))
    check_precision(precision)
    n, given = count_examples(x), x
    model, x = at_precision(model, x, precision)
    with (
        untouched(model, throughout=False) as written,
        exact_arithmetic(tf32=precision == "tf32"),
        plain_execution(fused_attention=large),
        open_recurrences(model),
    ):
        parameters = check_model(model, x, frozen)
        for parameter in parameters.values():
            parameter.requires_grad_()
        unscale_tables(model)
        with written, watch or nullcontext():
            f = evaluate(model, x, n, outputs)
        check_outputs(f, parameters)

        def run(x: ModelInput) -> Tensor:
            written.streams.rewind()
            with untouched(model):
                return evaluate(model, x, n, outputs).detach()

        def refuse_mixing(names: Sequence[str]) -> None:
            batch = at_precision(model, given, precision)[1]
            # A model may change at every call (spectral norm): then the outputs of a second call decide.
            if coupled == "exact" or not (
                depends_on_others(run, batch, f.detach()) and depends_on_others(run, batch, run(batch))
            ):
                return
            raise CoupledExamplesError(
                "each example's output must depend on that example alone, but the signals at "
                f"{names[0]!r} mix the {n} examples. Put layers that mix a batch into eval mode, or pass "
                'coupled="exact" for the kernel of the coupled outputs.' + _unequal_lengths(x) + _training_norms(model)
            )

        every = named_parameters(model)
        left_out = tuple(name for name in every if name not in parameters)
        yield Opened(f, parameters, left_out, refuse_mixing, room, written.hooked, known)


@dataclass(frozen=True)
class Survey:
    """What a pass takes, in bytes for an example: its forward pass and its largest tensor; number of outputs.

    For each direction: ``working`` is what the backward pass holds at once, cut as finely as it can be, ``signals``
    what all sites hold. ``unsure`` is the same as ``working`` and ``largest`` for the signals of sites that passes of
    more examples confirm. ``outer`` are sites of which gradient rows may be formed: (T, g, i, o), and whether their
    inputs are made anew (the patches of a convolution). ``known`` are the sites, for passes of more examples.
    ``fused``: attention ran as one operation, whose backward pass takes one direction at a time.
    """

    outputs: int
    held: int
    largest: int
    working: int
    signals: int
    unsure: tuple[int, ...]
    outer: tuple[tuple[int, int, int, int, bool], ...]
    known: KnownSites
    dtype: torch.dtype
    fused: bool


def survey(model: nn.Module, x: ModelInput, *, large: bool = False, **options: Unpack[ForwardOptions]) -> Survey:
    """The size of a pass of ``x``, by what autograd keeps of it and by its backward graph."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that its own node keeps as it is would never be freed

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with opened(model, x, **options, large=large, watch=hooks) as network:
        weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters.values()}
        kept[network.f.untyped_storage().data_ptr()] = network.f.untyped_storage().nbytes()
        sizes = [size for place, size in kept.items() if place not in weights]
        held = sum(sizes) + 2 * sum(tensor.nbytes for tensor in tensors_in(x))  # x is joined, and copied
        n, width = network.f.shape
        found, known = network.weight_sites, KnownSites()
        doubtful = found.keep_in(known, few=True)
        confirmed = working_bytes(found.graph, doubtful, ()), max(map(gradient_bytes, doubtful), default=0)
        working = working_bytes(found.graph, found.edges, found.waiting)
        signals = sum(map(gradient_bytes, found.edges))
        outer = set()
        for group in network.sites(network.cotangents(some=slice(0, 1))):
            for site in chain.from_iterable(group.values()):
                if isinstance(site, OuterSite):
                    anew = site.inputs_of(slice(0, 1)).untyped_storage().data_ptr() not in kept
                    outer.add((site.positions, site.groups, site.fan_in, site.fan_out, anew))
        taken = (held, max(sizes), working, signals, *confirmed)
        held, largest, working, signals, *unsure = (math.ceil(size / n) for size in taken)
        places = tuple(sorted(outer))
        fused = any("ScaledDotProduct" in node.name() for node in found.graph.nodes)
        return Survey(width, held, largest, working, signals, tuple(unsure), places, known, network.f.dtype, fused)


def outputs_of(
    model: nn.Module, x: ModelInput, *, outputs: Outputs = None, frozen: bool = False, precision: Precision = None,
    graph: bool = False,
) -> Float[Tensor, "n C"]:  # fmt: skip
    """The outputs alone, from the random state that a capture starts from; with their ``graph`` if wanted."""
    model, x = at_precision(model, x, precision)
    check_model(model, x, frozen)
    # With gradients, because the outputs may themselves be derivatives (a PDE residual).
    with untouched(model), exact_arithmetic(tf32=precision == "tf32"), plain_execution():
        f = evaluate(model, x, count_examples(x), outputs)
        return f if graph else f.detach()


def _training_norms(model: nn.Module) -> str:
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    return f" The batch norm layer {norms[0]!r} is in training mode: call model.eval()." if norms else ""


def _unequal_lengths(x: ModelInput) -> str:
    lengths = list(dict.fromkeys(len(t) for t in tensors_in(x) if t.dim()))
    if len(lengths) < 2:
        return ""
    return f" The tensors of x have unequal lengths {lengths} on axis 0, where the examples should be."


def check_outputs(f: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raise where outputs are not finite, or cannot be differentiated by the parameters."""
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


def unit_cotangents(f: Float[Tensor, "n C"], some: slice) -> Float[Tensor, "k n C"]:
    """One-hot for ``some`` of the outputs: rows of the identity, all of which may not fit."""
    start, stop, _ = some.indices(f.shape[1])
    rows = f.new_zeros(stop - start, 1, f.shape[1])
    rows[range(stop - start), 0, range(start, stop)] = 1
    return rows.expand(-1, len(f), -1)


def _given_cotangents(f: Float[Tensor, "n C"], directions: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
    n, width = f.shape
    if callable(directions):
        return loss_gradient(directions, f, "directions")[1][None]
    if directions.shape[1:] != f.shape:
        raise InputError(
            f"directions must have shape (k, {n}, {width}) to match the outputs, got {tuple(directions.shape)}."
        )
    return directions.detach().to(f)
