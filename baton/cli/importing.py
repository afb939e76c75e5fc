"""Imports of a new process without collections of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import in this block. Modules are no garbage: each collection, also that at exit, would only scan them again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
