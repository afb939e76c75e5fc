"""Data channels: one direction, two ends, frames in order through a ring of staging slots. A channel is disposable.

The contract of both ends, which `RingEnd` implements for two-sided transports. One-sided ends have no slots:
- Frame n uses slot n modulo the number of slots (`Ring`), in staging memory and never in KV blocks. The sender fills
  its slot; the receiver finds the same bytes in its own.
- The sender reuses a slot only after the receiver's credit, which comes over the Peer stream. So several frames may be
  under way, and the receiver may read a slot until it sends the credit. It starts a frame after the announcement.
- `start` never waits for the peer; it is called within `turn`, which may wait for other channels. `finish` waits for
  the peer, at most for the channel's deadline; it is called in frame order.
- Any error closes the channel permanently and raises `ChannelBroken`, which keeps nothing of the channel alive. The
  next channel gets a new generation and new staging.
- Both ends agree on the size of a frame over the Peer stream; no size comes from the data. gloo, for example, aborts
  the process if a message is longer than the posted receive.
- One thread opens, uses and closes an end. `close` is idempotent; it frees threads and sockets.
"""

from __future__ import annotations

import enum
import queue
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from baton.core import Incarnation, LeftOut, WorkerRef
from baton.engine.kv_cache import KVCache
from baton.errors import ChannelBroken
from kvtransfer.frames import FrameSpec
from kvtransfer.handoff import TransferSettings

MAX_KEYS = 64
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 16 << 10
ALIGNMENT = 64


