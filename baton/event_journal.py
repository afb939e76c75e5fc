"""A journal of this process's events, as JSON lines for an offline check (`tools/check_history.py`).

A line has `monotonic` and `wall` time in seconds, `process`, `incarnation`, `event` and the facts of that event. Its
handoff is `request` and `attempt`; attempt 0 means none yet. Blocks are pairs of index and generation. Tokens are
indices and counts: no prompt, text or token id is ever written.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import structlog

from baton.clock import Clock, SystemClock
from baton.core import HandoffId, Token
from baton.errors import ConfigError

log = structlog.get_logger(__name__)


class Blocks(Protocol):
    """Blocks and their generations in the order of their positions: an allocation or a reservation."""

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def generations(self) -> Sequence[int]: ...


class History:
    """The events of one process in file order. `History()` writes nothing. Thread-safe.

    Each event is one write: a killed process loses at most the line in progress. Leaving the context writes a clean
    stop or the error that ended the process.
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
        """Open FOLDER/PROCESS[-INCARNATION].jsonl; without a folder no events are kept. `role` is router, prefill or
        decode. Raises ConfigError if the file is not writable.
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
        return self._file is not None

    def step(self, event: str, handoff: HandoffId, **facts: object) -> None:
        """Append one event, and log it."""
        log.debug(f"handoff_{event}", handoff=handoff, **facts)
        self.note(event, handoff, **facts)

    def note(self, event: str, handoff: HandoffId | None = None, **facts: object) -> None:
        """Append one event. Facts must be JSON values."""
        if self._file is None:
            return
        name = {} if handoff is None else {"request": handoff.request_id, "attempt": handoff.attempt}
        rest = self._head | {"event": event} | name | facts
        with self._lock:  # lines are in order of time
            now = {"monotonic": self._clock.monotonic(), "wall": self._clock.wall()}
            self._append(json.dumps(now | rest, separators=(",", ":")).encode() + b"\n")

    def tokens(self, event: str, handoff: HandoffId, tokens: Sequence[Token]) -> None:
        """Append the indices of consecutive `tokens`, if there are any."""
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
        """Append the blocks first..end-1 of `held`, if there are any; the first `shared` of these are shared with other
        handoffs. `part` distinguishes two sets of blocks of one handoff, for example a fetch and its sequence.
        """
        if self._file is None:
            return
        pairs = list(zip(held.blocks[first:end], held.generations[first:end], strict=True))
        facts = {"own": pairs[shared:], "shared": pairs[:shared], "part": part}
        if pairs:
            self.note(event, handoff, **{name: fact for name, fact in facts.items() if fact})

    def _append(self, line: bytes) -> None:
        """Write a line. On an error stop writing, not the process; the check detects the missing end."""
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
        """Append the last event and close the file."""
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


OFF = History()  # keeps no events
