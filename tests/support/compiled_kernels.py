"""Compiled CPU kernels for tests, or a skip that states why this machine has none."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from baton.engine.kernels.cpu.compiler import Unavailable
from baton.home import baton_home

T = TypeVar("T")
SHARED = baton_home() / "kernels"  # of the run, before any test sets another $BATON_HOME


def compiled_or_skip(make: Callable[[], T]) -> T:
    """Return `make()`, which loads compiled kernels. Skip the test where this machine cannot run them."""
    try:
        return make()
    except Unavailable as why:
        pytest.skip(f"no compiled CPU kernels here: {why}")


def share_kernels(home: Path) -> Path:
    """Make the state folder `home`, whose processes use the kernels of the run. Compilation takes 5 s of a core."""
    home.mkdir(parents=True, exist_ok=True)
    SHARED.mkdir(parents=True, exist_ok=True)
    if not (home / "kernels").exists():
        (home / "kernels").symlink_to(SHARED)
    return home
