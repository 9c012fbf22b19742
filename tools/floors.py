"""Install gramscope with the lowest version of every dependency that pyproject.toml states, and try it.

    python tools/floors.py                         # a virtual environment in a temporary folder; a few minutes
    python tools/floors.py --set typer==0.12.0     # another version of one of them: this one breaks every command
    python tools/floors.py --torch torch==2.6.0 --torch-index URL     # URL: an index of torch's CPU wheels

What these packages need themselves is the newest that fits, as a user would get it. Torch is the one that
constraints.txt pins, unless --torch names another: its old wheels on the package index are CUDA builds of several
gigabytes, and a CPU build of the lowest, 2.6, cannot be had everywhere. Where this is so, that floor is not tried.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lowest() -> dict[str, str]:
    """Every package that a user may need, torch apart, at the lowest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    extras = ("plot", "lightning", "transformers", "export")
    stated = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    stated += [one for one in optional["test"] if one.startswith("accelerate")]  # the Trainer of transformers needs it
    floors = dict(requirement.split(">=") for requirement in stated)
    return {name: f"{name}=={floor}" for name, floor in floors.items() if name != "torch"}


def pinned_torch() -> str:
    return re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.M)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--torch", default=pinned_torch(), metavar="torch==VERSION")
    parser.add_argument("--torch-index", metavar="URL")
    options = parser.parse_args()
    pins = lowest() | {pin.split("==")[0]: pin for pin in options.set}
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"

        def run(*command: object) -> None:
            print("$", *command, flush=True)
            subprocess.run([str(part) for part in command], check=True, cwd=folder)

        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        # Torch first and alone: a bare name would bring the newest CUDA build. Then it is kept as it is.
        run(*install, *(["--index-url", options.torch_index] if options.torch_index else []), options.torch)
        run(*install, options.torch, *pins.values(), ROOT)
        run(python, "-m", "pip", "check")
        run(python, ROOT / "tools" / "smoke.py", "--extras")
        run(python, "-m", "gramscope", "demo", "--out", Path(folder) / "demo")
    print("The lowest versions work:", options.torch, *pins.values())


if __name__ == "__main__":
    sys.exit(main())
