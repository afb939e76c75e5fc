"""Base of the background Redis writers: any thread enqueues, one task writes, and callers never wait for Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from abc import ABC, abstractmethod

import structlog

from baton.errors import LedgerError
from baton.ledger.registry import Ledger

log = structlog.get_logger(__name__)

FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0


class BackgroundWriter(ABC):
    """Runs `_write` while `_left` is not 0, with growing delays while Redis is away. Create it on the event loop.

    `_repeat` is called when the store lost data, and every `repeat_s`, so that valid keys never expire. Subclasses
    enqueue under `_lock`, which is held for microseconds, and then call `_signal`.
    """

    def __init__(self, ledger: Ledger, name: str, repeat_s: float) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._name = name
        self._repeat_s = repeat_s
        self._signalled = False
        self._delay_s = FIRST_DELAY_S
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._timer = self._loop.call_later(repeat_s, self._refresh)
        self._unfollow = ledger.follow(self._refresh)
        self._task = self._loop.create_task(self._run(), name=name)

    @abstractmethod
    async def _write(self) -> LedgerError | None:
        """Make one round trip. Returns the error if something must be retried."""

    @abstractmethod
    def _left(self) -> int:
        """Return the number of pending writes."""

    @abstractmethod
    def _repeat(self) -> None:
        """Queue everything that must be in the store. The lock is held."""

    def _signal(self) -> None:
        if self._signalled:
            return
        self._signalled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._wake.set)

    def _refresh(self) -> None:
        with self._lock:
            self._repeat()
        self._wake.set()
        self._timer.cancel()
        self._timer = self._loop.call_later(self._repeat_s, self._refresh)

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._drain()
        except Exception:
            log.exception("ledger_writer_failed", writer=self._name)
            raise

    async def _drain(self) -> None:
        self._signalled = False  # later notes are seen below, or signalled again
        while self._left():
            error = await self._write()
            if error is None:
                self._delay_s = FIRST_DELAY_S
                continue
            if self._delay_s == FIRST_DELAY_S:
                log.warning("ledger_writer_waits", writer=self._name, left=self._left(), error=str(error))
            await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
        self._drained.set()

    async def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until nothing is pending. Raises LedgerError with the number left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._left():
                    self._drained.clear()
                    self._wake.set()
                    await self._drained.wait()
        except TimeoutError:
            raise LedgerError(f"{self._left()} {self._name} not written within {timeout_s:g} s") from None

    async def close(self, timeout_s: float = 1.0) -> None:
        """Write for at most `timeout_s`; drop the rest."""
        with self._lock:
            self._closed = True
        self._unfollow()
        self._timer.cancel()
        try:
            await self.flush(timeout_s)
        except LedgerError as error:
            log.warning("ledger_writer_closed", error=str(error))
        self._task.cancel()
        await asyncio.wait([self._task])
