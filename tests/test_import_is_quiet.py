"""Importing gramscope, and every room of it, changes nothing of the process: filters, logging, randomness, dtype."""

import subprocess
import sys
import textwrap

from fresh import run_after_torch

CHECK = """
import logging, random, sys, warnings
import numpy as np
import torch
# What torch and its like do on import is theirs; only what we add counts.
for name in {before!r}:
    __import__(name)

def state():
    root = logging.getLogger()
    ours = [logger for name, logger in logging.Logger.manager.loggerDict.items() if name.startswith("gramscope")]
    return {{
        "warning filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "root handlers": list(root.handlers),
        "root level": root.level,
        "logging disabled": root.manager.disable,
        "our loggers": ours,
        "excepthook": sys.excepthook,
        "torch random": torch.get_rng_state().tolist(),
        "python random": random.getstate(),
        "numpy random": str(np.random.get_state()),
        "numpy errors": np.geterr(),
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "print options": str(torch._tensor_str.PRINT_OPTS),
    }}

before = state()
{action}
after = state()
changed = [name for name in before if before[name] != after[name]]
print("changed:", changed)
"""

IMPORT_ALL = """
import importlib, pkgutil, gramscope
for found in pkgutil.walk_packages(gramscope.__path__, "gramscope."):
    # The callbacks import the trainers they are for, and those set filters of their own.
    theirs = ("__main__", ".lightning", ".huggingface")
    elsewhere = found.name.startswith("gramscope.cli") or found.name.endswith(theirs)
    if not elsewhere:
        importlib.import_module(found.name)
for name in gramscope.__all__:
    getattr(gramscope, name)
for name in gramscope.measures.__all__:
    getattr(gramscope.measures, name)
"""
# Third parties whose own import adds filters or loggers; imported before, so that the check sees only us.
THIRD_PARTIES = [
    "numpy",
    "scipy",
    "scipy.sparse.linalg",
    "scipy.stats",
    "scipy.optimize",
    "pandas",
    "sklearn",
    "sklearn.datasets",
]


def changes(action, before=()):
    script = textwrap.dedent(CHECK).format(action=textwrap.dedent(action), before=list(before))
    out, err = run_after_torch(script)
    return out.strip(), err


def test_importing_gramscope():
    assert changes("import gramscope") == ("changed: []", "")


def test_importing_every_room_and_measuring():
    measuring = """
    x = torch.arange(40.0).reshape(20, 2) ** 2
    gramscope.measures.richness(x, x[:, :1])
    gramscope.measures.cka(x, x)
    gramscope.measures.neural_collapse(x, torch.arange(20) % 3)
    """
    assert changes(IMPORT_ALL + textwrap.dedent(measuring), THIRD_PARTIES)[0] == "changed: []"


def test_the_check_would_see_it():
    careless = """
    warnings.simplefilter("ignore")
    logging.basicConfig(level=10)
    torch.manual_seed(0), torch.rand(1)
    torch.set_default_dtype(torch.float64)
    np.random.rand()
    """
    found, _ = changes(careless)
    for what in ("warning filters", "root handlers", "torch random", "default dtype", "numpy random"):
        assert what in found


def test_import_does_not_import_torch():
    run = subprocess.run(
        [sys.executable, "-c", "import sys, gramscope; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert run.stdout.strip() == "False"
