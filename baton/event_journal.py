"""What happened in this process, as JSON lines for an offline check (`tools/check_history.py`).

A line is one event: `monotonic` and `wall` time in seconds, `process` and its `incarnation`, `event`, the handoff that
it is about (`request`, `attempt`; attempt 0: none yet), and the facts of that event. Blocks are pairs of index and
generation. Tokens are indices and counts: no prompt, no text and no token id is ever noted.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import structlog

from baton.clock import Clock, SystemClock
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core import HandoffId, Token

log = structlog.get_logger(__name__)


class Blocks(Protocol):
    """Blocks and their generations, in the order of the positions that they hold: an allocation, or a reservation."""

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def generations(self) -> Sequence[int]: ...


class History:
    """The events of one process, in the order of its file; `History()` notes nothing. For any thread.

    Each event is one write: a process that is killed loses at most the line that it was writing. As a context manager
    it says at the end whether the process stopped in peace, or died of an error.
    """

    def __init__(
        self, file: int | None = None, process: str = "", incarnation: str = "", clock: Clock | None = None
    ) -> None:
        self._file = file  # a descriptor
        self._head = {"process": process, "incarnation": incarnation}
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: str | None, clock: Clock, role: str, process: str, incarnation: str = "") -> Self:
        """Begin FOLDER/PROCESS[-INCARNATION].jsonl; no folder: none is kept. Raises ConfigError: not writable.

        `role` is router, prefill or decode.
        """
        if folder is None:
            return cls()
        path = Path(folder) / f"{'-'.join(filter(None, (process, incarnation)))}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"history: cannot write {path}: {error.strerror}") from None
        history = cls(file, process, incarnation, clock)
        history.note("started", role=role)
        return history

    @property
    def kept(self) -> bool:
        """Whether anything is noted."""
        return self._file is not None

    def step(self, event: str, handoff: HandoffId, **facts: object) -> None:
        """Append one event, which is a line of the log as well."""
        log.debug(f"handoff_{event}", handoff=handoff, **facts)
        self.note(event, handoff, **facts)

    def note(self, event: str, handoff: HandoffId | None = None, **facts: object) -> None:
        """Append one event. Facts are what JSON can say."""
        if self._file is None:
            return
        name = {} if handoff is None else {"request": handoff.request_id, "attempt": handoff.attempt}
        rest = self._head | {"event": event} | name | facts
        with self._lock:  # the order of the file is the order of time
            now = {"monotonic": self._clock.monotonic(), "wall": self._clock.wall()}
            self._append(json.dumps(now | rest, separators=(",", ":")).encode() + b"\n")

    def tokens(self, event: str, handoff: HandoffId, tokens: Sequence[Token]) -> None:
        """Note the indices of `tokens`, which follow each other, if there are any."""
        if tokens:
            self.note(event, handoff, first=tokens[0].index, count=len(tokens))

    def blocks(
        self,
        event: str,
        handoff: HandoffId,
        held: Blocks,
        first: int = 0,
        end: int | None = None,
        *,
        shared: int = 0,
        part: str = "",
    ) -> None:
        """Note the blocks first..end-1 of `held`, if there are any; `shared` of these are not the handoff's alone.

        `part` tells apart what one handoff holds for two reasons, such as a fetch beside its sequence.
        """
        if self._file is None:
            return
        pairs = list(zip(held.blocks[first:end], held.generations[first:end], strict=True))
        facts = {"own": pairs[shared:], "shared": pairs[:shared], "part": part}
        if pairs:
            self.note(event, handoff, **{name: fact for name, fact in facts.items() if fact})

    def _append(self, line: bytes) -> None:
        """A history that cannot be kept must not end the process; the check sees that it was cut off."""
        if self._file is None:
            return
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("the line was not written as a whole")
        except OSError as error:
            log.warning("history_lost", error=str(error))
            os.close(self._file)
            self._file = None

    def close(self, error: BaseException | None = None) -> None:
        """Note the end, and nothing after it."""
        if error is None:
            self.note("stopped")
        else:
            self.note("died", error=type(error).__name__)
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


OFF = History()
"""Notes nothing, for nothing."""
