"""Which attempt of each request a worker saw last: a late message of an old one is refused wherever it arrives."""

from __future__ import annotations

from collections import OrderedDict

from baton.core import HandoffId
from baton.errors import StaleAttempt

REMEMBERED = 65536


class Attempts:
    """The highest attempt of each of the last `limit` requests. Used by one thread."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._last: OrderedDict[str, int] = OrderedDict()

    def check_new(self, handoff: HandoffId) -> None:
        """Raises StaleAttempt if this attempt, or a later one, was seen here."""
        last = self._last.get(handoff.request_id, 0)
        if handoff.attempt <= last:
            raise StaleAttempt(f"{handoff}: attempt {last} was seen here already")

    def saw(self, handoff: HandoffId) -> None:
        """From now on neither this attempt nor an older one is new."""
        last = self._last.pop(handoff.request_id, 0)
        self._last[handoff.request_id] = max(last, handoff.attempt)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)
