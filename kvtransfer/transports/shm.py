"""Shared memory between processes of one host: the receiver reads the sender's KV pool, and nothing else is copied.

The sender passes its pool (`baton.engine.memory.exposed`) over a unix socket; the receiver can only read it. Channels
of one sender share the pool. A block's generation shows whether its content is still the one that was announced, so
nothing at the sender waits for a receiver. The kernel frees the memory with the last process that has it.
A receiver can see the whole pool: both ends are processes of one cluster and one user.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor

from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import ExposedMemory, MappedMemory, check_platform
from baton.errors import ConfigError
from kvtransfer.frames import FrameSpec
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelName, KeyRelay, Places, Ring, Side, translate_errors
from kvtransfer.transports.host_pool import PoolEnd, pass_pool, receive_pool
from kvtransfer.transports.unix_socket import host_reach

_HANDSHAKE = 2  # version of the exchange that opens a channel


class ShmTransport:
    """Transport between KV caches in main memory. A cache that is not exposed can only receive. Raises ConfigError
    where processes cannot share memory safely.
    """

    name = "shm"
    one_sided = True

    def __init__(self, kv: KVCache) -> None:
        check_platform()
        if kv.device.type != "cpu":
            raise ConfigError(f"shm needs KV in main memory; KV is on {kv.device}")
        self.reach = f"{host_reach()}-{_HANDSHAKE}"
        self._exposed = kv.exposed if isinstance(kv.exposed, ExposedMemory) else None
        self.sends = self._exposed is not None
        self._kv = kv

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> PoolEnd:
        """See `Transport`. The memory is unmapped with its last tensor, so a read under way ends safely."""
        title, build = f"shm channel {name}", self._take if side is Side.RECEIVER else self._give
        return translate_errors(f"{title}: not built", lambda: build(title, keys, deadline_s))

    def _give(self, title: str, keys: KeyRelay, deadline_s: float) -> PoolEnd:
        if self._exposed is None:
            raise ConnectionError("the KV cache here is not exposed")
        with ExitStack() as failing:
            connected = failing.enter_context(unix_socket.connect(keys, deadline_s))
            pass_pool(connected, self._exposed.shape, self._kv.layout, self._exposed.file)
            failing.pop_all()
        return PoolEnd(title, connected)

    def _take(self, title: str, keys: KeyRelay, deadline_s: float) -> PoolEnd:
        with ExitStack() as leaving, ExitStack() as failing:
            connected = failing.enter_context(unix_socket.accept(keys, deadline_s))
            passed = receive_pool(connected, self._kv.layout, leaving)
            memory = MappedMemory(passed.file, passed.shape)
            pool = MappedPool(self._kv.reader_of(passed.layout, passed.shape.blocks, memory.kv), memory)
            failing.pop_all()
        return PoolEnd(title, connected, pool)


class MappedPool:
    """The sender's pool in memory that is mapped here: a `RemotePool`."""

    def __init__(self, cache: KVCache, memory: MappedMemory) -> None:
        self.cache, self._memory = cache, memory
        self.total_blocks, self.block_size = cache.total_blocks, cache.layout.block_size

    def probe(self, number: int, nbytes: int) -> Tensor:
        """See `RemotePool`."""
        return self._memory.probe(number)[:nbytes].clone()

    def read(self, kv: KVCache, spec: FrameSpec, places: Places, ours: Sequence[int]) -> bool:
        """See `RemotePool`."""
        blocks, expected = places.of(spec, self.block_size)
        if self._memory.generations(blocks) != expected:
            return False
        kv.copy_from(self.cache, spec.layers, places.blocks, ours, spec.begin, spec.end)
        kv.settle()
        return self._memory.generations(blocks) == expected
