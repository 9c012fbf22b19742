"""States of a bare recurrent module or cell, in closed form."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gramscope.base.axes import Axes
from gramscope.base.checks import check_finite, check_one_device, check_plain, check_tensor, shape_or_type
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.nested import ModelInput
from gramscope.propagators.layout import StateLayout, StateSite
from gramscope.propagators.network_states import NetworkStates
from gramscope.propagators.recurrent_layer import COMPONENTS, Weights
from gramscope.propagators.stack import run_stack
from gramscope.propagators.state_recorder import Node

CELLS = {nn.RNNCell: "rnn", nn.GRUCell: "gru", nn.LSTMCell: "lstm"}
MODULES = {nn.RNN: "rnn", nn.GRU: "gru", nn.LSTM: "lstm"}


def is_recurrent(model: nn.Module) -> bool:
    """Whether ``model`` is one of torch's recurrent modules or cells itself (a subclass may do anything)."""
    return type(model) in CELLS or type(model) in MODULES


class RecurrentStates(NetworkStates):
    """All hidden states of ``nn.RNN``, ``nn.GRU``, ``nn.LSTM`` or their cells over a sequence: one recurrent layer.

    The axes are (trial, time, site, unit); a site is a layer and direction, and for an LSTM its h and its c.
    """

    def __init__(
        self,
        model: nn.Module,
        x: ModelInput,
        h0: ModelInput,
        mask: Tensor | None,
        frozen: bool,
        dtype: torch.dtype | None,
    ) -> None:
        kind = _kind(model)
        refuse_options(model)
        inputs, valid = _sequence(model, x, mask)
        dtype = dtype or _working_dtype(model, inputs)
        weights, ways = _weights(model, dtype)
        check_one_device([("x", inputs)], weights[0].w_hh.device, "the model")
        _check_width(weights[0], inputs)
        check_finite(inputs, "x", "Look for NaN in the data.")
        inputs = inputs.to(dtype)
        shapes = _initial_shapes(model, x, len(weights), inputs.shape[1], weights[0].w_hh.shape[1])
        initial = _initial(h0, kind, shapes, inputs)
        self.stack = run_stack(kind, weights, inputs, initial, ways, valid)
        leaf = self.stack.values().clone().requires_grad_()
        _check_states(model, leaf)
        own = {name: weight for layer in weights for name, weight in layer.by_name().items()}
        counted = [name for name, parameter in model.named_parameters() if frozen or parameter.requires_grad]
        if not counted:
            raise InputError(
                "the model must have a parameter with requires_grad. Pass frozen=True to count frozen ones."
            )
        parameters = {name: own[name].detach().requires_grad_() for name in counted}
        n, steps, sites, width = leaf.shape
        each = Axes(trial=n, time=steps, unit=width)
        whole = Axes(trial=n, time=steps, site=sites, unit=width)
        layout = StateLayout(tuple(StateSite(name, each) for name in self.stack.sites), whole, "stacked", 2)
        output = leaf[:, :, sites - ways * self.stack.components :: self.stack.components]
        node = Node("recurrent", [], [leaf], None, self.stack, parameters)
        super().__init__(
            [node], layout, output, Axes(trial=n, time=steps, output=ways * width), parameters, None, valid
        )

    def propagate(self, q: Float[Tensor, "k N"], local: bool = False) -> Float[Tensor, "k N"]:
        return self._join([self.stack.join(self.stack.sweep(self.stack.split(*self._split(q)), local))])

    def propagate_adjoint(self, q: Float[Tensor, "k N"], local: bool = False) -> Float[Tensor, "k N"]:
        return self._join([self.stack.join(self.stack.sweep_adjoint(self.stack.split(*self._split(q)), local)[0])])

    def _split(self, q: Float[Tensor, "k N"]) -> list[Tensor]:
        return [q.reshape(len(q), *self.layout.axes.shape)]

    def _join(self, parts: Sequence[Tensor]) -> Float[Tensor, "k N"]:
        return parts[0].reshape(len(parts[0]), -1)


def refuse_options(model: nn.Module) -> None:
    """Raise for options of recurrent modules whose states these closed forms do not describe."""
    name = type(model).__name__
    if getattr(model, "proj_size", 0):
        raise UnsupportedError(
            f"nn.{name} must have proj_size=0, got proj_size={model.proj_size}: projected states are not supported. "
            "Use proj_size=0, or write the cell as a module cell(x, (h, c)) and pass it with h0."
        )
    dropout = getattr(model, "dropout", 0.0)
    if isinstance(dropout, float) and dropout > 0 and model.training and getattr(model, "num_layers", 1) > 1:
        raise UnsupportedError(
            f"nn.{name} must not drop out between its layers, got dropout={dropout} in training mode: its states "
            "are then random. Call model.eval() first."
        )


def _kind(model: nn.Module) -> str:
    family = (MODULES | CELLS)[type(model)]
    return f"rnn_{model.nonlinearity}" if family == "rnn" else family


def _working_dtype(model: nn.Module, inputs: Tensor) -> torch.dtype:
    """The model's own type; float32 where that is a half precision, since products then add up thousands of terms."""
    own = next(model.parameters()).dtype
    if inputs.dtype != own:
        raise InputError(
            f"x must have the model's dtype {own}, got {inputs.dtype}. Call x.to({own}), or pass precision='float64'."
        )
    return own if own in (torch.float32, torch.float64) else torch.float32


