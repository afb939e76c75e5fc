"""The second process of a measured pair, asked by the first one in the protocol of `benchmarks.lib.protocol`.

It lives in the first one's process group, so that both are stopped, woken and killed together.
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
    """`module` is a program that calls `serve`. It inherits the descriptors `files`, and ends with this process."""

    def __init__(self, module: str, setup: Setup, files: Sequence[int] = ()) -> None:
        command = [sys.executable, "-P", "-m", module, json.dumps(asdict(setup))]
        self._module = module
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=files
        )
        self.about = self.answer()

    def ask(self, command: str, **arguments: object) -> Answer:
        """Raises ChildFailed."""
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: object) -> None:
        """Let it work beside this process; `answer` is due later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        """Raises ChildFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"{self._module}: ended")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self._module}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
