"""Compiled CPU kernels for tests, or a skip that states why this machine has none."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from baton.engine.kernels.cpu.compiler import Unavailable

T = TypeVar("T")


def compiled_or_skip(make: Callable[[], T]) -> T:
    """Return `make()`, which loads compiled kernels. Skip the test where this machine cannot run them."""
    try:
        return make()
    except Unavailable as why:
        pytest.skip(f"no compiled CPU kernels here: {why}")
