"""Garbage collection, put off where many objects are made and hardly any garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_put_off() -> Iterator[None]:
    """No search for garbage inside: the objects made here would set off one through all objects of the process.

    With the usual libraries loaded these are some 400,000, and one search takes 0.2 seconds.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
