"""The global tangent kernel of a network's states."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Literal, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gramscope.base.axes import Axes
from gramscope.base.checks import check_choice, check_tensor
from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.capture.network import Outputs, unwrap_with_input
from gramscope.linalg import LinearOperator
from gramscope.propagators.build import cell_states, network_states, ode_states
from gramscope.propagators.layout import Selection
from gramscope.propagators.network_states import NetworkStates
from gramscope.propagators.neural_ode import NeuralODE
from gramscope.propagators.operators import ParameterJacobian, StateOperator
from gramscope.propagators.recurrent import RecurrentStates, is_recurrent

Precision = Literal["float64", "float32"] | None
NamedSweep = Callable[..., Tensor]  # of vectors over the states, for the parameters of some names


class GlobalOptions(TypedDict, total=False):
    """Options of :class:`GlobalNTK` that other functions pass on."""

    mask: Tensor | None
    outputs: Outputs
    frozen: bool
    precision: Precision


class GlobalNTK:
    """``NTK_S = P K P*``: how a gradient step moves every state of a network (arXiv:2605.08746).

    The states solve ``s = f(s, x, θ)``. ``K = J J*`` with ``J = ∂f/∂θ`` at frozen states, ``P = (1 - ∂f/∂s)^-1``, so
    ``ds/dθ = P J`` and one step of gradient descent moves the states by ``δs = -η P K P* ∇_s loss``.

    What the states are depends on the model:

    - ``nn.RNN``, ``nn.GRU``, ``nn.LSTM`` and their cells over a sequence: all hidden states, axes
      (trial, time, site, unit). A site is a layer and direction, for an LSTM its h and its c.
    - any ``cell(x_t, h) -> h`` with ``h0``: its h at each step; x is (trial, time, ...).
    - :class:`NeuralODE`: h at each time of its grid; x is its h0, or (h0, inputs).
    - anything else: what every weight site gives out (``u = W v + b``), and hidden states of recurrent layers in it.

    Args:
        model: any module. It is copied: later training does not change the operators.
        x: as the model takes it; a tuple is positional arguments, a dict keyword arguments. For cells (trial, time, i).
        h0: initial states in torch's shape; zeros if None. For a custom cell it must be given.
        mask: for recurrent modules and cells, bool (trial, time), True while a trial runs, or lengths (trial,). States
            after the end of a trial do not exist: K is zero and P the identity there.
        outputs: which outputs `.output` is about; see :func:`gramscope.capture`.
        frozen: count parameters with requires_grad=False too.
        precision: "float64" or "float32" runs a copy in that type. Half precision is measured in float32.

    Example:
        >>> import torch
        >>> model, x = torch.nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
        >>> g = GlobalNTK(model, x)
        >>> g.operator.rows
        Axes(trial=2, time=5, site=1, unit=4)
        >>> unit = torch.zeros(2, 5, 1, 4); unit[0, 2] = 1.0
        >>> later = g.axes.unflatten(g.P @ g.axes.flatten(unit))
        >>> bool((later[0, :2] == 0).all()), bool((later[1] == 0).all())  # neither backward in time nor across trials
        (True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        x: ModelInput,
        h0: ModelInput = None,
        *,
        mask: Tensor | None = None,
        outputs: Outputs = None,
        frozen: bool = False,
        precision: Precision = None,
    ) -> None:
        check_choice(precision, "precision", (None, "float64", "float32"))
        dtype = {None: None, "float64": torch.float64, "float32": torch.float32}[precision]
        model, x = unwrap_with_input(model, x)
        with torch.inference_mode(False):  # a graph is needed whatever the caller's mode
            self.states = self._linearised(model, x, h0, mask, outputs, frozen, dtype)

    @staticmethod
    def _linearised(
        model: nn.Module,
        x: ModelInput,
        h0: ModelInput,
        mask: Tensor | None,
        outputs: Outputs,
        frozen: bool,
        dtype: torch.dtype | None,
    ) -> NetworkStates:
        if is_recurrent(model):
            if outputs is not None:
                raise InputError(
                    "outputs must be left out for a recurrent module itself: its output is its last layer."
                )
            return RecurrentStates(model, x, h0, mask, frozen, dtype)
        if isinstance(model, NeuralODE):
            if h0 is not None or mask is not None or outputs is not None:
                raise InputError(
                    "h0, mask and outputs must be left out for a neural ODE: x is what it is called with, h0 or "
                    "(h0, inputs), and its output is its state at each time."
                )
            return ode_states(model, x, frozen, dtype)
        if h0 is not None:
            if outputs is not None:
                raise InputError("outputs must be left out for a cell: its output is its state at each step.")
            return cell_states(model, x, h0, mask, frozen, dtype)
        if mask is not None:
            raise InputError(
                "mask must be left out for a whole network: pass it in x as the model takes it. It serves "
                "recurrent modules and cells."
            )
        return network_states(model, x, outputs, frozen, dtype)

    def __repr__(self) -> str:
        dtype = str(self.states.dtype).removeprefix("torch.")
        return f"GlobalNTK({self.axes!r}, {len(self.sites)} sites, {len(self.parameters)} parameters, {dtype})"

    @property
    def axes(self) -> Axes:
        """The axes of the state vector; rows and columns of every operator on states."""
        return self.states.layout.axes

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the state variables, in order."""
        return self.states.layout.names

    @property
    def parameters(self) -> dict[str, torch.Size]:
        """The parameters counted, by name."""
        return dict(self.states.parameters)

    @property
    def values(self) -> Float[Tensor, " N"]:
        """The states themselves, flat."""
        return self.states.values

    @cached_property
    def P(self) -> StateOperator:
        """``P = (1 - ∂f/∂s)^-1``: how a push at one place reaches all later ones. ``P.T`` is backpropagation."""
        return StateOperator(self.states, self.states.propagate, self.states.propagate_adjoint)

    @cached_property
    def P_inverse(self) -> StateOperator:
        """``P^-1 = 1 - ∂f/∂s``."""
        forward, backward = self.states.propagate, self.states.propagate_adjoint
        return StateOperator(self.states, lambda q: q - forward(q, local=True), lambda q: q - backward(q, local=True))

    @cached_property
    def K(self) -> StateOperator:
        """``K = J J*``, the immediate effect of the parameters on the states."""
        return self._symmetric(self.states.kernel, tuple(self.states.parameters))

    @cached_property
    def K_parts(self) -> dict[str, StateOperator]:
        """``K_j`` by parameter; they sum to K."""
        return {name: self._symmetric(self.states.kernel, (name,)) for name in self.states.parameters}

    @cached_property
    def operator(self) -> LinearOperator:
        """``NTK_S = P K P*``."""
        return self._symmetric(self.states.step, tuple(self.states.parameters))

    def part(self, name: str) -> LinearOperator:
        """``P K_j P*`` of one parameter."""
        if name not in self.K_parts:
            raise InputError(f"there is no parameter {name!r}. There are {', '.join(self.K_parts)}.")
        return self._symmetric(self.states.step, (name,))

    def _symmetric(self, sweep: NamedSweep, names: tuple[str, ...]) -> StateOperator:
        """A product of some parameters' K with P and P*, or K itself."""
        of_names = partial(sweep, names=names)
        return StateOperator(self.states, of_names, of_names, symmetric=True)

    @cached_property
    def J(self) -> ParameterJacobian:
        """``J = ∂f/∂θ`` at frozen states, from parameters to states."""
        return ParameterJacobian(self.states, total=False)

    @cached_property
    def jacobian(self) -> ParameterJacobian:
        """``ds/dθ = P J``; ``operator = jacobian @ jacobian.T``."""
        return ParameterJacobian(self.states, total=True)

    @cached_property
    def C(self) -> StateOperator:
        """``C = ∂out/∂s``, from states to outputs."""
        return StateOperator(self.states, self.states.read, self.states.read_adjoint, rows=self.states.output_axes)

    @cached_property
    def output(self) -> LinearOperator:
        """``C P K P* C*``, the tangent kernel of the outputs."""
        return self.C @ self.operator @ self.C.T

    def select(self, site: str) -> Selection:
        """The restriction R to one site, with that site's own named axes; ``R @ g.operator @ R.T`` is its block."""
        return Selection(self.states.layout, site, self.states.dtype, self.states.device)

    def split(self, vector: Float[Tensor, " N"]) -> dict[str, Tensor]:
        """A state vector as one tensor for each site, by name."""
        if tuple(check_tensor(vector, "vector").shape) != (self.axes.size,):
            raise InputError(
                f"vector must have shape ({self.axes.size},) to match {self.axes!r}, got {tuple(vector.shape)}."
            )
        parts = self.states.layout.split(vector[None])
        return {name: part[0] for name, part in zip(self.sites, parts, strict=True)}


def check_global(g: object) -> None:
    """Raise for a model, say, where its linearised states are meant."""
    if not isinstance(g, GlobalNTK):
        raise InputError(f"g must be a GlobalNTK, got {type(g).__name__}. Of a model it is GlobalNTK(model, x).")
