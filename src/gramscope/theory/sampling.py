"""Monte Carlo bridge: the tensors of the theory measured on ensembles of sampled networks."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from gramscope.base.checks import check_count
from gramscope.base.errors import InputError
from gramscope.base.progress_bar import progress
from gramscope.base.rng import child_seed, generator
from gramscope.theory.comparison import Comparison, Estimates, SampleEstimate
from gramscope.theory.estimators import network_statistics
from gramscope.theory.finite_width import Flow, check_flow

_CHUNK_NUMBERS = 2**20  # float64 numbers of the largest intermediate of a batch: larger ones leave the cache


def ensemble(
    theory: Flow,
    width: int | Sequence[int] = 64,
    count: int = 1000,
    *,
    seed: int = 0,
    extrapolate: bool = True,
) -> Comparison:
    """Sample networks of finite width, measure K, Θ, V, D, F, A, B, P, Q, extrapolate to 1/n → 0, compare with theory.

    The networks are drawn from the theory's initialisation, batched by ``torch.vmap``; estimators have the weights of
    the layer in question integrated out (PDLT, arXiv:2106.10165). At layer 2 they are unbiased at every width; from
    layer 3 on n × correlator differs from the theory by O(1/n), which a fit in 1/n removes.

    Args:
        theory: ``FiniteWidthMLP(...).flow(x)``; its inputs and hyperparameters are used, and the ratios of its widths.
        width: n_1 of the sampled networks. One number n means the ladder n/2, n; several are used as they are. The fit
            is a line through two widths, a parabola through three or more.
        count: networks for each width.
        extrapolate: with False, no fit: only the widest networks are sampled and compared as they are.

    >>> from gramscope.theory import FiniteWidthMLP
    >>> flow = FiniteWidthMLP(widths=[2, 16, 1], C_b=0.1, C_W=1.6, lambda_b=0.4).flow(torch.tensor([[1.0, -0.5]]))
    >>> report = ensemble(flow, width=8, count=400, extrapolate=False)
    >>> report.max_pull < 4, report.networks
    (True, 400)
    """
    check_flow(theory, "theory")
    if len(theory) < 2:
        raise InputError("the theory must have at least two layers: a single layer is Gaussian and has no 1/n tensors.")
    if any(rate.skip for rate in theory.rates):
        raise InputError("the theory must be that of a plain network: networks with a skip are not sampled here.")
    check_count(count, "count", 8)
    ladder = _ladder(width, extrapolate)
    shapes = [_scaled(theory, n) for n in ladder]
    batches = [max(1, _CHUNK_NUMBERS // _numbers(shape, theory.gram.shape[0])) for shape in shapes]
    steps = sum(math.ceil(count / batch) for batch in batches)
    measured: list[Estimates] = []
    with progress("sampling networks", steps) as advance:
        for shape, batch in zip(shapes, batches, strict=True):
            samples = []
            rng = generator(child_seed(seed, "ensemble", *shape))
            for start in range(0, count, batch):
                samples.append(_sample(theory, shape, min(batch, count - start), rng))
                advance()
            measured.append(_estimates(theory, shape, _joined(samples)))
    left_out = ("P", "Q") if theory.has_kink and theory.kink == "distributional" else ()
    result = {
        # At layer 2 there is no remainder in 1/n, and all widths measure the same.
        key: _fit(ladder, [one[key] for one in measured], degree=0 if key[0] == 2 else min(2, len(ladder) - 1))
        for key in measured[0]
        if key[1] not in left_out
    }
    return Comparison(theory, result, tuple(ladder), count * len(ladder), left_out)


def _ladder(width: int | Sequence[int], extrapolate: bool) -> list[int]:
    several = list(width) if isinstance(width, Iterable) and not isinstance(width, str) else [width]
    if not several:
        raise InputError("width must be one or several integers, got an empty sequence.")
    several = sorted({check_count(n, "width") for n in several})
    if not extrapolate:
        return several[-1:]
    if len(several) == 1:
        if several[0] % 2:
            raise InputError(
                f"width must be even to extrapolate from width/2 and width, got {several[0]}. Or pass two."
            )
        return [several[0] // 2, several[0]]
    return several


def _scaled(theory: Flow, width: int) -> tuple[int, ...]:
    """n_1 .. n_{L-1} in the ratios of the theory's widths."""
    hidden = theory.widths[:-1]
    scaled = [width * n / hidden[0] for n in hidden]
    if any(n != int(n) for n in scaled):
        raise InputError(
            f"width must keep the ratios of the theory's widths {list(hidden)} in whole numbers, but {width} gives "
            f"{[round(n, 3) for n in scaled]}. Use a multiple of {hidden[0] // math.gcd(*hidden)}."
        )
    return tuple(int(n) for n in scaled)


