"""A unix socket between the two ends, for those who share memory: proof of the peer's life, and small messages.

The name is abstract, so nothing is left in any folder, and unguessable; but all users of the host can read it in
/proc/net/unix. So the kernel is asked who the other process belongs to, and it has to know a secret as well.

What hurries between two processes of one host: packets over a unix socket, past gRPC and its threads.

A frame of 4 MiB passes shared memory in well under a millisecond; a message over a gRPC stream costs a third of one, at
each end (`benchmarks/transfer.py`). What is said here is what the Peer stream would carry, in the same bytes:
announcements and credits, commits, if they are not too long, and what they are answered with.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kvtransfer.transports.base import RingEnd, Side, told
from kvtransfer.transports.rendezvous import awaited_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtransfer.transports.base import KeyRelay


MAX_PACKET = 1 << 15


class ControlSocket:
    """One end; `connected` is a SOCK_SEQPACKET socket. One thread sends and receives, any may `wake` it.

    Packets arrive whole, in order, or the other end is seen to be gone. `send` waits if some hundred are unread: more
    than there can be credits.
    """

    def __init__(self, title: str, connected: socket.socket) -> None:
        self._title = title
        self._socket = connected
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._outlet = select.poll()
        self._outlet.register(connected, select.POLLOUT)
        self._closed = False
        self._lock = threading.Lock()  # a file that is closed may be another one's at once

    def takes(self, nbytes: int) -> bool:
        """Whether `send` would take a packet of this size without waiting."""
        return nbytes <= MAX_PACKET and bool(self._outlet.poll(0))

    def send(self, packet: bytes) -> None:
        """Raises ChannelBroken."""
        told(self._title, lambda: self._socket.send(packet))

    @property
    def ready(self) -> bool:
        """Whether `receive` would give a packet, or raise. A wake alone does not count."""
        return any(file != self._woken for file, _ in self._poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next packet; None: woken instead, or none came in time. Raises ChannelBroken: the other end is gone."""
        return told(self._title, lambda: self._receive(timeout_s))

    def wake(self) -> None:
        """Have `receive` return, now or when it is called next. Closed: no-op."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """The other end sees it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._socket.close()
                os.close(self._woken)

    def _receive(self, timeout_s: float | None) -> bytes | None:
        ready = [file for file, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)]
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._socket.fileno() not in ready:
            return None
        packet = self._socket.recv(MAX_PACKET + 1)
        if not 0 < len(packet) <= MAX_PACKET:
            raise ConnectionError("closed by the other end" if not packet else f"a packet of over {MAX_PACKET} bytes")
        return packet


KEY = "unix"
_PREFIX = b"\0baton-kv-"  # of the name; the zero byte makes it abstract
_SECRET_BYTES = 16
_GREETING_S = 1.0  # for a process of the same user to say the secret after it has connected
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_EXPRESS_BYTES = 1 << 18  # for 64 packets of some 100 bytes and a commit: it counts as full when a quarter is taken
_NOTICE = struct.Struct("<QQ")  # number and bytes of a frame


class UnixSocketPair:
    """One end of a connected pair. Each message is one packet; a peer that is gone is seen at once, however it went.

    Methods raise OSError. `socket` has the channel's deadline, and so has `express`, a second pair for its user.
    """

    def __init__(self, connected: socket.socket, express: socket.socket) -> None:
        self.socket = connected
        self.express = express

    def tell(self, number: int, nbytes: int) -> None:
        """Frame `number` is there. Waits only if some 250 notices are unread, more than there should be credits."""
        self.socket.send(_NOTICE.pack(number, nbytes))

    def expect(self, number: int, nbytes: int) -> None:
        """Wait until the other end says just that, at most for the deadline."""
        try:
            notice = self.socket.recv(_NOTICE.size + 1)
        except TimeoutError:
            raise TimeoutError(f"no progress within {self.socket.gettimeout()} s") from None
        if not notice:
            raise ConnectionError("closed by the other end")
        if notice != _NOTICE.pack(number, nbytes):
            raise ConnectionError(f"frame {number} of {nbytes} bytes was expected, the other end said {notice.hex()}")

    def close(self) -> None:
        """Both sockets. Idempotent."""
        self.express.close()
        self.socket.close()

    def check(self) -> None:
        """Raises ConnectionError if the other end has closed, or will not say any more."""
        if self._polled(select.POLLRDHUP):
            raise ConnectionError("closed by the other end")

    @property
    def gone(self) -> bool:
        """Whether the other end has closed its socket, or its process is dead."""
        return self._polled(0)

    def _polled(self, events: int) -> bool:
        poll = select.poll()
        poll.register(self.socket, events)  # POLLHUP and POLLERR come unasked
        return bool(poll.poll(0))


