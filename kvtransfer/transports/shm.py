"""Shared memory between processes of one host: both ends see the same slots, and nothing is copied.

The receiver makes an unnamed file (memfd) of fixed size and passes it to the sender over a unix socket. The kernel
frees the memory when both processes are gone, for whatever reason.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from contextlib import ExitStack

import torch
from torch import Tensor

from baton.errors import ConfigError
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelName, KeyRelay, Ring, Side, translate_errors
from kvtransfer.transports.unix_socket import SocketEnd, UnixSocketPair, host_reach


class ShmTransport:
    """Transport over sealed memory files. Raises ConfigError without them, that is, everywhere except on Linux."""

    name = "shm"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.reach = host_reach()
        try:
            os.close(_sealed("baton-kv", mmap.PAGESIZE))
        except (AttributeError, OSError) as error:
            raise ConfigError(f"shm needs sealed memory files: {error}") from error

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> SocketEnd:
        """See `Transport`. All pages are mapped on return, so no frame waits for the kernel. The memory is unmapped
        with its last tensor, so a slot that is still in use stays readable.
        """
        title, build = f"shm channel {name}", _give if side is Side.RECEIVER else _take
        pair, staging = translate_errors(f"{title}: not built", lambda: build(name, keys, ring, deadline_s))
        return SocketEnd(title, staging, pair, side, pair.close)


def _give(name: ChannelName, keys: KeyRelay, ring: Ring, deadline_s: float) -> tuple[UnixSocketPair, Tensor]:
    """Make the memory and pass it to the sender. Raises OSError."""
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
    """Receive the memory and map it. Raises OSError."""
    with ExitStack() as leaving, ExitStack() as failing:
        pair = unix_socket.connect(keys, deadline_s)
        failing.callback(pair.close)
        _, files, _, _ = socket.recv_fds(pair.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            raise ConnectionError("the peer sent no memory")
        leaving.callback(os.close, files[0])
        _check_sealed(files[0], ring.nbytes)
        staging = _mapped(files[0], ring)
        failing.pop_all()
    return pair, staging


def _sealed(name: str, nbytes: int) -> int:
    """Return the descriptor of new, zeroed memory of fixed size. Raises OSError if there is not enough."""
    with ExitStack() as failing:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failing.callback(os.close, file)
        os.ftruncate(file, nbytes)
        os.posix_fallocate(file, 0, nbytes)  # an error now instead of SIGBUS later
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        failing.pop_all()
    return file


def _check_sealed(file: int, nbytes: int) -> None:
    """Raise OSError unless `file` has this size and is sealed against changes of it: then access is safe."""
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & needed != needed:
        raise ConnectionError("the memory of the peer is not sealed")
    if (size := os.fstat(file).st_size) != nbytes:
        raise ConnectionError(f"the memory of the peer has {size} bytes instead of {nbytes}")


def _mapped(file: int, ring: Ring) -> Tensor:
    """Map as uint8 [slots, size]. Never unmap explicitly: torch may still use the memory without Python's notice."""
    memory = mmap.mmap(file, ring.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(ring.slots, ring.size)