@dataclass(slots=True)
class Places:
    """Places of a sequence's blocks in the sender's pool, and the generations that their content has."""

    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    fresh: bool = True  # nothing was copied from them yet

    def of(self, spec: FrameSpec, block_size: int) -> tuple[list[int], list[int]]:
        """Return the blocks with the positions of a frame, and their generations."""
        needed = slice(spec.begin // block_size, -(-spec.end // block_size))
        return self.blocks[needed], self.generations[needed]

    def replace(self, first: int, blocks: Sequence[int], generations: Sequence[int]) -> None:
        """Set the places from block number `first` on. Blocks between the known ones and `first` are never read."""
        unknown = [0] * (first - len(self.blocks))
        self.blocks = [*self.blocks[:first], *unknown, *blocks]
        self.generations = [*self.generations[:first], *unknown, *generations]


class Side(enum.IntEnum):
    """The rank of an end in its channel."""

    SENDER = 0
    RECEIVER = 1


@dataclass(frozen=True, slots=True)
class ChannelName:
    """A unique name: a restarted peer or a rebuilt channel never meets an old end."""

    sender: Incarnation
    receiver: Incarnation
    generation: int

    def __str__(self) -> str:
        return f"{self.sender}-{self.receiver}-{self.generation}"


@dataclass(frozen=True, slots=True)
class Ring:
    """Staging of a channel: `slots` slots of `size` bytes each. Both ends use the receiver's values."""

    slots: int
    size: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.size


class ControlPath(Protocol):
    """A fast, ordered path for announcements, credits and commits; see `kvtransfer.transports.unix_socket`."""

    @property
    def ready(self) -> bool: ...
    def takes(self, nbytes: int) -> bool: ...
    def send(self, packet: bytes) -> None: ...
    def receive(self, timeout_s: float | None = None) -> bytes | None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class RemotePool(Protocol):
    """The sender's KV pool at the receiver of a one-sided channel. It is only read."""

    @property
    def total_blocks(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Positions per block; the receiver's may differ."""

    def probe(self, number: int, nbytes: int) -> Tensor:
        """Return the first `nbytes` of piece `number` of the pattern of `baton.engine.memory.exposed`, as it is there:
        uint8 [nbytes], in main memory. Raises ChannelBroken.
        """

    def read(self, kv: KVCache, spec: FrameSpec, places: Places, ours: Sequence[int]) -> bool:
        """Copy a frame from `places` of the sequence into its blocks `ours` of `kv`; on return the copy has ended.
        Return False if one of the places was given to another sequence before that; then the copied bytes mean nothing.
        Raises ChannelBroken.
        """


class ChannelEnd(Protocol):
    """One end of a channel; see the contract above. Frames are numbered 0, 1, 2, ... on both ends."""

    @property
    def control_socket(self) -> ControlPath | None:
        """The control path of a one-sided channel within a host."""
        return None

    @property
    def pool(self) -> RemotePool | None:
        """The sender's pool, if this is the receiver of a one-sided channel."""
        return None

    def slot(self, number: int) -> Tensor:
        """Return staging of frame `number`: uint8 [ring.size], contiguous, 64-byte aligned, on `device`."""

    @property
    def ordered(self) -> bool:
        """Whether `turn` may wait. Announcements must then be sent one by one."""
        return False

    def turn(self) -> AbstractContextManager[None]:
        """Wait until this end may start frames; the block starts them. A sender announces them there, too. Raises
        ChannelBroken.
        """
        return nullcontext()

    def start(self, number: int, nbytes: int) -> None:
        """Send `nbytes` of the filled slot (sender), or post their receive (receiver). Raises ChannelBroken."""

    def finish(self, number: int) -> None:
        """Wait until frame `number` has left (sender) or is in its slot (receiver). Raises ChannelBroken."""

    def close(self) -> None:
        """Release everything; the other end fails in its current or next call."""


class Transport(Protocol):
    """A kind of channel. Two ends can use it if their `name` and `reach` are equal."""

    name: str  # in the cluster file and in PeerHello
    one_sided: bool  # the receiver reads the sender's pool, on the same host; there are no slots
    sends: bool  # whether this worker can be the sender
    reach: str  # a value shared by all ends that can meet, such as a host name; empty means everywhere

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> ChannelEnd:
        """Build this end, exchanging `keys`. `deadline_s` limits each step, then each frame. Raises ChannelBroken."""


class KeyRelay:
    """Exchange of rendezvous keys over the Peer stream, which replaces a listening store. `send` sends a key to the
    peer. Received keys wait, up to a limit, until the transport takes them.
    """

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self.send = send
        self._arrived: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._count = 0

    def deliver(self, key: str, value: bytes) -> None:
        """Add a received key, from the stream's thread. Raises ChannelBroken if it exceeds the limits."""
        self._count += 1
        if self._count > MAX_KEYS or len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise ChannelBroken(f"rendezvous key out of bounds: number {self._count}, {len(value)} bytes")
        self._arrived.put((key, value))

    def receive(self, timeout_s: float) -> tuple[str, bytes] | None:
        """Return the next key of the peer, or None after `timeout_s`."""
        try:
            return self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def expect(self, key: str, deadline_s: float) -> bytes:
        """Return the value of `key`, the peer's next key. Raises TimeoutError, or ConnectionError for another key."""
        arrived = self.receive(deadline_s)
        if arrived is None:
            raise TimeoutError(f"the peer did not send {key!r} within {deadline_s} s")
        if arrived[0] != key:
            raise ConnectionError(f"the peer sent {arrived[0]!r} instead of {key!r}")
        return arrived[1]


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker's transports, best first, and those of `auto` that it cannot use."""

    transports: Sequence[Transport]
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Properties that all channels of a worker share."""

    kv: KVCache
    me: WorkerRef
    fingerprint: str
    settings: TransferSettings
    choice: Choice

    @property
    def ring(self) -> Ring:
        """Staging of a channel: a slot fits a frame, and at least one position of one layer."""
        size = max(self.settings.frame_size, self.kv.layout.layer_token_bytes)
        return Ring(self.settings.credits, -(-size // ALIGNMENT) * ALIGNMENT)

    def ring_of(self, transport: Transport) -> Ring:
        """The ring that this worker grants for a channel. Frames that need no staging are as large as a whole ring."""
        return Ring(self.ring.slots, self.ring.nbytes) if transport.one_sided else self.ring

    @property
    def max_channels(self) -> int:
        """Number of rings that fit into staging memory; at least 1."""
        return max(1, self.settings.staging_memory // self.ring.nbytes)

    def transport(self, name: str) -> Transport | None:
        """Return this worker's transport of that name, if there is one."""
        return next((transport for transport in self.choice.transports if transport.name == name), None)


PREFERENCE = ("shm", "cuda_ipc", "nixl", "nccl", "gloo", "grpc")  # best first, in any place that has them


def local_ring(ring: Ring, device: torch.device) -> Tensor:
    """Allocate the ring of one end: uint8 [slots, size]."""
    return torch.empty(ring.slots, ring.size, dtype=torch.uint8, device=device)


T = TypeVar("T")


class RingEnd(ChannelEnd):
    """A `ChannelEnd` over `staging` (uint8 [slots, size]). Any error of its transport closes it permanently.

    Transports raise OSError or RuntimeError, as their libraries do. The end raises ChannelBroken with the text alone,
    because a kept exception would keep the connection and its sockets.
    """

    def __init__(self, title: str, staging: Tensor) -> None:
        self._title = title
        self._staging: Tensor | None = staging

    def slot(self, number: int) -> Tensor:
        """See `ChannelEnd`. Raises ChannelBroken if the end is closed."""
        if self._staging is None:
            raise ChannelBroken(f"{self._title}: closed")
        return self._staging[number % len(self._staging)]

    def start(self, number: int, nbytes: int) -> None:
        size = self.slot(number).numel()
        if not 0 < nbytes <= size:
            self.close()
            raise ChannelBroken(f"{self._title}: frame {number} of {nbytes} bytes, a slot has {size}")
        self._guard(lambda: self._start(number, nbytes))

    def finish(self, number: int) -> None:
        self.slot(number)
        self._guard(lambda: self._finish(number))

    def close(self) -> None:
        if self._staging is not None:
            self._staging = None
            self._release()

    @abstractmethod
    def _start(self, number: int, nbytes: int) -> None: ...

    @abstractmethod
    def _finish(self, number: int) -> None: ...

    @abstractmethod
    def _release(self) -> None:
        """Release the transport's resources; called once."""

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            translate_errors(self._title, call)
        except ChannelBroken:
            self.close()
            raise


def translate_errors(what: str, call: Callable[[], T]) -> T:
    """Return the result of `call`. Raises ChannelBroken with only the text of a library's error."""
    try:
        return call()
    except (OSError, RuntimeError) as error:
        failure = str(error) or type(error).__name__
    raise ChannelBroken(f"{what}: {failure}")
