"""``gs.sketch``: a few numbers for each example's gradient, from which kernels follow without forming a gradient."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from gramscope.base.arithmetic import exact_arithmetic
from gramscope.base.checks import check_choice, check_count
from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import InputError
from gramscope.base.memory_budget import free_memory
from gramscope.base.nested import ModelInput
from gramscope.base.progress_bar import progress
from gramscope.base.user_warnings import SlowPathWarning, warn
from gramscope.capture import OuterSite, Site
from gramscope.capture.capturing import Opened, opened
from gramscope.capture.network import Outputs, Precision, count_examples, named_parameters, slice_examples, unwrap
from gramscope.kernels.contractions import strips
from gramscope.kernels.memory import SIGNALS
from gramscope.scale.sketch_factors import Projections, SketchPlan
from gramscope.scale.sketch_projections import Method
from gramscope.scale.sketch_result import Sketch
from gramscope.scale.sketch_sites import Factors, may_be_apart, sketched, sketched_apart

Loss = Literal["cross_entropy"] | Callable[[Tensor, Tensor], Tensor]
Layers = str | Sequence[str] | int
OUTPUTS_AT_ONCE = 16  # directions of one backward pass
MANY_OUTPUTS = 1024  # from which on the user is told how many backward passes they take
BLOCK = 64  # examples at a time of a data set that is given as tensors


def sketch(
    model: nn.Module,
    loader: object,
    *,
    size: int = 16,
    repeats: int = 6,
    outputs: Outputs = None,
    loss: Loss | None = None,
    layers: Layers = "*",
    method: Method = "learned",
    seed: int = 0,
    apart: bool = True,
    like: Sketch | None = None,
    frozen: bool = False,
    precision: Precision = None,
) -> Sketch:
    """Sketches of every example's gradient, streaming over a data set: at most size x size numbers for each parameter.

    For a weight site ``u = W v`` with signals ``s = ∂f/∂u`` the sketch is

        φ = Σ_T (P_oᵀ s) ⊗ (P_iᵀ v),     E[P Pᵀ] = 1,     so     E⟨φ_μ, φ_ν⟩ = ⟨∂f_μ/∂W, ∂f_ν/∂W⟩.

    No gradient is formed where that is cheaper: T(i a + o b + a b) operations instead of T i o. The result gives
    kernels, norms, nearest neighbours and alignments, with standard errors over ``repeats`` independent sketches. The
    page Sketches of the docs says which size serves which use.

    Args:
        model: any module.
        loader: batches of examples, each as :func:`gramscope.ntk` takes ``x``, or (x, y). y is for the loss; without
            one it is left out, if the model takes one argument alone. A tensor, a tuple or a dict is a whole data set,
            taken some examples at a time.
        size: a parameter's sketch has at most size x size numbers; parameters that have no more are held whole.
        repeats: independent sketches; the error falls as 1/√repeats. From 2 on there are standard errors.
        outputs: which outputs f, as for :func:`gramscope.ntk`; ``gs.project(k)`` for very many.
        loss: sketch the gradient of the loss of each example alone, one direction instead of all outputs:
            "cross_entropy", or a function of (outputs (n, C), y) that returns (n,) losses.
        layers: names or patterns of parameters ("head.*"), or a number k for those of the last k modules. The backward
            pass ends at the first of them.
        method: how P is made. "learned": half of its columns span the large directions of the first examples'
            gradients, the others are random beside them; unbiased as well. "orthogonal": random directions alone.
        seed: of the random matrices. They depend on it, on the parameter's name and on its shape alone.
        apart: keep projected signals and inputs apart for weights that each example uses at one position (readouts of
            classifiers), each with at most size² numbers: far less error, for two numbers where there was one.
        like: a sketch whose random (and learned) matrices to use again, so that both may be compared: of an earlier
            checkpoint, or of other data. ``size``, ``repeats``, ``method``, ``seed`` and ``apart`` are
            then its own.
        frozen, precision: see ``gramscope.capture``.

    References: Park et al. 2023 (arXiv:2303.14186, TRAK) project formed gradients; Choe et al. 2024
    (arXiv:2405.13954, LoGra) project the two factors.

    Example:
        >>> import torch, gramscope as gs
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
        >>> x = torch.randn(50, 20)
        >>> found = gs.sketch(model, x, size=8, repeats=6)
        >>> found.kernel().value.shape
        torch.Size([50, 50])
        >>> exact = gs.ntk(model, x, reduce="trace")
        >>> bool((found.kernel().value - exact).norm() < 0.2 * exact.norm())
        True
    """
    chosen = _chosen(unwrap(model), layers, frozen)
    if like is None:
        check_choice(method, "method", get_args(Method))
        counts = check_count(size, "size"), check_count(repeats, "repeats")
        made = Projections(SketchPlan(*counts, method, check_count(seed, "seed", least=0), bool(apart)))
    else:
        _check_like(like, chosen)
        made = like.projections.renewed()
    stream = _Stream(model, chosen, made, outputs, loss, precision)
    batches = _batches(loader, loss is not None)
    with progress("sketch, batch", _length(batches)) as advance, only(unwrap(model), chosen):
        for batch in batches:
            stream.add(batch, _length(batches))
            advance()
    return stream.finish()


class _Stream:
    """Adds batch after batch to the features of all parameters."""

    def __init__(
        self, model: nn.Module, chosen: Sequence[str], made: Projections, outputs: Outputs, loss: Loss | None,
        precision: Precision,
    ) -> None:  # fmt: skip
        self.model, self.made, self.outputs, self.precision = model, made, outputs, precision
        self.loss = _loss_function(loss) if loss is not None else None
        self.shapes = {
            name: tuple(real_view(p).shape) for name, p in named_parameters(unwrap(model)).items() if name in chosen
        }
        self.parts: dict[str, list[Tensor]] = {name: [] for name, shape in self.shapes.items() if math.prod(shape)}
        self.inputs: dict[str, list[Tensor]] = {}
        self.slow: dict[str, None] = {}
        self.width = -1

    def add(self, batch: ModelInput, count: int) -> None:
        x, y = (_inputs(batch, self.model), None) if self.loss is None else _pair(batch)
        device = next(self.model.parameters()).device
        room = SIGNALS.get(device.type, SIGNALS["cuda"])
        with (
            torch.no_grad(),
            exact_arithmetic(tf32=self.precision == "tf32"),
            opened(self.model, x, outputs=self.outputs, precision=self.precision, room=room) as network,
        ):
            found = self._sketched(network, y, room, 0 if any(self.parts.values()) else count)
            self.slow |= dict.fromkeys(network.weight_sites.slow)
        for held, new in zip((self.parts, self.inputs), found, strict=True):
            for name, part in new.items():
                held.setdefault(name, []).append(part)

    def _sketched(
        self, network: Opened, y: Tensor | None, room: int, count: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Features and inputs of a batch; refused, after some outputs, where ``count`` such batches would not fit."""
        n, width = network.f.shape
        self._check_width(width)
        k = width if self.loss is None else 1
        found: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        expected = 0
        for start, stop in strips(k, OUTPUTS_AT_ONCE):
            for group in network.sites(self._cotangents(network, y, slice(start, stop)), room):
                for name, sites in group.items():
                    if name not in self.parts or not sites:
                        continue
                    factors = self._factors(name, sites)
                    if name in self.made.apart:
                        part, inputs[name] = self._apart(name, sites, factors)
                    else:
                        part = sketched(sites, factors).cpu()
                    if name not in found:
                        beside = inputs[name].nbytes if name in inputs else 0
                        expected += count * (part.nbytes // part.shape[2] * k + beside)
                        _check_fits(expected)
                        found[name] = part.new_zeros(len(part), n, k, part.shape[3])
                    found[name][:, :, start:stop] = part
        self._add_unused(found, inputs, n, k)
        return found, inputs

    def _factors(self, name: str, sites: Sequence[Site]) -> Factors:
        like = sites[0].held if sites else named_parameters(unwrap(self.model))[name].detach()
        dtype = torch.promote_types(like.real.dtype, torch.float32)
        return self.made.factors(name, self.shapes[name], sites, dtype, like.device)

    def _apart(self, name: str, sites: Sequence[Site], factors: Factors) -> tuple[Tensor, Tensor]:
        if not may_be_apart(sites, factors.matrix):
            raise InputError(
                f"{name} must be used once, at one position, in all batches if it was so in the first, but here it is "
                "used more often. Pass apart=False."
            )
        site = sites[0]
        assert isinstance(site, OuterSite)
        signals, inputs = sketched_apart(site, factors)
        return signals.cpu(), inputs.cpu()

    def _add_unused(self, found: dict[str, Tensor], inputs: dict[str, Tensor], n: int, k: int) -> None:
        """Parameters that no example of this batch has used have gradient zero."""
        for name in self.parts:
            if name in found:
                continue
            factors = self._factors(name, ())
            d = factors.entries
            if name in self.made.apart:  # zero signals; whatever the inputs
                d, w = self._widths_apart(name, factors)
                inputs[name] = torch.zeros(factors.repeats, n, 1, w, dtype=factors.rows.dtype, device="cpu")
            found[name] = torch.zeros(factors.repeats, n, k, d, dtype=factors.rows.dtype, device="cpu")

    def _widths_apart(self, name: str, factors: Factors) -> tuple[int, int]:
        """Numbers of signals and of inputs, as earlier batches have them; else rows are taken for signals."""
        if self.parts[name]:
            return self.parts[name][0].shape[3], self.inputs[name][0].shape[3]
        return factors.rows.shape[2], factors.columns.shape[2]

    def _cotangents(self, network: Opened, y: Tensor | None, some: slice) -> Tensor:
        if self.loss is None:
            return network.cotangents(some=some)
        loss, n = self.loss, len(network.f)

        def total(f: Tensor) -> Tensor:
            values = loss(f, y)
            if not isinstance(values, Tensor) or values.shape != (n,):
                got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise InputError(
                    f"loss must return one number for each of the {n} examples, shape ({n},), got {got}. Leave out "
                    'the mean, e.g. reduction="none".'
                )
            return values.sum()

        return network.cotangents(total)

    def _check_width(self, width: int) -> None:
        if self.width not in (-1, width):
            raise InputError(
                f"all batches must give the same number of outputs, got {self.width} and {width}. Choose them with "
                "outputs=lambda model, x: ..., or pass a loss."
            )
        if self.width < 0 and self.loss is None and width > MANY_OUTPUTS:
            warn(
                f"each batch takes a backward pass for each of its {width:,} outputs. A loss takes one: pass loss=..., "
                "or fewer outputs, such as outputs=gs.project(16).",
                SlowPathWarning,
            )
        self.width = width

    def finish(self) -> Sketch:
        if not any(self.parts.values()):
            raise InputError("loader must give at least one batch, got none. A generator can be used only once.")
        features = {name: torch.cat(parts, 1) for name, parts in self.parts.items()}
        inputs = {name: torch.cat(parts, 1) for name, parts in self.inputs.items()}
        return Sketch(features, self.made, tuple(self.slow), inputs)


# What the user gives ------------------------------------------------------------------------------


def _chosen(model: nn.Module, layers: Layers, frozen: bool) -> list[str]:
    """The parameters meant by ``layers``, in the order of the model."""
    names = [name for name, p in named_parameters(model).items() if frozen or p.requires_grad]
    if isinstance(layers, int) and not isinstance(layers, bool):
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        if not 1 <= layers <= len(modules):
            raise InputError(f"layers must be between 1 and {len(modules)}, the modules with parameters, got {layers}.")
        last = modules[-layers:]
        return [name for name in names if name.rpartition(".")[0] in last]
    patterns = [layers] if isinstance(layers, str) else layers
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f'layers must be a pattern such as "head.*", several, or a number of modules, got {layers!r}.')
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"layers must match a parameter, but {pattern!r} matches none of {', '.join(names)}.")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _check_like(like: Sketch, chosen: Sequence[str]) -> None:
    if not isinstance(like, Sketch):
        raise InputError(f"like must be a sketch, got {type(like).__name__}. Make it with gs.sketch, or load it.")
    if set(like.features) != set(chosen):
        odd = sorted(set(like.features) ^ set(chosen))
        raise InputError(
            f"like must be a sketch of the same parameters, but {odd[0]!r} is in one of them only. Choose the same "
            "layers of the same architecture."
        )


