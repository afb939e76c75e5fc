"""Unix sockets between two ends on one host: proof that the peer lives, and a fast path for small messages.

The abstract name leaves no file behind and cannot be guessed, but all users of the host can read it in /proc/net/unix.
So the kernel must confirm the peer's user, and the peer must send a secret.

The control socket (`ControlSocket`) bypasses gRPC and its threads. A 4 MiB frame passes shared memory in well under
1 ms; a gRPC message costs about 0.3 ms at each end (`benchmarks/transfer.py`). It carries the same bytes as the Peer
stream: announcements, credits, commits that are short enough, and their replies.
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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from torch import Tensor

from baton.errors import ConfigError
from baton.hashing import fingerprint
from kvtransfer.transports.base import KeyRelay, RingEnd, Side, translate_errors

MAX_PACKET = 1 << 15


def host_reach(*namespaces: str) -> str:
    """Return a name that this user's processes share on this host, in the same network, user and given namespaces.
    `namespaces` are names as in /proc/self/ns. Raises ConfigError without Linux's /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inodes = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in ("net", "user", *namespaces)]
    except OSError as error:
        raise ConfigError(f"works only on Linux, with /proc: {error}") from error
    return fingerprint([boot, str(os.geteuid()), *inodes])


class ControlSocket:
    """One end of a pair. One thread sends and receives, any thread may `wake` it. Packets arrive whole and in order
    until the peer is gone. `send` blocks if some hundred are unread, more than there can be credits.
    """

    def __init__(self, title: str, connected: socket.socket) -> None:
        self._title = title
        self._socket = connected  # of type SOCK_SEQPACKET
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._outlet = select.poll()
        self._outlet.register(connected, select.POLLOUT)
        self._closed = False
        self._lock = threading.Lock()  # a closed descriptor may be reused immediately

    def takes(self, nbytes: int) -> bool:
        """Whether `send` takes a packet of this size without blocking."""
        return nbytes <= MAX_PACKET and bool(self._outlet.poll(0))

    def send(self, packet: bytes) -> None:
        """Send a packet. Raises ChannelBroken."""
        translate_errors(self._title, lambda: self._socket.send(packet))

    @property
    def ready(self) -> bool:
        """Whether `receive` returns a packet, or raises, without a wait. A wake alone does not count."""
        return any(file != self._woken for file, _ in self._poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next packet, or None after a wake or the timeout. Raises ChannelBroken if the peer is gone."""
        return translate_errors(self._title, lambda: self._receive(timeout_s))

    def wake(self) -> None:
        """Make `receive` return, now or at its next call. No-op if closed."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    def close(self) -> None:
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
            raise ConnectionError("closed by the peer" if not packet else f"a packet of over {MAX_PACKET} bytes")
        return packet


KEY = "unix"
_PREFIX = b"\0baton-kv-"  # of the name; the zero byte makes it abstract
_SECRET_BYTES = 16
_GREETING_S = 1.0  # seconds for a process of the same user to send the secret after it has connected
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONTROL_BYTES = 1 << 18  # for 64 packets of some 100 bytes and a commit: it counts as full when a quarter is used
_NOTICE = struct.Struct("<QQ")  # number and bytes of a frame


class UnixSocketPair:
    """One end of a connected pair. Each message is one packet. The peer's end is detected immediately, for any reason.
    Methods raise OSError. `socket` and `control_socket`, a second pair for its user, have the channel's deadline.
    """

    def __init__(self, connected: socket.socket, control_socket: socket.socket) -> None:
        self.socket = connected
        self.control_socket = control_socket

    def notify(self, number: int, nbytes: int) -> None:
        """Notify that frame `number` is filled. Blocks only if some 250 notices are unread, more than the credits."""
        self.socket.send(_NOTICE.pack(number, nbytes))

    def expect(self, number: int, nbytes: int) -> None:
        """Wait for exactly this notice, at most for the deadline."""
        try:
            notice = self.socket.recv(_NOTICE.size + 1)
        except TimeoutError:
            raise TimeoutError(f"no progress within {self.socket.gettimeout()} s") from None
        if not notice:
            raise ConnectionError("closed by the peer")
        if notice != _NOTICE.pack(number, nbytes):
            raise ConnectionError(f"frame {number} of {nbytes} bytes was expected, but the peer sent {notice.hex()}")

    def close(self) -> None:
        self.control_socket.close()
        self.socket.close()

    def check(self) -> None:
        """Raise ConnectionError if the peer has closed, or will send nothing more."""
        if self._polled(select.POLLRDHUP):
            raise ConnectionError("closed by the peer")

    @property
    def gone(self) -> bool:
        """Whether the peer has closed its socket, or its process is dead."""
        return self._polled(0)

    def _polled(self, events: int) -> bool:
        poll = select.poll()
        poll.register(self.socket, events)  # POLLHUP and POLLERR are always reported
        return bool(poll.poll(0))


class SocketEnd(RingEnd):
    """An end of a ring that both ends see: a notice marks a filled slot, and nothing is copied. `mark` is called with a
    frame's number, at the sender before the notice, at the receiver after it.
    """

    def __init__(
        self,
        title: str,
        staging: Tensor,
        pair: UnixSocketPair,
        side: Side,
        free: Callable[[], object],
        mark: Callable[[int], object] = lambda number: None,
    ) -> None:
        super().__init__(title, staging)
        self._pair = pair
        self._side = side
        self._free = free
        self._mark = mark
        self._expected: dict[int, int] = {}
        self.control_socket = ControlSocket(title, pair.control_socket)

    def _start(self, number: int, nbytes: int) -> None:
        if self._side is Side.SENDER:
            self._mark(number)
            self._pair.notify(number, nbytes)
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
        if self.control_socket is not None:
            self.control_socket.close()
        self._free()


def accept(keys: KeyRelay, deadline_s: float) -> UnixSocketPair:
    """Listen, send the address, and wait for the peer. Other connections are closed. Raises OSError."""
    name = _PREFIX + secrets.token_hex(16).encode()
    secret, deadline = secrets.token_bytes(_SECRET_BYTES), time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        keys.send(KEY, secret + name)
        while (left := deadline - time.monotonic()) > 0:
            if (connected := _next(listener, secret, left)) is not None:
                return _with_control_socket(connected, deadline_s)
    raise TimeoutError(f"the peer did not connect within {deadline_s} s")


def connect(keys: KeyRelay, deadline_s: float) -> UnixSocketPair:
    """Connect to the address that the peer sent. Raises OSError."""
    value = keys.expect(KEY, deadline_s)
    secret, name = value[:_SECRET_BYTES], value[_SECRET_BYTES:]
    if not name.startswith(_PREFIX):
        raise ConnectionError(f"{name!r} is not the name of a channel")
    with ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connected.settimeout(deadline_s)
        connected.connect(name)
        if not _same_user(connected):
            raise PermissionError("the peer belongs to another user")
        connected.send(secret)
        _, files, _, _ = socket.recv_fds(connected, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            raise ConnectionError("closed by the peer")
        control_socket = socket.socket(fileno=files[0])
        control_socket.settimeout(deadline_s)
        failing.pop_all()
    return UnixSocketPair(connected, control_socket)


def _with_control_socket(connected: socket.socket, deadline_s: float) -> UnixSocketPair:
    """Make the second pair and pass one half to the peer."""
    connected.settimeout(deadline_s)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ExitStack() as failing, theirs:
        failing.callback(mine.close)
        failing.callback(connected.close)
        mine.settimeout(deadline_s)
        for half in (mine, theirs):
            half.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BYTES)
        socket.send_fds(connected, [b"\0"], [theirs.fileno()])
        failing.pop_all()
    return UnixSocketPair(connected, mine)


def _next(listener: socket.socket, secret: bytes, timeout_s: float) -> socket.socket | None:
    """Accept the next connection, if it is the peer's."""
    listener.settimeout(timeout_s)
    with suppress(TimeoutError):
        connected, _ = listener.accept()
        if _is_peer(connected, secret):
            return connected
        connected.close()
    return None


def _is_peer(connected: socket.socket, secret: bytes) -> bool:
    connected.settimeout(_GREETING_S)
    with suppress(OSError):
        return _same_user(connected) and hmac.compare_digest(connected.recv(_SECRET_BYTES + 1), secret)
    return False


def _same_user(connected: socket.socket) -> bool:
    """Whether the peer's process had this user when it connected or began to listen."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
