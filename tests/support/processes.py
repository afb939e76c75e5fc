"""Programs for `python -c` that start within milliseconds because they import none of our code."""

from __future__ import annotations

SILENT = "import time; time.sleep(60)"
READY = """
import os, time
os.write(int(os.environ["BATON_READY_FD"]), b'{"port": 5}\\n')
time.sleep(60)
"""
