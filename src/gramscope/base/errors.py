"""The errors of gramscope. Each message says what must hold, what was got, and what to do."""


class GramscopeError(Exception):
    """Any error that gramscope raises on purpose."""


class InputError(GramscopeError, ValueError):
    """What was passed in cannot be measured: wrong shape, no examples, NaN, nothing to differentiate."""


class UnsupportedError(GramscopeError, TypeError):
    """A kind of tensor, model or option that gramscope does not handle, named."""


class CoupledExamplesError(GramscopeError, ValueError):
    """One example's output depends on another example, so a kernel between single examples is not defined."""
