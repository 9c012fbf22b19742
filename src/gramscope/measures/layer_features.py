"""Features of layers chosen by name or glob, as rows, with a stated reduction of spatial and token axes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from gramscope.base.checks import check_choice, shape_or_type
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.base.user_warnings import warn
from gramscope.capture.activations import At, Layers, Mode, Visit, activations
from gramscope.capture.side_effects import untouched

Reduction = Literal["flatten", "pool", "unfold", "last"]
Reduce = Reduction | Callable[[Tensor], Tensor]
Channels = Literal["first", "last"] | None
Batch: TypeAlias = Any  # what the user's own loader yields
Batches: TypeAlias = object  # an iterable of batches, or one input tensor or dict; checked by batches_of


class FeatureOptions(TypedDict, total=False):
    """Options of :func:`features` that other measures pass on."""

    at: At | Mapping[str, At]
    channels: Channels
    mode: Mode


_TIME_FIRST = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.Transformer,
)
_CHANNELS_FIRST = tuple(
    getattr(nn, kind + f"{d}d")
    for kind in ("Conv", "ConvTranspose", "BatchNorm", "InstanceNorm", "MaxPool", "AvgPool", "AdaptiveAvgPool")
    for d in (1, 2, 3)
) + (nn.GroupNorm, nn.PixelShuffle)
_CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.GLU, *_TIME_FIRST)


def features(
    model: nn.Module,
    x: ModelInput,
    layers: Layers = "*",
    *,
    reduce: Reduce = "flatten",
    at: At | Mapping[str, At] = "output",
    channels: Channels = None,
    mode: Mode = "eval",
) -> dict[str, Tensor]:
    """Features of the layers named by ``layers`` for the examples ``x``, one row an example, by layer name.

    An activation (n, C, H, W) or (n, T, d) becomes rows by ``reduce``:

    - ``"flatten"``: (n, C·H·W), every entry is a feature;
    - ``"pool"``: (n, C), the mean over positions;
    - ``"unfold"``: (n·H·W, C), every position is a row of its own;
    - ``"last"``: (n, d), the last token;
    - a function of the activation that returns (n, p).

    Where ``x`` is a dict with an ``attention_mask``, padded tokens count neither in the mean nor as rows, and the last
    token is the last one attended to. Layers that run time-first (``batch_first=False``) are turned round.

    Args:
        model: any module; it is left as it was.
        x: a tensor with examples first, a tuple of positional arguments, or a dict of keyword arguments.
        layers: names or globs, see :func:`gramscope.capture.activations.activations`.
        reduce: as above.
        at: outputs of the layers, or their inputs; or a dict of these by layer name.
        channels: whether channels come right after the examples or last. None: first for convolutions, norms of images
            and any 4- or 5-axis activation of an unknown module, last for linear layers, layer norms, attention,
            recurrent layers and any 3-axis activation of an unknown module.
        mode: "eval" (default), "train" or "as_is".

    Example:
        >>> import torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten())
        >>> found = gs.measures.features(model, torch.ones(5, 1, 6, 6), reduce="pool")
        >>> {name: tuple(value.shape) for name, value in found.items()}
        {'0': (5, 4), '1': (5, 4), '2': (5, 64)}
    """
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    reader = RowReduction(reduce, channels, mask if isinstance(mask, Tensor) and mask.dim() == 2 else None)
    return activations(model, x, layers, at=at, mode=mode, reader=reader)


def feature_batches(
    model: nn.Module,
    data: Batches,
    layers: Layers = "*",
    *,
    reduce: Reduce = "flatten",
    inputs: Callable[[Batch], ModelInput] | None = None,
    **options: Unpack[FeatureOptions],
) -> Iterator[tuple[dict[str, Tensor], Batch]]:
    """Features of each batch of ``data``, with the batch itself, one batch in memory at a time.

    A ``DataLoader`` draws its seed from torch's random stream when it is iterated, here as in a loop of your own.

    Args:
        model: any module; it is left as it was.
        data: an iterable of batches, or one input tensor or dict of keyword arguments (then one batch).
        layers: names or globs.
        inputs: takes what the model is called with out of a batch. By default the first entry of a tuple or list, a
            dict without its ``labels``, and anything else as it is.
        reduce, options: as for :func:`features`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(5, 3), torch.arange(5)), 2)
        >>> [(found[""].shape[0], batch[1].tolist()) for found, batch in feature_batches(model, loader, "")]
        [(2, [0, 1]), (2, [2, 3]), (1, [4])]
    """
    for batch in batches_of(data):
        yield features(model, (inputs or inputs_of)(batch), layers, reduce=reduce, **options), batch


def batches_of(data: Batches) -> Iterable[Batch]:
    """The batches themselves; one input tensor, or one dict of keyword arguments, is one batch."""
    if isinstance(data, Tensor | Mapping):
        return [data]
    if not isinstance(data, Iterable):
        raise InputError(f"data must be an iterable of batches or one input tensor, got {type(data).__name__}.")
    return data


@contextmanager
def streams_kept(data: Batches) -> Iterator[None]:
    """Random streams after going through ``data`` as before: a loader draws from torch's, or from its own generator.

    For what goes through the data from end to end; to put streams back between batches would repeat augmentations.
    """
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    own = [(g, g.get_state()) for g in found if isinstance(g, torch.Generator)]
    with untouched(nn.Identity(), throughout=False):
        try:
            yield
        finally:
            for generator, state in own:
                generator.set_state(state)


def inputs_of(batch: Batch) -> ModelInput:
    """What a model takes of a batch: its first part, or all of a mapping but the labels."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in ("labels", "label")}
    if isinstance(batch, tuple | list):
        if not batch:
            raise InputError("a batch must hold an input, got an empty one.")
        return batch[0]
    return batch


