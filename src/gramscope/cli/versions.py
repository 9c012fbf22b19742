"""The versions that a bug report needs."""

import platform
from importlib.metadata import version

import gramscope

LIBRARIES = ("numpy", "scipy", "pandas", "xarray")


def versions() -> dict[str, str]:
    """Name to version: gramscope, Python, torch with its CUDA and the GPU it sees, and the main libraries."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return {
        "gramscope": gramscope.__version__,
        "Python": f"{platform.python_version()} ({platform.system()}, {platform.machine()})",
        "torch": torch.__version__,
        "CUDA": f"{torch.version.cuda or 'none'} ({gpu})",
        **{name: version(name) for name in LIBRARIES},
    }
