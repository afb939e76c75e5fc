"""Programs that convert files of a model in a process of their own, because they import torch or transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from baton.errors import CheckpointError

LIMIT_S = 300.0


def output_of(argv: Sequence[str], problem: str, remedy: str) -> str:
    """Run this Python with arguments, without input, and return its output. Raises CheckpointError that begins with
    `problem`, and contains the last line of the program's errors.
    """
    env, command = os.environ | {"HF_HUB_OFFLINE": "1"}, [sys.executable, *argv]
    try:
        done = subprocess.run(command, input=b"", capture_output=True, env=env, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{problem} (not converted within {LIMIT_S:g} s)") from error
    if not done.returncode:
        return done.stdout.decode()
    reason = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason"])[-1]
    raise CheckpointError(f"{problem} ({reason}): {remedy}")
