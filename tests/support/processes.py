"""Programs of the tests.

Those for `python -c` start within milliseconds because they import none of our code.
"""

import subprocess
import sys
from pathlib import Path

SILENT = "import time; time.sleep(60)"
READY = """
import os, time
os.write(int(os.environ["BATON_READY_FD"]), b'{"port": 5}\\n')
time.sleep(60)
"""


def start_program(module: str, *args: str) -> subprocess.Popen[str]:
    """Start a program of the tests that exchanges lines of text over its stdin and stdout."""
    command, root, pipe = [sys.executable, "-m", module, *args], Path(__file__).parents[2], subprocess.PIPE
    return subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
