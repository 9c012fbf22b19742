"""Whether two attempts of a run look at the same probe through the same network: digests that the run keeps."""

import hashlib
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.network import Outputs, named_parameters

_WHAT = ("with another probe (other x, precision or outputs)", "with another model (other parameter names or shapes)")


def fingerprint(model: nn.Module, x: ModelInput, outputs: Outputs) -> NDArray[np.uint8]:
    """SHA-256 of the inputs (and chosen outputs), and of the names and shapes of the parameters: two rows of 32 bytes.

    Targets are left out, since neither the kernel nor the features depend on them.
    """
    probe = hashlib.sha256()
    for tensor in tensors_in(x):
        values = _plain(tensor)
        probe.update(repr(values.shape).encode())
        probe.update(values.data)
    probe.update(b"" if callable(outputs) else repr(outputs).encode())
    shapes = {name: list(parameter.shape) for name, parameter in named_parameters(model).items()}
    digests = (probe.digest(), hashlib.sha256(json.dumps(shapes).encode()).digest())
    return np.stack([np.frombuffer(digest, dtype=np.uint8) for digest in digests])


def _plain(tensor: Tensor) -> NDArray[Any]:
    """The values; floats in 32 bits, so that the same examples in another precision are the same."""
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_floating_point():
        values = values.to(torch.float32)
    return np.ascontiguousarray(values.cpu().numpy())


def difference(stored: NDArray[Any] | None, now: NDArray[np.uint8]) -> str:
    """How the run began, if not as it goes on now; "" also for a run from before fingerprints were kept."""
    if stored is None or stored.shape != now.shape:
        return ""
    return " and ".join(what for what, a, b in zip(_WHAT, stored, now, strict=True) if not np.array_equal(a, b))