@dataclass(frozen=True)
class RowReduction:
    """Reduces an activation to rows while the forward pass still runs, so that only rows are kept."""

    reduce: Reduce
    channels: Channels = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        if not callable(self.reduce) and self.reduce not in get_args(Reduction):
            raise InputError(f'reduce must be "flatten", "pool", "unfold", "last" or a function, got {self.reduce!r}.')
        check_choice(self.channels, "channels", ("first", "last", None))

    def __call__(self, tensor: Tensor, visit: Visit) -> Tensor:
        where = f"layer {visit.name!r}" if visit.name else "the model's output"
        if callable(self.reduce):
            return _checked_rows(self.reduce(tensor), where)
        tensor = _examples_first(tensor, visit, where)
        if tensor.dim() <= 2:
            return tensor.reshape(len(tensor), -1) if tensor.dim() == 2 else tensor[:, None]
        if self.reduce == "flatten":
            return tensor.flatten(1)
        return self._by_position(self._positions(tensor, visit), where)

    def _positions(self, tensor: Tensor, visit: Visit) -> Tensor:
        """(n, T, d): positions in the middle, channels last."""
        channels = self.channels or _guess_channels(tensor, visit.module)
        return tensor.flatten(2).mT if channels == "first" else tensor.flatten(1, -2)

    def _by_position(self, tokens: Tensor, where: str) -> Tensor:
        n, length, _ = tokens.shape
        mask = self.mask
        if mask is not None and tuple(mask.shape) != (n, length):
            warn(
                f"attention_mask has shape {tuple(mask.shape)}, but {where} has {length} positions for {n} examples: "
                "all of them count there, padding too. Leave that layer out, or pass a reduce function that handles it."
            )
            mask = None
        if mask is None:
            if self.reduce == "pool":
                # A float16 sum over many positions overflows or drops terms; the mean itself fits the dtype.
                return tokens.mean(1, dtype=_wide(tokens.dtype)).to(tokens.dtype)
            return tokens[:, -1] if self.reduce == "last" else tokens.flatten(0, 1)
        attended = mask.to(tokens.device) != 0
        if not bool(attended.any(1).all()):
            raise InputError(f"attention_mask must keep at least one token of each example ({where}).")
        if self.reduce == "pool":
            wide = torch.where(attended[..., None], tokens, 0).sum(1, dtype=_wide(tokens.dtype))
            return (wide / attended.sum(1, keepdim=True)).to(tokens.dtype)
        if self.reduce == "last":
            places = torch.arange(length, device=tokens.device).expand(n, length)
            last = torch.where(attended, places, -1).amax(1)
            return tokens[torch.arange(n, device=tokens.device), last]
        return tokens[attended]


def _examples_first(tensor: Tensor, visit: Visit, where: str) -> Tensor:
    if _time_first(visit.module) and tensor.dim() == 3 and tensor.shape[1] == visit.examples:
        return tensor.transpose(0, 1)
    if tensor.dim() and tensor.shape[0] == visit.examples:
        return tensor
    raise InputError(
        f"the activation of {where} must have one row for each of the {visit.examples} examples on its first axis, got "
        f"shape {tuple(tensor.shape)}. Give a function instead of a named reduction, e.g. "
        "reduce=lambda a: a.unflatten(0, (n, -1)).mean(1), or leave this layer out."
    )


def _time_first(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        return _time_first(module.layers[0])
    owner: Any = module
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        owner = module.self_attn
    return isinstance(module, _TIME_FIRST) and not getattr(owner, "batch_first", True)


def _guess_channels(tensor: Tensor, module: nn.Module) -> Channels:
    if isinstance(module, _CHANNELS_FIRST):
        return "first"
    if isinstance(module, _CHANNELS_LAST):
        return "last"
    return "first" if tensor.dim() >= 4 else "last"


def _checked_rows(rows: object, where: str) -> Tensor:
    if not isinstance(rows, Tensor) or rows.dim() != 2:
        raise InputError(f"a reduction must return rows (n, p), got {shape_or_type(rows)} for {where}.")
    return rows


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
