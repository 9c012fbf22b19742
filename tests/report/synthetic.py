"""Small run directories, written by hand after the schema, so that the page is tested apart from the store."""

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

LAYERS = ["0", "2", "4", "6"]
WEIGHTS = [f"{layer}.weight" for layer in LAYERS]
ACTIVATIONS = ["1", "3", "5"]
HOSTILE = "</script><img src=x onerror=alert(1)>"


def write_meta(path: Path, name: str, **more):
    path.mkdir(parents=True, exist_ok=True)
    meta = {
        "schema": 1,
        "name": name,
        "created": "2026-11-15T09:00:00+00:00",
        "gramscope": "0.1.0",
        "model": "Sequential",
        "parameters": {weight: [32, 32] for weight in WEIGHTS},
        "layers": LAYERS,
        "measures": ["share", "kernel", "richness"],
        "facts": {},
        "probe": {"examples": 40, "classes": 4},
        "notes": [],
        "config": {},
    }
    (path / "meta.json").write_text(json.dumps({**meta, **more}), encoding="utf-8")


def strict(value: float):
    """As the schema writes numbers: what is not finite becomes a word."""
    value = float(value)
    if value != value:
        return "NaN"
    return value if abs(value) != float("inf") else ("Infinity" if value > 0 else "-Infinity")


def append(path: Path, step: int, scalars: dict, arrays: dict | None = None, *, attempt=0, failures=None):
    """Commit one step: the arrays first, then the line."""
    entry = None
    if arrays:
        (path / "arrays").mkdir(exist_ok=True)
        suffix = "" if attempt == 0 else f"_{attempt}"
        file = f"arrays/step_{step:08d}{suffix}.safetensors"
        body = save({name: np.ascontiguousarray(value) for name, value in arrays.items()})
        (path / file).write_bytes(body)
        entry = {"file": file, "sha256": hashlib.sha256(body).hexdigest(), "names": list(arrays)}
    record = {
        "step": step,
        "time": 0.01 * step,
        "attempt": attempt,
        "scalars": {name: strict(value) for name, value in scalars.items()},
        "arrays": entry,
        "failures": failures or {},
    }
    with (path / "scalars.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def write_run(path: Path, *, name=None, lazy=False, steps=tuple(range(0, 401, 25)), layers=LAYERS, seed=0, **meta):
    """A whole run with everything the page can draw; its numbers are made up but shaped like real ones."""
    weights = [f"{layer}.weight" for layer in layers]
    parameters = {weight: [32, 32] for weight in weights}
    write_meta(path, name or path.name, **{"layers": list(layers), "parameters": parameters, **meta})
    for step in steps:
        scalars, arrays = moment(step, max(steps) or 1, lazy, layers, np.random.default_rng([seed, step]))
        append(path, step, scalars, arrays)
    return path


def moment(step, end, lazy, layers, rng):
    t = step / end
    moved = (0.2 if lazy else 3.0) * (1 - np.exp(-5 * t))
    scalars = {
        "loss": 2.3 * np.exp(-(3 if lazy else 6) * t) + 0.01 * rng.random(),
        "loss/test": 2.3 * np.exp(-(2 if lazy else 4) * t) + 0.1,
        "accuracy": 1 - 0.9 * np.exp(-(4 if lazy else 9) * t),
        "accuracy/test": 0.97 - 0.87 * np.exp(-(4 if lazy else 7) * t),
        "kernel/drift": moved,
        "kernel/alignment": 0.1 + (0.05 if lazy else 0.6) * (1 - np.exp(-5 * t)),
        "kernel/participation_ratio": 6 + 10 * np.exp(-3 * t),
        "richness": 0.65 - (0.02 if lazy else 0.6) * (1 - np.exp(-4 * t)),
        "richness/effective_dimension": 20 - (1 if lazy else 14) * t,
        "step/predicted_loss_change": -0.1 * np.exp(-3 * t),
        "step/true_loss_change": -0.09 * np.exp(-3 * t) * (1 + 0.1 * rng.standard_normal()),
        "step/error": 0.05 + 0.05 * rng.random(),
        "step/second_order": 0.03 * rng.random(),
        "step/mask_flips": 0.02 * rng.random(),
        "norm/parameters": 20 + 3 * t,
        "overhead": 0.03,
        "lr": 0.1,
    }
    raw = np.array([np.exp(-abs(place - (len(layers) - 1) * (1 - t))) for place in range(len(layers))])
    for place, layer in enumerate(layers):
        growth = (1 - np.exp(-4 * t)) * (0.1 if lazy else 1)
        scalars[f"share/{layer}"] = raw[place] / raw.sum()
        scalars[f"target_linearity/{layer}"] = min(1.0, 0.2 + 0.15 * place + 0.3 * growth)
        scalars[f"delta_gram/{layer}"] = (1 + place) * growth
        scalars[f"delta_vc/{layer}"] = (1 + place) * growth * (1 + 0.05 * rng.standard_normal())
        scalars[f"gradient_norm/{layer}"] = (1 + place) * np.exp(-2 * t)
        scalars[f"dead_units/{layer}"] = 0.1 * place * t
        scalars[f"gram_vc_correlation/{layer}"] = 1 - 0.05 * rng.random()
        scalars[f"alpha/{layer}.weight"] = 6 - 3 * growth + 0.2 * rng.standard_normal()
        scalars[f"alpha_null/{layer}.weight"] = 6 + 0.2 * rng.standard_normal()
    for activation in ACTIVATIONS:
        scalars[f"flips/{activation}"] = 0.3 * np.exp(-4 * t) * rng.random()
    labels = np.sort(np.arange(40) % 4)
    same = labels[:, None] == labels[None, :]
    noise = rng.standard_normal((40, 12))
    kernel = noise @ noise.T / 12 + (0.5 if lazy else 6 * t) * same
    k = np.arange(1, 21)
    arrays = {
        "kernel": kernel.astype(np.float32),
        "kernel/labels": labels.astype(np.int64),
        "richness/quality": 1 - np.exp(-k / (8 - 6 * t * (not lazy))),
        "richness/utilisation": 1 - np.exp(-k / (6 - 5 * t * (not lazy))),
        "richness/intensity": k ** -(1.0 + t),
        "step/predicted": rng.standard_normal(80),
    }
    arrays["step/true"] = arrays["step/predicted"] * 1.1 + 0.05 * rng.standard_normal(80)
    for layer in layers:
        weight = rng.standard_normal((32, 32)) / 6 + 0.2 * t * np.outer(
            rng.standard_normal(32), rng.standard_normal(32)
        )
        arrays[f"spectrum/{layer}.weight"] = np.linalg.eigvalsh(weight.T @ weight)
    return scalars, arrays
