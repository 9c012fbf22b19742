"""The hierarchy of any network: transports are Jacobians between named layers, by vjp and jvp.

``A^ℓ_{μν} = Σ_k G^k_{μν} (∂v^k_μ/∂x^ℓ_μ)ᵀ (∂v^k_ν/∂x^ℓ_ν)``, k over the places where a weight meets data ``v^k`` that
depends on layer ℓ, G^k the Gram matrix of the signals there; a convolution or a sequence sums over its positions, a
tied weight over all its uses. With ``B v = Σ_ν (signal)_ν ⊗ (∂v^k_ν/∂x^ℓ_ν) v_ν``, a vector over the parameters, it is
``A = Bᵀ B``.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from gramscope.base.arithmetic import users_autocast
from gramscope.base.axes import Axes
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.base.nested import ModelInput
from gramscope.capture.backward_graph import nodes_below, nodes_under
from gramscope.capture.linear_map import LinearMap, check_custom_functions
from gramscope.capture.network import Outputs, Precision
from gramscope.capture.retained_run import RetainedRun, WeightUse, open_layers
from gramscope.linalg import LinearOperator

Leaves = list[Tensor]
Sides = tuple[Leaves, Leaves]


class Transport(LinearOperator):
    """``T^{k←ℓ} = ∂x^k/∂x^ℓ`` between two named layers of any module, for a whole batch.

    Rows and columns run over (example, unit), the units of a layer flattened. Both products are traversals of one kept
    graph: ``Tᵀ w`` a backward pass, ``T v`` a backward pass through the graph of that.

    Example:
        >>> import torch, gramscope as gs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> gs.hierarchy.Transport(net, torch.ones(5, 3), "0", "2").shape
        (10, 20)
    """

    def __init__(
        self, model: nn.Module, x: ModelInput, source: str, target: str, *, outputs: Outputs = None,
        precision: Precision = None,
    ) -> None:  # fmt: skip
        run = open_layers(
            model, x, list(dict.fromkeys([source, target])), outputs=outputs, frozen=True, precision=precision,
            watch=False,
        )  # fmt: skip
        self._delta, self._value = run.perturbations[source], run.values[target]
        self._within = run.within
        self._map = LinearMap([self._value], [self._delta])
        n = len(run.f)
        dtype = torch.promote_types(self._value.dtype, torch.float32)
        super().__init__(
            _layer_axes(self._value, n, target), _layer_axes(self._delta, n, source), dtype=dtype,
            device=self._value.device,
        )  # fmt: skip

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        if x.shape[1] == 0:
            return x.new_zeros(self.rows.size, 0)
        (moved,) = self._within(lambda: self._map.jvp([x.T.reshape(-1, *self._delta.shape)], x.shape[1]))
        return moved.reshape(x.shape[1], -1).T.to(self.dtype)

    def _adjoint_matmat(self, x: Float[Tensor, "rows k"]) -> Float[Tensor, "cols k"]:
        if x.shape[1] == 0:
            return x.new_zeros(self.cols.size, 0)
        (moved,) = self._within(lambda: self._map.vjp([x.T.reshape(-1, *self._value.shape)]))
        if moved is None:
            return x.new_zeros(self.cols.size, x.shape[1])
        return moved.reshape(x.shape[1], -1).T.to(self.dtype)


class NetworkPullback(LinearOperator):
    """``A^ℓ`` of any network at the named layer ℓ, on vectors over (example, output, unit).

    For a chain of Linear and ReLU layers it is :meth:`Fields.pullback`. Wherever the network is piecewise linear and
    has no biases above ℓ, the first-order change of ``g^ℓ = ∂f/∂x^ℓ`` in a gradient step is ``Δg^ℓ_μ = -η Σ_ν A_{μν}
    x^ℓ_ν e_ν``; smooth activations add a term with their second derivative, which A does not contain.

    Args:
        model: any module.
        x: examples.
        layer: name of a module whose output is ``x^ℓ``, or "input".
        outputs, frozen, precision: as for ``gs.capture``.

    Example:
        >>> import torch, gramscope as gs
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        >>> gs.hierarchy.NetworkPullback(net, torch.ones(4, 1, 4, 4), "1").rows
        Axes(example=4, output=3, unit=8)
    """

    def __init__(
        self, model: nn.Module, x: ModelInput, layer: str, *, outputs: Outputs = None, frozen: bool = False,
        precision: Precision = None,
    ) -> None:  # fmt: skip
        run = open_layers(model, x, [layer], outputs=outputs, frozen=frozen, precision=precision)
        self._delta, self._f, self._within = run.perturbations[layer], run.f, run.within
        self.value = run.values[layer].detach()
        _check_seen(run, self._delta)
        self._uses = run.within(lambda: _above(run, self._delta))
        self._to_data = LinearMap([t for use in self._uses for t in use.data], [self._delta])
        self._to_weights = LinearMap([w for use in self._uses for w in use.weights], list(run.parameters.values()))
        n = len(self._f)
        units = _layer_axes(self.value, n, layer)["unit"]
        axes = Axes(example=n, output=self._f.shape[1], unit=units)
        dtype = torch.promote_types(self._f.dtype, torch.float32)
        super().__init__(axes, axes, dtype=dtype, device=self._f.device, symmetric=True)

    @property
    def conjugates(self) -> Float[Tensor, "n C unit"]:
        """``g^ℓ = ∂f/∂x^ℓ`` for every output."""
        each = self._within(lambda: [_gradient([self._f], self._delta, [c]) for c in self._cotangents()])
        return torch.stack(each, 1).reshape(self.rows.shape).to(self.dtype)

    def apply(self, v: Tensor) -> Float[Tensor, "n C unit"]:
        """``Σ_{νd} A_{μc,νd} v_{νd}``."""
        if tuple(v.shape) != self.rows.shape:
            raise InputError(f"v must have shape {self.rows.shape} (example, output, unit), got {tuple(v.shape)}.")
        found = self.matvec(v.reshape(-1).to(dtype=self.dtype, device=self.device))
        return found.reshape(self.rows.shape)

    def _matmat(self, x: Float[Tensor, "cols k"]) -> Float[Tensor, "rows k"]:
        columns = self._within(lambda: [self._product(column) for column in x.T])
        return torch.stack(columns, 1) if columns else x.new_zeros(self.rows.size, 0)

    def _product(self, v: Float[Tensor, " cols"]) -> Float[Tensor, " rows"]:
        """``Bᵀ B v``: a tangent for each output up to the uses of weights, and a cotangent for each output back."""
        if not self._uses:
            return torch.zeros_like(v)
        by_output = v.reshape(self.rows.shape).to(self._delta.dtype).unbind(1)
        met: list[Tensor] | None = None
        for signals, tangent in zip(self._signals, by_output, strict=True):
            moved = self._to_data.jvp([tangent.reshape(1, *self._delta.shape)], 1)
            share = self._meet(signals, [t[0] for t in moved])
            met = share if met is None else [a + b for a, b in zip(met, share, strict=True)]
        assert met is not None
        # To the parameters and back to the weights as they were used: a weight may be a view of a parameter or a
        # function of several, and one parameter may be used many times.
        at_parameters = self._to_weights.vjp([t[None] for t in met])
        shared = [t[0] for t in self._to_weights.jvp(at_parameters, 1)]
        each = [self._return(signals, shared) for signals in self._signals]
        return torch.stack(each, 1).reshape(-1).to(self.dtype)

    def _cotangents(self) -> list[Float[Tensor, "n C"]]:
        unit = torch.eye(self._f.shape[1], dtype=self._f.dtype, device=self._f.device)
        return [row.expand_as(self._f).contiguous() for row in unit]

    @cached_property
    def _signals(self) -> list[list[list[Tensor | None]]]:
        """∂f/∂u of every output at every use, kept: each product needs them twice."""
        edges = [edge for use in self._uses for edge in use.edges]
        by_output: list[list[list[Tensor | None]]] = []
        for cotangent in self._cotangents():
            found = iter(torch.autograd.grad(self._f, edges, cotangent, retain_graph=True, allow_unused=True))
            by_output.append([[next(found) for _ in use.edges] for use in self._uses])
        return by_output

    def _meet(self, signals: list[list[Tensor | None]], tangents: list[Tensor]) -> list[Tensor]:
        """``B v`` in the weights as they were used, from the tangents of the data they met."""
        return self._mixed(signals, tangents, lambda data, weights: (data, weights))

    def _return(self, signals: list[list[Tensor | None]], changes: list[Tensor]) -> Tensor:
        """``Bᵀ``: from changes of the weights to cotangents of the data they met, and back to layer ℓ."""
        back = self._mixed(signals, changes, lambda data, weights: (weights, data))
        return _gradient([t for use in self._uses for t in use.data], self._delta, back)

    def _mixed(
        self, signals: list[list[Tensor | None]], along: list[Tensor], sides: Callable[[Leaves, Leaves], Sides]
    ) -> list[Tensor]:
        """``∂²⟨s, u⟩/∂a∂b`` of every use, contracted with ``along`` on side a; what is left is of side b."""
        given = iter(along)
        found: list[Tensor] = []
        for use, of_use in zip(self._uses, signals, strict=True):
            data, weights, paired = _paired(use, of_use)
            here, there = sides(data, weights)
            mine = [next(given) for _ in here]
            if paired is None:
                found += [torch.zeros_like(leaf) for leaf in there]
                continue
            slopes = torch.autograd.grad(paired, here, create_graph=True, allow_unused=True)
            terms = [(s * t).sum() for s, t in zip(slopes, mine, strict=True) if s is not None and s.requires_grad]
            found += _gradients(terms, there)
        return found


def _check_seen(run: RetainedRun, delta: Tensor) -> None:
    """Raise where a parameter meets data that depends on the layer inside a custom function, out of sight."""
    run.within(lambda: check_custom_functions([run.f], run.parameters.values()))
    names = {get_gradient_edge(p).node: name for name, p in run.parameters.items()}
    moving = get_gradient_edge(delta).node
    for node in nodes_below([run.f]):
        if not isinstance(node, BackwardCFunction):
            continue
        below = [nodes_under([child]) for child, _ in node.next_functions if child is not None]
        own = [names[n] for reach in below if moving not in reach for n in reach if n in names]
        if own and any(moving in reach for reach in below):
            raise UnsupportedError(
                f"a pullback must see where every weight multiplies its data, but parameter {own[0]!r} does so "
                f"inside the custom autograd.Function {node.name().removesuffix('Backward')}. Write it in "
                "torch operations here."
            )


def _above(run: RetainedRun, delta: Tensor) -> tuple[WeightUse, ...]:
    """WeightUses whose data depends on the perturbed layer, and whose output f depends on."""
    kept = []
    for use in run.uses:
        dependent = torch.autograd.grad(
            list(use.data), delta, [torch.ones_like(t) for t in use.data], retain_graph=True, allow_unused=True
        )[0]
        if dependent is not None:
            kept.append(use)
    return tuple(kept)


def _paired(use: WeightUse, signals: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Fresh leaves and ``⟨s, u⟩`` of one use; None where no signal comes back."""
    with torch.enable_grad(), users_autocast():
        data, weights, outputs = use.rerun()
        terms = [(u * s).sum() for u, s in zip(outputs, signals, strict=True) if s is not None]
        return data, weights, sum(terms[1:], terms[0]) if terms else None


def _gradients(terms: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    if not terms:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(terms, list(leaves), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def _gradient(tensors: Sequence[Tensor], leaf: Tensor, cotangents: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(list(tensors), leaf, list(cotangents), retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(leaf) if found is None else found


def _layer_axes(tensor: Tensor, n: int, name: str) -> Axes:
    if tensor.dim() < 1 or tensor.shape[0] != n:
        raise InputError(
            f"layer {name!r} must have the {n} examples on its first axis, got shape {tuple(tensor.shape)}. Name a "
            "layer that has."
        )
    return Axes(example=n, unit=tensor.numel() // n)
