"""What a data channel is: one direction, two ends, bytes in order, disposable.

The contract of both ends:
- `send` and `recv` block, at most for the channel's deadline per call. Any error closes the channel for good and is
  raised as `ChannelBroken`; a new channel gets a new generation and new staging.
- The two ends agree on the size of every message beforehand, over the Peer stream. A transport need not survive a
  message that is longer than the posted receive (gloo aborts the process), and no size ever comes from the data.
- `send` returns when `data` may be overwritten: the bytes have left. `recv` returns when all of `out` is written.
- Both point at staging memory, never at KV blocks: a receive that was posted cannot be taken back.
- An end belongs to one thread, which opens, uses and closes it. `close` is idempotent; it frees threads and sockets.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.errors import ChannelBroken
from baton.hashing import frame_digest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from baton.core import Incarnation

MAX_KEYS = 64
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 16 << 10


class Side(enum.IntEnum):
    """The rank of an end in its channel."""

    SENDER = 0
    RECEIVER = 1


@dataclass(frozen=True, slots=True)
class ChannelName:
    """Names one channel for ever: a restarted peer, or a rebuilt channel, never meets an old half."""

    sender: Incarnation
    receiver: Incarnation
    generation: int

    def __str__(self) -> str:
        return f"{self.sender}-{self.receiver}-{self.generation}"


class ChannelEnd(Protocol):
    """One end of a channel; see the contract above."""

    def send(self, data: Tensor) -> None:
        """Sender only. `data`: uint8 [n], contiguous, on the transport's device. Raises ChannelBroken."""

    def recv(self, out: Tensor) -> None:
        """Receiver only. Fills `out`: uint8 [n], contiguous, on the transport's device. Raises ChannelBroken."""

    def close(self) -> None:
        """Give everything back; the other end fails at its next or current call."""


class Transport(Protocol):
    """A way to make channels."""

    @property
    def name(self) -> str:
        """As in the cluster file and in PeerHello."""

    @property
    def device(self) -> torch.device:
        """Where staging must lie."""

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> ChannelEnd:
        """Build this end, exchanging `keys` with the other one. `deadline_s` bounds this call and later each message.

        Raises ChannelBroken.
        """


class KeyRelay:
    """Carries rendezvous keys between the two ends, over the Peer stream instead of a store that listens.

    `deliver` may be called (by the stream's thread) before the transport asks: what came early is kept, in bounds.
    """

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self.send = send
        self._lock = threading.Lock()
        self._early: list[tuple[str, bytes]] = []
        self._count = 0
        self._sink: Callable[[str, bytes], None] | None = None

    def deliver(self, key: str, value: bytes) -> None:
        """A key of the other side came. Raises ChannelBroken when it is no key that a rendezvous needs."""
        with self._lock:
            self._count += 1
            if self._count > MAX_KEYS or len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
                raise ChannelBroken(f"rendezvous key out of bounds: number {self._count}, {len(value)} bytes")
            if self._sink is None:
                self._early.append((key, value))
            else:
                self._sink(key, value)

    def attach(self, sink: Callable[[str, bytes], None]) -> None:
        """Pass keys to `sink` from now on, those that came early first."""
        with self._lock:
            self._sink = sink
            for key, value in self._early:
                sink(key, value)
            self._early.clear()


def wire_digest(data: Tensor) -> bytes:
    """The digest of a frame in staging, wherever that lies. Waits for the device."""
    return frame_digest(data.cpu().numpy().data)
