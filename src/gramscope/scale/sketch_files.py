"""Sketches on disk: one safetensors file, written whole or not at all."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gramscope.base.errors import InputError
from gramscope.scale.sketch_factors import Projections, SketchPlan
from gramscope.scale.sketch_result import Sketch
from gramscope.scale.sketch_sites import MatrixShape
from gramscope.store.files import Disk
from gramscope.store.store_errors import disk_trouble

if TYPE_CHECKING:
    from torch import Tensor

KIND = "gramscope sketch"
VERSION = 1
FEATURES, INPUTS, BASES = "features/", "inputs/", "bases/"


def save_sketch(sketch: Sketch, path: str | os.PathLike[str]) -> None:
    """Write ``sketch`` to ``path``; what was there before stays until the new file is complete."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"path must be a file, got the directory {path}. Pass e.g. {path / 'sketch.safetensors'}.")
    made = sketch.projections
    about = {
        "plan": asdict(made.plan),
        "matrices": {name: [list(made.matrices[name].shape), made.matrices[name].split] for name in sketch.features},
        "apart": sorted(made.apart),
        "fallback": list(sketch.fallback),
        "fingerprint": sketch.fingerprint(),
    }
    tensors: dict[str, Tensor] = {FEATURES + name: part.contiguous() for name, part in sketch.features.items()}
    tensors |= {INPUTS + name: part.contiguous() for name, part in sketch.inputs.items()}
    tensors |= {BASES + name: basis.contiguous() for name, basis in made.bases.items()}
    text = {"kind": KIND, "version": str(VERSION), "sketch": json.dumps(about)}
    with disk_trouble(f"writing the sketch {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Disk().write_whole(path, save(tensors, metadata=text))


def load_sketch(path: str | os.PathLike[str]) -> Sketch:
    """The sketch that :meth:`Sketch.save` wrote. No code of the file is run.

    Example:
        >>> import tempfile, torch, gramscope as gs
        >>> found = gs.sketch(torch.nn.Linear(3, 2), torch.eye(3), size=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found.save(folder + "/a.safetensors")
        ...     again = gs.scale.load_sketch(folder + "/a.safetensors")
        >>> torch.equal(found.kernel().value, again.kernel().value)
        True
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} must be a file that sketch.save wrote, but there is no such file.")
    try:
        with disk_trouble(f"reading the sketch {path}"), safe_open(path, framework="pt") as file:
            text = file.metadata() or {}
            if text.get("kind") != KIND:
                raise InputError(f"{path} must be a file that sketch.save wrote, but it is another safetensors file.")
            if int(text["version"]) > VERSION:
                raise InputError(
                    f"{path} has version {text['version']}, but this gramscope reads sketches up to version {VERSION}. "
                    "Upgrade: pip install --upgrade gramscope."
                )
            about = json.loads(text["sketch"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} must be a file that sketch.save wrote, but it is damaged ({error}).") from error
    matrices = {name: MatrixShape(tuple(shape), split) for name, (shape, split) in about["matrices"].items()}
    bases, inputs = (
        {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)} for kind in (BASES, INPUTS)
    )
    features = {name: tensors[FEATURES + name] for name in about["matrices"]}
    made = Projections(SketchPlan(**about["plan"]), matrices, bases, set(about["apart"]))
    found = Sketch(features, made, tuple(about["fallback"]), inputs)
    if found.fingerprint() != about["fingerprint"]:
        raise InputError(f"{path} must be as sketch.save wrote it, but its parts do not belong together. Restore it.")
    return found
