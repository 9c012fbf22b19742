"""Execute the notebooks of docs/notebooks and write them back with their outputs, so that they can be read as they are.

    python tools/notebooks.py                 # all of them; about a minute
    python tools/notebooks.py quick-start     # one

What changes from run to run without meaning is left out: times, messages on stderr, and the numbers of cells.
"""

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def executed(path: Path) -> Any:
    """The notebook with fresh outputs; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
            for out in cell.outputs:
                if "execution_count" in out:
                    out.execution_count = None
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            begun = time.perf_counter()
            nbformat.write(cleaned(executed(path)), path)
            print(f"{path.name}: {time.perf_counter() - begun:.1f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
