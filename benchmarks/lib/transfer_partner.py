"""Second process of a measured pair. The first one asks it in the protocol of `benchmarks.lib.protocol`.

Both are in one process group, so that they are stopped, continued and killed together.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.lib.protocol import ChildFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.lib.protocol import Answer, Setup


class Partner:
    """A process running `module`, which calls `serve`. It inherits the descriptors `files` and ends with its parent."""

    def __init__(self, module: str, setup: Setup, files: Sequence[int] = ()) -> None:
        command = [sys.executable, "-P", "-m", module, json.dumps(asdict(setup))]
        self._module = module
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=files
        )
        self.pid = self._process.pid
        self.about = self.answer()

    def ask(self, command: str, **arguments: object) -> Answer:
        """Send a command and return its answer. Raises ChildFailed."""
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: object) -> None:
        """Send a command without waiting. `answer` must follow."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        """Return the answer of the last command. Raises ChildFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{self._module}: ended")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self._module}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
