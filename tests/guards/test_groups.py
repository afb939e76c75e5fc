"""Tests of one group run in one process: they share what is expensive, and two at a time would disturb each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
from pathlib import Path

import pytest


@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_where(number):
    Path(f"{number}.ran").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_groups_of_tests_are_not_split(tmp_path: Path) -> None:
    """pytest 9.2 with pytest-xdist 3.8 does, and says nothing of it."""
    (tmp_path / "test_it.py").write_text(TESTS)
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-c", "/dev/null", "test_it.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len({file.read_text() for file in tmp_path.glob("*.ran")}) == 1
