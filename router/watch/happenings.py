"""The last things that a reader should know of: who came and went, what was refused, failed, or went on elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from baton.clock import Clock
from baton.rpc.v1 import admin_pb2

KEPT = 200


@dataclass(slots=True)
class _Pending:
    at: float
    text: str
    request_id: str
    times: int = 1


class Happenings:
    """The latest `KEPT`, numbered from 1. Equal ones between two looks are one: a lost worker fails many requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[admin_pb2.Happening] = deque(maxlen=KEPT)
        self._pending: dict[tuple[str, str, str], _Pending] = {}
        self.last = 0  # the number of the latest

    def add(
        self,
        kind: str,
        text: str,
        request_id: str = "",
        worker_id: str = "",
        *,
        at: float | None = None,
        alike: str = "",
    ) -> None:
        """`kind` as in `Happening`; `text` never has anything of a prompt or an answer in it. `at`: Unix time.
        `alike`: what makes it equal to others; "": its text.
        """
        key = kind, alike or text, worker_id
        found = self._pending.get(key)
        if found is not None:
            found.times += 1
        elif len(self._pending) < KEPT:
            at = self._clock.wall() if at is None else at
            self._pending[key] = _Pending(at, text, request_id)

    def settle(self) -> int:
        """Number what has come; returns the last number. To be called each second, whether or not anybody looks."""
        for (kind, _, worker_id), one in self._pending.items():
            once = one.times == 1
            text, request_id = (one.text, one.request_id) if once else (f"{one.text} ({one.times} times)", "")
            told = admin_pb2.Happening(time_s=one.at, kind=kind, text=text, request_id=request_id, worker_id=worker_id)
            self._kept.append(told)
            self.last += 1
        self._pending.clear()
        return self.last

    def since(self, number: int) -> list[admin_pb2.Happening]:
        """Those after this number that are still known, oldest first."""
        return list(islice(self._kept, max(0, len(self._kept) - (self.last - number)), None))
