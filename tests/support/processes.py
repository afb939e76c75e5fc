"""Programs of the tests, and a full disk for the private files of a cluster.

Programs for `python -c` start within milliseconds because they import none of our code.
"""

import os

import pytest

SILENT = "import time; time.sleep(60)"
READY = """
import os, time
os.write(int(os.environ["BATON_READY_FD"]), b'{"port": 5}\\n')
time.sleep(60)
"""


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes of state files fail with ENOSPC, as /dev/full does, until the patch is undone."""
    real = os.open

    def full(path, flags, *mode):
        return real("/dev/full", os.O_WRONLY) if str(path).endswith(".new") else real(path, flags, *mode)

    monkeypatch.setattr(os, "open", full)
