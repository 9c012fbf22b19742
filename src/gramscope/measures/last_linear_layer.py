"""The last linear layer of a model, found by watching it run, and its inputs beside the model's outputs."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.capture.activations import Mode, activations
from gramscope.capture.network import plain_name, unwrap_with_input
from gramscope.measures.layer_features import Batch, Batches, Channels, Reduce, batches_of, features, inputs_of


def last_layer(model: nn.Module, x: ModelInput) -> str:
    """The name of the last linear layer that runs on ``x``.

    Among the linear layers called, the last whose output is the model's output (up to its shape); if a softmax or a
    reshaping follows and none is, the last one called. For a model with several heads give the name.

    Args:
        model: any module; it is left as it was.
        x: a small batch.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> last_layer(model, torch.ones(2, 3))
        '2'
    """
    model, x = unwrap_with_input(model, x)
    names = [plain_name(name) for name, module in model.named_modules() if _is_linear(module)]
    if not names:
        raise InputError(
            f"{type(model).__name__} must contain a linear layer (nn.Linear) for its last one to be found. Name the "
            "layer whose inputs are the features: layer='...'."
        )
    if names == [""]:
        return ""
    found = activations(model, x, ["", *names], missing="skip")
    output = found.pop("")
    if not found:
        raise InputError(
            "no linear layer of the model runs as a module on x. Name the layer of the features: layer='...'."
        )
    same = [name for name, value in found.items() if value.numel() == output.numel() and _equal(value, output)]
    return (same or list(found))[-1].partition("@")[0]


def last_layer_batches(
    model: nn.Module,
    data: Batches,
    layer: str | None = None,
    *,
    reduce: Reduce = "flatten",
    inputs: Callable[[Batch], ModelInput] | None = None,
    channels: Channels = None,
    mode: Mode = "eval",
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each batch the inputs Φ of the last linear layer (or of ``layer``) and the outputs F of the model, as rows.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> [(tuple(phi.shape), tuple(f.shape)) for phi, f in last_layer_batches(model, torch.randn(6, 3).split(4))]
        [((4, 4), (4, 2)), ((2, 4), (2, 2))]
    """
    for batch in batches_of(data):
        x = (inputs or inputs_of)(batch)
        layer = last_layer(model, x) if layer is None else layer
        if layer == "":  # the model itself: its two sides take two passes
            phi = features(model, x, "", reduce=reduce, at="input", channels=channels, mode=mode)
            f = features(model, x, "", reduce=reduce, channels=channels, mode=mode)
        else:
            phi = features(model, x, ["", layer], reduce=reduce, at={layer: "input"}, channels=channels, mode=mode)
            f = {"": phi.pop("")}
        if len(phi) > 1:
            raise InputError(
                f"layer {layer!r} must be called once to hold the features, but it gave {list(phi)}. Name one of these."
            )
        yield next(iter(phi.values())), f[""]


def _is_linear(module: nn.Module) -> bool:
    # The Conv1D of Hugging Face's GPT-2 is a linear layer with its weight transposed.
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "LazyLinear")


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.flatten(), b.flatten()))