class SocketEnd(RingEnd):
    """An end of a ring that both ends see: a notice says that a slot is filled, nothing is copied.

    `mark` is called with the number of a frame, at the sender before the notice, at the receiver after it.
    """

    def __init__(
        self,
        title: str,
        staging: Tensor,
        pair: UnixSocketPair,
        side: Side,
        let_go: Callable[[], object],
        mark: Callable[[int], object] = lambda number: None,
    ) -> None:
        super().__init__(title, staging)
        self._pair = pair
        self._side = side
        self._let_go = let_go
        self._mark = mark
        self._expected: dict[int, int] = {}
        self.express = ControlSocket(title, pair.express)

    def _start(self, number: int, nbytes: int) -> None:
        if self._side is Side.SENDER:
            self._mark(number)
            self._pair.tell(number, nbytes)
        else:
            self._pair.check()
            self._expected[number] = nbytes

    def _finish(self, number: int) -> None:
        if self._side is Side.SENDER:
            self._pair.check()
        else:
            self._pair.expect(number, self._expected.pop(number, 0))
            self._mark(number)

    def _release(self) -> None:
        if self.express is not None:
            self.express.close()
        self._let_go()


def accept(keys: KeyRelay, deadline_s: float) -> UnixSocketPair:
    """Listen, say where, and wait for the other end. Whoever else connects is turned away. Raises OSError."""
    name = _PREFIX + secrets.token_hex(16).encode()
    secret, deadline = secrets.token_bytes(_SECRET_BYTES), time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        keys.send(KEY, secret + name)
        while (left := deadline - time.monotonic()) > 0:
            if (connected := _next(listener, secret, left)) is not None:
                return _with_express(connected, deadline_s)
    raise TimeoutError(f"the other end did not connect within {deadline_s} s")


def connect(keys: KeyRelay, deadline_s: float) -> UnixSocketPair:
    """Connect to where the other end says it listens. Raises OSError."""
    value = awaited_key(keys, KEY, deadline_s)
    secret, name = value[:_SECRET_BYTES], value[_SECRET_BYTES:]
    if not name.startswith(_PREFIX):
        raise ConnectionError(f"{name!r} is no name of a channel")
    with ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connected.settimeout(deadline_s)
        connected.connect(name)
        if not _mine(connected):
            raise PermissionError("the other end belongs to another user")
        connected.send(secret)
        _, files, _, _ = socket.recv_fds(connected, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            raise ConnectionError("closed by the other end")
        express = socket.socket(fileno=files[0])
        express.settimeout(deadline_s)
        failing.pop_all()
    return UnixSocketPair(connected, express)


def _with_express(connected: socket.socket, deadline_s: float) -> UnixSocketPair:
    """Make the second pair, and give the other end its half."""
    connected.settimeout(deadline_s)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as failing, theirs:
        failing.callback(mine.close)
        failing.callback(connected.close)
        mine.settimeout(deadline_s)
        for half in (mine, theirs):
            half.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _EXPRESS_BYTES)
        socket.send_fds(connected, [b"\0"], [theirs.fileno()])
        failing.pop_all()
    return UnixSocketPair(connected, mine)


def _next(listener: socket.socket, secret: bytes, timeout_s: float) -> socket.socket | None:
    """Who connects next, if it is the other end."""
    listener.settimeout(timeout_s)
    with suppress(TimeoutError):
        connected, _ = listener.accept()
        if _knows(connected, secret):
            return connected
        connected.close()
    return None


def _knows(connected: socket.socket, secret: bytes) -> bool:
    connected.settimeout(_GREETING_S)
    with suppress(OSError):
        return _mine(connected) and hmac.compare_digest(connected.recv(_SECRET_BYTES + 1), secret)
    return False


def _mine(connected: socket.socket) -> bool:
    """Whether the process at the other end had this user when it connected, or began to listen."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
