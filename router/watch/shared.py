"""What is dear to make and asked for by many: made once for all who ask at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from baton.clock import Clock

T = TypeVar("T")

_FRESH_S = 0.09  # less than the shortest interval of a watcher
_SHARE = 20  # it is shown for so many times as long as it took: thousands of workers must not fill the router's loop


class Shared(Generic[T]):
    """What `make` gave last, until that is too old."""

    def __init__(self, make: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._make, self._clock = make, clock
        self._lock = asyncio.Lock()
        self._made: list[T] = []
        self._until = 0.0

    async def get(self) -> T:
        """Raises what `make` raises."""
        async with self._lock:
            begun = self._clock.monotonic()
            if not self._made or begun >= self._until:
                self._made = [await self._make()]
                took_s = self._clock.monotonic() - begun
                self._until = begun + max(_FRESH_S, _SHARE * took_s)
            return self._made[0]
