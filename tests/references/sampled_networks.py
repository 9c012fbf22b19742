"""The tensors of the finite-width theory by their definitions: networks are drawn, differentiated twice, averaged.

Nothing is integrated out and no recursion is used: any architecture will do. Slow and noisy, with error bars.
"""

import torch
from torch import Tensor


def sampled_tensors(network, stds, rates, samples, n, count, seed=0, batch=500):
    """Means and standard errors of K, Θ, V, D, F, A, B, P, Q times n, over ``count`` networks.

    ``network(θ)`` is a function of one flat parameter vector with outputs (samples, neurons); ``stds`` and ``rates``
    are the standard deviation and the learning rate of each parameter.
    """
    rng = torch.Generator().manual_seed(seed)
    draws = []
    for start in range(0, count, batch):
        theta = stds * torch.randn(min(batch, count - start), len(stds), generator=rng, dtype=torch.float64)
        draws.append(torch.vmap(lambda t: _one(network, t, rates, samples))(theta))
    z, H, dH = (torch.cat(parts) for parts in zip(*draws, strict=True))
    return _averages(z, H, dH, n)


def _one(network, theta, rates, samples) -> tuple[Tensor, Tensor, Tensor]:
    """z (a, i), H (a, i, b, j), dH (a, i, b, j, c, k) of one network."""

    def flat(t):
        return network(t).reshape(-1)

    jacobian = torch.func.jacrev(flat)(theta)
    u = rates * jacobian
    size = len(jacobian)

    def second(v, w):
        return torch.func.jvp(lambda t: torch.func.jvp(flat, (t,), (v,))[1], (theta,), (w,))[1]

    dH = torch.vmap(lambda v: torch.vmap(lambda w: second(v, w))(u))(u).permute(2, 0, 1)
    shape = (samples, size // samples)
    return flat(theta).reshape(shape), (jacobian @ u.T).reshape(*shape * 2), dH.reshape(*shape * 3)


def _averages(z, H, dH, n):
    neurons = z.shape[2]
    off = 1 - torch.eye(neurons, dtype=z.dtype)
    off = off / off.sum()
    own = torch.einsum("taibi->tabi", H)
    dH_ijj = torch.einsum("taibjcj->tabcij", dH)
    dH_iij = torch.einsum("taibicj->tabcij", dH)
    zz = torch.einsum("tai,tbi->tabi", z, z)
    dzz, dH_own = zz - zz.mean((0, 3), keepdim=True), own - own.mean((0, 3), keepdim=True)
    samples = {
        "K": zz.mean(-1),
        "Theta": own.mean(-1),
        "V": n * torch.einsum("tabi,tcdj,ij->tabcd", dzz, dzz, off),
        "D": n * torch.einsum("tabi,tcdj,ij->tabcd", dzz, dH_own, off),
        "A": n * torch.einsum("tabi,tcdj,ij->tabcd", dH_own, dH_own, off),
        "F": n * torch.einsum("tai,tcj,tbidj,ij->tabcd", z, z, H, off),
        "B": n * torch.einsum("taicj,tbidj,ij->tabcd", H, H, off),
        "P": n * torch.einsum("tabcij,tdi,ij->tabcd", dH_ijj, z, off),
        "Q": n * torch.einsum("tabcij,tdj,ij->tabcd", dH_iij, z, off),
    }
    return {name: (one.mean(0), one.std(0) / len(one) ** 0.5) for name, one in samples.items()}
