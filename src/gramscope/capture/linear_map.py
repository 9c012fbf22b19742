"""A stretch of autograd graph as a linear map: products with ``J = ∂outputs/∂inputs`` and with ``Jᵀ``.

``Jᵀ c`` is a backward pass. It is linear in c, so a backward pass through its own graph is ``J v``: nothing runs the
network again. That needs a backward pass that autograd can differentiate in c. Custom functions, adjoint solvers and
backward hooks may give the right ``Jᵀ c`` and not allow this, often without an error. So ``w·(J v) = (Jᵀ w)·v`` is
checked once for every map; where it fails, ``J`` is taken row by row in plain backward passes, exact and slower.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gramscope.base.complex_numbers import real_view
from gramscope.base.errors import UnsupportedError
from gramscope.base.progress_bar import progress
from gramscope.base.rng import gaussian, generator
from gramscope.base.user_warnings import warn
from gramscope.capture.backward_graph import batched_gradients, dense, is_out_of_memory, leaves_below, nodes_below
from gramscope.capture.side_effects import checked_gradients, gradients_returned

Products = Callable[[Sequence[Tensor | None]], list[Tensor]]

# How far both sides of the identity may differ, relative to the sizes of their terms. Float64 networks may round to
# float32 inside, as some norms of transformers do; a part of J that is missing shows at the size of that part.
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# Gradients this many roundings below the largest may be rounding and nothing else: they are left out of the check.
NOISE = 1e3


class LinearMap:
    """``∂outputs/∂inputs`` between tensors of one graph.

    Vectors are lists of tensors (k, *shape), one for each output or input, for k vectors at once. A graph of ``proven``
    operations is not checked.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, proven: bool = False) -> None:
        self.outputs, self.inputs, self.proven = list(outputs), list(inputs), proven
        self.slow = ""  # why J v is taken row by row, if it is; a warning says it, too
        self._live = [output for output in self.outputs if output.requires_grad]
        self._cotangents: list[Tensor] = []
        self._transposed: tuple[Tensor | None, ...] | None = None

    def vjp(self, cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """``Jᵀ c``; None for an input on which no output depends."""
        if not self._live or not self.inputs:
            return [None] * len(self.inputs)
        pairs = zip(self.outputs, cotangents, strict=True)
        chosen = [c.to(o.dtype).contiguous() for o, c in pairs if o.requires_grad]
        with gradients_returned(self.inputs):
            return batched_gradients(self._live, self.inputs, chosen)

    def jvp(self, tangents: Sequence[Tensor | None], count: int) -> list[Tensor]:
        """``J v`` for ``count`` vectors; None stands for a tangent of zero."""
        if not self._live or all(t is None for t in tangents):
            return [o.new_zeros(count, *o.shape) for o in self.outputs]
        differentiable = self._checked_transpose() is not None
        found = iter(self._twice_backward(tangents) if differentiable else self._by_rows(tangents))
        return [next(found) if o.requires_grad else o.new_zeros(count, *o.shape) for o in self.outputs]

    def along(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """``J v`` for one vector, as a differentiable function of everything the graph was made of."""
        gradients = self._checked_transpose()
        if gradients is None:
            raise UnsupportedError(
                f"every operation of the model must have a second derivative here. {self.slow} Write its backward "
                "pass in differentiable operations; nothing is approximated."
            )
        used = [(g, t) for g, t in zip(gradients, tangents, strict=True) if g is not None and g.requires_grad]
        if not used:
            return [torch.zeros_like(o).detach() for o in self.outputs]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(
                [g for g, _ in used], self._cotangents, [t for _, t in used], create_graph=True, allow_unused=True
            ))  # fmt: skip
        moved = [next(found) if o.requires_grad else None for o in self.outputs]
        return [torch.zeros_like(o).detach() if m is None else m for m, o in zip(moved, self.outputs, strict=True)]

    def check(self, products: Products) -> bool:
        """Do these products with J satisfy ``w·(J v) = (Jᵀ w)·v``, every input having its say?

        v is ``Jᵀ w``, the part of each input scaled such that it adds 1 to both sides: an input whose part is missing
        or wrong shows, however small its gradient is beside those of the others.
        """
        w = [_random_like(o) for o in self._live]
        found = checked_gradients(self._live, self.inputs, w, retain_graph=True)
        gradients = [None if g is None else dense(g) for g in found]
        norms = [0.0 if g is None else _norm(g) for g in gradients]
        if not 0 < max(norms, default=0.0) < math.inf or any(math.isnan(norm) for norm in norms):
            return True  # nothing to compare: J is zero, or not finite itself
        dtype = self._live[0].dtype
        noise = min(NOISE * torch.finfo(dtype).eps, 1e-2) * max(norms)
        # Zeros for inputs without a gradient: times an infinite second derivative they are no number.
        scales = [0.0 if norm <= noise else 1 / norm for norm in norms]
        tangents = [
            None if g is None else g.detach()[None] * scale * scale for g, scale in zip(gradients, scales, strict=True)
        ]
        expected = sum(scale > 0 for scale in scales)
        terms = [(a.conj() * b[0]).real.double() for a, b in zip(w, products(tangents), strict=True)]
        size = expected + sum(float(term.abs().sum()) for term in terms)
        error = abs(sum(float(term.sum()) for term in terms) - expected)
        return error <= LIMITS.get(dtype, 1e-4) * size

    def _checked_transpose(self) -> tuple[Tensor | None, ...] | None:
        """The graph of ``Jᵀ c``, made and checked at its first use; None where it cannot be differentiated in c."""
        if self._transposed is None and not self.slow:
            self._cotangents = [torch.zeros_like(o, requires_grad=True) for o in self._live]
            with torch.enable_grad():
                self._transposed = checked_gradients(self._live, self.inputs, self._cotangents, create_graph=True)
            try:
                right = self.proven or self.check(self._twice_backward)
                why = "" if right else "is right but not differentiable in its cotangent"
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                why = f"can be taken only once ({str(error).splitlines()[0]})"
            if why:
                self._transposed, self._cotangents = None, []
                self.slow = _slow_path(self._live, why)
                warn(self.slow)
        return self._transposed

    def _twice_backward(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        assert self._transposed is not None
        pairs = zip(self._transposed, tangents, strict=True)
        used = [(g, t) for g, t in pairs if g is not None and t is not None and g.requires_grad]
        count = len(next(t for t in tangents if t is not None))
        found: list[Tensor | None] = [None] * len(self._live)
        if used:
            vectors = [t.to(g.dtype).contiguous() for g, t in used]
            found = batched_gradients([g for g, _ in used], self._cotangents, vectors)
        return [o.new_zeros(count, *o.shape) if f is None else f for f, o in zip(found, self._live, strict=True)]

    def _by_rows(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """The same from the rows of J, one plain backward pass for each entry of the outputs."""
        count = len(next(t for t in tangents if t is not None))
        result = []
        with progress("rows of the Jacobian", sum(o.numel() for o in self._live)) as advance:
            for output in self._live:
                if output.is_complex():
                    raise UnsupportedError(f"a complex output cannot be differentiated row by row. {self.slow}")
                moved = output.new_zeros(count, output.numel())
                for entry in range(output.numel()):
                    unit = output.new_zeros(1, *output.shape)
                    unit.view(-1)[entry] = 1
                    for row, tangent in zip(batched_gradients([output], self.inputs, [unit]), tangents, strict=True):
                        if row is not None and tangent is not None:
                            # ⟨row, v⟩ of real vectors, complex numbers being two real ones.
                            # A parameter may be one number, without axes.
                            vectors = tangent.to(row.dtype).unsqueeze(-1).flatten(1)
                            moved[:, entry] += (vectors @ row.flatten().conj()).real
                    advance()
                result.append(moved.view(count, *output.shape))
        return result


def check_custom_functions(outputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> None:
    """Raise where parameters hide in a custom function of the graph, which is searched for them.

    Its backward pass then calls another one, which adds to their ``.grad``: one pass of zeros tells.
    """
    live = [output for output in outputs if output.requires_grad]
    if any(isinstance(node, BackwardCFunction) for node in nodes_below(live)):
        with gradients_returned(parameters):
            zeros = [torch.zeros_like(output) for output in live]
            torch.autograd.grad(live, list(leaves_below(live).values()), zeros, retain_graph=True, allow_unused=True)


def _slow_path(outputs: Sequence[Tensor], why: str) -> str:
    """What to tell the user, with the functions that may be the cause by name."""
    custom = [n.name().removesuffix("Backward") for n in nodes_below(outputs) if isinstance(n, BackwardCFunction)]
    names = ", ".join(dict.fromkeys(custom)) or "an operation or a backward hook"
    count = sum(output.numel() for output in outputs)
    return f"The backward pass of {names} {why}: J v takes {count:,} plain backward passes, one for each output."


def _norm(x: Tensor) -> float:
    """In float64: of some million float32 squares, a sum in float32 is off by more than the check allows."""
    return float(torch.linalg.vector_norm(real_view(x), dtype=torch.float64))


def _random_like(tensor: Tensor) -> Tensor:
    parts = gaussian(tensor.numel(), 1 + tensor.is_complex(), rng=generator(0), dtype=torch.float64, device="cpu")
    flat = torch.view_as_complex(parts) if tensor.is_complex() else parts[:, 0]
    return flat.reshape(tensor.shape).to(tensor)
