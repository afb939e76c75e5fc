"""Programs of child processes, for `python -c`, that import nothing of ours: they start within milliseconds."""

from __future__ import annotations

SILENT = "import time; time.sleep(60)"
READY = """
import os, time
os.write(int(os.environ["BATON_READY_FD"]), b'{"port": 5}\\n')
time.sleep(60)
"""
