"""A sender's pool on the same host: how it is passed over a Unix socket, and the ends of a channel that reads it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from baton.core import KVLayout
from baton.engine.memory.exposed import Shape
from baton.errors import ChannelBroken
from kvtransfer.transports.base import RemotePool
from kvtransfer.transports.unix_socket import ControlSocket

_POOL = struct.Struct("<QQQ")  # blocks, bytes of KV, positions per block; a handle may follow


@dataclass(frozen=True, slots=True)
class Passed:
    """A pool that was passed: its shape and layout, the descriptor of its memory in main memory, and its handle."""

    shape: Shape
    layout: KVLayout
    file: int
    handle: bytes


def pass_pool(connected: socket.socket, shape: Shape, layout: KVLayout, file: int, handle: bytes = b"") -> None:
    """Pass a pool to the receiver. Raises OSError."""
    packed = _POOL.pack(shape.blocks, shape.kv_bytes, layout.block_size)
    socket.send_fds(connected, [packed + handle], [file])


def receive_pool(connected: socket.socket, ours: KVLayout, leaving: ExitStack, handle_bytes: int = 0) -> Passed:
    """Receive the sender's pool, whose layout is `ours` except for the block size. `leaving` closes the descriptor.
    Raises OSError.
    """
    size = _POOL.size + handle_bytes
    packed, files, _, _ = socket.recv_fds(connected, size, 1, socket.MSG_CMSG_CLOEXEC)
    for file in files:
        leaving.callback(os.close, file)
    if len(files) != 1 or len(packed) != size:
        raise ConnectionError("the peer sent no memory")
    blocks, kv_bytes, block_size = _POOL.unpack_from(packed)
    layout = replace(ours, block_size=block_size)
    if not block_size or kv_bytes != blocks * layout.block_bytes:
        raise ConnectionError(f"{kv_bytes} bytes are not {blocks} blocks of {block_size} positions")
    return Passed(Shape(blocks, kv_bytes), layout, files[0], packed[_POOL.size :])


class PoolEnd:
    """An end of a channel without slots. `pool` is the sender's, at the receiver. `release` frees what it used, and the
    socket is closed after that: the sender sees then that its memory is not used any more.
    """

    ordered = False

    def __init__(
        self,
        title: str,
        connected: socket.socket,
        pool: RemotePool | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._title, self._release = title, release
        self.pool = pool
        self.control_socket = ControlSocket(title, connected)

    def slot(self, number: int) -> Tensor:
        """Raise ChannelBroken: the receiver reads from `pool`."""
        raise ChannelBroken(f"{self._title}: has no slots")

    def turn(self) -> AbstractContextManager[None]:
        """Do not wait: frames need no order among channels."""
        return nullcontext()

    def start(self, number: int, nbytes: int) -> None:
        """Raise ChannelBroken if the peer is gone."""
        self.control_socket.check()

    def finish(self, number: int) -> None:
        """Do nothing: a frame that was announced can be read."""

    def close(self) -> None:
        try:
            self._release()
        finally:
            self.control_socket.close()
