"""Install a wheel in an empty environment, as a user would, and try every command and a call for each library.

    python tools/try_wheel.py dist/gramscope-0.2.0-py3-none-any.whl

Torch is the one that constraints.txt pins; everything else is the newest that the wheel allows.
"""

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from floors import ROOT, pinned_torch


def main(wheel: Path) -> None:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"

        def run(*command: object) -> None:
            print("$", *command, flush=True)
            subprocess.run([str(part) for part in command], check=True, cwd=folder)

        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*install, pinned_torch())
        run(*install, pinned_torch(), wheel.resolve())
        run(python, "-m", "pip", "check")
        run(Path(folder) / "bin" / "gramscope", "--version")
        run(python, ROOT / "tools" / "smoke.py")
    print(f"{wheel.name} works in an empty environment ({time.perf_counter() - begun:.0f} s)")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
