"""A role of Baton as a plain process, started as its supervisor starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.cluster.processes import PARENT, READY_FD

ROOT = Path(__file__).parents[2]


class RoleProcess:
    """A process of `argv` that reports when it is ready, and dies with the test. `log` is the file of its output."""

    def __init__(self, argv: Sequence[object], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        self.ready: dict[str, Any] = {}
        read_fd, write_fd = os.pipe()
        extra = {READY_FD: str(write_fd), PARENT: str(os.getpid()), **(env or {})}
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [str(part) for part in argv],
                stdout=output,
                stderr=output,
                env=os.environ | extra,
                pass_fds=(write_fd,),
                cwd=ROOT,
            )
        os.close(write_fd)
        self._pipe = os.fdopen(read_fd)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_ready(self) -> dict[str, Any]:
        """Return the facts that it reports when it is ready. Fails with its log if it ends before."""
        with self._pipe as pipe:
            line = pipe.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)
        return self.ready

    def end(self, number: int = signal.SIGTERM, within_s: float = 20.0) -> int:
        """Send a signal, wait, and return the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(within_s)


def baton_argv(*args: object) -> list[object]:
    """The command line of `baton ARGS` in this environment."""
    return [sys.executable, "-m", "baton", *args]
