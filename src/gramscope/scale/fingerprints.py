"""Fingerprints: is this the same model, are these the same examples and the same outputs?"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramscope.base.complex_numbers import real_view
from gramscope.base.nested import ModelInput, tensors_in
from gramscope.capture.network import Outputs, unwrap


def fingerprint_model(model: nn.Module) -> str:
    """SHA-256 of the names, shapes, dtypes and values of all parameters and buffers, in 64 hexadecimal digits.

    The device does not count, nor do the wrappers of ``torch.compile`` and data-parallel training. What the model does
    with its parameters is not in it; the sample of outputs in :class:`Fingerprints` sees that.

    >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> b.load_state_dict(a.state_dict())
    <All keys matched successfully>
    >>> fingerprint_model(a) == fingerprint_model(b)
    True
    """
    inner = unwrap(model)
    named = [*inner.named_parameters(), *inner.named_buffers()]
    return _digest((name.replace("_orig_mod.", ""), tensor) for name, tensor in named)


def fingerprint_data(x: ModelInput) -> str:
    """SHA-256 of the shapes, dtypes and values of all tensors of x.

    >>> fingerprint_data(torch.zeros(3)) == fingerprint_data((torch.zeros(3),))
    True
    """
    return _digest(("", tensor) for tensor in tensors_in(x))


def fingerprint_outputs(outputs: Outputs) -> str:
    """What was chosen of the outputs, in words: columns by number, a name, or that it was a function, and which.

    Two functions of one name are distinguished by their results (the sample in :class:`Fingerprints`).

    >>> fingerprint_outputs([0, 2]), fingerprint_outputs(None)
    ('[0, 2]', 'all')
    """
    if outputs is None:
        return "all"
    if callable(outputs) and not isinstance(outputs, Tensor):
        return f"function {getattr(outputs, '__name__', type(outputs).__name__)}"  # wherever it is defined
    return repr(outputs.tolist() if hasattr(outputs, "tolist") else outputs)


@dataclass(frozen=True)
class Fingerprints:
    """Whose kernel a folder holds. ``sample`` has the first outputs of the first examples.

    The digests tell other weights and other data. The sample tells another architecture of the same weights, another
    mode (training, evaluation) and another function of outputs; it is compared with a tolerance, so that a kernel may
    be begun on one kind of device and finished on another.
    """

    model: str
    x: str
    x2: str | None
    outputs: str
    sample: tuple[tuple[float, ...], ...]

    def differences(self, other: "Fingerprints") -> list[str]:
        """What is not the same, in words."""
        named = {
            "another model (other weights)": self.model != other.model,
            "other examples x": self.x != other.x,
            "other examples x2": self.x2 != other.x2,
            f"other outputs ({other.outputs} instead of {self.outputs})": self.outputs != other.outputs,
        }
        found = [what for what, differs in named.items() if differs]
        if not found and not self._same_sample(other):
            found.append("a model that gives other outputs (another architecture, mode or function of outputs)")
        return found

    def _same_sample(self, other: "Fingerprints", tol: float = 1e-2) -> bool:
        mine, theirs = (torch.tensor(prints.sample, dtype=torch.float64, device="cpu") for prints in (self, other))
        if mine.shape != theirs.shape:
            return False
        size = max(float(mine.abs().max()), float(theirs.abs().max()))
        return float((mine - theirs).abs().max()) <= tol * size


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in named:
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        values = real_view(tensor.detach()).contiguous().reshape(-1).cpu()
        total.update(values.view(torch.uint8).numpy().data)
    return total.hexdigest()
