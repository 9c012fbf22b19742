"""A progress bar for long work, for people who watch; silent in scripts, logs and tests."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gramscope.base.streams import streams_put_back


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of ``total`` steps; draws only on a terminal, and not for a few steps."""
    if total < 4 or not sys.stderr.isatty():
        yield lambda: None
        return
    with streams_put_back():  # importing rich draws from Python's random numbers
        from rich.console import Console
        from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
