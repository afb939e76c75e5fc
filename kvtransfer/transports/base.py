"""What a data channel is: one direction, two ends, frames in order through a ring of staging slots, disposable.

The contract of both ends:
- A channel has a ring of slots (`Ring`) in staging memory, never KV blocks: frame n uses slot n modulo their number.
  The sender fills the slot, the receiver finds the same bytes in its own. Where both see the same memory (shared
  memory, one GPU) the slot is one and the same, and nothing is copied.
- The sender touches a slot again only when the receiver has given it back (a credit, over the Peer stream): so `start`
  need not have left when the next frame is started, and the receiver may read a slot until it gives the credit.
- `start` never waits for the other end; `finish` does, at most for the channel's deadline, and is called in the order
  of the frames. Any error closes the channel for good and is raised as `ChannelBroken`, which keeps nothing of the
  channel alive; a new one gets a new generation and new staging.
- The two ends agree on the size of every frame beforehand, over the Peer stream. A transport need not survive a message
  that is longer than the posted receive (gloo aborts the process), and no size ever comes from the data.
- An end belongs to one thread, which opens, uses and closes it. `close` is idempotent; it frees threads and sockets.

What the ends of all transports share: staging, bounds, and the rule of failure.
"""

from __future__ import annotations

import enum
import queue
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from baton.errors import ChannelBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from baton.core import Incarnation, WorkerRef
    from baton.engine.kv_cache import KVCache
    from kvtransfer.handoff import TransferSettings
    from kvtransfer.transports.unix_socket import ControlSocket


MAX_KEYS = 64
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 16 << 10
ALIGNMENT = 64


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


@dataclass(frozen=True, slots=True)
class Ring:
    """Staging of a channel: `slots` pieces of `size` bytes each. Both ends use the receiver's values."""

    slots: int
    size: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.size


class ChannelEnd(Protocol):
    """One end of a channel; see the contract above. Frames are numbered 0, 1, 2, ... on both ends.

    `express`: where announcements, credits and commits pass faster than over the Peer stream, and in their order.
    """

    @property
    def express(self) -> ControlSocket | None: ...

    def slot(self, number: int) -> Tensor:
        """Staging of frame `number`: uint8 [ring.size], contiguous, aligned to 64 bytes, on the transport's device."""

    def start(self, number: int, nbytes: int) -> None:
        """The sender's slot is filled: let `nbytes` of it leave. The receiver: expect them. Raises ChannelBroken."""

    def finish(self, number: int) -> None:
        """Wait until frame `number` has left (sender), or is in its slot (receiver). Raises ChannelBroken."""

    def close(self) -> None:
        """Give everything back; the other end fails at its next or current call."""


class Transport(Protocol):
    """A way to make channels. Two ends can use one if their `name` and `reach` are equal."""

    @property
    def name(self) -> str:
        """As in the cluster file and in PeerHello."""

    @property
    def reach(self) -> str:
        """Within what it works: the same for all ends that can meet, such as a name of this host; "": anywhere."""

    @property
    def device(self) -> torch.device:
        """Where staging lies."""

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> ChannelEnd:
        """Build this end, exchanging `keys` with the other one. `deadline_s` bounds each step, and later each frame.

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
    """What all channels of one worker have in common. `transports`: those that may be used, the best first."""

    kv: KVCache
    me: WorkerRef
    fingerprint: str
    settings: TransferSettings
    transports: tuple[Transport, ...]

    @property
    def ring(self) -> Ring:
        """As this worker grants it: a slot holds a frame, and at least one position of one layer."""
        size = max(self.settings.frame_size, self.kv.layout.layer_token_bytes)
        return Ring(self.settings.credits, -(-size // ALIGNMENT) * ALIGNMENT)

    @property
    def max_channels(self) -> int:
        """How many rings staging memory holds; at least 1."""
        return max(1, self.settings.staging_memory // self.ring.nbytes)

    def transport(self, name: str) -> Transport | None:
        """The one of that name, if this worker has it."""
        return next((transport for transport in self.transports if transport.name == name), None)


def local_ring(ring: Ring, device: torch.device) -> Tensor:
    """Memory for a ring of one end: uint8 [slots, size]."""
    return torch.empty(ring.slots, ring.size, dtype=torch.uint8, device=device)


T = TypeVar("T")


class RingEnd(ABC):
    """A `ChannelEnd` over `staging` (uint8 [slots, size]). What a transport raises in it closes it for good.

    A transport raises OSError or RuntimeError, as its libraries do; the end makes ChannelBroken of it, with the text
    alone: a kept exception would keep the connection, and its sockets.
    """

    express: ControlSocket | None = None

    def __init__(self, title: str, staging: Tensor) -> None:
        self._title = title
        self._staging: Tensor | None = staging

    def slot(self, number: int) -> Tensor:
        """See `ChannelEnd`. Raises ChannelBroken when the end is closed."""
        if self._staging is None:
            raise ChannelBroken(f"{self._title}: closed")
        return self._staging[number % len(self._staging)]

    def start(self, number: int, nbytes: int) -> None:
        """See `ChannelEnd`."""
        size = self.slot(number).numel()
        if not 0 < nbytes <= size:
            self.close()
            raise ChannelBroken(f"{self._title}: frame {number} of {nbytes} bytes, a slot has {size}")
        self._guard(lambda: self._start(number, nbytes))

    def finish(self, number: int) -> None:
        """See `ChannelEnd`."""
        self.slot(number)
        self._guard(lambda: self._finish(number))

    def close(self) -> None:
        """See `ChannelEnd`."""
        if self._staging is not None:
            self._staging = None
            self._release()

    @abstractmethod
    def _start(self, number: int, nbytes: int) -> None: ...

    @abstractmethod
    def _finish(self, number: int) -> None: ...

    @abstractmethod
    def _release(self) -> None:
        """Called once."""

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            told(self._title, call)
        except ChannelBroken:
            self.close()
            raise


def told(what: str, call: Callable[[], T]) -> T:
    """What `call` returns. Raises ChannelBroken, with the text and nothing else, for what a library raises."""
    try:
        return call()
    except (OSError, RuntimeError) as error:
        failure = str(error) or type(error).__name__
    raise ChannelBroken(f"{what}: {failure}")
