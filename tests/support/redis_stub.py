"""A connection without a Redis. Tests delay its answers and lose some of them."""

import asyncio
from collections.abc import Callable
from typing import Any

from baton.errors import LedgerError


class StubConnection:
    """A connection whose `gate` delays calls. Each of `lose_next` loses one answer; False skips the call, too."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.lose_next: list[bool] = []

    def key(self, *parts: str) -> str:
        return ":".join(parts)

    async def answered(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act`. Raises LedgerError if the answer is lost."""
        self.arrived.set()
        await self.gate.wait()
        lost = self.lose_next.pop(0) if self.lose_next else None
        answer = act() if lost is not False else None
        if lost is not None:
            raise LedgerError("away")
        return answer
