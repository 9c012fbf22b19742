"""The gradient noise scale: how many examples a batch must have before its gradient is more signal than noise."""

from jaxtyping import Float
from torch import Tensor

from gramscope.base.checks import check_number
from gramscope.base.errors import InputError
from gramscope.base.moments import as_rows
from gramscope.base.user_warnings import undefined


def gradient_noise_scale(example_squares: Float[Tensor, " n"], mean_square: float) -> float:
    """Simple noise scale ``tr Σ / |G|²`` of n gradients, one for each example, from their sizes alone.

    ``example_squares`` are ``|g_i|²``, ``mean_square`` is ``|ḡ|²`` of their mean ``ḡ = Σ g_i / n``. Numerator and
    denominator are unbiased: ``tr Σ = (Σ|g_i|² - n|ḡ|²) / (n - 1)`` and ``|G|² = |ḡ|² - tr Σ / n``. NaN, with a
    warning, where the estimate of ``|G|²`` is not positive: n examples are then too few to see the gradient at all.

    Reference: McCandlish et al. 2018 (arXiv:1812.06162), equation 2.9 and appendix A.1.

    Example:
        >>> import torch
        >>> gradient_noise_scale(torch.tensor([1.0, 9.0]), 4.0)  # two gradients, 1 and 3, of one parameter
        0.6666666666666666
    """
    noise, signal = noise_and_signal(example_squares, mean_square)
    if signal <= 0:
        few = f"{len(example_squares)} examples are too few to tell the gradient from its noise"
        return undefined("the gradient noise scale", few)
    return noise / signal


def noise_and_signal(example_squares: Float[Tensor, " n"], mean_square: float) -> tuple[float, float]:
    """The unbiased estimates of ``tr Σ`` and ``|G|²``; the second may be negative."""
    squares, mean_square = as_rows(example_squares, "example_squares"), check_number(mean_square, "mean_square")
    n = len(squares)
    if n < 2 or squares.shape[1] != 1:
        raise InputError(
            "example_squares must be one number for each of 2 examples at least, got shape "
            f"{tuple(example_squares.shape)}. The noise scale compares examples: pass a larger probe."
        )
    noise = max(float(squares.sum()) - n * mean_square, 0.0) / (n - 1)
    return noise, mean_square - noise / n
