"""An optimiser that takes only one part of another optimiser's step: the Gram-altering, or the Gram-preserving."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gramscope.base.checks import check_plain
from gramscope.base.errors import InputError, UnsupportedError
from gramscope.capture.network import named_parameters, unwrap
from gramscope.hierarchy.optimizer_step import ParamGroup
from gramscope.measures.gram_split import Keep, Method, gram_only_step, split_step
from gramscope.measures.weight_matrices import MatrixForm, weight_forms

__all__ = ["GramOnly"]


class GramOnly(Optimizer):
    """Any optimiser, of whose steps only the Gram-altering (or Gram-preserving) part is taken.

    After the inner optimiser has moved ``W₁ → W₂`` (momentum, weight decay and all), W becomes ``Q W₂``, which has the
    Gram matrix of W₂ and differs from W₁ by no needless turn; or, preserving, ``Qᵀ W₁``, which has that of W₁. A
    network that learns as well with the altering part alone learns through its Gram matrices.

    It is an optimiser: hand it to schedulers, ``GradScaler``, checkpoints and hooks in place of the inner one, whose
    ``param_groups``, ``state`` and ``state_dict`` it shares. Several wrapped optimisers do not know of one another.

    Args:
        optimizer: the inner optimiser; everything but the last correction is its work.
        keep: "altering" or "preserving".
        method: "procrustes" keeps the Gram matrix exactly for steps of any size; "sylvester" adds the first-order part
            (W + altering, or W + preserving), which errs by the square of the step.
        others: parameters that are no matrices (biases, norms, embeddings): "pass" takes their step, "freeze" undoes
            it.
        model: tells groups of convolutions, transposed layouts, packed projections and embeddings from plain matrices,
            and gives names. Without it every parameter of two axes or more is (out, everything else).

    The correction is an SVD in float64 for each weight and step, rounded to the parameter's own dtype. ``plan`` says
    what is done with each parameter. Reference: arXiv:2605.06258, Gram-only step.

    Example:
        >>> layer = torch.nn.Linear(3, 2).double()
        >>> optimizer = GramOnly(torch.optim.SGD(layer.parameters(), lr=0.1), keep="preserving", model=layer)
        >>> before = layer.weight.detach().T @ layer.weight.detach()
        >>> layer(torch.ones(4, 3).double()).square().sum().backward()
        >>> optimizer.step()
        >>> bool(((layer.weight.T @ layer.weight) - before).abs().max() < 1e-14)
        True
        >>> print(optimizer)
        GramOnly(SGD, keep='preserving', method='procrustes', others='pass')
          weight (2x3): preserving part
          bias (2): full step, no matrix
    """

    # A fused inner optimiser would be told the loss scale through attributes set on it, which here would land on the
    # wrapper; without this flag GradScaler unscales the gradients itself, and skips steps with infinities.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        keep: Keep = "altering",
        method: Method = "procrustes",
        others: Literal["pass", "freeze"] = "pass",
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UnsupportedError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Wrap each optimiser by "
                "itself."
            )
        _check_option("keep", keep, ("altering", "preserving"))
        _check_option("method", method, ("procrustes", "sylvester"))
        _check_option("others", others, ("pass", "freeze"))
        self.optimizer = optimizer
        self.keep, self.method, self.others = keep, method, others
        self._forms, self._names = _known_forms(model)
        # The documented way to a working Optimizer without new groups: hooks and profiling are set up, nothing else.
        self.__setstate__({})
        for parameter in self._parameters():
            _check(parameter)

    # What is shared with the inner optimiser ---------------------------------------------------------

    @property
    def param_groups(self) -> list[ParamGroup]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> ParamGroup:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: ParamGroup) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    def __getstate__(self) -> ParamGroup:
        # Torch's own copies groups and state alone, and would lose the inner optimiser on copying and pickling.
        return {k: v for k, v in self.__dict__.items() if k in _OWN}

    # Hooks of the wrapper act about the inner optimiser's own, in torch's order; each fires once.

    def state_dict(self) -> ParamGroup:
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict: ParamGroup = self.optimizer.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: ParamGroup) -> None:
        state_dict = state_dict.copy()  # a hook may write to it
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self.optimizer.load_state_dict(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: ParamGroup) -> None:
        self.optimizer.add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _check(parameter)

    # The step ----------------------------------------------------------------------------------------

    @property
    def plan(self) -> dict[str, str]:
        """What is done with each parameter: its name (or group and place), and its part of the step."""
        taken = {"pass": "full step", "freeze": "no step"}[self.others]
        plan = {}
        for group, members in enumerate(self.param_groups):
            for place, parameter in enumerate(members["params"]):
                name = self._names.get(parameter, f"group {group}, parameter {place}")
                shape = "x".join(map(str, parameter.shape)) or "scalar"
                form = self._form(parameter)
                plan[f"{name} ({shape})"] = f"{taken}, no matrix" if form is None else f"{self.keep} part"
        return plan

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimiser, of which one part is kept; its loss comes back."""
        before = {parameter: parameter.detach().clone() for parameter in self._parameters()}
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        with torch.no_grad():
            for parameter, old in before.items():
                if not torch.equal(parameter, old):  # an unmoved weight stays as it is to the last bit
                    self._correct(parameter, old)
        return loss

    def _correct(self, parameter: Tensor, old: Tensor) -> None:
        form = self._form(parameter)
        if form is None:
            if self.others == "freeze":
                parameter.copy_(old)
            return
        w1, w2 = form.matrices(old), form.matrices(parameter)
        if not bool(torch.isfinite(w2).all()):
            name = self._names.get(parameter, f"of shape {tuple(parameter.shape)}")
            raise InputError(
                f"the step of parameter {name} must be finite, but the optimiser wrote NaN or infinity into it. "
                "The run has diverged: lower the learning rate or clip gradients."
            )
        if self.method == "procrustes":
            new = gram_only_step(w1, w2, self.keep)
        else:
            new = w1 + getattr(split_step(w1, w2 - w1), self.keep)
        parameter.copy_(form.tensor(new, parameter))

    def _form(self, parameter: Tensor) -> MatrixForm | None:
        if parameter in self._names:
            return self._forms.get(parameter)
        return MatrixForm.plain(parameter.shape) if parameter.dim() >= 2 and parameter.numel() else None

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def __repr__(self) -> str:
        inner = type(self.optimizer).__name__
        head = f"GramOnly({inner}, keep={self.keep!r}, method={self.method!r}, others={self.others!r})"
        return "\n".join([head, *(f"  {name}: {part}" for name, part in self.plan.items())])


_OWN = ("optimizer", "keep", "method", "others", "_forms", "_names")


def _known_forms(model: nn.Module | None) -> tuple[dict[Tensor, MatrixForm], dict[Tensor, str]]:
    """Matrix forms and names by parameter; the object and not its id, so that copies and pickles keep them."""
    if model is None:
        return {}, {}
    parameters = named_parameters(unwrap(model))
    forms: dict[Tensor, MatrixForm] = {parameters[use.parameter]: use.form for use in weight_forms(model).values()}
    return forms, {parameter: name for name, parameter in parameters.items()}


def _check(parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise InputError("parameters must have a shape, but one is lazy and not initialised. Call model(x) once first.")
    check_plain(parameter, f"a parameter of shape {tuple(parameter.shape)}")
    if type(parameter).__name__ == "DTensor" or hasattr(parameter, "_local_tensor"):
        raise UnsupportedError(
            "GramOnly needs whole weight matrices, but a parameter is a DTensor (sharded). Use it with data "
            "parallelism (DDP), where each process holds the whole weight."
        )


def _check_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name} must be one of {allowed}, got {value!r}.")