def _numbers(shape: tuple[int, ...], samples: int) -> int:
    return max(shape) ** 2 * samples**4


def _sample(theory: Flow, shape: tuple[int, ...], count: int, rng: torch.Generator) -> dict[str, list[Tensor]]:
    x = theory.inputs()
    tensors: list[Tensor] = []
    fan_in = x.shape[1]
    for n, rate in zip(shape, theory.rates, strict=False):
        W = torch.randn(count, n, fan_in, generator=rng, dtype=torch.float64, device="cpu")
        b = torch.randn(count, n, generator=rng, dtype=torch.float64, device="cpu")
        tensors += [W.to(x.device) * math.sqrt(rate.C_W / fan_in), b.to(x.device) * math.sqrt(rate.C_b)]
        fan_in = n

    def one(*flat: Tensor) -> dict[str, list[Tensor]]:
        weights = list(zip(flat[::2], flat[1::2], strict=True))
        return network_statistics(weights, x, theory.mlp.activation, theory.rates)

    result: dict[str, list[Tensor]] = torch.vmap(one)(*tensors)
    return result


def _joined(samples: list[dict[str, list[Tensor]]]) -> dict[str, list[Tensor]]:
    layers = range(len(samples[0]["G"]))
    return {name: [torch.cat([part[name][layer] for part in samples]) for layer in layers] for name in samples[0]}


def _mean(values: Tensor) -> SampleEstimate:
    """The mean over networks and its standard error."""
    return SampleEstimate(values.mean(0), values.std(0) / math.sqrt(len(values)))


def _covariance(n: int, left: Tensor, right: Tensor) -> SampleEstimate:
    """n × the covariance of averages over n neurons; the error is that of the mean of the products."""
    products = torch.einsum("sab,scd->sabcd", left - left.mean(0), right - right.mean(0))
    return _mean(products * (n * len(left) / (len(left) - 1)))


def _estimates(theory: Flow, shape: tuple[int, ...], values: dict[str, list[Tensor]]) -> Estimates:
    result: Estimates = {}
    for place, n in enumerate(shape):
        layer, rate = place + 2, theory.rates[place + 1]
        G, W = values["G"][place], values["W"][place]
        result[layer, "K"] = _mean(rate.C_b + G)
        result[layer, "Theta"] = _mean(rate.lambda_b + W)
        for name, left, right in (("V", G, G), ("D", G, W), ("A", W, W)):
            result[layer, name] = _covariance(n, left, right)
        for name in ("F", "B", "P", "Q"):
            result[layer, name] = _mean(values[name][place])
    return result


def _fit(widths: list[int], estimates: list[SampleEstimate], degree: int) -> SampleEstimate:
    """Value at 1/n = 0 of a least-squares polynomial in 1/n.

    All widths weigh the same: the measured error of a covariance is small where its value happens to be, and weights
    made of it would pull the fit towards zero.
    """
    powers = np.array([[n ** (-float(k)) for k in range(degree + 1)] for n in widths])
    share = np.linalg.pinv(powers)[0]
    value = sum(float(c) * estimate.value for c, estimate in zip(share, estimates, strict=True))
    square = sum(float(c) ** 2 * estimate.error.square() for c, estimate in zip(share, estimates, strict=True))
    value, square = (torch.as_tensor(part, device="cpu") for part in (value, square))
    return SampleEstimate(value, square.sqrt())
