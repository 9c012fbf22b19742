"""CIFAR-10 from files on disk, in any of four forms; nothing is downloaded."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from gramscope.base.checks import check_count
from gramscope.base.errors import InputError
from gramscope.base.rng import generator
from gramscope.tasks.digit_images import Task
from gramscope.tasks.idx import chosen_folder

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # by channel; arXiv:2410.04264, H.4.2
SIZE = 3 * 32 * 32
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
ALLOWED = {"_reconstruct", "ndarray", "dtype", "encode", "_codecs.encode"}

Images = tuple[NDArray[np.uint8], NDArray[np.int64]]  # (n, 3, 32, 32) and (n,)


def cifar10(folder: str | Path | None = None, train: int | None = None, test: int | None = None) -> Task:
    """CIFAR-10 as images (n, 3, 32, 32), each channel standardised by the usual mean and standard deviation.

    ``folder`` holds one of: ``cifar10.npz`` (x, y, xt, yt; images (n, 32, 32, 3) of bytes); the standard batches of the
    Python version (``data_batch_1`` to ``5`` and ``test_batch``) or of the binary one (the same with ``.bin``); or
    sheets ``data_batch_1.png`` to ``5`` and ``test_batch.png``, an image to a row of 1,024 pixels, with the labels in
    ``train_lables.json`` and ``test_lables.json`` (needs Pillow). If None, a folder ``cifar10`` is looked for in
    ``$GRAMSCOPE_DATA`` and ``../shared/data``. ``train`` and ``test`` take the first so many examples.

    Reference: Krizhevsky 2009; arXiv:2410.04264, appendix H.4.2 (mean and standard deviation).
    """
    place = chosen_folder("cifar10", folder, train, test, "the standard batches, or cifar10.npz,")
    (x, y), (x_test, y_test) = _read(place)
    return Task(
        _standardised(x[:train]), torch.from_numpy(y[:train]), _standardised(x_test[:test]),
        torch.from_numpy(y_test[:test]),
    )  # fmt: skip


def crop_and_flip(x: Float[Tensor, "n c h w"], *, seed: int, shift: int = 4) -> Float[Tensor, "n c h w"]:
    """Each image shifted by up to ``shift`` pixels, filled with 0, and mirrored with probability ½.

    Reference: arXiv:2410.04264, appendix H.4.2. Pass another seed for each batch.

    >>> crop_and_flip(torch.ones(2, 3, 8, 8), seed=0, shift=0).equal(torch.ones(2, 3, 8, 8))
    True
    """
    if x.dim() != 4:
        raise InputError(f"x must be images (n, channels, height, width), got shape {tuple(x.shape)}.")
    shift = check_count(shift, "shift", 0)
    n, _, height, width = x.shape
    rng = generator(seed)
    down, right = (torch.randint(2 * shift + 1, (n, 1), generator=rng, device="cpu") for _ in range(2))
    mirrored = torch.rand(n, 1, generator=rng, device="cpu") < 0.5
    rows = down + torch.arange(height, device="cpu")
    columns = torch.arange(width, device="cpu").expand(n, width)
    columns = right + torch.where(mirrored, columns.flip(1), columns)
    padded = torch.nn.functional.pad(x, (shift,) * 4).movedim(1, -1)  # (n, h, w, c)
    each = torch.arange(n, device="cpu")[:, None, None]
    picked = padded[each.to(x.device), rows[:, :, None].to(x.device), columns[:, None].to(x.device)]
    return picked.movedim(-1, 1).contiguous()


def _standardised(x: NDArray[np.uint8]) -> Float[Tensor, "n 3 32 32"]:
    mean, std = (torch.tensor(values, device="cpu").reshape(3, 1, 1) for values in (MEAN, STD))
    return (torch.from_numpy(np.array(x)).float() / 255 - mean) / std


def _read(folder: Path) -> tuple[Images, Images]:
    """Training and test images in the first form that the folder holds."""
    if (folder / "cifar10.npz").exists():
        return _from_npz(folder / "cifar10.npz")
    readers = {"": _from_pickle, ".bin": _from_binary}
    for ending, reader in readers.items():
        if (folder / f"test_batch{ending}").exists():
            parts = [reader(_present(folder / f"{name}{ending}")) for name in BATCHES]
            return _joined(parts), reader(folder / f"test_batch{ending}")
    if (folder / "test_batch.png").exists():
        labels = [
            np.array(json.loads(_present(folder / f"{part}_lables.json").read_text("utf-8")))
            for part in ("train", "test")
        ]
        x = np.concatenate([_sheet(_present(folder / f"{name}.png")) for name in BATCHES])
        return _checked(x, labels[0], folder), _checked(_sheet(folder / "test_batch.png"), labels[1], folder)
    for inner in ("cifar-10-batches-py", "cifar-10-batches-bin"):
        if (folder / inner).is_dir():
            return _read(folder / inner)
    found = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else "no such folder"
    raise FileNotFoundError(
        f"{folder} must hold cifar10.npz, test_batch, test_batch.bin or test_batch.png with the rest of that form, but "
        f"has {found}."
    )


def _from_npz(path: Path) -> tuple[Images, Images]:
    with np.load(path) as stored:
        pairs = [(stored[x].transpose(0, 3, 1, 2), stored[y]) for x, y in (("x", "y"), ("xt", "yt"))]
    train, test = (_checked(x, y, path) for x, y in pairs)
    return train, test


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays, numbers and text, and refuses anything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED and module.partition(".")[0] in ("numpy", "_codecs"):
            return super().find_class(module, name)
        raise InputError(f"a CIFAR-10 batch must hold arrays and text alone, but it asks for {module}.{name}. Refused.")


def _from_pickle(path: Path) -> Images:
    stored = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    if not isinstance(stored, dict) or not {b"data", b"labels"} <= stored.keys():
        raise InputError(f"{path} must be a CIFAR-10 batch, a dict with data and labels. Fetch it again.")
    return _checked(np.asarray(stored[b"data"]), np.asarray(stored[b"labels"]), path)


def _from_binary(path: Path) -> Images:
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(raw) == 0 or len(raw) % (SIZE + 1):
        raise InputError(f"{path} must hold records of {SIZE + 1} bytes, got {len(raw)} bytes. Fetch it again.")
    records = raw.reshape(-1, SIZE + 1)
    return _checked(records[:, 1:], records[:, 0], path)


def _sheet(path: Path) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "PNG sheets need Pillow: pip install 'gramscope[images]'. Or use the standard batches."
        ) from error
    largest, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # a sheet is larger than Pillow's limit for the web
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    finally:
        Image.MAX_IMAGE_PIXELS = largest
    if pixels.size % SIZE:
        raise InputError(f"{path} must hold whole images of 1,024 pixels, got {pixels.shape[:2]} pixels.")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _checked(x: NDArray[np.generic], y: NDArray[np.generic], path: Path) -> Images:
    if x.dtype != np.uint8 or x.size != len(y) * SIZE or len(y) == 0:
        raise InputError(
            f"{path} must hold one label for each image of {SIZE} bytes, got {x.dtype} images of shape {x.shape} and "
            f"{len(y)} labels. Fetch it again."
        )
    labels = y.astype(np.int64)
    if labels.min() < 0 or labels.max() > 9:
        raise InputError(f"{path} must hold labels from 0 to 9, got {labels.min()} to {labels.max()}. Fetch it again.")
    return x.astype(np.uint8, copy=False).reshape(-1, 3, 32, 32), labels


def _joined(parts: list[Images]) -> Images:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _present(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} must hold {path.name} as well, but it is missing. Fetch the data again."
        )
    return path
