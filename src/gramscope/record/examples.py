"""The probe's examples, from tensors, numpy arrays, a Dataset, a DataLoader or a batch of Hugging Face's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gramscope.base.errors import InputError
from gramscope.base.nested import map_tensors, tensors_in
from gramscope.base.streams import streams_put_back
from gramscope.record.objective import IGNORED

EXAMPLES = 256  # of a Dataset, from its beginning
SEQUENCES = 8  # of one that holds token ids: a vocabulary of outputs at every token is large
CAUSAL = ("ForCausalLM", "LMHeadModel")  # Hugging Face's language models shift their labels themselves


def taken(probe: object, model: nn.Module) -> tuple[object, str]:
    """The probe as tensors on the model's device, and where they were taken from; tensors are left as they are."""
    said = ""
    if isinstance(probe, DataLoader | Dataset):
        probe, said = _from_dataset(probe)
    elif not any(isinstance(leaf, np.ndarray) for leaf in _leaves(probe)):
        return _split_labels(probe, model), ""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return _split_labels(map_tensors(lambda t: t.to(device), _as_tensors(probe)), model), said


def _from_dataset(given: DataLoader[object] | Dataset[object]) -> tuple[object, str]:
    """The first examples. The sampler is not asked: it would draw from the streams that training draws from."""
    loader = given if isinstance(given, DataLoader) else None
    dataset: Any = given if loader is None else loader.dataset  # a length is not part of Dataset, but most have one
    kind = f"the {type(dataset).__name__} of a DataLoader" if loader is not None else type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"probe must be a data set with a length and an index, but {kind} can only be iterated, and training would "
            "miss the examples taken from it. Pass one batch of it, such as next(iter(another_loader))."
        )
    if not len(dataset):
        raise InputError(f"probe must have at least one example, but {kind} is empty.")
    collate = loader.collate_fn if loader is not None and loader.batch_size is not None else default_collate
    with streams_put_back():  # an augmentation may draw
        one = collate([dataset[0]])
        count = min(len(dataset), SEQUENCES if _is_tokens(one) else EXAMPLES)
        return collate([dataset[place] for place in range(count)]), f"the first {count} examples of {kind}"


def _is_tokens(batch: object) -> bool:
    x = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    first = next(iter(tensors_in(x)), None)
    return first is not None and first.dim() > 1 and not first.is_floating_point()


def _leaves(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _as_tensors(value: object) -> object:
    """numpy arrays as tensors, in tuples, lists and dicts."""
    if isinstance(value, Mapping):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_as_tensors(item) for item in value)
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.from_numpy(np.array(value))  # a copy: torch takes neither negative strides nor what is read-only
    except TypeError as error:
        raise InputError(f"arrays of a probe must hold numbers, got {value.dtype}. Encode them as numbers.") from error


def _split_labels(probe: object, model: nn.Module) -> object:
    """(x, y) of a batch as a Hugging Face model is trained on it: a dict with ``labels`` beside the inputs.

    Language models compare the output at t with the label at t + 1: here y[:, t] belongs to the output at t.
    """
    if not isinstance(probe, Mapping) or not isinstance(probe.get("labels"), Tensor):
        return probe
    x = {key: value for key, value in probe.items() if key != "labels"}
    labels = probe["labels"]
    decoder_input = getattr(model, "prepare_decoder_input_ids_from_labels", None)  # of encoder-decoder models
    if decoder_input is not None and "decoder_input_ids" not in x:
        x["decoder_input_ids"] = decoder_input(labels=labels)
    if labels.dim() < 2 or not type(model).__name__.endswith(CAUSAL):
        return x, labels
    return x, torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