def _weights(model: nn.Module, dtype: torch.dtype) -> tuple[list[Weights], int]:
    """The weights of each recurrent layer and the number of directions; copies, so training on is safe."""

    def read(suffix: str) -> Weights:
        names = [f"weight_ih{suffix}", f"weight_hh{suffix}"]
        names += (
            [f"bias_ih{suffix}", f"bias_hh{suffix}"] if getattr(model, f"bias_ih{suffix}", None) is not None else []
        )
        tensors = []
        for name in names:
            check_plain(getattr(model, name), f"parameter {name!r}")
            tensors.append(getattr(model, name).detach().to(dtype, copy=True))
        return Weights(tuple(names), *tensors)

    if type(model) in CELLS:
        return [read("")], 1
    ways = 2 if model.bidirectional else 1
    layers = range(int(model.num_layers))  # type: ignore[arg-type]
    return [read(f"_l{layer}" + ("_reverse" if way else "")) for layer in layers for way in range(ways)], ways


def _sequence(
    model: nn.Module, x: ModelInput, mask: Tensor | None
) -> tuple[Float[Tensor, "T B i"], Bool[Tensor, "T B"] | None]:
    """x with time first, and which steps are valid (None: all)."""
    lengths = None
    if isinstance(x, PackedSequence):
        if mask is not None:
            raise InputError("mask must be left out where x is a PackedSequence: it knows its lengths.")
        x, lengths = pad_packed_sequence(x)
    elif isinstance(x, Tensor):
        check_plain(x, "x")
        if x.dim() not in (2, 3):
            raise InputError(f"x must have axes (trial, time, input), or (time, input) alone, got {tuple(x.shape)}.")
        if x.dim() == 2:
            x = x[:, None]
        elif type(model) in CELLS or bool(model.batch_first):
            x = x.transpose(0, 1)
    else:
        raise InputError(f"x must be a tensor or a PackedSequence for a recurrent module, got {type(x).__name__}.")
    steps, trials = x.shape[:2]
    if not steps or not trials:
        raise InputError(f"x must have at least one trial and one time step, got {trials} and {steps}.")
    inputs = x.detach()
    if lengths is None and mask is None:
        return inputs, None
    if lengths is None:
        assert mask is not None
        valid = valid_steps(mask, trials, steps)
    else:
        valid = torch.arange(steps, device="cpu")[:, None] < lengths
    valid = valid.to(x.device)
    return inputs.masked_fill(~valid[:, :, None], 0.0), valid  # whatever stands in the padding


def valid_steps(mask: Tensor, trials: int, steps: int) -> Bool[Tensor, "T B"]:
    """A mask (trial, time), True where a trial still runs, or lengths (trial,), as (time, trial)."""
    check_tensor(mask, "mask")
    if mask.dim() == 1 and not mask.is_floating_point() and mask.dtype != torch.bool and len(mask) == trials:
        if int(mask.min()) < 1 or int(mask.max()) > steps:
            raise InputError(f"lengths must lie between 1 and {steps}, got {int(mask.min())} to {int(mask.max())}.")
        return torch.arange(steps, device=mask.device)[:, None] < mask
    if mask.dtype != torch.bool or tuple(mask.shape) != (trials, steps):
        raise InputError(
            f"mask must be bool with shape (trial, time) = ({trials}, {steps}), or integer lengths ({trials},), got "
            f"{mask.dtype} with shape {tuple(mask.shape)}."
        )
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or not bool(mask[:, 0].all()):
        raise InputError("mask must be True from the first step of a trial to its last, without gaps.")
    return mask.mT


def _initial_shapes(
    model: nn.Module, x: ModelInput, recurrent_layers: int, trials: int, width: int
) -> list[tuple[int, ...]]:
    """The shapes that h0 may have, the full one first: besides that, torch's own for this module and this x."""
    alone = isinstance(x, Tensor) and x.dim() == 2
    if type(model) in CELLS:
        return [(recurrent_layers, trials, width), (trials, width), *([(width,)] if alone else [])]
    return [(recurrent_layers, trials, width), *([(recurrent_layers, width)] if alone else [])]


def _initial(h0: ModelInput, kind: str, shapes: list[tuple[int, ...]], like: Tensor) -> Float[Tensor, "B S H"]:
    components = COMPONENTS[kind]
    recurrent_layers, trials, width = shapes[0]
    if h0 is None:
        return like.new_zeros(trials, recurrent_layers * len(components), width)
    given = tuple(h0) if isinstance(h0, tuple | list) else (h0,)
    if len(given) != len(components):
        raise InputError(f"h0 must hold {' and '.join(components)} for this module, got {len(given)} tensors.")
    parts = []
    for name, part in zip(components, given, strict=True):
        if not isinstance(part, Tensor) or tuple(part.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise InputError(f"h0 ({name}) must have shape {wanted}, got {shape_or_type(part)}.")
        check_finite(part, f"h0 ({name})", "Look for NaN in the initial state.")
        check_one_device([("h0", part)], like.device, "the model")
        parts.append(part.detach().to(like.dtype).reshape(recurrent_layers, trials, width))
    return torch.stack(parts, dim=1).flatten(0, 1).transpose(0, 1)


def _check_width(weights: Weights, inputs: Tensor) -> None:
    if inputs.shape[-1] != weights.w_ih.shape[1]:
        raise InputError(
            f"x must have {weights.w_ih.shape[1]} inputs on its last axis to match the model, got {inputs.shape[-1]}."
        )


def _check_states(model: nn.Module, values: Tensor) -> None:
    for name, parameter in model.named_parameters():
        check_finite(parameter, f"parameter {name!r}", "The run has diverged: load an earlier checkpoint.")
    check_finite(values, "the hidden states", "The dynamics overflow: use precision='float64' or fewer steps.")
