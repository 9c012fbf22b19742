"""Names of a package that are looked up on first use, so that importing the package stays cheap."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from gramscope.base.streams import streams_put_back


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from what its ``if TYPE_CHECKING:`` block imports.

    One list serves type checkers and users (as ``attach_stub`` of the package lazy_loader has it). A name that is a
    package inside this one is that package: ``gramscope.capture`` can be called.

    >>> look_up, names, public = lazy_names("gramscope.store")
    >>> look_up("StoreError").__name__, "Run" in public
    ('StoreError', True)
    """
    homes = _shown_imports(package)
    public = sorted(homes)

    def look_up(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(public)}")
        with streams_put_back():  # libraries may draw when they are imported; scikit-learn does
            inside = f"{package}.{name}"
            value = import_module(inside) if find_spec(inside) else getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up, lambda: sorted(public), public


def _shown_imports(package: str) -> dict[str, str]:
    """Public names and the module of each, from the source of the package."""
    spec = find_spec(package)
    source = getattr(spec.loader, "get_source")(package) if spec is not None else None  # noqa: B009
    if source is None:
        raise ImportError(f"{package} is looked up in its own source, which must be installed beside its bytecode.")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    lines = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: line.module for line in lines for alias in line.names if line.module}
