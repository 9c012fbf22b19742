"""Slow and plain: the trace estimators as their papers define them, one probe at a time."""

import torch
from torch import Tensor


def xtrace_samples(matrix: Tensor, probes: Tensor, *, on_sphere: bool) -> Tensor:
    """The leave-one-out estimates of XTrace, each with its own QR (Epperly, Tropp & Webber 2024, (2.1))."""
    n, m = probes.shape
    image = matrix @ probes
    samples = []
    for i in range(m):
        basis = torch.linalg.qr(torch.cat([image[:, :i], image[:, i + 1 :]], dim=1)).Q
        residual = probes[:, i] - basis @ (basis.mT @ probes[:, i])
        if on_sphere:
            residual = residual * (n - m + 1) ** 0.5 / residual.norm()
        samples.append((basis.mT @ matrix @ basis).trace() + residual @ matrix @ residual)
    return torch.stack(samples)


def hutchpp_value(matrix: Tensor, sketch: Tensor, probes: Tensor) -> Tensor:
    """Hutch++ with the projector written out (Meyer, Musco, Musco & Woodruff 2021, algorithm 1)."""
    basis = torch.linalg.qr(matrix @ sketch).Q
    complement = torch.eye(len(matrix), dtype=matrix.dtype) - basis @ basis.mT
    rest = [z @ complement @ matrix @ complement @ z for z in probes.mT]
    return (basis.mT @ matrix @ basis).trace() + torch.stack(rest).mean()
