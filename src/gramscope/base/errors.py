"""The errors of gramscope. Each message says what must hold, what was got, and what to do."""


class GramscopeError(Exception):
    """Any error that gramscope raises on purpose. The others below are kinds of it.

    >>> import torch, gramscope as gs
    >>> try:
    ...     gs.ntk(torch.nn.Linear(2, 1), torch.full((3, 2), float("nan")))
    ... except gs.GramscopeError as error:
    ...     print(type(error).__name__)
    InputError
    """


class InputError(GramscopeError, ValueError):
    """What was passed in cannot be measured: wrong shape, no examples, NaN, nothing to differentiate.

    >>> import torch, gramscope as gs
    >>> try:
    ...     gs.ntk(torch.nn.Linear(2, 1), torch.ones(0, 2))
    ... except gs.InputError as error:
    ...     print(error)
    x must have at least one example on its first axis, got shape (0, 2). Pass a non-empty batch.
    """


class UnsupportedError(GramscopeError, TypeError):
    """A kind of tensor, model or option that gramscope does not handle; the message names it.

    >>> import torch, gramscope as gs
    >>> try:
    ...     gs.ntk(torch.nn.Linear(2, 1), torch.ones(3, 2).to_sparse())
    ... except gs.UnsupportedError as error:
    ...     print(str(error).split(",")[0])
    x must be a dense tensor
    """


class CoupledExamplesError(GramscopeError, ValueError):
    """One example's output depends on another example, so a kernel between single examples is not defined.

    Batch norm in training mode does that. Call ``model.eval()``, or pass ``coupled="exact"``.

    >>> import torch, gramscope as gs
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), torch.randn(4, 2)
    >>> try:
    ...     gs.ntk(model, x)
    ... except gs.CoupledExamplesError:
    ...     print("coupled")
    coupled
    >>> gs.ntk(model.eval(), x).shape
    torch.Size([4, 2, 4, 2])
    """
