"""Neural ODEs and state-space layers step by step, entry by entry, in plain operations: no scan, no solver object."""

import torch
from torch import Tensor
from torch.nn import functional as F


def solver_states(field, times: Tensor, h: Tensor, solver: str, substeps: int, x: Tensor | None = None) -> Tensor:
    """(trial, time, ...): the Butcher tableau of the solver, written out."""
    tableau = {
        "euler": ([0.0], [[]], [1.0]),
        "midpoint": ([0.0, 0.5], [[], [0.5]], [0.0, 1.0]),
        "rk4": ([0.0, 0.5, 0.5, 1.0], [[], [0.5], [0.0, 0.5], [0.0, 0.0, 1.0]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
    }
    nodes, rows, weights = tableau[solver]
    states = []
    for k in range(len(times) - 1):
        dt = (times[k + 1] - times[k]) / substeps
        driven = () if x is None else (x[:, k],)
        for i in range(substeps):
            t, slopes = times[k] + i * dt, []
            for node, row in zip(nodes, rows, strict=True):
                inner = h + dt * sum((c * s for c, s in zip(row, slopes, strict=True)), torch.zeros_like(h))
                slopes.append(field(t + node * dt, inner, *driven))
            h = h + dt * sum(c * s for c, s in zip(weights, slopes, strict=True))
        states.append(h)
    return torch.stack(states, dim=1)


def s4d_states(layer, x: Tensor) -> list[Tensor]:
    """States of an S4D layer in the order of its sites, real and imaginary parts by the rules of sines and cosines."""
    step = layer.log_step.exp()[:, None]
    decay, frequency = layer.log_decay.exp(), layer.frequency
    size = torch.exp(-step * decay)
    real, imaginary = size * torch.cos(step * frequency), size * torch.sin(step * frequency)
    # (a - 1)/A with A = -decay + i frequency
    square = decay**2 + frequency**2
    gain_real = (-(real - 1) * decay + imaginary * frequency) / square
    gain_imaginary = (-imaginary * decay - (real - 1) * frequency) / square
    h = [torch.zeros(len(x), *decay.shape, dtype=x.dtype) for _ in range(2)]
    rows = []
    for t in range(x.shape[1]):
        h = [
            real * h[0] - imaginary * h[1] + gain_real * x[:, t, :, None],
            imaginary * h[0] + real * h[1] + gain_imaginary * x[:, t, :, None],
        ]
        rows.append(torch.stack(h, dim=-1))
    states = torch.stack(rows, dim=1)
    return [states, (states * layer.read).sum((-1, -2)), layer.skip * x]


def selective_states(layer, x: Tensor) -> list[Tensor]:
    """States of a selective layer in the order of its sites."""
    projected = layer.project(x)
    low, B, _ = projected.split([layer.rank, layer.modes, layer.modes], dim=-1)
    steps = layer.steps(low)
    delta, A = F.softplus(steps), -layer.log_decay.exp()
    h, rows = torch.zeros(len(x), *A.shape, dtype=x.dtype), []
    for t in range(x.shape[1]):
        step = delta[:, t, :, None]
        h = torch.exp(step * A) * h + step * x[:, t, :, None] * B[:, t, None]
        rows.append(h)
    return [projected, steps, torch.stack(rows, dim=1), layer.skip * x]


def output_of(states: list[Tensor], layer, x: Tensor) -> Tensor:
    """What the layer gives out, from its states."""
    if len(states) == 3:
        return 2 * states[1] + states[2]
    C = states[0][..., -layer.modes :]
    return (states[2] * C[:, :, None]).sum(-1) + states[3]
