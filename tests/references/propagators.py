"""Stacked states and their Jacobian by plain autograd, one backward pass a scalar; no operator, no closed form.

A *run* is a function of no arguments that computes, with the parameters' graph, the list of state tensors in the order
and the shapes that the operators use.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def stacked_jacobian(states: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """ds/dθ, (N, p), for states of any shape, flattened."""
    rows = []
    for value in states.reshape(-1):
        if not value.requires_grad:
            rows.append(torch.zeros(sum(p.numel() for p in parameters), dtype=states.dtype))
            continue
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        rows.append(torch.cat([piece.reshape(-1) for piece in pieces]))
    return torch.stack(rows)


def dense_parts(step: Callable[[list[Tensor]], list[Tensor]], states: list[Tensor], parameters: Sequence[Tensor]):
    """L = ∂f/∂s and J = ∂f/∂θ as matrices, for ``f(s)`` given as a function of the list of all states."""
    leaves = [s.detach().clone().requires_grad_() for s in states]
    made = torch.cat([m.reshape(-1) for m in step(leaves)])
    both = [*leaves, *parameters]
    joined = stacked_jacobian(made, both)
    count = sum(s.numel() for s in leaves)
    return joined[:, :count], joined[:, count:]


def recurrent_states(module: nn.Module, x: Tensor, h0=None, lengths=None) -> Tensor:
    """(trial, time, site, unit): hidden states of nn.RNN, nn.GRU or nn.LSTM from torch's own cells, step by step.

    x is (trial, time, input). After the end of a trial the states are zero.
    """
    kind = type(module).__name__
    ways, layers = (2 if module.bidirectional else 1), module.num_layers
    n, steps, _ = x.shape
    lengths = [steps] * n if lengths is None else lengths
    width = module.hidden_size
    parts = 2 if kind == "LSTM" else 1
    if h0 is None:
        h0 = [torch.zeros(layers * ways, n, width, dtype=x.dtype) for _ in range(parts)]
    elif isinstance(h0, Tensor):
        h0 = [h0]
    trials = []
    for b in range(n):
        below = [x[b, t] for t in range(steps)]
        columns = []
        for layer in range(layers):
            shown = []
            for way in range(ways):
                suffix = f"_l{layer}" + ("_reverse" if way else "")
                state = [h[layer * ways + way, b] for h in h0]
                run = [[torch.zeros(width, dtype=x.dtype)] * parts for _ in range(steps)]
                order = range(lengths[b])
                for t in reversed(order) if way else order:
                    state = one_step(kind, module, suffix, below[t], state)
                    run[t] = state
                shown.append([r[0] for r in run])
                columns += [[r[part] for r in run] for part in range(parts)]
            below = [torch.cat([one[t] for one in shown]) for t in range(steps)]
        trials.append(torch.stack([torch.stack([column[t] for column in columns]) for t in range(steps)]))
    return torch.stack(trials)


def one_step(kind: str, module: nn.Module, suffix: str, x: Tensor, state: list[Tensor]) -> list[Tensor]:
    weights = [getattr(module, f"{name}{suffix}") for name in ("weight_ih", "weight_hh")]
    biases = [getattr(module, f"{name}{suffix}", None) for name in ("bias_ih", "bias_hh")]
    a = weights[0] @ x + (0 if biases[0] is None else biases[0])
    r = weights[1] @ state[0] + (0 if biases[1] is None else biases[1])
    if kind == "RNN":
        return [torch.tanh(a + r) if module.nonlinearity == "tanh" else torch.relu(a + r)]
    if kind == "GRU":
        reset, update = torch.sigmoid(a[: -len(a) // 3] + r[: -len(r) // 3]).chunk(2)
        new = torch.tanh(a[-len(a) // 3 :] + reset * r[-len(r) // 3 :])
        return [(1 - update) * new + update * state[0]]
    enter, forget, new, leave = (a + r).chunk(4)
    memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return [torch.sigmoid(leave) * torch.tanh(memory), memory]
