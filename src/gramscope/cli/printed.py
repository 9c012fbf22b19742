"""What commands print: strict JSON for programs, where a number that is not finite is null; tables for people."""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version

import gramscope
from gramscope.base.json_values import json_values

LIBRARIES = ("numpy", "scipy", "pandas", "xarray")


def json_line(value: object) -> str:
    """One line of JSON that every parser takes.

    >>> json_line({"loss": float("nan"), "steps": [1, 2.5]})
    '{"loss": null, "steps": [1, 2.5]}'
    """
    return json.dumps(json_values(value, not_finite="null"), allow_nan=False)


def aligned(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], width: int = 80) -> list[str]:
    """Lines of a table of named rows. A name is never cut: where it is too long, its cells stand on the next line.

    The last column is set to the left, as it holds words; all others to the right.

    >>> rows = [("a", ["2.5", "power law"]), ("a.longer.name", ["3", "none"])]
    >>> for line in aligned(["alpha", "verdict"], rows, width=24):
    ...     print(line)
    name    alpha  verdict
    a         2.5  power law
    a.longer.name
                3  none
    """
    widths = [max(len(row[k]) for row in [titles, *(cells for _, cells in rows)]) for k in range(len(titles))]
    room = max(4, width - sum(widths) - 2 * len(widths))
    first = min(room, max(len("name"), *(len(name) for name, _ in rows)))

    def cells_of(cells: Sequence[str]) -> str:
        *numbers, last = cells
        return "".join(f"  {cell:>{size}}" for cell, size in zip(numbers, widths, strict=False)) + f"  {last}"

    lines = [f"{'name':<{first}}{cells_of(titles)}"]
    for name, cells in rows:
        if len(name) > first:
            lines += [name, " " * first + cells_of(cells)]
        else:
            lines.append(f"{name:<{first}}{cells_of(cells)}")
    return lines


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
