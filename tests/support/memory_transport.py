"""Transport within one process, with the same contract as the others."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from baton.errors import ChannelBroken
from kvtransfer.transports.base import RingEnd, Side, local_ring

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.transports.base import ChannelName, KeyRelay, Ring


class MemoryTransport:
    """The object through which two ends share one ring: both workers of a process must be given the same one."""

    name = "memory"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.reach = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._waiting: dict[tuple[ChannelName, Side], Meeting] = {}

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> MemoryEnd:
        """See `Transport`. The first end makes the ring, the second one finds it."""
        title = f"memory channel {name}"
        with self._changed:
            meeting = self._waiting.pop((name, Side(1 - side)), None)
            if meeting is None:
                meeting = self._wait((name, side), ring, deadline_s)
            self._changed.notify_all()
        if meeting is None:
            raise ChannelBroken(f"{title}: no peer within {deadline_s} s")
        return MemoryEnd(title, meeting, side, deadline_s)

    def _wait(self, key: tuple[ChannelName, Side], ring: Ring, deadline_s: float) -> Meeting | None:
        made = self._waiting[key] = Meeting(local_ring(ring, self.device))
        if self._changed.wait_for(lambda: self._waiting.get(key) is not made, deadline_s):
            return made
        del self._waiting[key]
        return None


@dataclass(slots=True, eq=False)
class Meeting:
    """State that two ends share. `sizes` has the bytes of frames that were sent and not yet taken, by number."""

    staging: Tensor
    sizes: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


class MemoryEnd(RingEnd):
    """An end of a shared ring: a started frame has arrived."""

    def __init__(self, title: str, meeting: Meeting, side: Side, deadline_s: float) -> None:
        super().__init__(title, meeting.staging)
        self._meeting = meeting
        self._side = side
        self._deadline_s = deadline_s
        self._expected: dict[int, int] = {}

    def _start(self, number: int, nbytes: int) -> None:
        with self._meeting.changed:
            self._check()
            (self._expected if self._side else self._meeting.sizes)[number] = nbytes
            self._meeting.changed.notify_all()

    def _finish(self, number: int) -> None:
        meeting = self._meeting
        with meeting.changed:
            here = self._side is Side.SENDER or meeting.changed.wait_for(
                lambda: meeting.closed or number in meeting.sizes, self._deadline_s
            )
            self._check()
            if not here:
                raise TimeoutError(f"no progress within {self._deadline_s} s")
            if self._side is Side.RECEIVER and meeting.sizes.pop(number) != self._expected.pop(number, None):
                raise ConnectionError(f"frame {number} does not have the expected size")

    def _release(self) -> None:
        with self._meeting.changed:
            self._meeting.closed = True
            self._meeting.changed.notify_all()

    def _check(self) -> None:
        if self._meeting.closed:
            raise ConnectionError("closed by the peer")
