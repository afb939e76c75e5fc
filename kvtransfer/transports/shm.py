"""Shared memory between processes of one host: both see the same slots, nothing is copied and nothing is left behind.

The receiver makes the memory as a file without a name (memfd), which can neither shrink nor grow, and hands it to the
sender over a unix socket. When the last of both processes is gone, however it went, so is the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from baton.errors import ConfigError
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import Side, told
from kvtransfer.transports.rendezvous import host_reach
from kvtransfer.transports.unix_socket import SocketEnd, UnixSocketPair

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.transports.base import ChannelName, KeyRelay, Ring


class ShmTransport:
    """Raises ConfigError where the system has no such memory, which is everywhere but on Linux."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.reach = host_reach()
        try:
            os.close(_sealed("baton-kv", mmap.PAGESIZE))
        except (AttributeError, OSError) as error:
            raise ConfigError(f"shm needs sealed memory files: {error}") from error

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> SocketEnd:
        """See `Transport`. All pages are there when it returns: no frame waits for the kernel to find some.

        The memory is unmapped when no tensor of it is left, so a slot that somebody still holds stays readable.
        """
        title, build = f"shm channel {name}", _give if side is Side.RECEIVER else _take
        pair, staging = told(f"{title}: not built", lambda: build(name, keys, ring, deadline_s))
        return SocketEnd(title, staging, pair, side, pair.close)


def _give(name: ChannelName, keys: KeyRelay, ring: Ring, deadline_s: float) -> tuple[UnixSocketPair, Tensor]:
    """The receiver's part. Raises OSError."""
    with ExitStack() as leaving, ExitStack() as failing:
        file = _sealed(f"baton-kv-{name}", ring.nbytes)
        leaving.callback(os.close, file)
        staging = _mapped(file, ring)
        pair = unix_socket.accept(keys, deadline_s)
        failing.callback(pair.close)
        socket.send_fds(pair.socket, [b"\0"], [file])
        failing.pop_all()
    return pair, staging


def _take(name: ChannelName, keys: KeyRelay, ring: Ring, deadline_s: float) -> tuple[UnixSocketPair, Tensor]:
    """The sender's part. Raises OSError."""
    with ExitStack() as leaving, ExitStack() as failing:
        pair = unix_socket.connect(keys, deadline_s)
        failing.callback(pair.close)
        _, files, _, _ = socket.recv_fds(pair.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            raise ConnectionError("the other end sent no memory")
        leaving.callback(os.close, files[0])
        _check_sealed(files[0], ring.nbytes)
        staging = _mapped(files[0], ring)
        failing.pop_all()
    return pair, staging


def _sealed(name: str, nbytes: int) -> int:
    """The descriptor of new memory, zero, that keeps its size for ever. Raises OSError: there is not enough."""
    with ExitStack() as failing:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failing.callback(os.close, file)
        os.ftruncate(file, nbytes)
        os.posix_fallocate(file, 0, nbytes)  # an error now instead of SIGBUS later
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        failing.pop_all()
    return file


def _check_sealed(file: int, nbytes: int) -> None:
    """Raises OSError unless `file` is memory of this size whose size nobody can change: touching it is safe."""
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & needed != needed:
        raise ConnectionError("the other end's memory is not sealed")
    if (size := os.fstat(file).st_size) != nbytes:
        raise ConnectionError(f"the other end's memory has {size} bytes instead of {nbytes}")


def _mapped(file: int, ring: Ring) -> Tensor:
    """uint8 [slots, size]. Never unmapped by hand: torch does not tell Python that it still uses the memory."""
    memory = mmap.mmap(file, ring.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(ring.slots, ring.size)
