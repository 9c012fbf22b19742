"""MNIST and Fashion-MNIST from gzipped idx files on disk; nothing is downloaded."""

import gzip
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramscope.base.checks import check_choice, check_counts
from gramscope.base.rng import generator
from gramscope.tasks.digit_images import Task

DTYPES = {8: "u1", 9: "i1", 11: "i2", 12: "i4", 13: "f4", 14: "f8"}
FILES = {
    "x": ("train-images-idx3-ubyte", "train-images.idx3-ubyte"),
    "y": ("train-labels-idx1-ubyte", "train-labels.idx1-ubyte"),
    "x_test": ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte"),
    "y_test": ("t10k-labels-idx1-ubyte", "t10k-labels.idx1-ubyte"),
}


def data_folder(name: str) -> Path | None:
    """Where the files of a data set lie: ``$GRAMSCOPE_DATA``, then ``../shared/data``; None where neither has them."""
    roots = [os.environ.get("GRAMSCOPE_DATA"), "../shared/data"]
    for root in roots:
        if root and (Path(root) / name).is_dir():
            return Path(root) / name
    return None


def chosen_folder(name: str, folder: str | Path | None, train: int | None, test: int | None, files: str) -> Path:
    """``folder``, or where the data set ``name`` is found; numbers of examples are checked before it is read."""
    check_counts(1, **{key: count for key, count in (("train", train), ("test", test)) if count is not None})
    place = Path(folder) if folder is not None else data_folder(name)
    if place is None:
        raise FileNotFoundError(
            f"{name} must lie in a folder {name!r} under $GRAMSCOPE_DATA or ../shared/data, but neither has it. Put "
            f"{files} there, or pass folder=."
        )
    return place


def read_idx(path: Path) -> Tensor:
    """The tensor in an idx file, gzipped or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:2] != b"\x00\x00" or raw[2] not in DTYPES:
        raise ValueError(f"{path} must be an idx file, but its first bytes are {raw[:4]!r}. Fetch it again.")
    sizes = np.frombuffer(raw, ">i4", raw[3], 4).tolist()
    body = raw[4 + 4 * raw[3] :]
    dtype = np.dtype(DTYPES[raw[2]])
    wanted = math.prod(sizes) * dtype.itemsize
    if len(body) != wanted:
        raise ValueError(f"{path} must hold {wanted} bytes of data for shape {sizes}, got {len(body)}. Fetch it again.")
    return torch.from_numpy(np.frombuffer(body, dtype.newbyteorder(">")).astype(dtype).reshape(sizes))


def mnist(
    name: str = "mnist", folder: str | Path | None = None, train: int | None = None, test: int | None = None
) -> Task:
    """MNIST (or ``name="fashion-mnist"``) with pixels standardised as one variable, images flattened to 784.

    ``folder`` holds the four idx files; if None it is looked for in ``$GRAMSCOPE_DATA`` and ``../shared/data``.
    ``train`` and ``test`` take the first so many examples.
    """
    place = chosen_folder(name, folder, train, test, "the four gzipped idx files")
    found = {key: read_idx(_file(place, names)) for key, names in FILES.items()}
    x, x_test = (found[key].flatten(1).float() / 255 for key in ("x", "x_test"))
    mean, std = x.mean(), x.std()
    return Task(
        ((x - mean) / std)[:train], found["y"].long()[:train], ((x_test - mean) / std)[:test],
        found["y_test"].long()[:test],
    )  # fmt: skip


def _file(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        for candidate in (folder / f"{name}.gz", folder / name):
            if candidate.exists():
                return candidate
    raise FileNotFoundError(f"{folder} must hold {names[0]}.gz, but has {sorted(p.name for p in folder.iterdir())}.")


def label_encoded(task: Task, *, test: str = "random", seed: int = 0) -> Task:
    """A copy of ``task`` with the label written into each image: pixels from 0 to 1, the first ones a one-hot label.

    The encoded data of arXiv:2410.04264, appendix H.4.1: true labels in training, random ones in the test set, so that
    a network which learnt nothing but the label pixels is right by chance only. ``test="true"`` rewards it instead.
    Beside standardised pixels the label would be weak, and learnt far later.
    """
    check_choice(test, "test", ("random", "true"))
    classes, low = task.classes, task.x.min()
    span = (task.x.max() - low).clamp_min(torch.finfo(task.x.dtype).tiny)

    def encoded(x: Tensor, labels: Tensor) -> Tensor:
        marked = (x - low) / span
        marked[:, :classes] = torch.nn.functional.one_hot(labels, classes).to(x.dtype)
        return marked

    shown = task.y_test
    if test == "random":
        shown = torch.randint(classes, shown.shape, generator=generator(seed), device="cpu")
    return replace(task, x=encoded(task.x, task.y), x_test=encoded(task.x_test, shown))
