"""What a data channel is: one direction, two ends, bytes in order, disposable.

The contract of both ends:
- `send` and `recv` block, at most for the channel's deadline per call. Any error closes the channel for good and is
  raised as `ChannelBroken`, which keeps nothing of the channel alive; a new one gets a new generation and new staging.
- The two ends agree on the size of every message beforehand, over the Peer stream. A transport need not survive a
  message that is longer than the posted receive (gloo aborts the process), and no size ever comes from the data.
- `send` returns when `data` may be overwritten: the bytes have left. `recv` returns when all of `out` is written.
- Both point at staging memory, never at KV blocks: a receive that was posted cannot be taken back.
- An end belongs to one thread, which opens, uses and closes it. `close` is idempotent; it frees threads and sockets.
"""

from __future__ import annotations

import enum
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from baton.errors import ChannelBroken
from baton.hashing import frame_digest
from kvtransfer.plan import FrameSpec, plan_frames, staging_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from baton.core import Incarnation, WorkerRef
    from baton.engine.kv import KVCache
    from kvtransfer.handoff import TransferSettings

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
        """Build this end, exchanging `keys` with the other one. `deadline_s` bounds each step, and later each message.

        Raises ChannelBroken.
        """


class KeyRelay:
    """Carries rendezvous keys between the two ends, over the Peer stream instead of a store that listens.

    `send` says a key to the other side. What comes from there waits, in bounds, until the transport asks for it.
    """

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self.send = send
        self._arrived: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._count = 0

    def deliver(self, key: str, value: bytes) -> None:
        """From the stream's thread: a key came. Raises ChannelBroken when it is no key that a rendezvous needs."""
        self._count += 1
        if self._count > MAX_KEYS or len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise ChannelBroken(f"rendezvous key out of bounds: number {self._count}, {len(value)} bytes")
        self._arrived.put((key, value))

    def receive(self, timeout_s: float) -> tuple[str, bytes] | None:
        """The next key of the other side; None: none came in this time."""
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What all channels of one worker have in common."""

    kv: KVCache
    me: WorkerRef
    fingerprint: str
    settings: TransferSettings
    transport: Transport

    def plan(self, known_tokens: int, frame_size: int) -> tuple[FrameSpec, ...]:
        """The frames of a handoff of that many positions, at least 1."""
        layout = self.kv.layout
        return plan_frames(layout, layout.blocks_for(known_tokens), frame_size)

    def staging(self, frame_size: int) -> Tensor:
        """Memory for the largest frame: uint8 [n], on the transport's device. It belongs to one channel."""
        nbytes = staging_bytes(self.kv.layout, frame_size)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.transport.device)


def wire_digest(data: Tensor) -> bytes:
    """The digest of a frame in staging, wherever that lies. Waits for the device."""
    return frame_digest(data.cpu().numpy().data)
