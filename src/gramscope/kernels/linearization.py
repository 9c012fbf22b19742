"""A network linearised at its parameters: products with the Jacobian and its transpose, each one graph traversal.

``g(c) = Jᵀ c`` is computed once with a graph, linear in the placeholder c. Then ``Jᵀ w`` is one backward pass through
the network's graph, and ``J v`` one backward pass through the graph of g: neither runs the network again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.capture.capture import Precision
from gramscope.capture.network import (
    Outputs,
    check_model,
    count_examples,
    evaluate,
    in_float64,
    prepare_input,
    unwrap,
)
from gramscope.capture.surroundings import exact_arithmetic, plain_execution, untouched


class _Evaluation(nn.Module):
    """The model and the choice of its outputs as one module, so that parameters can be swapped for both."""

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, x: Any) -> Float[Tensor, "n C"]:
        return evaluate(self.model, x, count_examples(x), self.outputs)


class Linearization:
    """``f(θ + v) ≈ f + J v`` at copies of the parameters, so that later training does not disturb it."""

    def __init__(
        self,
        model: nn.Module,
        x: Any,
        outputs: Outputs = None,
        frozen: bool = False,
        precision: Precision = None,
    ) -> None:
        model = unwrap(model)
        if precision == "float64":
            model = in_float64(model)
        count_examples(x)
        x = prepare_input(x, torch.float64 if precision == "float64" else None)
        self.tf32 = precision == "tf32"
        recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
        # cuDNN's recurrent kernels cannot be differentiated twice.
        cudnn = torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not recurrent)
        with untouched(model), exact_arithmetic(self.tf32), plain_execution(), cudnn:
            chosen = check_model(model, x, frozen)
            named = {name: p for name, p in model.named_parameters() if any(p is q for q in chosen.values())}
            self.parameters = {clean: p.detach().clone().requires_grad_() for clean, p in chosen.items()}
            swapped = {f"model.{name}": copy for name, copy in zip(named, self.parameters.values(), strict=True)}
            self.f: Tensor = torch.func.functional_call(_Evaluation(model, outputs), swapped, (x,))
            self._placeholder = torch.zeros_like(self.f, requires_grad=True)
            self._transposed = self._gradients(self.f, self._placeholder, create_graph=True)
        self.rows = Axes(example=self.f.shape[0], output=self.f.shape[1])
        self.cols = Axes(parameter=sum(p.numel() for p in self.parameters.values()))
        self.dtype = torch.promote_types(self.f.dtype, torch.float32)
        self.device = self.f.device

    def jvp(self, vectors: Float[Tensor, "p k"]) -> Float[Tensor, "rows k"]:
        """``J v`` for each column v."""
        pieces = torch.split(vectors.T, [p.numel() for p in self.parameters.values()], dim=1)
        tangents = [
            piece.reshape(-1, *p.shape).to(p.dtype) for piece, p in zip(pieces, self.parameters.values(), strict=True)
        ]
        used = [(g, t) for g, t in zip(self._transposed, tangents, strict=True) if g is not None and g.requires_grad]
        if not used or vectors.shape[1] == 0:
            return vectors.new_zeros(self.rows.size, vectors.shape[1])
        outputs, cotangents = [g for g, _ in used], [t for _, t in used]
        with exact_arithmetic(self.tf32):
            (result,) = _batched(outputs, (self._placeholder,), cotangents)
        return result.reshape(vectors.shape[1], -1).T.to(self.dtype)

    def vjp(self, vectors: Float[Tensor, "rows k"]) -> Float[Tensor, "p k"]:
        """``Jᵀ w`` for each column w."""
        if vectors.shape[1] == 0:
            return vectors.new_zeros(self.cols.size, 0)
        cotangents = vectors.T.reshape(-1, *self.f.shape).to(self.f.dtype)
        with exact_arithmetic(self.tf32):
            gradients = _batched([self.f], tuple(self.parameters.values()), [cotangents])
        return torch.cat([g.reshape(vectors.shape[1], -1) for g in gradients], dim=1).T.to(self.dtype)

    def flat(self, values: Mapping[str, Tensor | float]) -> Float[Tensor, " p"]:
        """Numbers or tensors by parameter name as one flat vector; parameters that are not named get zero."""
        unknown = sorted(set(values) - set(self.parameters))
        if unknown:
            raise KeyError(f"no parameter is called {unknown[0]!r}; there are {', '.join(self.parameters)}.")
        pieces = []
        for name, parameter in self.parameters.items():
            value = torch.as_tensor(values.get(name, 0.0), dtype=self.dtype, device=self.device)
            pieces.append(value.expand(parameter.shape).reshape(-1))
        return torch.cat(pieces)

    def split(self, vector: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """A flat vector over the parameters as tensors by name."""
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        return {name: piece.view(p.shape) for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)}

    def _gradients(self, output: Tensor, cotangent: Tensor, create_graph: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            output,
            tuple(self.parameters.values()),
            cotangent,
            create_graph=create_graph,
            retain_graph=True,
            allow_unused=True,
        )


def _batched(outputs: list[Tensor], inputs: tuple[Tensor, ...], cotangents: list[Tensor]) -> list[Tensor]:
    """Products for every column, in one batched traversal where torch can, else one by one."""
    count = len(cotangents[0])
    if count > 1:
        try:
            found = torch.autograd.grad(
                outputs, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            return [i.new_zeros(count, *i.shape) if g is None else g for g, i in zip(found, inputs, strict=True)]
        except RuntimeError:  # an operation without a batching rule
            pass
    each = [
        torch.autograd.grad(outputs, inputs, [c[k] for c in cotangents], retain_graph=True, allow_unused=True)
        for k in range(count)
    ]
    return [
        torch.stack([torch.zeros_like(i) if g is None else g for g in column])
        for column, i in zip(zip(*each, strict=True), inputs, strict=True)
    ]
