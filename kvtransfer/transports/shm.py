"""Shared memory between processes of one host: the receiver reads the sender's KV pool, and nothing else is copied.

The sender passes its pool (`baton.engine.memory.exposed`) over a unix socket; the receiver can only read it. Channels
of one sender share the pool. A block's generation shows whether its content is still the one that was announced, so
nothing at the sender waits for a receiver. The kernel frees the memory with the last process that has it.
A receiver can see the whole pool: both ends are processes of one cluster and one user.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import MappedMemory, Shape, check_platform
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.frames import FrameSpec
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelName, KeyRelay, Places, Ring, Side, translate_errors
from kvtransfer.transports.unix_socket import ControlSocket, UnixSocketPair, host_reach

_POOL = struct.Struct("<QQQ")  # blocks, bytes of KV, positions per block


class ShmTransport:
    """Transport between KV caches in main memory. A cache that is not exposed can only receive. Raises ConfigError
    where processes cannot share memory safely.
    """

    name = "shm"
    one_sided = True
    device = torch.device("cpu")

    def __init__(self, kv: KVCache) -> None:
        check_platform()
        if kv.device.type != "cpu":
            raise ConfigError(f"shm needs KV in main memory; KV is on {kv.device}")
        self.reach = host_reach()
        self.sends = kv.exposed is not None
        self._kv = kv

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> PoolEnd:
        """See `Transport`. The memory is unmapped with its last tensor, so a read under way ends safely."""
        title, build = f"shm channel {name}", self._take if side is Side.RECEIVER else self._give
        pair, pool = translate_errors(f"{title}: not built", lambda: build(keys, deadline_s))
        return PoolEnd(title, pair, pool)

    def _give(self, keys: KeyRelay, deadline_s: float) -> tuple[UnixSocketPair, MappedPool | None]:
        """Pass the pool to the receiver. Raises OSError."""
        if (exposed := self._kv.exposed) is None:
            raise ConnectionError("the KV cache here is not exposed")
        with ExitStack() as failing:
            pair = unix_socket.connect(keys, deadline_s)
            failing.callback(pair.close)
            shape = exposed.shape
            packed = _POOL.pack(shape.blocks, shape.kv_bytes, self._kv.layout.block_size)
            socket.send_fds(pair.socket, [packed], [exposed.file])
            failing.pop_all()
        return pair, None

    def _take(self, keys: KeyRelay, deadline_s: float) -> tuple[UnixSocketPair, MappedPool | None]:
        """Receive the sender's pool and map it. Raises OSError."""
        with ExitStack() as leaving, ExitStack() as failing:
            pair = unix_socket.accept(keys, deadline_s)
            failing.callback(pair.close)
            packed, files, _, _ = socket.recv_fds(pair.socket, _POOL.size, 1, socket.MSG_CMSG_CLOEXEC)
            for file in files:
                leaving.callback(os.close, file)
            if len(files) != 1 or len(packed) != _POOL.size:
                raise ConnectionError("the peer sent no memory")
            blocks, kv_bytes, block_size = _POOL.unpack(packed)
            layout = replace(self._kv.layout, block_size=block_size)
            if not block_size or kv_bytes != blocks * layout.block_bytes:
                raise ConnectionError(f"{kv_bytes} bytes are not {blocks} blocks of {block_size} positions")
            memory = MappedMemory(files[0], Shape(blocks, kv_bytes))
            pool = MappedPool(self._kv.reader_of(layout, blocks, memory.kv), memory)
            failing.pop_all()
        return pair, pool


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
        needed = slice(spec.begin // self.block_size, -(-spec.end // self.block_size))
        blocks, expected = places.blocks[needed], places.generations[needed]
        if self._memory.generations(blocks) != expected:
            return False
        kv.copy_from(self.cache, spec.layers, places.blocks, ours, spec.begin, spec.end)
        kv.settle()
        return self._memory.generations(blocks) == expected


class PoolEnd:
    """An end of a channel without slots. `pool` is the sender's, at the receiver."""

    ordered = False

    def __init__(self, title: str, pair: UnixSocketPair, pool: MappedPool | None) -> None:
        self._title, self._pair = title, pair
        self.pool = pool
        self.control_socket = ControlSocket(title, pair.control_socket)

    def slot(self, number: int) -> Tensor:
        """Raise ChannelBroken: the receiver reads from `pool`."""
        raise ChannelBroken(f"{self._title}: has no slots")

    def turn(self) -> AbstractContextManager[None]:
        """Do not wait: frames need no order among channels."""
        return nullcontext()

    def start(self, number: int, nbytes: int) -> None:
        """Raise ChannelBroken if the peer is gone."""
        translate_errors(self._title, self._pair.check)

    def finish(self, number: int) -> None:
        """Do nothing: a frame that was announced can be read."""

    def close(self) -> None:
        self.control_socket.close()
        self._pair.close()
