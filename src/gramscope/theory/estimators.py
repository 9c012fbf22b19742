"""The tensors of the theory for one sampled network, with the weights of the layer in question integrated out.

Given layer l, the weights of layer l + 1 are Gaussian, and averaging over them leaves sums over the neurons of layer l
(exact at every width). These have far less variance than products of outputs. The dNTK of
layer l, a tensor of n³ neurons, enters P and Q contracted; the forward equation (11.24) takes the contraction down a
layer at a time, in n³ operations, without the tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from gramscope.theory.activation_functions import Activation
from gramscope.theory.recursions import Rates

Weights: TypeAlias = list[tuple[Tensor, Tensor]]  # W (n_l, n_{l-1}) and b (n_l,) of layers 1 .. L - 1


@dataclass
class _HiddenLayer:
    """A hidden layer of one network: activations and derivatives (samples, neurons), NTK (samples², neurons²)."""

    s: Tensor
    s1: Tensor
    s2: Tensor
    H: Tensor
    W: Tensor
    rates: Rates

    @property
    def width(self) -> int:
        return self.s.shape[-1]


def network_statistics(
    weights: Weights, x: Float[Tensor, "n features"], activation: Activation, rates: tuple[Rates, ...]
) -> dict[str, list[Tensor]]:
    """For layers 2..L: the averages G, W whose covariances are V, D, A, and the values of F, B, P, Q."""
    states = _states(weights, x, activation, rates)
    result: dict[str, list[Tensor]] = {name: [] for name in ("G", "W", "F", "B", "P", "Q")}
    for place, state in enumerate(states):
        above = rates[place + 1]
        C, n = above.C_W, state.width
        G = torch.einsum("aj,bj->ab", state.s, state.s) / n
        slopes = torch.einsum("aj,abjj,bj->ab", state.s1, state.H, state.s1) / n
        result["G"].append(C * G)
        result["W"].append(above.lambda_W * G + C * slopes)
        F = C**2 / n * _mean_F(state)
        result["F"].append(F)
        result["B"].append(C**2 / n * _mean_B(state))
        below = states[: place + 1]
        result["P"].append(C**2 / n * (_explicit_P(state) + _dntk_P(below)))
        dntk = C**2 / n * (_explicit_Q(state) + _dntk_Q(below))
        result["Q"].append(dntk + above.lambda_W / C * F.permute(1, 0, 3, 2))
    return result


def _states(weights: Weights, x: Tensor, activation: Activation, rates: tuple[Rates, ...]) -> list[_HiddenLayer]:
    states: list[_HiddenLayer] = []
    signal, n = x, x.shape[1]
    for (W, b), rate in zip(weights, rates, strict=False):
        jets = activation.batched_jets(signal @ W.T + b)
        fresh = rate.lambda_b + rate.lambda_W / n * signal @ signal.T
        H = fresh[:, :, None, None] * torch.eye(W.shape[0], dtype=x.dtype, device=x.device)
        if states:
            J = W * states[-1].s1[:, None, :]  # ∂z/∂z of the layer below, a sample at a time: (a, i, j)
            H = H + (J[:, None] @ states[-1].H) @ J[None].transpose(-1, -2)
        states.append(_HiddenLayer(jets[0], jets[1], jets[2], H, W, rate))
        signal, n = jets[0], W.shape[0]
    return states


def _mean_F(state: _HiddenLayer) -> Tensor:
    # s_j;a s'_j;b H_jk;bd s_k;c s'_k;d
    products = state.s[:, None] * state.s1[None]  # (a, b, j)
    left = torch.einsum("abj,bdjk->abdk", products, state.H)
    return torch.einsum("abdk,cdk->abcd", left, products)


def _mean_B(state: _HiddenLayer) -> Tensor:
    # (s'_j;a s'_k;c H_jk;ac) (s'_j;b s'_k;d H_jk;bd), summed over j and k.
    weighted = state.s1[:, None, :, None] * state.s1[None, :, None, :] * state.H
    return torch.einsum("acjk,bdjk->abcd", weighted, weighted)


def _explicit_P(state: _HiddenLayer) -> Tensor:
    # s''_m;0 s_m;3 H_mk;01 H_mk;02 s'_k;1 s'_k;2; the samples 0 1 2 3 are a b c d.
    sloped = state.H * state.s1[None, :, None, :]
    pairs = (sloped[:, :, None] * sloped[:, None]).sum(-1)
    return torch.einsum("abcm,adm->abcd", pairs, state.s2[:, None] * state.s[None])


def _explicit_Q(state: _HiddenLayer) -> Tensor:
    # s''_k;0 s'_k;1 H_kk;01 H_km;02 s'_m;2 s_m;3
    left = state.s2[:, None] * state.s1[None] * torch.einsum("abkk->abk", state.H)
    right = torch.einsum("ackm,cdm->acdk", state.H, state.s1[:, None] * state.s[None])
    return torch.einsum("abk,acdk->abcd", left, right)


def _dntk_P(states: list[_HiddenLayer]) -> Tensor:
    """Σ_km s'_m;0 s_m;3 s'_k;1 s'_k;2 dH_mkk;012 of the last state's layer; c has the samples (a, d), M (b, c)."""
    total = states[-1].s.new_zeros(())
    for c, M, W, below, spread in _downwards(states):
        M_right, sloped = M @ W, below.H * below.s1[None, :, None, :]  # H_kp;ab s'_p;b
        # Second line of (11.24): s'' of the layer below, and two NTKs.
        right = sloped[:, None] @ (W.T @ M_right).transpose(-1, -2)[None]  # (a, b, c, k, p)
        bend = (sloped[:, :, None] * right).sum(-1)
        total = total + torch.einsum("abck,adk->abcd", bend, c @ W * below.s2[:, None])
        # Third and fourth lines: the NTK's own dependence on the weights of this layer; Σ s'_k;a s_k;b H_kq;ac s'_q;c.
        pull = torch.einsum("abk,ackq->abcq", below.s1[:, None] * below.s[None], sloped)
        third = torch.einsum("adi,bciq->adbcq", c, M_right)
        total = total + spread * torch.einsum("adbcq,abcq->abcd", third, pull)
        fourth = torch.einsum("adi,bcip->adbcp", c, M.transpose(-1, -2) @ W)
        total = total + spread * torch.einsum("adbcp,acbp->abcd", fourth, pull)
    return total


def _dntk_Q(states: list[_HiddenLayer]) -> Tensor:
    """Σ_km s'_k;0 s'_k;1 s'_m;2 s_m;3 dH_kkm;012 of the last state's layer; c has the samples (c, d), M (a, b)."""
    total = states[-1].s.new_zeros(())
    for c, M, W, below, spread in _downwards(states):
        sloped = below.H * below.s1[None, :, None, :]
        products = below.s1[:, None] * below.s[None]  # s'_k;a s_k;b
        reach = torch.einsum("ackq,cdq->acdk", sloped, c @ W)
        bend = (W.T @ M @ W * sloped).sum(-1) * below.s2[:, None]
        total = total + torch.einsum("abk,acdk->abcd", bend, reach)
        trace = torch.einsum("abii->ab", M)
        total = total + spread * trace[:, :, None, None] * torch.einsum("abk,acdk->abcd", products, reach)
        pull = torch.einsum("ack,abkp->acbp", products, sloped)  # Σ s'_k;a s_k;c H_kp;ab s'_p;b
        fourth = torch.einsum("abip,cdi->abcdp", M, c) @ W
        total = total + spread * torch.einsum("abcdp,acbp->abcd", fourth, pull)
    return total


def _downwards(states: list[_HiddenLayer]) -> Iterator[tuple[Tensor, Tensor, Tensor, _HiddenLayer, float]]:
    """c and M with which dH of a layer is contracted, its weights, the layer below and λ_W over its width; top first.

    At the top ``c = s' s`` and M is the diagonal of ``s' s'``; s' and W take both down.
    """
    top = states[-1]
    c, M = top.s1[:, None] * top.s[None], torch.diag_embed(top.s1[:, None] * top.s1[None])
    for place in reversed(range(1, len(states))):
        W, below = states[place].W, states[place - 1]
        yield c, M, W, below, states[place].rates.lambda_W / below.width
        c = c @ W * below.s1[:, None]
        M = W.T @ M @ W * below.s1[:, None, :, None] * below.s1[None, :, None, :]
