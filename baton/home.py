"""The folder for files that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path


def baton_home() -> Path:
    """Return `$BATON_HOME`, or `~/.baton`."""
    return Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
