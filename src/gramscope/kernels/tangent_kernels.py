"""A network at initialisation as a kernel and a meta kernel, in the form that a nearly-kernel machine asks for.

``k̂ = J λ Jᵀ`` is the tangent kernel, ``μ̂ = dH`` the dNTK, with composite index (example, output). The meta kernel is
only ever contracted: with a matrix over pairs of training outputs, or with one vector. Arrays in, arrays out.
"""

from typing import Unpack

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from gramscope.base.errors import InputError
from gramscope.base.nested import ModelInput
from gramscope.kernels.expansion import Expansion, ExpansionOptions, check_options
from gramscope.kernels.kernel_velocity import dntk

# Singular values of a contraction below this share of the largest are rounding of a matrix of lower rank.
RANK = 1e-13


class TangentKernels:
    """Kernel ``k̂(x, x')`` and meta kernel ``μ̂(x0, x1, x2)`` of a network as it is, for ``NearlyKernelRegressor``.

    Rows are (example, output) flattened: n examples of a network with C outputs give n·C rows. The network runs as a
    float64 copy unless ``precision`` says otherwise, since kernels are inverted.

    Reference: PDLT (arXiv:2106.10165) equations (11.148), (11.149).

    Example:
        >>> import numpy as np, torch, gramscope as gs
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> kernels = gs.kernels.TangentKernels(model)
        >>> x = np.random.default_rng(0).normal(size=(5, 2))
        >>> kernels(x, x[:3]).shape, kernels.meta(x, x[:3], x[:3]).shape
        ((5, 3), (5, 3, 3))
    """

    def __init__(self, model: nn.Module, **options: Unpack[ExpansionOptions]) -> None:
        self.model = model
        self.options: ExpansionOptions = {"precision": "float64", **options}
        check_options(self.options)

    def __repr__(self) -> str:
        return f"TangentKernels of {type(self.model).__name__} ({self.options['precision'] or 'own precision'})"

    @torch.inference_mode(False)
    def initial(self, x: ModelInput) -> Float[np.ndarray, "n C"]:
        """The outputs of the network as it stands, z(θ₀)."""
        return _array(self._at(x).f)

    @torch.inference_mode(False)
    def __call__(self, x: ModelInput, x2: ModelInput = None) -> Float[np.ndarray, "u v"]:
        """``k̂ = J(x) λ J(x2)ᵀ``."""
        left = self._at(x)
        right = left if x2 is None or x2 is x else self._at(x2)
        kernel = left @ right.directions()
        return _array((kernel + kernel.T) / 2 if right is left else kernel)

    @torch.inference_mode(False)
    def meta(self, x0: ModelInput, x1: ModelInput, x2: ModelInput) -> Float[np.ndarray, "u v w"]:
        """``μ̂(x0, x1, x2)`` with all its entries; for small problems."""
        whole = dntk(self.model, *map(self._tensors, (x0, x1, x2)), **self.options)
        n0, c, n1, _, n2, _ = whole.shape
        return _array(whole.reshape(n0 * c, n1 * c, n2 * c))

    @torch.inference_mode(False)
    def curvature(self, x: ModelInput, train: ModelInput, pairs: Float[np.ndarray, "v v"]) -> Float[np.ndarray, " u"]:
        """``Σ_{ab} μ̂(x; a, b) Z^{ab}``: second derivatives along the eigenvectors of the symmetric part of Z."""
        at, fitted = self._at(x), self._at(train)
        _check_fits(pairs, "pairs", 2, fitted)
        values, vectors = np.linalg.eigh((pairs + pairs.T) / 2)
        total = np.zeros(at.rows.size)
        for value, vector in zip(values, vectors.T, strict=True):
            if abs(value) > RANK * np.abs(values).max():
                along = fitted.step(_vector(vector, fitted))
                total += value * _array(at.tangent(along) @ along)
        return total

    @torch.inference_mode(False)
    def transport(self, x: ModelInput, train: ModelInput, pairs: Float[np.ndarray, "v v"]) -> Float[np.ndarray, " u"]:
        """``Σ_{ab} μ̂(a; x, b) Z^{ab}``: one vector over the parameters, then J(x)."""
        at, fitted = self._at(x), self._at(train)
        _check_fits(pairs, "pairs", 2, fitted)
        left, values, right = np.linalg.svd(pairs)
        moved = torch.zeros(fitted.cols.size, dtype=fitted.dtype, device=fitted.device)
        for value, a, b in zip(values, left.T, right, strict=True):
            if value > RANK * values.max():
                along = fitted.step(_vector(b, fitted))
                moved = moved + value * (fitted.tangent(along).T @ _vector(a, fitted))
        return _array(at @ (fitted.rates @ moved))

    @torch.inference_mode(False)
    def applied(
        self, x: ModelInput, x2: ModelInput, train: ModelInput, vector: Float[np.ndarray, " v"]
    ) -> Float[np.ndarray, "u w"]:
        """``Σ_a μ̂(x; x2, a) v^a``."""
        at, other, fitted = self._at(x), self._at(x2), self._at(train)
        _check_fits(vector, "vector", 1, fitted)
        along = fitted.step(_vector(vector, fitted))
        return _array(at.tangent(along) @ other.directions())

    @torch.inference_mode(False)
    def feature_movement(self, train: ModelInput, vector: Float[np.ndarray, " v"]) -> float:
        """``√(tr J̇ λ J̇ᵀ / tr J λ Jᵀ)``, J̇ the change of the features J on ``train`` along ``λ Jᵀ v``, at first order.

        ``tr J̇ λ J̇ᵀ = Σ_{ijk} ddII_{i i j k} v_j v_k``, the second ddNTK contracted.
        """
        fitted = self._at(train)
        _check_fits(vector, "vector", 1, fitted)
        maps = fitted.tangent(fitted.step(_vector(vector, fitted))), fitted
        sizes = [float((fitted.rates.diagonal * one.dense().square()).sum()) for one in maps]
        return (sizes[0] / sizes[1]) ** 0.5 if sizes[1] > 0 else 0.0

    def _tensors(self, x: ModelInput) -> ModelInput:
        """Arrays become tensors in the type and on the device of the parameters."""
        if not isinstance(x, np.ndarray):
            return x
        first = next(self.model.parameters())
        dtype = first.dtype if np.issubdtype(x.dtype, np.floating) else None
        return torch.from_numpy(np.ascontiguousarray(x)).to(device=first.device, dtype=dtype)

    def _at(self, x: ModelInput) -> Expansion:
        return Expansion(self.model, self._tensors(x), **self.options)


def _check_fits(array: Float[np.ndarray, "..."], name: str, axes: int, fitted: Expansion) -> None:
    """Raise unless an array over the training outputs has their number on each of its axes."""
    rows, outputs = fitted.rows.size, fitted.f.shape[1]
    if np.shape(array) != (rows,) * axes:
        raise InputError(
            f"{name} must have shape {(rows,) * axes}, with the {rows} outputs of train on each axis "
            f"({rows // outputs} examples x {outputs}, flattened), got {np.shape(array)}."
        )
    if not np.isfinite(array).all():
        raise InputError(f"{name} must be finite, but it has a NaN or an infinity. Look at what it was solved from.")


def _vector(array: Float[np.ndarray, " v"], at: Expansion) -> Float[Tensor, " v"]:
    return torch.as_tensor(array, dtype=at.dtype, device=at.device)


def _array(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().cpu().numpy()
