"""Names of a package that are looked up on first use, so that importing the package stays cheap."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from gramscope.base.streams import streams_put_back


def lazy_names(package: str, files: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package whose public names live in the given files of it, or of another.

    >>> look_up, names = lazy_names("gramscope.base", {"Axes": "axes"})
    >>> look_up("Axes").__name__, names()
    ('Axes', ['Axes'])
    """

    def look_up(name: str) -> object:
        if name not in files:
            raise AttributeError(f"{package} has no {name!r}; it has {', '.join(sorted(files))}")
        with streams_put_back():  # libraries may draw when they are imported; scikit-learn does
            file = files[name] if "." in files[name] else f"{package}.{files[name]}"
            value = getattr(import_module(file), name)
        setattr(sys.modules[package], name, value)
        return value

    return look_up, lambda: sorted(files)
