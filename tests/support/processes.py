"""Programs of the tests, and a full disk for the private files of a cluster.

Programs for `python -c` start within milliseconds because they import none of our code.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SILENT = "import time; time.sleep(60)"
READY = """
import os, time
os.write(int(os.environ["BATON_READY_FD"]), b'{"port": 5}\\n')
time.sleep(60)
"""


def start_program(module: str, *args: str) -> subprocess.Popen[str]:
    """Start a program of the tests that exchanges lines of text over its stdin and stdout."""
    command, root = [sys.executable, "-m", module, *args], Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes of state files fail with ENOSPC, as /dev/full does, until the patch is undone."""
    real = os.open

    def full(path, flags, *mode):
        return real("/dev/full", os.O_WRONLY) if str(path).endswith(".new") else real(path, flags, *mode)

    monkeypatch.setattr(os, "open", full)
