"""Velocity of the NTK and curvature of the outputs, in units of one forward pass, beside the dense way.

    python benchmarks/dntk.py                          cases of this device
    python benchmarks/dntk.py --device cuda            the same on a GPU, larger
    python benchmarks/dntk.py --case cnn --n 8         one case at another size

The dense way is the JVP of the Jacobian-contraction NTK in torch.func, ``jvp(θ -> J Jᵀ, step)``, with J from
``vmap(jacrev)``; where J does not fit, only the products are run. Values are compared. "c" is one forward pass. On a
CPU seconds are CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import models
import timing
from gramscope.kernels.kernel_velocity import dntk_velocity, dntk_velocity_operator, output_curvature

CASES = {
    "cpu": [("mlp", 256), ("mlp", 4), ("cnn", 2)],
    "cuda": [("mlp", 1024), ("mlp", 64), ("cnn", 32), ("resnet8", 32)],
}


@dataclass(frozen=True)
class Row:
    case: str
    what: str
    seconds: float
    forwards: float
    peak_mib: float
    difference: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", choices=["mlp", "cnn", "resnet8", "resnet18"])
    parser.add_argument("--n", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        timing.use_cpu_time()
    torch.backends.cudnn.allow_tf32 = False  # float32 for both sides, as ours is anyway
    cases = CASES["cuda" if device.type == "cuda" else "cpu"]
    if options.case:
        cases = [(options.case, options.n or dict(cases).get(options.case, 8))]
    rows = []
    for name, n in cases:
        rows += run(name, n, device, options.repeats)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def run(name: str, n: int, device: torch.device, repeats: int) -> list[Row]:
    model, x = models.build(name, n, device)
    model = with_tanh(model)
    residual = torch.randn(n, models.CLASSES, generator=torch.Generator().manual_seed(2)).to(device) / n
    size = sum(p.numel() for p in model.parameters())
    print(f"\n{name} (tanh), N = {n}, C = {models.CLASSES}, {size:,} parameters, {device}")
    with torch.no_grad():
        forward = measured(lambda: model(x), device, 4 * repeats)[0]
    print(f"  one forward pass: {1e3 * forward:.2f} ms")
    vector = torch.randn(n * models.CLASSES, generator=torch.Generator().manual_seed(3)).to(device)
    operator = dntk_velocity_operator(model, x, residual, check=False)
    curve, product = peer_curvature(model, x, residual), peer_product(model, x, residual, vector)
    contestants: list[tuple[str, Callable[[], Tensor], Tensor]] = [
        ("curvature, no witness", lambda: output_curvature(model, x, residual, check=False), curve),
        ("curvature", lambda: output_curvature(model, x, residual), curve),
        ("curvature, torch.func", lambda: peer_curvature(model, x, residual), curve),
        ("velocity, one more product", lambda: operator @ vector, product),
        ("velocity, first product", lambda: dntk_velocity_operator(model, x, residual) @ vector, product),
        ("velocity, one product, torch.func", lambda: peer_product(model, x, residual, vector), product),
    ]
    if 6 * n * models.CLASSES * size * 4 < timing.available_bytes(device):
        reference = peer_dense(model, x, residual)
        contestants += [
            ("velocity, dense", lambda: dntk_velocity(model, x, residual), reference),
            ("velocity, dense, torch.func", lambda: peer_dense(model, x, residual), reference),
        ]
    rows = []
    for what, call, want in contestants:
        seconds, value = measured(call, device, repeats)
        peak = timing.peak_bytes(call, device) / 2**20
        difference = float((value.reshape(-1) - want.reshape(-1)).norm() / want.norm())
        rows.append(Row(name, what, seconds, seconds / forward, peak, difference))
        print(f"  {what:34s} {1e3 * seconds:10.2f} ms {seconds / forward:9.1f} c {peak:9.0f} MiB   {difference:.1e}")
    return rows


def measured(call: Callable[[], Tensor], device: torch.device, repeats: int) -> tuple[float, Tensor]:
    """Median seconds after one call that is not counted, and the value."""
    value = call()
    return statistics.median(timing.seconds(call, device) for _ in range(repeats)), value


def with_tanh(model: nn.Module) -> nn.Module:
    """A smooth twin: with ReLU most of a second derivative is zero and cheap."""
    for name, child in model.named_children():
        setattr(model, name, nn.Tanh() if isinstance(child, nn.ReLU) else with_tanh(child))
    return model


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def step_of(model: nn.Module, x: Tensor, residual: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((model(x) * residual).sum(), parameters)
    return dict(zip(names, gradients, strict=True))


def peer_dense(model: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    def one(parameters: dict[str, Tensor], single: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (single[None],))[0]

    def kernel(parameters: dict[str, Tensor]) -> Tensor:
        rows = torch.func.vmap(torch.func.jacrev(one), (None, 0))(parameters, x)
        flat = torch.cat([part.flatten(0, 1).flatten(1) for part in rows.values()], dim=1)
        return flat @ flat.T

    with torch.no_grad():
        step = step_with_grad(model, x, residual)
        return -torch.func.jvp(kernel, (parameters_of(model),), (step,))[1]


def peer_curvature(model: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    step = step_with_grad(model, x, residual)
    with torch.no_grad():
        slope = lambda p: torch.func.jvp(outputs, (p,), (step,))[1]  # noqa: E731
        return 0.5 * torch.func.jvp(slope, (parameters_of(model),), (step,))[1]


def peer_product(model: nn.Module, x: Tensor, residual: Tensor, vector: Tensor) -> Tensor:
    """JVP along the step of ``θ -> J Jᵀ w``."""

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    def applied(parameters: dict[str, Tensor]) -> Tensor:
        f, pull = torch.func.vjp(outputs, parameters)
        (direction,) = pull(vector.reshape(f.shape))
        return torch.func.jvp(outputs, (parameters,), (direction,))[1]

    step = step_with_grad(model, x, residual)
    with torch.no_grad():
        return -torch.func.jvp(applied, (parameters_of(model),), (step,))[1]


def step_with_grad(model: nn.Module, x: Tensor, residual: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        return step_of(model, x, residual)


if __name__ == "__main__":
    main()
