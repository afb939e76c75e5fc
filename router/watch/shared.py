"""What is dear to make and asked for by many: made once for all who ask at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from baton.clock import Clock

T = TypeVar("T")

_FRESH_S = 0.09  # less than the shortest interval of a watcher
_SHARE = 20  # it is shown for so many times as long as it took: thousands of workers must not fill the router's loop
_STALE_S = 2.0  # but never longer: one making that had to wait for a core must not stop the picture


class Shared(Generic[T]):
    """What `make` gave last, until that is too old. `first` is awaited before: what others take is no work of ours, and
    a Redis that is silent must not make old what is shown.
    """

    def __init__(self, first: Callable[[], Awaitable[object]], make: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._first, self._make, self._clock = first, make, clock
        self._lock = asyncio.Lock()
        self._made: list[T] = []
        self._until = 0.0

    async def get(self) -> T:
        """Raises what `make` raises."""
        async with self._lock:
            if not self._made or self._clock.monotonic() >= self._until:
                await self._first()
                begun = self._clock.monotonic()
                self._made = [await self._make()]
                took_s = self._clock.monotonic() - begun
                self._until = begun + min(max(_FRESH_S, _SHARE * took_s), max(_STALE_S, 2 * took_s))
            return self._made[0]
