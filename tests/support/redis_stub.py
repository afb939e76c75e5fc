"""A connection to no Redis: tests say when it answers, and which answers are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baton.errors import LedgerError


class StubConnection:
    """`gate` holds calls back. `lose_next`: of the next calls the answer is lost; False: they were not done either."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.lose_next: list[bool] = []

    def key(self, *parts: str) -> str:
        return ":".join(parts)

    async def answered(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act`. Raises LedgerError when that is lost."""
        self.arrived.set()
        await self.gate.wait()
        lost = self.lose_next.pop(0) if self.lose_next else None
        answer = act() if lost is not False else None
        if lost is not None:
            raise LedgerError("away")
        return answer