@contextmanager
def only(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Gradients for these parameters alone, so that a backward pass ends where they do; put back after."""
    parameters = named_parameters(model).items()
    changed = [parameter for name, parameter in parameters if parameter.requires_grad is not (name in names)]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _batches(loader: object, pairs: bool) -> Iterable[Any]:
    if isinstance(loader, Tensor | Mapping | tuple):
        n = count_examples(loader)
        return [slice_examples(loader, n, slice(start, start + BLOCK)) for start in range(0, n, BLOCK)]
    if not isinstance(loader, Iterable):
        what = "(x, y) batches" if pairs else "batches"
        raise InputError(f"loader must be an iterable of {what}, or tensors, got {type(loader).__name__}.")
    return loader


def _length(batches: Iterable[Any]) -> int:
    """Number of batches, 1 where it cannot be told."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return 1


def _inputs(batch: Any, model: nn.Module) -> ModelInput:
    """The inputs of a batch; of (x, y) only x, if the model cannot be called with both."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return batch
    signature = inspect.signature(unwrap(model).forward)
    try:
        signature.bind(*batch)
    except TypeError:
        return batch[0]
    return batch


def _pair(batch: Any) -> tuple[Any, Tensor]:
    if not isinstance(batch, Sequence) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise InputError(
            f"with a loss each batch must be a pair (x, y) with a tensor y, got {type(batch).__name__}. For a model "
            "that computes its own loss, pass outputs=lambda model, x: ... that returns it for each example."
        )
    return batch[0], batch[1]


def _loss_function(loss: Loss) -> Callable[[Tensor, Any], Tensor]:
    if callable(loss):
        return loss
    if loss == "cross_entropy":
        return lambda f, y: nn.functional.cross_entropy(f, y, reduction="none")
    raise InputError(f'loss must be "cross_entropy" or a function of (outputs, y), got {loss!r}.')


def _check_fits(expected: int) -> None:
    room = free_memory(torch.device("cpu"))
    if expected > room:
        raise InputError(
            f"the sketch must fit into memory, but will take {expected:,} bytes and {room:,} are free. Pass a smaller "
            "size or fewer repeats, a loss or outputs=gs.project(k) instead of all outputs, or fewer layers."
        )
